"""A job's screen: state, curves, costs, and the end of its log. Pure functions from a picture to rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells
from rich.text import Text

from cloudtrain.entrypoints import events

from ..backend import LogLine
from ..errors import in_words
from ..text.charts import Signs
from ..text.terminal import RANK_COLOURS
from ..text.visible import cleaned
from . import figures
from .model import Curves, TailShot, WatchedJob
from .rows import QUIET, WARNS, Part, help_rows, in_job, keys_of_job, row
from .view_state import ViewState

_LOG_SHARE = 3  # the log gets at least a third of the screen
_LEAST_LOG = 2
_BESIDE_LARGE = 5  # rows that a larger log leaves: its title, the keys, and three rows of figures


@dataclass(frozen=True)
class ViewSection:
    """Rows that are shown or hidden together: on a low screen the sections of the highest rank are hidden first."""

    rank: int
    rows: list[Text]


def view(
    watched: WatchedJob,
    tail: TailShot,
    choice: ViewState,
    size: tuple[int, int],
    signs: Signs,
    now_s: float,
    note: str = "",
) -> list[Text]:
    """Return the screen's rows, `size` columns wide and rows high; `note` is the newest message of cloudtrain."""
    width, height = size
    sections = _sections(watched, (width, height), signs, now_s)
    room = height - 2 - bool(note)  # the log's title, the keys
    kept = _kept(sections, room - _least_log(height, choice))
    head = [each for section in kept for each in section.rows]
    left = max(0, room - len(head))
    log = help_rows(width, left, signs) if choice.helps else _log(tail, choice, width, left, signs)
    notes = [row(width, signs, (f"! {cleaned(note)}", "yellow"))] if note else []
    rows = [*head, _log_title(tail, choice, width, signs), *log]
    rows += [Text("")] * (height - 1 - len(notes) - len(rows))
    return [*rows[: max(0, height - 1 - len(notes))], *notes, keys_of_job(choice, watched, width, signs)][:height]


def log_page(
    watched: WatchedJob, choice: ViewState, size: tuple[int, int], signs: Signs, now_s: float, note: str = ""
) -> int:
    """Return the number of visible log lines."""
    room = size[1] - 2 - bool(note)
    kept = _kept(_sections(watched, size, signs, now_s), room - _least_log(size[1], choice))
    return max(1, room - sum(len(section.rows) for section in kept))


def _least_log(height: int, choice: ViewState) -> int:
    return max(_LEAST_LOG, height - _BESIDE_LARGE if choice.is_large else height // _LOG_SHARE)


def _sections(watched: WatchedJob, size: tuple[int, int], signs: Signs, now_s: float) -> list[ViewSection]:
    """Return the sections of the job, in screen order."""
    width, height = size
    curves = watched.curves or Curves()
    tall = max(1, min(6, (height - 24) // 4)) if height > 30 else 1  # rows of a curve
    ranked: tuple[tuple[int, Callable[[], list[Text]]], ...] = (
        (0, lambda: figures.heading(watched, width, signs, now_s)),
        (1, lambda: figures.trouble(watched, width, signs, now_s)),
        (11, lambda: figures.place(watched, width, signs)),
        (2, lambda: figures.progress(watched, width, signs, now_s)),
        (1, lambda: figures.error(watched, width, signs)),
        (5, lambda: figures.following(watched, width, signs)),
        (4, lambda: figures.track(curves.loss, width, tall, signs)),
        (6, lambda: figures.track(curves.rate, width, max(1, tall - 1), signs)),
        (7, lambda: figures.metrics(watched, width, signs)),
        (8, lambda: figures.split(curves, width, signs)),
        (9, lambda: figures.exchange(watched, width, signs)),
        (6, lambda: figures.gpus(watched, width, signs)),
        (10, lambda: figures.memory(curves, width, signs)),
        (3, lambda: figures.spend(watched, width, signs)),
        (7, lambda: figures.limit(watched, width, signs, now_s)),
        (8, lambda: figures.checkpoint(watched, width, signs, now_s)),
        (6, lambda: figures.alerts(watched, width, signs, now_s)),
        (9, lambda: figures.attempts(watched, width, signs, now_s)),
    )
    sections = (ViewSection(rank, _rows(draw, width, signs)) for rank, draw in ranked)
    return [section for section in sections if section.rows]


def _rows(draw: Callable[[], list[Text]], width: int, signs: Signs) -> list[Text]:
    """Return the section's rows, or the error if drawing fails: a single job's data must not end the whole view."""
    try:
        return draw()
    except Exception as error:
        return [row(width, signs, (f"! not shown: {in_words(error)}", WARNS))]


def _kept(sections: Sequence[ViewSection], room: int) -> list[ViewSection]:
    """Return the sections that fit, dropping the least important; the heading stays."""
    kept = list(sections)
    while len(kept) > 1 and sum(len(section.rows) for section in kept) > room:
        kept.remove(max(reversed(kept), key=lambda section: section.rank))
    return kept


def _log_title(tail: TailShot, choice: ViewState, width: int, signs: Signs) -> Text:
    rule = signs.rule
    words = f"log of rank {choice.ranks}" if choice.ranks else "log"
    if choice.held is not None:
        words += f", {choice.back} lines below" if choice.back else ""
        words += ", PAUSED"
    elif tail.fault:
        words += f", which cannot be read for now: {cleaned(tail.fault)}"
    elif tail.is_over:
        words += ", to its end"
    text = row(width, signs, (f"{rule}{rule} ", QUIET), words, " ")
    text.append(rule * (width - text.cell_len), QUIET)
    return text


def _log(tail: TailShot, choice: ViewState, width: int, height: int, signs: Signs) -> list[Text]:
    """Return the last lines, or earlier lines if the user has scrolled back."""
    lines = tail.lines if choice.held is None else choice.held
    if not lines:
        words = "no lines yet" if tail.is_read else "reading the log" if not tail.fault else ""
        return [row(width, signs, (words, QUIET))][:height]
    end = len(lines) - choice.back
    shown = [_line(line, tail, width, signs, wraps=choice.wraps) for line in lines[max(0, end - height) : end]]
    return [each for rows in shown for each in rows][-height:] if height else []


def _line(line: LogLine, tail: TailShot, width: int, signs: Signs, *, wraps: bool) -> list[Text]:
    """Return the rows of a line: a row cut at the width, or several rows if the log is wrapped."""
    text = in_job(cleaned(events.parse(line.text)[0]))
    parts: list[Part] = []
    if tail.is_prefixed:
        number = line.node if line.rank is None else line.rank
        who = f"node{line.node}" if line.rank is None else f"r{line.rank}"
        parts.append((f"[{who}] ", RANK_COLOURS[number % len(RANK_COLOURS)]))
    room = width - sum(cell_len(part[0]) for part in parts)
    pieces = chop_cells(text, room) if wraps and room > 0 and text else [text]
    indent: list[Part] = [" " * (width - room)] if parts else []
    return [row(width, signs, *(indent if place else parts), piece) for place, piece in enumerate(pieces)]

"""A job's screen: state, curves, costs, and the end of its log. Pure functions from a picture to rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.cells import cell_len, chop_cells
from rich.text import Text

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.format import dollars, span

from ..backend import LogLine
from ..errors import in_words
from ..jobs.view import JobView, failure_lines, outcome, with_reason
from ..metering import meter
from ..store import exchange_figures
from ..store.progress import shown
from ..text import charts
from ..text.charts import Signs
from ..text.terminal import RANK_COLOURS
from ..text.units import clock, percent, quantity, size, step_time
from ..text.visible import cleaned
from .model import Curves, TailShot, Track, WatchedJob
from .rows import BAD, GOOD, LABEL, QUIET, STATE_STYLES, WARNS, Part, help_rows, in_job, job_keys, labelled, row, sides
from .view_state import Size, ViewState

SLOW_S = 5.0  # a poll slower than this is shown
_LOG_SHARE = 3  # the log gets at least a third of the screen
_LEAST_LOG = 2
_BESIDE_LARGE = 5  # rows that a larger log leaves: its title, the keys, and three rows of figures
_LEAST_BAR = 6  # columns; a shorter bar is not drawn
_MOST_BAR = 60
_TRIES = 4
_FAR = 20.0  # a loss whose maximum is so many times its minimum is drawn on a log scale
_PART_COLOURS = ("green", "magenta", "yellow", "blue")
_ALERTS = {
    "projected": "will reach its limit first",
    "within": "will finish within its limits",
    "deadline": "its deadline is near",
    "stalled": "no progress",
    "unreachable": "backend silent",
    "restarted": "ranks started again",
    "moved": "no machines: moved to the next candidate",
}
_ENDS = ("started", "succeeded", "failed", "stopped", "preempted")


# Rows that are shown or hidden together, and their rank: on a low screen the highest rank is hidden first.
_Section = tuple[int, list[Text]]


def view(
    watched: WatchedJob, tail: TailShot, choice: ViewState, size: Size, signs: Signs, now_s: float, note: str = ""
) -> tuple[list[Text], int]:
    """Return the rows of the screen, and the number of visible log lines; `note`: the newest message of cloudtrain."""
    width, height = size
    room = height - 2 - bool(note)  # the log's title, the keys
    least = max(_LEAST_LOG, height - _BESIDE_LARGE if choice.is_large else height // _LOG_SHARE)
    kept = _kept(_sections(watched, size, signs, now_s), room - least)
    head = [text for _, texts in kept for text in texts]
    left = max(0, room - len(head))
    log = help_rows(width, left, signs) if choice.helps else _log(tail, choice, width, left, signs)
    notes = [row(width, signs, (f"! {cleaned(note)}", "yellow"))] if note else []
    rows = [*head, _log_title(tail, choice, width, signs), *log]
    rows += [Text("")] * (height - 1 - len(notes) - len(rows))
    rows = [*rows[: max(0, height - 1 - len(notes))], *notes, job_keys(choice, watched, width, signs)][:height]
    return rows, max(1, left)


def _sections(watched: WatchedJob, screen: Size, signs: Signs, now_s: float) -> list[_Section]:
    width, height = screen
    view, curves = replace(watched.view, now_s=now_s), watched.curves or Curves()
    tall = max(1, min(6, (height - 24) // 4)) if height > 30 else 1  # rows of a curve

    def texts(label: str, *words: str) -> list[Text]:
        """Return a row for each text, the first with the label."""
        kept = [text for text in words if text]
        return [labelled(width, signs, "" if place else label, cleaned(text)) for place, text in enumerate(kept)]

    ranked: tuple[tuple[int, Callable[[], list[Text]]], ...] = (
        (0, lambda: _heading(view, width, signs)),
        (1, lambda: _trouble(watched, width, signs, now_s)),
        (11, lambda: texts("backend", view.place)),
        (2, lambda: _progress(view, width, signs)),
        (3, lambda: texts("trials", *watched.trials)),
        (1, lambda: _error(view, width, signs)),
        (5, lambda: [] if view.job.active else texts("next", *view.next_steps)),
        (4, lambda: _track(curves.loss, width, tall, signs)),
        (6, lambda: _track(curves.rate, width, max(1, tall - 1), signs)),
        (7, lambda: texts("metrics", view.metrics)),
        (10, lambda: texts("run", view.progress.get("run_url") or "")),
        (8, lambda: _split(view.step_s, curves, width, signs)),
        (9, lambda: texts("exchange", exchange_figures.words(view.progress))),
        (9, lambda: texts("staleness", exchange_figures.histogram(view.progress, signs.levels))),
        (6, lambda: [*texts("GPUs", view.gpus), *_warning(view.gpu_warning, width, signs)]),
        (10, lambda: _memory(curves, width, signs)),
        (3, lambda: _spend(view, width, signs)),
        (7, lambda: _limit(view, width, signs)),
        (8, lambda: texts("checkpoint", _checkpoint(view))),
        (6, lambda: _alerts(watched, width, signs, now_s)),
        (6, lambda: texts("tries", *_tries(view))),
        (9, lambda: texts("before", _before(view))),
    )
    return [(rank, rows) for rank, draw in ranked if (rows := _rows(draw, width, signs))]


def _warning(words: str, width: int, signs: Signs) -> list[Text]:
    return [row(width, signs, (f"! {cleaned(words)}", WARNS))] if words else []


def _heading(view: JobView, width: int, signs: Signs) -> list[Text]:
    job = view.job
    left: list[Part] = [(job.id, "bold"), "  ", (cleaned(outcome(job)), STATE_STYLES.get(job.attempt.word, "bold"))]
    took = "" if view.took_s is None else span(view.took_s)
    took += f" of at most {span(job.attempt.plan.cap_s)}" if took and job.active else ""
    return [sides(width, signs, left, [(took, QUIET)] if took else [])]


def _trouble(watched: WatchedJob, width: int, signs: Signs, now_s: float) -> list[Text]:
    """Return a warning if the picture may be out of date."""
    backend, since_s = watched.job.backend, watched.job.attempt.unreachable_since_s
    words = watched.fault
    if not words and since_s is not None:
        ago = span(now_s - since_s)
        words = f"{backend} has not answered for {ago}; showing its last report; the job is unaffected"
    elif not words and watched.asks_since_s is not None and (waited_s := now_s - watched.asks_since_s) > SLOW_S:
        words = f"{backend} was asked {span(waited_s)} ago, no answer yet"
    return _warning(words, width, signs)


def _progress(view: JobView, width: int, signs: Signs) -> list[Text]:
    job, progress = view.job, view.progress
    if "sweep" in progress:
        return [labelled(width, signs, "progress", cleaned(shown(progress)))]
    if "step" not in progress:
        detail = cleaned(view.state.detail or "")
        if not job.active:
            return [labelled(width, signs, "progress", detail or "no step reported")]
        words = {"pending": "waiting to begin"}.get(view.state.state, "no step reported yet")
        return [labelled(width, signs, "progress", f"{words}: {detail}" if detail else words)]
    share = view.share_done
    if share is None:
        return [labelled(width, signs, "progress", f"step {progress['step']}")]
    left, right = f"step {progress['step']}/{progress['max_steps']} ", percent(share)
    if job.active and view.left_s is not None and view.money.finish_at_s is not None:
        right += f", done in {span(view.left_s)}, at {clock(view.money.finish_at_s, view.now_s)}"
    room = min(_MOST_BAR, width - LABEL - len(left) - len(right) - 1)
    drawn = charts.bar(share, room, signs) + " " if room >= _LEAST_BAR else ""
    return [labelled(width, signs, "progress", left, (drawn, "cyan"), right)]


def _error(view: JobView, width: int, signs: Signs) -> list[Text]:
    if not view.state.error:
        return []
    words = [in_job(cleaned(line)) for line in failure_lines(view.state.error) if line.strip()] or ["unknown"]
    return [labelled(width, signs, "" if place else "error", (line, BAD)) for place, line in enumerate(words[:3])]


def _track(curve: Track | None, width: int, height: int, signs: Signs) -> list[Text]:
    if curve is None:
        return []
    newest = quantity(curve.newest) if isinstance(curve.newest, float) else curve.newest.upper()
    style = "bold" if isinstance(curve.newest, float) else BAD
    range_words = ""
    if curve.least is not None and curve.largest is not None:
        range_words = f"  least {quantity(curve.least):<7} largest {quantity(curve.largest):<7}"
    words = f"{newest:>8}"
    room = width - LABEL - len(words) - len(range_words) - 1
    if room < _LEAST_BAR:
        range_words, room = "", width - LABEL - len(words) - 1
    values, name = _by_decades(curve)
    drawn = charts.chart(values, max(0, room), height, signs)
    first: list[Part] = [(f"{drawn[0]:<{max(0, room)}}", "cyan"), (f" {words}", style), (range_words, QUIET)]
    return [labelled(width, signs, name, *first), *(labelled(width, signs, "", (each, "cyan")) for each in drawn[1:])]


def _by_decades(curve: Track) -> tuple[Sequence[float | None], str]:
    """Return the values to draw and their name: the logarithm of a loss with a large range, else its end looks flat."""
    if curve.name != "loss" or not curve.least or curve.least <= 0 or (curve.largest or 0.0) < _FAR * curve.least:
        return curve.values, curve.name
    return [None if value is None else math.log10(value) for value in curve.values], f"{curve.name} (log)"


def _split(step_s: float | None, curves: Curves, width: int, signs: Signs) -> list[Text]:
    if step_s is None:
        return []
    took = f"{step_time(step_s)} "
    if not curves.split:
        return [labelled(width, signs, "step time", took)]
    shares = [share for _, share in curves.split]
    legend: list[Part] = []
    for place, ((name, _), share) in enumerate(zip(curves.split, shares, strict=True)):
        sign = signs.parts[place % len(signs.parts)]
        legend += [" ", (sign, _PART_COLOURS[place % 4]), f"{name} {percent(share)}"]
    used = sum(len(part if isinstance(part, str) else part[0]) for part in legend)
    room = min(_MOST_BAR, width - LABEL - len(took) - used)
    runs = charts.stacked(shares, room if room >= _LEAST_BAR else 0, signs)
    drawn = [(run, _PART_COLOURS[place % 4]) for place, run in enumerate(runs)]
    return [labelled(width, signs, "step time", took, *drawn, *legend[0 if room >= _LEAST_BAR else 1 :])]


def _memory(curves: Curves, width: int, signs: Signs) -> list[Text]:
    """Return the peak memory of rank 0: of its GPU, as a share if the total is known."""
    if curves.memory_bytes is None:
        return []
    label = "GPU memory" if curves.is_gpu else "memory"
    total = curves.memory_total_bytes
    if total is None:
        return [labelled(width, signs, label, f"{size(curves.memory_bytes)} at most so far, on rank 0")]
    share = curves.memory_bytes / total
    words = f" {percent(share)}, {size(curves.memory_bytes)} of {size(total)} at most so far, on rank 0"
    room = min(_MOST_BAR, width - LABEL - len(words))
    drawn = charts.bar(share, room, signs) if room >= _LEAST_BAR else ""
    colour = WARNS if share > 0.9 else "cyan"
    return [labelled(width, signs, label, (drawn, colour), words if drawn else words.lstrip())]


def _spend(view: JobView, width: int, signs: Signs) -> list[Text]:
    """Return the cost and its share of the limit, the cost per hour, and the forecast cost."""
    words, spent, limit = view.spent, view.money.spent_micro, view.money.limit_micro
    if view.job.active and view.money.projected_micro:
        words += f"; {dollars(view.money.projected_micro)} when done"
    room = min(_MOST_BAR, width - LABEL - len(words) - 1)
    if spent is None or not limit or room < _LEAST_BAR:
        return [labelled(width, signs, "spend", words)]
    share = spent / limit
    style = BAD if share >= 1 else WARNS if share >= 0.8 else GOOD
    return [labelled(width, signs, "spend", (charts.bar(share, room, signs), style), f" {words}")]


def _limit(view: JobView, width: int, signs: Signs) -> list[Text]:
    """Return when the job leaves and when it is ended, and the limit that comes before its finish."""
    if not view.job.active or not view.limit_times:
        return []
    first: list[Part] = [(f"; ! {view.limit_first}", WARNS)] if view.limit_first else []
    return [labelled(width, signs, "limit", view.limit_times, *first)]


def _checkpoint(view: JobView) -> str:
    step, saved_s = view.money.checkpoint_step, view.money.saved_s
    parts = ["" if step is None else f"step {step}", "" if saved_s is None else f"{span(view.now_s - saved_s)} ago"]
    return ", ".join(filter(None, parts))


def _alerts(watched: WatchedJob, width: int, signs: Signs, now_s: float) -> list[Text]:
    """Return the alerts sent, the newest first, with their channels."""
    words: list[str] = []
    for alert in reversed(watched.alerts):
        kind, _, rest = alert.key.partition(":")
        if kind in _ENDS:
            continue
        what = f"{rest.partition('@')[0]} % of the budget" if kind == "budget" else _ALERTS.get(kind, kind)
        where = ", ".join(channel for channel in alert.channels if channel != "terminal")
        words.append(f"{clock(alert.told_s, now_s)} {cleaned(what)}{f' ({where})' if where else ''}")
    return [labelled(width, signs, "alerts", ("; ".join(words), WARNS))] if words else []


def _tries(view: JobView) -> list[str]:
    """Return the newest tries of a job with several candidates, the newest first."""
    newest = view.tries[: -_TRIES - 1 : -1]
    return [f"{clock(each.at_s, view.now_s)} {each.candidate}. {each.place}: {each.result}" for each in newest]


def _before(view: JobView) -> str:
    """Return how the earlier attempts ended, the newest first."""
    words = []
    for attempt in view.runs[-2::-1]:
        state = attempt.state
        held_s = meter.held_s(attempt, view.now_s) if state.ended_s is not None else None
        took = "" if held_s is None else f" after {span(held_s)}"
        words.append(f"{attempt.number} {with_reason(state)}{took}")
    return f"attempt {'; '.join(words)}" if words else ""


def _rows(draw: Callable[[], list[Text]], width: int, signs: Signs) -> list[Text]:
    """Return the section's rows, or the error if drawing fails: a single job's data must not end the whole view."""
    try:
        return draw()
    except Exception as error:
        return [row(width, signs, (f"! not shown: {in_words(error)}", WARNS))]


def _kept(sections: Sequence[_Section], room: int) -> list[_Section]:
    """Return the sections that fit, dropping the least important; the heading stays."""
    kept = list(sections)
    while len(kept) > 1 and sum(len(rows) for _, rows in kept) > room:
        kept.remove(max(reversed(kept), key=lambda section: section[0]))
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

"""A table of jobs: a row for each job, their total cost, and cloudtrain's own messages. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from cloudtrain.entrypoints.format import cell, counted, dollars, most, span

from ..errors import in_words
from ..jobs.view import with_reason
from ..store import loss_bins
from ..text import charts
from ..text.charts import Signs
from ..text.units import percent, quantity
from ..text.visible import cleaned
from .model import Scene, WatchedJob
from .rows import QUIET, STATE_STYLES, WARNS, Part, help_rows, row, sides, table_keys
from .view_state import Size, ViewState

_HEADS = ("JOB", "STATE", "STEP", "DONE", "LOSS", "LEFT", "USD SPENT")
_WEIGHTS = ("STATE", "LEFT", "USD SPENT", "LOSS", "DONE", "STEP")  # added in this order while they fit
_AFTER_CURVES = ("STEP", "DONE")
_MOST_NAME = 24  # a longer name is cut if space is short
_LEAST_SPARK, _MOST_SPARK = 6, 48
_GAP = 2
_NOTES = 6  # maximum number of messages
# The widths of the columns, by head in order, and of the curves; 0 if no curve fits.
_Shape = tuple[dict[str, int], int]


def view(scene: Scene, choice: ViewState, size: Size, signs: Signs, words: str) -> list[Text]:
    """Return the rows of the screen; `words` describe the selection of jobs."""
    width, height = size
    texts = [_shown(watched, scene.now_s) for watched in scene.jobs]
    shape = widths, spark = _shape(texts, width)
    curve = {"LOSS": spark + 1} if spark else {}
    heads = [set_cell_size(head, columns + curve.get(head, 0)) for head, columns in widths.items()]
    notes = _notes(scene, len(texts), width, height, signs)
    room = max(1, height - 4 - len(notes))
    ids = [watched.job.id for watched in scene.jobs]
    chosen = ids.index(choice.chosen) if choice.chosen in ids else 0
    begin = min(max(0, chosen - room // 2), max(0, len(ids) - room))
    about: Part = f"  {words}"
    if len(ids) > room:
        about = (f"  {begin} jobs above, {max(0, len(ids) - begin - room)} below", WARNS)
    rows = [sides(width, signs, [("cloudtrain watch", "bold"), about], [(_clock(scene.now_s), QUIET)])]
    rows.append(row(width, signs, (f"  {(' ' * _GAP).join(heads)}".rstrip(), QUIET)))
    for place in range(begin, min(len(ids), begin + room)):
        rows.append(_row(scene.jobs[place], texts[place], shape, width, signs, is_chosen=place == chosen))
    if not ids:
        rows.append(row(width, signs, ("no job is active, and no job has ended recently: cloudtrain submit", QUIET)))
    if choice.helps:
        rows = [rows[0], *help_rows(width, height - 3 - len(notes), signs)]
    rows += [Text("")] * (height - 2 - len(notes) - len(rows))
    rows = [*rows[: max(0, height - 2 - len(notes))], *notes, _totals(scene.jobs, width, signs)]
    return [*rows, table_keys(choice, width, signs)][:height]


def _shown(watched: WatchedJob, now_s: float) -> dict[str, str]:
    """Return the text of each column; for invalid figures only id and error, so that the remaining rows stay."""
    try:
        return {head: cleaned(text) for head, text in _texts(watched, now_s).items()}
    except Exception as error:
        fault = f"? {cleaned(in_words(error))}"[:_MOST_NAME]
        return dict.fromkeys(_HEADS, "") | {"JOB": watched.job.id, "STATE": fault}


def _texts(watched: WatchedJob, now_s: float) -> dict[str, str]:
    view = replace(watched.view, now_s=now_s)
    job, state, fields, share = view.job, view.state, view.progress, view.share_done
    loss, left_s = fields.get("loss"), view.left_s if view.job.active else None
    if job.attempt.unreachable_since_s is not None:
        state = replace(state, reason="no answer")
    word = with_reason(state) if job.attempt.word == state.state else job.attempt.word
    of_limit = "" if view.money.percent is None else f", {view.money.percent} %"
    return {
        "JOB": job.id,
        "STATE": "paused" if state.reason == "paused" else word,
        "STEP": f"{fields.get('step', '')}" + (f"/{fields['max_steps']}" if share is not None else ""),
        "DONE": "" if share is None else percent(share),
        "LOSS": quantity(loss) if isinstance(loss, float | int) else str(loss or "").upper(),
        "LEFT": "" if left_s is None else span(left_s),
        "USD SPENT": f"{cell(view.money.spent_micro)}{of_limit}",
    }


def _shape(texts: Sequence[dict[str, str]], width: int) -> _Shape:
    """Return the columns that fit beside the name, by priority; the remaining space is for the curves."""
    natural = {head: max([len(head), *(cell_len(each[head]) for each in texts)]) for head in _HEADS}
    room = width - 2 - min(natural["JOB"], _MOST_NAME)
    kept = {"JOB"}
    for head in _WEIGHTS:
        needs = natural[head] + _GAP
        if head in _AFTER_CURVES and "LOSS" in kept:
            needs += _LEAST_SPARK + 1
        if needs <= room:
            kept.add(head)
            room -= natural[head] + _GAP
    widths = {head: natural[head] for head in _HEADS if head in kept}
    longer = min(natural["JOB"] - min(natural["JOB"], _MOST_NAME), max(0, room - _LEAST_SPARK - 1))
    widths["JOB"] = min(natural["JOB"], _MOST_NAME) + longer
    over = room - longer - 1
    return widths, min(_MOST_SPARK, over) if "LOSS" in kept and over >= _LEAST_SPARK else 0


def _row(
    watched: WatchedJob, texts: dict[str, str], shape: _Shape, width: int, signs: Signs, *, is_chosen: bool
) -> Text:
    (widths, spark), state = shape, watched.job.attempt.word
    parts: list[Part] = [(signs.pointer + " ", "bold") if is_chosen else "  "]
    for place, (head, columns) in enumerate(widths.items()):
        parts.append(" " * _GAP if place else "")
        if head == "LOSS" and spark:
            losses = [each.loss for each in loss_bins.load(watched.job.attempt.progress.get("curve")).bins]
            parts += [(set_cell_size(charts.chart(losses, spark, 1, signs)[0], spark), "cyan"), " "]
        text = texts[head]
        if cell_len(text) > columns:
            text = text[: columns - 1] + signs.cut
        style = {"STATE": STATE_STYLES.get(state, ""), "JOB": "bold" if is_chosen else ""}.get(head, "")
        parts.append((set_cell_size(text, columns), style))
    return row(width, signs, *parts)


def _notes(scene: Scene, jobs: int, width: int, height: int, signs: Signs) -> list[Text]:
    """Return the newest messages that fit below the jobs."""
    room = min(_NOTES, max(height - 4 - jobs - 1, 0 if height < 12 else 1), len(scene.notes))
    newest = scene.notes[len(scene.notes) - room :]
    return [row(width, signs, (f"{_clock(time_s)} {cleaned(text)}", WARNS)) for time_s, text in newest]


def _totals(jobs: Sequence[WatchedJob], width: int, signs: Signs) -> Text:
    active = sum(watched.job.active for watched in jobs)
    burn = sum(watched.view.money.burn_micro_h or 0 for watched in jobs)
    spent = sum(watched.view.money.spent_micro or 0 for watched in jobs)
    unknown = sum(watched.view.money.spent_micro is None for watched in jobs)
    count = counted(len(jobs), "job")
    words = f"{count}, {active} active: {dollars(burn)}/h, {most(spent)} spent"
    words += f", and {unknown} at an unknown price" if unknown else ""
    silent = sum(watched.job.attempt.unreachable_since_s is not None for watched in jobs)
    return row(width, signs, (words, "bold"), (f"; no answer about {silent}" if silent else "", WARNS))


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))

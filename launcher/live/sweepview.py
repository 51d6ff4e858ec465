"""The screen of a sweep: its money, its rungs, the best trials and the running trials. Pure functions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from cloudtrain.entrypoints.format import dollars

from ..sweeps.overview import figure, place_of, values_text
from ..text import charts
from ..text.charts import Signs
from ..text.visible import cleaned
from .rows import BAD, GOOD, QUIET, WARNS, labelled, row, sides

_BAR = 24  # columns
_RUNG_HEADS = ("RUNG", "STEP", "DONE", "RUNNING", "FAILED", "BEST")
_STYLES = {"running": "bold cyan", "ended": "bold green", "stopped": "bold magenta", "failed": "bold red"}


@dataclass(frozen=True)
class SweepShot:
    """A sweep as last read: `found` is the JSON of `status`, `notes` are the newest messages of the driver."""

    found: dict[str, Any]
    notes: tuple[str, ...] = ()


def view(shot: SweepShot, size: tuple[int, int], signs: Signs, now_s: float) -> list[Text]:
    """Return the screen's rows, `size` columns wide and rows high. Trials that do not fit are left out."""
    width, height = size
    found = shot.found
    about = f"  {found['algorithm']}, {found['trials']} of {found['planned']} trials began"
    clock = time.strftime("%H:%M:%S", time.localtime(now_s))
    state = (found["state"], _STYLES[found["state"]])
    rows = [
        sides(width, signs, [(found["sweep"], "bold"), "  ", state, (about, QUIET)], [(clock, QUIET)]),
        _money(found, width, signs),
        Text(""),
        *_rungs(found, width, signs),
    ]
    keys = row(
        width, signs, ("q", "bold"), (" leave; the running trials go on   ", QUIET), ("^L", "bold"), " draw again"
    )
    notes = [row(width, signs, (cleaned(words), WARNS)) for words in shot.notes[-3:]]
    room = height - len(rows) - len(notes) - 1
    trials = [*_running(found, width, signs), *_best(found, width, signs)]
    rows += trials[: max(0, room)]
    rows += [Text("")] * (height - len(rows) - len(notes) - 1)
    return [*rows[: max(0, height - len(notes) - 1)], *notes, keys][:height]


def _money(found: dict[str, Any], width: int, signs: Signs) -> Text:
    spent, held = dollars(found["spend_usd"] * 1e6), dollars(found["held_usd"] * 1e6)
    if found["limit_usd"] is None:
        return labelled(width, signs, "money", f"{spent} spent, {held} held", (", no budget", QUIET))
    share = min(1.0, found["spend_usd"] / found["limit_usd"]) if found["limit_usd"] else 1.0
    drawn = charts.bar(share, _BAR, signs)
    words = f"  {spent} of {dollars(found['limit_usd'] * 1e6)} spent, {held} held"
    return labelled(width, signs, "money", (drawn, GOOD if share < 0.8 else WARNS), words)


def _rungs(found: dict[str, Any], width: int, signs: Signs) -> list[Text]:
    rows = [row(width, signs, ("".join(f"{head:>10}" for head in _RUNG_HEADS), QUIET))]
    for each in found["rungs"]:
        cells = [each["rung"], each["step"], each["done"], each["running"]]
        best = "-" if each["best"] is None else figure(each["best"])
        failed = (f"{each['failed']:>10}", BAD if each["failed"] else "")
        rows.append(row(width, signs, "".join(f"{cell:>10}" for cell in cells), failed, f"{best:>10}"))
    return rows


def _running(found: dict[str, Any], width: int, signs: Signs) -> list[Text]:
    rows = [Text(""), row(width, signs, ("RUNNING", QUIET))]
    for each in found["running"]:
        words = f"  {each['trial']:>5}  rung {each['rung']}  "
        if each["step"] is None or not each["until_step"]:
            rows.append(row(width, signs, words, (cleaned(each["state"]), QUIET)))
            continue
        drawn = charts.bar(min(1.0, each["step"] / each["until_step"]), _BAR, signs)
        loss = "" if each["loss"] is None else f", loss {figure(each['loss'])}"
        rows.append(row(width, signs, words, (drawn, GOOD), f"  step {each['step']}/{each['until_step']}{loss}"))
    if len(rows) == 2:
        rows.append(row(width, signs, ("  no trial runs", QUIET)))
    return rows


def _best(found: dict[str, Any], width: int, signs: Signs) -> list[Text]:
    rows = [Text(""), row(width, signs, ("BEST", QUIET))]
    for each in found["best"]:
        value = f"{found['metric']} {figure(each['value'])}"
        words = f"  {each['trial']:>5}  {cleaned(value)} at {place_of(found, each)}  "
        rows.append(row(width, signs, words, (cleaned(values_text(each["values"])), QUIET)))
    if len(rows) == 2:
        rows.append(row(width, signs, ("  no result yet", QUIET)))
    return rows

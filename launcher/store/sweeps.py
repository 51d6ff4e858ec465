"""The table of the segments of sweeps' trials, as the sweeps' jobs report them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from cloudtrain.entrypoints import events

from ..text import sanitize
from .database import Database

SegmentState = Literal["saved", "running", "done", "failed"]
ENDED = ("done", "failed")
# The states in a report. `saved`: interrupted; the segment begins again later.
_STATES: dict[str, SegmentState] = {
    "running": "running",
    "paused": "done",
    "done": "done",
    "failed": "failed",
    "saved": "saved",
}


class SegmentRecord(NamedTuple):
    """A segment of a trial, or a report about it."""

    trial: int
    rung: int
    state: SegmentState
    value: float | None = None  # the metric at the end, None without a result
    step: int | None = None  # the trial's own at the end of a segment with a result, None before
    seconds: float = 0.0  # in a slot; of a report, since the segment's last start
    ended_s: float | None = None  # unix seconds


def take(database: Database, job_id: str, reports: Sequence[SegmentRecord]) -> None:
    """Store the reports of a sweep's job about its trials, in their order."""
    used_s = {(each.trial, each.rung): each.seconds for each in segments(database, job_id)} if reports else {}
    for each in reports:
        key = each.trial, each.rung
        used_s[key] = used_s.get(key, 0.0) + each.seconds
        row = (*each[:5], used_s[key], each.ended_s)
        database.execute("INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (job_id, *row))


def reports_in(lines: Iterable[tuple[str, float]]) -> list[SegmentRecord]:
    """Return the valid reports about trials in the lines of a sweep, each line with its time in unix seconds."""
    found = []
    for line, time_s in lines:
        event = events.parse(line)[1] if events.MARK in line else None
        if event is None or event["e"] != "trial":
            continue
        trial, rung, state = sanitize.count(event.get("trial")), sanitize.count(event.get("rung")), event.get("state")
        if trial is None or rung is None or state not in _STATES:
            continue
        value, kept = sanitize.value(event.get("value")), _STATES[state]
        number = float(value) if isinstance(value, int | float) and math.isfinite(value) else None
        kept = "failed" if kept == "done" and number is None else kept
        seconds = sanitize.seconds(event.get("seconds")) or 0.0
        step = sanitize.count(event.get("step")) if kept == "done" else None
        number = number if kept == "done" else None
        found.append(SegmentRecord(trial, rung, kept, number, step, seconds, time_s if kept in ENDED else None))
    return found


def segments(database: Database, job_id: str) -> list[SegmentRecord]:
    """Return the segments of a sweep's job, by trial and rung."""
    rows = database.execute("SELECT * FROM segments WHERE job_id = ? ORDER BY trial, rung", (job_id,))
    return [SegmentRecord._make(row[1:]) for row in rows]  # the columns are the fields, in their order


def forget(database: Database, job_id: str) -> None:
    """Delete the rows of the sweep's job."""
    database.execute("DELETE FROM segments WHERE job_id = ?", (job_id,))

"""The tables of sweeps: a row for each sweep, and a row for each segment of a trial.

A segment's row is written before the segment is sent, and names the job and the number of the attempt that trains the
segment. So a process that dies between the two leaves a row by which the next process sends the segment, once.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.format import down, up, usd

from ..errors import BudgetError, NoSuchJobError
from ..job import ACTIVE, Attempt, Job
from ..text import sanitize
from ..text.units import parse_money
from .database import Database
from .registry import attempt_of

LEASE_S = 30.0  # after the death of its holder, a lease ends by itself
TRIAL_JOBS = "SELECT job_id FROM segments"

SegmentState = Literal["due", "sent", "done", "failed", "stopped"]
ENDED = ("done", "failed", "stopped")  # stopped: by the user; `resume` of the sweep goes on with the trial
# The states in a report of a packed sweep. `saved`: interrupted; the segment begins again later.
_STATES: dict[str, SegmentState] = {
    "running": "sent",
    "paused": "done",
    "done": "done",
    "failed": "failed",
    "saved": "due",
}


@dataclass(frozen=True)
class SweepRecord:
    """A sweep: its config with the section `sweep`, the archive of its code, and the limit of the cost of all trials.

    `state`: running, ended, stopped by the user, or failed: the job of a packed sweep has failed.
    """

    id: str
    created_s: float
    config: dict[str, Any]
    config_file: str
    bundle: dict[str, Any]
    limit_micro: int | None
    state: str = "running"


@dataclass(frozen=True)
class TrialReport:
    """A packed sweep's report about a segment of a trial."""

    trial: int
    rung: int
    state: SegmentState
    value: float | None = None  # the metric, None before or without a result
    seconds: float = 0.0  # in a slot since the segment's last start, 0 at the start
    time_s: float = 0.0  # of the report, unix seconds
    step: int | None = None  # the trial's own, at the end of a segment with a result


@dataclass(frozen=True)
class SegmentRecord:
    """A segment of a trial. Of a packed sweep `until_step` is the trial's own step at its end, None before."""

    sweep: str
    trial: int
    rung: int
    job_id: str
    attempt: int  # of `job_id`, trains the segment
    until_step: int | None  # None for a training to its end
    state: SegmentState = "due"
    value: float | None = None  # the metric at the end, None without a result
    tries: int = 0  # attempts that ended too early
    seconds: float | None = None  # in a slot of a packed sweep
    ended_s: float | None = None  # of a packed sweep, unix seconds


def add(database: Database, sweep: SweepRecord) -> None:
    """Store a new sweep."""
    row = (sweep.id, sweep.created_s, json.dumps(sweep.config), sweep.config_file, json.dumps(sweep.bundle))
    database.execute("INSERT INTO sweeps VALUES (?, ?, ?, ?, ?, ?, ?, 0)", (*row, sweep.limit_micro, sweep.state))


def find(database: Database, key: str) -> SweepRecord:
    """Return the sweep by its id, its name (the newest sweep), a unique prefix of the id, or `last`.

    Raises NoSuchJobError.
    """
    every = sweeps(database)
    found = every[:1] if key == "last" else [each for each in every if each.id == key]
    found = found or [each for each in every if each.config.get("name") == key][:1]
    found = found or [each for each in every if each.id.startswith(key)]
    if len(found) != 1 or not key:
        raise NoSuchJobError(f"no sweep `{key}`", hint="cloudtrain advance names all running sweeps")
    return found[0]


def sweeps(database: Database, *, active: bool = False, sweep_id: str | None = None) -> list[SweepRecord]:
    """Return the sweeps, the newest first; with `sweep_id`, the sweep with exactly this id."""
    rows = database.execute(
        "SELECT * FROM sweeps WHERE (state = 'running' OR NOT ?1) AND (?2 IS NULL OR id = ?2) ORDER BY created_s DESC",
        (active, sweep_id),
    )
    return [
        SweepRecord(
            *(row["id"], row["created_s"], json.loads(row["config"]), row["config_file"], json.loads(row["bundle"])),
            *(row["limit_micro"], row["state"]),
        )
        for row in rows
    ]


def of_job(database: Database, job_id: str) -> list[SweepRecord]:
    """Return the sweep to which the job belongs, as a list of at most one."""
    rows = database.execute("SELECT sweep FROM segments WHERE job_id = ? LIMIT 1", (job_id,))
    return sweeps(database, sweep_id=rows[0]["sweep"] if rows else job_id)


def forget(database: Database, sweep_id: str) -> None:
    """Delete the rows of the sweep and of its segments; the ledger keeps the costs."""
    database.execute("DELETE FROM segments WHERE sweep = ?", (sweep_id,))
    database.execute("DELETE FROM sweeps WHERE id = ?", (sweep_id,))


def add_packed(database: Database, job: Job) -> None:
    """Store the sweep of a packed sweep's job, which has the same id, or its changed config."""
    limit = (job.config.get("budget") or {}).get("limit")
    limit_micro = None if limit is None else parse_money(str(limit))
    sweep = SweepRecord(job.id, job.created_s, job.config, job.config_file, job.bundle, limit_micro)
    known = sweeps(database, sweep_id=job.id)
    if not known:
        add(database, sweep)
    elif known[0].config != sweep.config:
        change(database, sweep)


def follow_packed(database: Database, job: Job, reports: Sequence[TrialReport], state: str) -> None:
    """Store the reports of a packed sweep's job about its trials, and the sweep's state by the job's state."""
    add_packed(database, job)
    used_s = {(each.trial, each.rung): each.seconds or 0.0 for each in segments(database, job.id)} if reports else {}
    for each in reports:
        key = each.trial, each.rung
        used_s[key] = used_s.get(key, 0.0) + each.seconds
        segment = SegmentRecord(job.id, *key, job.id, job.attempt.number, each.step, each.state, each.value)
        ended_s = each.time_s if each.state in ENDED else None
        write(database, replace(segment, seconds=used_s[key], ended_s=ended_s))
    ended = {"succeeded": "ended", "failed": "failed"}.get(state, "stopped")
    set_state(database, job.id, "running" if state in ACTIVE else ended)


def reports_in(lines: Iterable[tuple[str, float]]) -> list[TrialReport]:
    """Return the reports about trials in the lines of a packed sweep, each line with its time in unix seconds.

    A line with invalid values is left out.
    """
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
        found.append(TrialReport(trial, rung, kept, number if kept == "done" else None, seconds, time_s, step))
    return found


def set_state(database: Database, sweep_id: str, state: str) -> None:
    """Store the sweep's state."""
    database.execute("UPDATE sweeps SET state = ? WHERE id = ?", (state, sweep_id))


def change(database: Database, sweep: SweepRecord) -> None:
    """Store the sweep's config, limit and state."""
    values = (json.dumps(sweep.config), sweep.limit_micro, sweep.state, sweep.id)
    database.execute("UPDATE sweeps SET config = ?, limit_micro = ?, state = ? WHERE id = ?", values)


def lease(database: Database, sweep_id: str, held_s: float = 0.0) -> float:
    """Take the right to drive the sweep for LEASE_S seconds; return its end, or 0 if a different process has the right.

    `held_s`: the end of the caller's own lease, which the call renews.
    """
    now_s = time.time()
    taken = database.execute(
        "UPDATE sweeps SET lease_s = ? WHERE id = ? AND (lease_s <= ? OR lease_s = ?) RETURNING lease_s",
        (now_s + LEASE_S, sweep_id, now_s, held_s),
    )
    return float(taken[0]["lease_s"]) if taken else 0.0


def free(database: Database, sweep_id: str, held_s: float) -> None:
    """End the own lease, which ends at `held_s`; leave the lease of a different process."""
    database.execute("UPDATE sweeps SET lease_s = 0 WHERE id = ? AND lease_s = ?", (sweep_id, held_s))


def segments(database: Database, sweep_id: str) -> list[SegmentRecord]:
    """Return the segments of the sweep, by trial and rung."""
    rows = database.execute("SELECT * FROM segments WHERE sweep = ? ORDER BY trial, rung", (sweep_id,))
    return [SegmentRecord(*row) for row in rows]  # the columns are the fields, in their order


def write(database: Database, segment: SegmentRecord) -> None:
    """Store the segment in place of an earlier row."""
    database.execute("INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(segment))


def update(database: Database, before: SegmentRecord, after: SegmentRecord) -> None:
    """Store `after` in place of `before`, or if the row was removed; leave the row of a concurrent process."""
    key = before.sweep, before.trial, before.rung
    with database.transaction():
        rows = database.execute("SELECT * FROM segments WHERE sweep = ? AND trial = ? AND rung = ?", key)
        if not rows or SegmentRecord(**dict(rows[0])) == before:
            write(database, after)


def remove(database: Database, segment: SegmentRecord) -> None:
    """Delete the row of a segment that is still due."""
    database.execute(
        "DELETE FROM segments WHERE sweep = ? AND trial = ? AND rung = ? AND state = 'due'",
        (segment.sweep, segment.trial, segment.rung),
    )


@dataclass(frozen=True)
class RungFigures:
    """The ended segments of a rung: their count, and the least and the greatest metric; None without a number."""

    rung: int
    ended: int
    least: float | None
    greatest: float | None


def rung_figures(database: Database, sweep_id: str) -> list[RungFigures]:
    """Return the figures of each rung with an ended segment, the lowest rung first."""
    rows = database.execute(
        "SELECT rung, COUNT(*) AS ended, MIN(value) AS least, MAX(value) AS greatest FROM segments"
        " WHERE sweep = ? AND state NOT IN ('due', 'sent') GROUP BY rung ORDER BY rung",
        (sweep_id,),
    )
    return [RungFigures(**dict(row)) for row in rows]


def running(database: Database, sweep_id: str) -> list[dict[str, Any]]:
    """Return the segments that are due or run, the highest rung first, with the state and the progress of the attempt.

    The progress of a packed sweep's job is no trial's, and is left out.
    """
    rows = database.execute(
        "SELECT s.trial, s.rung, s.job_id AS job, s.until_step, COALESCE(a.state, s.state) AS state,"
        " CASE WHEN s.job_id != s.sweep THEN a.progress END AS progress FROM segments s"
        " LEFT JOIN attempts a ON a.job_id = s.job_id AND a.number = s.attempt"
        " WHERE s.sweep = ? AND s.state IN ('due', 'sent') ORDER BY s.rung DESC, s.trial",
        (sweep_id,),
    )
    return [{**dict(row), "progress": json.loads(row["progress"] or "{}")} for row in rows]


def attempts(database: Database, sweep_id: str) -> dict[str, list[Attempt]]:
    """Return all attempts of the sweep's jobs by job, in order."""
    rows = database.execute(
        "SELECT *, created_s AS sent_s FROM attempts"
        " WHERE job_id IN (SELECT job_id FROM segments WHERE sweep = ?) ORDER BY job_id, number",
        (sweep_id,),
    )
    found = defaultdict[str, list[Attempt]](list)
    for row in rows:
        found[row["job_id"]].append(attempt_of(row, row["job_id"]))
    return found


def paces(database: Database, sweep_id: str) -> dict[tuple[str, int], tuple[float, int]]:
    """Return by job and attempt the seconds in which the attempt trained, and the steps; by the points of steps."""
    rows = database.execute(
        "SELECT job_id, attempt, MAX(time_s) - MIN(time_s) AS seconds, MAX(step) - MIN(step) AS steps FROM points"
        " WHERE kind IN ('step', 'eval') AND step IS NOT NULL"
        " AND job_id IN (SELECT job_id FROM segments WHERE sweep = ?) GROUP BY job_id, attempt",
        (sweep_id,),
    )
    return {(row["job_id"], row["attempt"]): (row["seconds"], row["steps"]) for row in rows if row["steps"]}


def spent_and_held(database: Database, sweep_id: str) -> tuple[int, int]:
    """Return the cost of the ended attempts of the sweep's jobs, and the worst case of the others, in micro-dollars."""
    row = database.execute(
        "SELECT COALESCE(SUM(CASE state WHEN 'settled' THEN COALESCE(spent_micro, amount_micro) END), 0) AS spent,"
        " COALESCE(SUM(CASE state WHEN 'held' THEN amount_micro END), 0) AS held FROM reservations"
        " WHERE job_id = ?1 OR job_id IN (SELECT job_id FROM segments WHERE sweep = ?1)",
        (sweep_id,),
    )[0]
    return row["spent"], row["held"]


def require_room(database: Database, job_id: str, amount_micro: int | None) -> None:
    """Raise BudgetError if the job is a sweep's trial, and the sweep's budget has no room for the worst case.

    Call the function in the transaction that reserves the worst case.
    """
    rows = database.execute(
        "SELECT id, limit_micro FROM sweeps WHERE limit_micro IS NOT NULL"
        " AND id IN (SELECT sweep FROM segments WHERE job_id = ?)",
        (job_id,),
    )
    for row in rows:
        left = row["limit_micro"] - sum(spent_and_held(database, row["id"]))
        if amount_micro is None or amount_micro > left:
            needs = "its price is unknown" if amount_micro is None else f"it may cost {usd(up(amount_micro))}"
            message = f"{job_id} is not sent: {needs}, and the sweep {row['id']} has {usd(down(max(left, 0)))} left"
            raise BudgetError(message)

"""The tables of sweeps: a row for each sweep, and a row for each segment of a trial.

A segment's row is written before the segment is sent, and names the job and the number of the attempt that trains the
segment. So a process that dies between the two leaves a row by which the next process sends the segment, once.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from cloudtrain.entrypoints.format import down, up, usd
from cloudtrain.launcher.errors import BudgetError, NoSuchJobError
from cloudtrain.launcher.job import Attempt
from cloudtrain.launcher.store.database import Database
from cloudtrain.launcher.store.registry import attempt_of

__all__ = ["TRIAL_JOBS", "RungFigures", "SegmentRecord", "SweepRecord", "lease", "require_room", "spent_and_held"]

LEASE_S = 30.0  # after the death of its holder, a lease ends by itself
TRIAL_JOBS = "SELECT job_id FROM segments"

SegmentState = Literal["due", "sent", "done", "failed"]


@dataclass(frozen=True)
class SweepRecord:
    """A sweep: its config with the section `sweep`, the archive of its code, and the limit of the cost of all trials.

    `state`: running, ended, or stopped by the user.
    """

    id: str
    created_s: float
    config: dict[str, Any]
    config_file: str
    bundle: dict[str, Any]
    limit_micro: int | None
    state: str = "running"


@dataclass(frozen=True)
class SegmentRecord:
    """A segment of a trial. `attempt` of `job_id` trains it; `until_step` is None for a training to its end.

    `value` is the metric at the end, None without a result; `tries` counts the attempts that ended too early.
    """

    sweep: str
    trial: int
    rung: int
    job_id: str
    attempt: int
    until_step: int | None
    state: SegmentState = "due"
    value: float | None = None
    tries: int = 0


def add(database: Database, sweep: SweepRecord) -> None:
    """Store a new sweep."""
    row = (sweep.id, sweep.created_s, json.dumps(sweep.config), sweep.config_file, json.dumps(sweep.bundle))
    database.execute("INSERT INTO sweeps VALUES (?, ?, ?, ?, ?, ?, ?, 0)", (*row, sweep.limit_micro, sweep.state))


def find(database: Database, key: str) -> SweepRecord:
    """Return the sweep by its id, a unique prefix of the id, or `last`. Raises NoSuchJobError."""
    every = sweeps(database)
    found = every[:1] if key == "last" else [each for each in every if each.id == key]
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


def set_state(database: Database, sweep_id: str, state: str) -> None:
    """Store the sweep's state."""
    database.execute("UPDATE sweeps SET state = ? WHERE id = ?", (state, sweep_id))


def update(database: Database, sweep: SweepRecord) -> None:
    """Store the sweep's config, limit and state."""
    values = (json.dumps(sweep.config), sweep.limit_micro, sweep.state, sweep.id)
    database.execute("UPDATE sweeps SET config = ?, limit_micro = ?, state = ? WHERE id = ?", values)


def lease(database: Database, sweep_id: str) -> bool:
    """Return whether this process may drive the sweep for LEASE_S seconds: no other process has the lease."""
    now_s = time.time()
    with database.transaction():
        held = database.execute("SELECT 1 FROM sweeps WHERE id = ? AND lease_s > ?", (sweep_id, now_s))
        if not held:
            database.execute("UPDATE sweeps SET lease_s = ? WHERE id = ?", (now_s + LEASE_S, sweep_id))
    return not held


def free(database: Database, sweep_id: str) -> None:
    """End the lease."""
    database.execute("UPDATE sweeps SET lease_s = 0 WHERE id = ?", (sweep_id,))


def segments(database: Database, sweep_id: str) -> list[SegmentRecord]:
    """Return the segments of the sweep, by trial and rung."""
    rows = database.execute("SELECT * FROM segments WHERE sweep = ? ORDER BY trial, rung", (sweep_id,))
    return [SegmentRecord(**dict(row)) for row in rows]


def write(database: Database, segment: SegmentRecord) -> None:
    """Store the segment in place of an earlier row."""
    database.execute(
        "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(segment.sweep, segment.trial, segment.rung, segment.job_id, segment.attempt, segment.until_step),
            *(segment.state, segment.value, segment.tries),
        ),
    )


def remove(database: Database, segment: SegmentRecord) -> None:
    """Delete the row of a segment that was not sent."""
    database.execute(
        "DELETE FROM segments WHERE sweep = ? AND trial = ? AND rung = ?", (segment.sweep, segment.trial, segment.rung)
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
        " WHERE sweep = ? AND state IN ('done', 'failed') GROUP BY rung ORDER BY rung",
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


def trial_jobs(database: Database) -> set[str]:
    """Return the ids of the jobs of all sweeps."""
    return {row["job_id"] for row in database.execute(TRIAL_JOBS)}


def spent_and_held(database: Database, sweep_id: str) -> tuple[int, int]:
    """Return the cost of the ended attempts of the sweep's jobs, and the worst case of the others, in micro-dollars."""
    row = database.execute(
        "SELECT COALESCE(SUM(CASE state WHEN 'settled' THEN COALESCE(spent_micro, amount_micro) END), 0) AS spent,"
        " COALESCE(SUM(CASE state WHEN 'held' THEN amount_micro END), 0) AS held FROM reservations"
        " WHERE job_id IN (SELECT job_id FROM segments WHERE sweep = ?)",
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

"""The lines of a job list, fast for any number of jobs: the line of an ended job is made once, and cached.

The description of an ended job stays the same until a resume. Its line and its JSON are cached in a narrow table;
triggers in the database delete the row on any write to the job. Active jobs are few, and their lines are never cached.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from cloudtrain.entrypoints.format import amount

from ..errors import ConfigError
from ..job import ACTIVE, Attempt, Job
from ..money.forecast import forecast
from ..store import sweeps
from ..store.progress import shown
from ..store.registry import RAN, Registry
from ..text.terminal import json_line
from .describe import as_json, in_line, outcome

FORM = 9  # version of the rows: raise FORM when a line's words or the JSON change, so that all rows are made again
UNSENT_S = 86_400.0  # how long a list shows a job that was never sent
_BATCH = 500  # rows in a transaction


@dataclass(frozen=True)
class JobFilter:
    """A filter of jobs; an empty field, or None, matches all jobs. `limit`: how many of the newest jobs to list.

    `tags` with their values, None for any value; `since_s`: the earliest submit, in unix seconds. `hides_unsent`:
    without jobs that were never sent, from a day after the submit on. `hides_trials`: without the jobs of sweeps.
    """

    states: frozenset[str] = frozenset()
    backends: frozenset[str] = frozenset()
    project: str | None = None
    tags: tuple[tuple[str, str | None], ...] = ()
    since_s: float | None = None
    limit: int | None = None
    hides_unsent: bool = False
    hides_trials: bool = False

    @property
    def is_narrow(self) -> bool:
        """Whether states, backends, a project, tags or a date limit the choice."""
        return bool(self.states or self.backends or self.project or self.tags or self.since_s)


class ListRow(NamedTuple):
    """A job in a list; `described` is the job's JSON, empty if only text was requested."""

    seq: int
    job_id: str
    backend: str
    state: str
    ranks: str
    outcome: str
    progress: str
    money: str
    created_s: float
    described: str


@dataclass(frozen=True)
class Listing:
    """The lines of the chosen jobs, the newest first.

    `active` has the jobs that may be running: the listed jobs and the hidden trials.
    """

    lines: list[ListRow]
    active: list[Job]


def chosen(
    registry: Registry,
    choice: JobFilter,
    ask: Callable[[list[Job]], list[Job]] | None = None,
    *,
    described: bool = False,
) -> Listing:
    """Return the chosen jobs; with `described` the lines hold the JSON of `status --json`.

    `ask` updates jobs that may be running (poller.ask); without `ask` the list shows their last known state.
    """
    is_any = not choice.states
    with registry.database.snapshot():  # a job that ends or resumes meanwhile is still listed once
        active = [job for job in registry.jobs(active=True) if _fits(job, choice)]
        has_ended = not choice.states or not choice.states <= set(ACTIVE)
        ended, fresh = _ended(registry, choice, described) if has_ended else ([], [])
    _keep(registry, fresh)
    if is_any and choice.limit is not None:  # ask only about listed jobs
        newest = sorted([*(job.seq for job in active), *(line.seq for line in ended)], reverse=True)[: choice.limit]
        active = [job for job in active if job.seq >= newest[-1]]
    if ask is not None and active:
        active = ask(active)
    now_s = time.time()
    active_lines = {job.seq: _line(row_of(job, attempts_of(registry, job), now_s)) for job in active}
    trials = sweeps.trial_jobs(registry.database) if choice.hides_trials and active else set()
    listed = [line for line in active_lines.values() if line.job_id not in trials]
    lines = [*(line for line in listed if is_any or line.state in choice.states), *ended]
    lines = sorted(lines, key=lambda line: -line.seq)[: choice.limit] if active_lines else ended
    shown_seqs = {line.seq for line in lines} if active_lines else set()
    return Listing(lines, [job for job in active if job.active and (job.seq in shown_seqs or job.id in trials)])


def attempts_of(registry: Registry, job: Job) -> list[Attempt]:
    """Return all attempts of the job; a job with a single attempt needs no query."""
    return [job.attempt] if job.attempt.number == 1 else registry.attempts(job)


@dataclass(frozen=True)
class _Fresh:
    """An ended job as read, with the row for the table `listed`."""

    job: Job
    attempts: list[Attempt]
    row: tuple[Any, ...]


def _ended(registry: Registry, choice: JobFilter, described: bool) -> tuple[list[ListRow], list[_Fresh]]:
    """Return the lines of the chosen ended jobs, the newest first, and the jobs whose rows were not cached."""
    fresh = _missing(registry, choice)
    where, values = _conditions(choice)
    names = [*ListRow._fields[:-1], "described" if described else "''"]
    rows = registry.database.execute(
        f"SELECT {', '.join(names)} FROM listed WHERE {where} ORDER BY seq DESC LIMIT ?",
        (*values, -1 if choice.limit is None else choice.limit),
    )
    lines = list(map(ListRow._make, rows))
    made = [_line(each.row) for each in fresh if _fits(each.job, choice)]
    if choice.hides_unsent:
        is_old = {each.job.seq for each in fresh if _is_old_unsent(each)}
        made = [line for line in made if line.seq not in is_old]
    made = [line for line in made if not choice.states or line.state in choice.states]
    return (sorted([*lines, *made], key=lambda line: -line.seq)[: choice.limit] if made else lines), fresh


def _conditions(choice: JobFilter) -> tuple[str, list[Any]]:
    """Return the choice as an SQL condition, with the values."""
    parts: list[str] = ["form = ?"]
    values: list[Any] = [FORM]
    for column, names in (("state", choice.states), ("backend", choice.backends)):
        if names:
            parts.append(f"{column} IN ({', '.join('?' * len(names))})")
            values += sorted(names)
    if choice.project is not None:
        parts.append("project = ?")
        values.append(choice.project)
    if choice.since_s is not None:
        parts.append("created_s >= ?")
        values.append(choice.since_s)
    if choice.hides_unsent:
        parts.append("NOT (outcome = 'not sent' AND created_s < ? AND job_id NOT IN (" + RAN + "))")
        values.append(time.time() - UNSENT_S)
    if choice.hides_trials:
        parts.append(f"job_id NOT IN ({sweeps.TRIAL_JOBS})")
    for key, value in choice.tags:
        parts.append("EXISTS (SELECT 1 FROM json_each(tags) WHERE key = ? AND value = COALESCE(?, value))")
        values += [key, value]
    return " AND ".join(parts), values


def _fits(job: Job, choice: JobFilter) -> bool:
    """Return whether the choice includes the job, for any state."""
    tags = job.asked.tags
    return (
        (not choice.backends or job.backend in choice.backends)
        and (choice.project is None or choice.project == job.asked.project)
        and (choice.since_s is None or job.created_s >= choice.since_s)
        and all(key in tags and value in (None, tags[key]) for key, value in choice.tags)
    )


def _is_old_unsent(each: _Fresh) -> bool:
    is_unsent = all(attempt.phase == "never_sent" for attempt in each.attempts)
    return is_unsent and each.job.created_s < time.time() - UNSENT_S


def _missing(registry: Registry, choice: JobFilter) -> list[_Fresh]:
    """Make the rows of ended jobs that are not cached; with only a `limit`, no more rows than the list can show."""
    hidden = sweeps.TRIAL_JOBS if choice.hides_trials else "''"
    missing = registry.database.execute(
        f"SELECT seq FROM jobs WHERE seq NOT IN (SELECT seq FROM listed WHERE form = ?) AND id NOT IN ({hidden})"
        " ORDER BY seq DESC",
        (FORM,),
    )
    seqs = [row[0] for row in missing]
    if choice.limit is not None and not choice.is_narrow:
        active = registry.database.execute("SELECT 1 FROM attempts WHERE state IN (?, ?, ?)", ACTIVE)
        seqs = seqs[: choice.limit + len(active)]
    now_s = time.time()
    return [
        _Fresh(job, attempts, row_of(job, attempts, now_s))
        for begin in range(0, len(seqs), _BATCH)
        for job, attempts in _seen(registry, seqs[begin : begin + _BATCH])
    ]


def _seen(registry: Registry, seqs: Sequence[int]) -> list[tuple[Job, list[Attempt]]]:
    """Return the ended jobs with these numbers, with all attempts."""
    return [(job, attempts_of(registry, job)) for job in registry.numbered(seqs) if not job.active]


def _keep(registry: Registry, fresh: Sequence[_Fresh]) -> None:
    """Cache the new rows of jobs that have not changed since the read.

    Skip rows instead of waiting for a concurrent writer, and on a full disk: the cache only saves time, and the next
    list makes the rows again.
    """
    with suppress(ConfigError), registry.database.at_once():
        for begin in range(0, len(fresh), _BATCH):
            some = fresh[begin : begin + _BATCH]
            with registry.database.transaction():
                now = {job.seq: (job, attempts) for job, attempts in _seen(registry, [each.job.seq for each in some])}
                for each in some:
                    if now.get(each.job.seq) == (each.job, each.attempts):
                        places = ", ".join("?" * len(each.row))
                        registry.database.execute(f"INSERT OR REPLACE INTO listed VALUES ({places})", each.row)


def _line(row: Sequence[Any]) -> ListRow:
    return ListRow(*row[: len(ListRow._fields)])


def row_of(job: Job, attempts: Sequence[Attempt], now_s: float) -> tuple[Any, ...]:
    """Return the job's row in the table `listed`, in the order of the columns: the line, then the search columns.

    If cloudtrain fails to describe a job, the row has the state and `?`: the remaining jobs must still be listed.
    """
    plan = job.attempt.plan
    try:
        how, far, money = outcome(job), shown(job.attempt.progress) or in_line(job) or "-", _spent(job, attempts, now_s)
        described = json_line(as_json(job, attempts))
    except Exception as error:
        how, far, money = job.attempt.state.state, "?", "?"
        known = {"job": job.id, "name": job.name, "backend": job.backend, "state": how, "created_s": job.created_s}
        described = json.dumps({**known, "fault": f"it cannot be described: {type(error).__name__}: {error}"})
    line = ListRow(
        seq=job.seq,
        job_id=job.id,
        backend=job.backend,
        state=job.attempt.state.state,
        ranks=f"{plan.instances} x {plan.nproc_per_node}",
        outcome=how,
        progress=far,
        money=money,
        created_s=job.created_s,
        described=described,
    )
    return (*line, FORM, job.asked.project, json.dumps(job.asked.tags))


def _spent(job: Job, attempts: Sequence[Attempt], now_s: float) -> str:
    money = forecast(job, attempts, now_s)
    if money.spent_micro is None:
        return "?"
    share = f" {100 * money.spent_micro // money.limit_micro}%" if money.limit_micro else ""
    return amount(money.spent_micro) + share

"""The lines of a job list, fast for any number of jobs: the line of an ended job is stored with the job's end.

`keep` stores an ended job's line and JSON, in the transaction that stores the end; the registry drops them with any
later change of the job. A job without a stored line is described by each list: active jobs are few.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from cloudtrain.entrypoints.format import cell

from ..errors import CloudtrainError, ConfigError
from ..job import ACTIVE, Attempt, Job, State, StoredConfig
from ..metering import meter
from ..metering.money import Money
from ..money.forecast import limit_micro, up_to
from ..store.progress import shown
from ..store.registry import RAN, Registry
from ..store.tries import next_words
from ..text.terminal import json_line
from .view import JobView, in_line, outcome, progress_of, read_view, view_of

# Versions of the stored lines: raise LINE_FORM when the words change, so that all lines are made again, and JSON_FORM
# when only the JSON changes: a list of text then uses the stored lines. A row has both in its column `form`.
LINE_FORM, JSON_FORM = 13, 5
BATCH = 500  # jobs whose lines are made in a transaction: other writers wait for some 0.1 s
UNSENT_S = 86_400.0  # how long a list shows a job that was never sent

Row = tuple[Any, ...]  # of the table `listed`
_KEEP = f"INSERT OR REPLACE INTO listed VALUES ({', '.join('?' * 13)})"


@dataclass(frozen=True)
class JobFilter:
    """A filter of jobs; an empty field, or None, matches all jobs."""

    states: frozenset[str] = frozenset()
    backends: frozenset[str] = frozenset()
    project: str | None = None
    tags: tuple[tuple[str, str | None], ...] = ()
    """Tags with their values, None for any value."""
    since_s: float | None = None
    """The earliest submit, in unix seconds."""
    limit: int | None = None
    """How many of the newest jobs to list."""
    hides_unsent: bool = False
    """Without jobs that were never sent, from a day after the submit on."""

    @property
    def is_narrow(self) -> bool:
        """Whether states, backends, a project, tags or a date limit the choice."""
        return bool(self.states or self.backends or self.project or self.tags or self.since_s)

    def includes(self, backend: str, created_s: float, asked: StoredConfig) -> bool:
        """Return whether the filter includes a job, in any state."""
        return (
            (not self.backends or backend in self.backends)
            and (self.project is None or self.project == asked.project)
            and (self.since_s is None or created_s >= self.since_s)
            and all(key in asked.tags and value in (None, asked.tags[key]) for key, value in self.tags)
        )


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
    """The lines of the chosen jobs, the newest first."""

    lines: list[ListRow]
    active: list[JobView]
    """The listed jobs that may be running."""
    faults: dict[str, CloudtrainError]
    """By job id, why a job is listed as last seen."""


def chosen(
    registry: Registry, choice: JobFilter, ask: Callable[..., Any] | None = None, *, described: bool = False
) -> Listing:
    """Return the chosen jobs; with `described` the lines hold the JSON of `status --json`, less `sweep`.

    `ask` updates jobs that may be running (poller.ask); without `ask` the list shows their last known state.
    """
    with suppress(ConfigError), registry.database.at_once():  # skipped during another write, and on a full disk
        deque(_missing(registry, described, keeps=True), maxlen=0)
    with registry.database.snapshot():  # a job that ends or resumes meanwhile is still listed once
        made = [row for job, row in _missing(registry, described) if _is_wanted(registry, job, choice)]
        stored = _stored(registry, choice, described)
        running = registry.unlisted(_valid(described), active=True, described=described)
        jobs = [job for job in running if _is_wanted(registry, job, choice)]
    if choice.limit is not None and not choice.states:  # ask only about listed jobs
        known = [*(job.seq for job in jobs), *(row[0] for row in made), *(line.seq for line in stored)]
        newest = sorted(known, reverse=True)[: choice.limit]
        jobs = [job for job in jobs if job.seq >= newest[-1]]
    faults: dict[str, CloudtrainError] = {}
    if ask is not None and (active := [job for job in jobs if job.active]):
        answers = ask(registry, active)
        found, faults = {job.id: job for job in answers.jobs}, answers.faults
        jobs = [found.get(job.id, job) for job in jobs]
    made += [_row_of(registry, job, described) for job in jobs]
    fresh = [ListRow._make(row[: len(ListRow._fields)]) for row in made]
    fresh = [line for line in fresh if not choice.states or line.state in choice.states]
    lines = sorted([*fresh, *stored], key=lambda line: -line.seq)[: choice.limit] if fresh else stored
    listed = {line.seq for line in lines} if fresh else set()
    may_run = [job for job in jobs if job.active and job.seq in listed]
    return Listing(lines, [read_view(registry, job) for job in may_run], faults)


def _missing(registry: Registry, described: bool, *, keeps: bool = False) -> Iterator[tuple[Job, Row]]:
    """Yield the ended jobs without a stored line, with their rows; a batch at a time, stored if `keeps`."""
    database, before = registry.database, None
    while True:
        with database.transaction() if keeps else database.snapshot():
            jobs = registry.unlisted(_valid(described), active=False, described=described, before=before, limit=BATCH)
            rows = [_row_of(registry, job, described) for job in jobs]
            if keeps:
                database.execute_each(_KEEP, rows)
        if not jobs:
            return
        yield from zip(jobs, rows, strict=True)
        before = jobs[-1].seq


def end_unsent(registry: Registry, attempt: Attempt, state: State) -> None:
    """Store that the attempt was and will never be sent, with the job's line, unless the attempt was sent meanwhile."""
    with registry.database.transaction():
        registry.mark_never_sent(attempt, state)
        keep(registry, attempt.job_id)


def keep(registry: Registry, job_id: str) -> None:
    """Store the job's line if the job has ended: to be called in the transaction that stores the end."""
    if not (job := registry.find(job_id)).active:
        registry.database.execute(_KEEP, _row_of(registry, job))


def _row_of(registry: Registry, job: Job, described: bool = True) -> Row:
    attempts = [job.attempt] if job.attempt.number == 1 else registry.attempts(job)
    return row_of(job, attempts, time.time(), described)


def _stored(registry: Registry, choice: JobFilter, described: bool) -> list[ListRow]:
    """Return the stored lines of the chosen jobs, the newest first."""
    if choice.states and choice.states <= set(ACTIVE):
        return []
    where, values = _conditions(choice, described)
    names = [*ListRow._fields[:-1], "described" if described else "''"]
    sql = f"SELECT {', '.join(names)} FROM listed WHERE {where} ORDER BY seq DESC LIMIT ?"
    rows = registry.database.execute(sql, (*values, -1 if choice.limit is None else choice.limit))
    return list(map(ListRow._make, rows))


def _is_wanted(registry: Registry, job: Job, choice: JobFilter) -> bool:
    """Return whether to describe the job."""
    if not choice.includes(job.backend, job.created_s, job.asked):
        return False
    if job.active:
        return True
    return not (choice.hides_unsent and job.created_s < time.time() - UNSENT_S and registry.never_ran(job))


def _valid(described: bool) -> str:
    """Return the SQL condition for a stored line of this version, with JSON if `described`."""
    return f"form = {_form()} AND described != ''" if described else f"form % 1000 = {LINE_FORM}"


def _form() -> int:
    return LINE_FORM + 1000 * JSON_FORM


def _conditions(choice: JobFilter, described: bool) -> tuple[str, list[Any]]:
    """Return the choice of stored lines as an SQL condition, with the values."""
    parts, values = [_valid(described)], list[Any]()
    for column, names in (("state", choice.states), ("backend", choice.backends)):
        if names:
            parts.append(f"{column} IN ({', '.join('?' * len(names))})")
            values += sorted(names)
    for condition, value in (("project = ?", choice.project), ("created_s >= ?", choice.since_s)):
        if value is not None:
            parts.append(condition)
            values.append(value)
    if choice.hides_unsent:
        parts.append("NOT (outcome = 'not sent' AND created_s < ? AND job_id NOT IN (" + RAN + "))")
        values.append(time.time() - UNSENT_S)
    for key, value in choice.tags:
        parts.append("EXISTS (SELECT 1 FROM json_each(tags) WHERE key = ? AND value = COALESCE(?, value))")
        values += [key, value]
    return " AND ".join(parts), values


def row_of(job: Job, attempts: Sequence[Attempt], now_s: float, described: bool = True) -> Row:
    """Return the job's row in the table `listed`, in the order of the columns: the line, then the search columns.

    Without `described`, the row has no JSON.
    If cloudtrain fails to describe a job, the row has the state and `?`: the remaining jobs must still be listed.
    """
    plan, attempts = job.attempt.plan, up_to(job.attempt, attempts)
    try:
        spent_micro = meter.spent_micro(meter.legs_of(attempts), now_s)
        percent = Money(spent_micro, None, limit_micro(job), None).percent
        how, far = outcome(job), next_words(job) or shown(progress_of(job, attempts)) or in_line(job) or "-"
        money = "?" if spent_micro is None else f"{cell(spent_micro)}{'' if percent is None else f' {percent}%'}"
        told = json_line(view_of(job, attempts, now_s).as_json()) if described else ""
    except Exception as error:
        how, far, money = job.attempt.state.state, "?", "?"
        known = {"job": job.id, "name": job.name, "backend": job.backend, "state": how, "created_s": job.created_s}
        told = json.dumps({**known, "fault": f"it cannot be described: {type(error).__name__}: {error}"})
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
        described=told,
    )
    return (*line, _form(), job.asked.project, json.dumps(job.asked.tags))

"""What a list says of each job, quick however many there are: of one that has ended it is made once, and kept.

A job that has ended says the same for ever, until somebody resumes it. So its line and its JSON lie ready in a narrow
table, from which triggers in the database drop them as soon as anything writes to the job. Those that may be running
are few, and are made as they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cloudtrain.entrypoints.figures import amount
from cloudtrain.launcher.describe import as_json, outcome, project_of
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.job import ACTIVE, Attempt, Job
from cloudtrain.launcher.money.outlook import outlook
from cloudtrain.launcher.progress import shown
from cloudtrain.launcher.registry import Registry

__all__ = ["FORM", "Choice", "Line", "Listing", "attempts_of", "chosen"]

FORM = 1  # of what is kept: raised when a line's words or the JSON change, so that all are made anew
_BATCH = 500  # are kept in one transaction


@dataclass(frozen=True)
class Choice:
    """Which jobs: what is empty or None chooses all. `limit`: the newest so many of them.

    `tags` with their values, None for any; `since_s`: submitted from then on, in unix seconds.
    """

    states: frozenset[str] = frozenset()
    backends: frozenset[str] = frozenset()
    project: str | None = None
    tags: tuple[tuple[str, str | None], ...] = ()
    since_s: float | None = None
    limit: int | None = None

    @property
    def is_narrow(self) -> bool:
        """Whether more than the number is chosen by."""
        return bool(self.states or self.backends or self.project or self.tags or self.since_s)


class Line(NamedTuple):
    """A job in a list; `described` is its JSON, empty where only the words were asked for."""

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
    """The chosen jobs' lines, the newest first; `active` are those of them that may be running."""

    lines: list[Line]
    active: list[Job]


def chosen(
    registry: Registry,
    choice: Choice,
    ask: Callable[[list[Job]], list[Job]] | None = None,
    *,
    described: bool = False,
) -> Listing:
    """Return the chosen jobs; with `described` their lines hold the JSON that `status --json` prints.

    `ask` brings jobs that may be running up to date (asking.ask); without it they are told as last seen.
    """
    is_any = not choice.states
    active = [job for job in registry.jobs(active=True) if _fits(job, choice)]
    ended = [] if choice.states and choice.states <= set(ACTIVE) else _ended(registry, choice, described=described)
    if is_any and choice.limit is not None:  # nobody is asked who is not listed
        newest = sorted([*(job.seq for job in active), *(line.seq for line in ended)], reverse=True)[: choice.limit]
        active = [job for job in active if job.seq >= newest[-1]]
    if ask is not None and active:
        active = ask(active)
    now_s = time.time()
    told = {job.seq: Line(*_row(job, attempts_of(registry, job), now_s)[: len(Line._fields)]) for job in active}
    lines = [*(line for line in told.values() if is_any or line.state in choice.states), *ended]
    lines = sorted(lines, key=lambda line: -line.seq)[: choice.limit] if told else ended
    shown_seqs = {line.seq for line in lines} if told else set()
    return Listing(lines, [job for job in active if job.active and job.seq in shown_seqs])


def attempts_of(registry: Registry, job: Job) -> list[Attempt]:
    """Return all attempts; of most jobs that is the one which is known already."""
    return [job.attempt] if job.attempt.number == 1 else registry.attempts(job)


def _ended(registry: Registry, choice: Choice, *, described: bool) -> list[Line]:
    """Return the lines of the chosen jobs that have ended, the newest first; what is not kept yet is made now."""
    loose = _make_missing(registry, choice)
    where, values = _conditions(choice)
    names = [*Line._fields[:-1], "described" if described else "''"]
    rows = registry.database.execute(
        f"SELECT {', '.join(names)} FROM listed WHERE {where} ORDER BY seq DESC LIMIT ?",
        (*values, -1 if choice.limit is None else choice.limit),
    )
    lines = list(map(Line._make, rows))
    return lines if not loose else sorted([*lines, *loose], key=lambda line: -line.seq)[: choice.limit]


def _conditions(choice: Choice) -> tuple[str, list[Any]]:
    """Return the choice as a condition of SQL, with its values."""
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
    for key, value in choice.tags:
        parts.append("EXISTS (SELECT 1 FROM json_each(tags) WHERE key = ? AND value = COALESCE(?, value))")
        values += [key, value]
    return " AND ".join(parts), values


def _fits(job: Job, choice: Choice) -> bool:
    """Return whether the job, in whatever state, is one of the chosen."""
    tags = job.config.get("tags") or {}
    return (
        (not choice.backends or job.backend in choice.backends)
        and (choice.project is None or choice.project == project_of(job))
        and (choice.since_s is None or job.created_s >= choice.since_s)
        and all(key in tags and value in (None, tags[key]) for key, value in choice.tags)
    )


def _make_missing(registry: Registry, choice: Choice) -> list[Line]:
    """Make and keep the lines that are not there; return those of the chosen that could not be kept: a full disk.

    Where the newest few are listed, no more are made.
    """
    missing = registry.database.execute(
        "SELECT seq FROM jobs WHERE seq NOT IN (SELECT seq FROM listed WHERE form = ?) ORDER BY seq DESC", (FORM,)
    )
    seqs = [row[0] for row in missing]
    if choice.limit is not None and not choice.is_narrow:
        seqs = seqs[
            : choice.limit + len(registry.database.execute("SELECT 1 FROM attempts WHERE state IN (?, ?, ?)", ACTIVE))
        ]
    loose: list[Line] = []
    for begin in range(0, len(seqs), _BATCH):
        loose += _make(registry, seqs[begin : begin + _BATCH], choice)
    return loose


def _make(registry: Registry, seqs: Sequence[int], choice: Choice) -> list[Line]:
    """Make and keep the lines of those of these jobs that have ended; return the chosen ones where they cannot be kept.

    In one transaction, so that nobody changes a job after its line was made and before it is there to be dropped.
    """
    jobs = registry.numbered(seqs)
    if not any(not job.active for job in jobs):
        return []
    made: list[tuple[Job, tuple[Any, ...]]] = []
    try:
        with registry.database.transaction():
            now_s = time.time()
            ended = [job for job in registry.numbered(seqs) if not job.active]
            made = [(job, _row(job, attempts_of(registry, job), now_s)) for job in ended]
            for _, row in made:
                registry.database.execute(f"INSERT OR REPLACE INTO listed VALUES ({', '.join('?' * len(row))})", row)
    except ConfigError:
        lines = [Line(*row[: len(Line._fields)]) for job, row in made if _fits(job, choice)]
        return [line for line in lines if not choice.states or line.state in choice.states]
    return []


def _row(job: Job, attempts: Sequence[Attempt], now_s: float) -> tuple[Any, ...]:
    """Return what the table `listed` holds of the job, in its columns' order: a line's, then what it is found by."""
    money = outlook(job, attempts, now_s)
    spent = "?"
    if money.spent_micro is not None:
        share = f" {100 * money.spent_micro // money.limit_micro}%" if money.limit_micro else ""
        spent = amount(money.spent_micro) + share
    plan = job.attempt.plan
    line = Line(
        seq=job.seq,
        job_id=job.id,
        backend=job.backend,
        state=job.attempt.state.state,
        ranks=f"{plan['instances']} x {plan['nproc_per_node']}",
        outcome=outcome(job),
        progress=shown(job.attempt.progress) or "-",
        money=spent,
        created_s=job.created_s,
        described=json.dumps(as_json(job, attempts), ensure_ascii=False, allow_nan=False),
    )
    return (*line, FORM, project_of(job), json.dumps(job.config.get("tags") or {}, ensure_ascii=False))

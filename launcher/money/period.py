"""The cost of jobs in a time span, per job and per group; a leg over the end of a month is split.

Months are calendar months in UTC. Only the columns that the legs need are read, so ten thousand jobs take a fraction of
a second.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from ..metering import meter
from ..store.attempts import COST_COLUMNS, attempt_of
from ..store.budgets import month_of, month_span
from ..store.database import Database
from ..text.times import seconds
from ..text.units import as_usd, parse_duration

_BY = re.compile(r"^(project|backend|name|tag:.+)$")
_DAY = re.compile(r"^\d{4}-\d{2}-\d{2}$")
_ATTEMPTS = f"""
SELECT a.job_id, {COST_COLUMNS}, jobs.name, jobs.backend, jobs.created_s
FROM attempts a JOIN jobs ON jobs.id = a.job_id
WHERE a.phase != 'never_sent'
      AND (a.state IN ('pending', 'running', 'stopping')
           OR COALESCE(CASE WHEN json_valid(a.outcome) THEN json_extract(a.outcome, '$.ended_s') END, ?1) >= ?1)
ORDER BY jobs.seq, a.number
"""
# The ledger keeps the costs of removed jobs by month; each cost counts at its end.
_REMOVED = """
SELECT r.project, COUNT(DISTINCT r.job_id) AS jobs,
       COALESCE(SUM(s.spent_micro), 0) AS spent, MAX(r.spent_micro IS NULL) AS unknown,
       MIN(r.ended_s, COALESCE(CAST(strftime('%s', s.month || '-01', '+1 month') AS REAL), r.ended_s)) AS at_s
FROM reservations r LEFT JOIN spends s ON s.job_id = r.job_id AND s.attempt = r.attempt
WHERE r.state = 'settled' AND r.job_id NOT IN (SELECT id FROM jobs) AND at_s > ? AND at_s <= ?
GROUP BY r.project HAVING spent > 0 OR unknown
"""
_LABELS = """
SELECT id, json_extract(config, '$.tags') AS tags, json_extract(config, '$.project') AS project FROM jobs
WHERE id IN (SELECT value FROM json_each(?))
"""


@dataclass
class Spent:
    """The cost of a job in the span; `spent_micro` leaves out legs without a price, and `unknown` marks them.

    The removed jobs of a project are a single row of `jobs` jobs, with the state `removed`.
    """

    job_id: str
    name: str
    backend: str
    created_s: float
    state: str
    project: str = ""
    tags: dict[str, Any] = field(default_factory=dict)
    spent_micro: int = 0
    unknown: bool = False
    node_s: float = 0.0
    jobs: int = 1


@dataclass
class Group:
    """The cost of the jobs with the same `key`; `unknown` counts the jobs without a known price."""

    key: str
    jobs: int = 0
    spent_micro: int = 0
    unknown: int = 0
    node_s: float = 0.0


def spent_between(database: Database, from_s: float, to_s: float, now_s: float, *, labels: bool = False) -> list[Spent]:
    """Return the jobs that ran in the span, the most expensive first; `labels` adds tags and projects."""
    spent = spent_in(database, {"": (from_s, to_s)}, now_s)[""]
    return labelled(database, spent) if labels else spent


def spent_in(database: Database, spans: Mapping[str, tuple[float, float]], now_s: float) -> dict[str, list[Spent]]:
    """Return by the span's name what `spent_between` returns without labels, with a single read of the attempts."""
    database.require_sound("jobs", "attempts", "reservations", "spends")
    found: dict[str, dict[str, Spent]] = {name: {} for name in spans}
    for row in database.execute(_ATTEMPTS, (min(from_s for from_s, _ in spans.values()),)):
        attempt = attempt_of(row, row["job_id"])
        legs = meter.legs_of([attempt])
        ends_s = [leg.end_s(now_s) for leg in legs]
        begins_s = [end_s if leg.started_s is None else leg.started_s for leg, end_s in zip(legs, ends_s, strict=True)]
        begin_s, end_s = min(begins_s, default=0.0), max(ends_s, default=0.0)
        for name, (from_s, to_s) in spans.items():
            is_lost = attempt.phase == "damaged" and attempt.created_s < to_s  # its times are not known
            if is_lost or (begin_s < to_s and end_s >= from_s):
                job = found[name].get(attempt.job_id) or Spent(
                    row["job_id"], row["name"], row["backend"], row["created_s"], ""
                )
                job.state = attempt.state.state
                job.unknown |= is_lost
                if _add(job, legs, from_s, to_s, now_s) or is_lost:
                    found[name][attempt.job_id] = job
    for name, span in spans.items():
        for row in database.execute(_REMOVED, span):
            title = f"(removed jobs{' of ' * bool(row['project'])}{row['project']})"
            found[name][title] = removed = Spent(title, title, "-", 0.0, "removed", row["project"], jobs=row["jobs"])
            removed.spent_micro, removed.unknown = row["spent"], bool(row["unknown"])

    def order(job: Spent) -> tuple[Any, ...]:
        return -job.spent_micro, not job.unknown, job.created_s

    return {name: sorted(jobs.values(), key=order) for name, jobs in found.items()}


def labelled(database: Database, spent: list[Spent]) -> list[Spent]:
    """Return the jobs, with their tags and projects."""
    jobs = {job.job_id: job for job in spent}
    for row in database.execute(_LABELS, (json.dumps(list(jobs)),)):
        job, project = jobs[row["id"]], row["project"] or ""
        job.project = json.loads(project).get("name") or "" if project.startswith("{") else project  # with a ledger
        job.tags = json.loads(row["tags"] or "{}")
    return spent


def grouped(spent: Iterable[Spent], by: str) -> list[Group]:
    """Return sums by `tag:NAME`, `project`, `backend` or `name`, the largest first; "" groups jobs without a value."""
    found: dict[str, Group] = {}
    for job in spent:
        group = found.get(key := _key(job, by)) or found.setdefault(key, Group(key))
        group.jobs += job.jobs
        group.spent_micro += job.spent_micro
        group.unknown += job.unknown
        group.node_s += job.node_s
    return sorted(found.values(), key=lambda each: (-each.spent_micro, each.key))


def total(spent: Iterable[Spent]) -> Group:
    """Return the sum over all jobs."""
    groups = grouped(spent, "")
    return groups[0] if groups else Group("")


def as_json(spent: Sequence[Spent], groups: Sequence[Group] | None = None) -> dict[str, Any]:
    """Return the sum, and the groups or else the jobs, with stable names; an unknown `spend_usd` is null."""
    if groups is not None:
        return _sum_json(total(spent)) | {"groups": [{"key": each.key, **_sum_json(each)} for each in groups]}
    return _sum_json(total(spent)) | {"jobs": [_job_json(job) for job in spent]}


def span_of(month: str | None, since: str | None) -> tuple[float, float]:
    """Return the begin and the end of a month, by default the present one, or of the time since then, in unix seconds.

    `since` is as in `begin_of`. Raises UsageError for both, or for an invalid time.
    """
    now_s = time.time()
    if month is not None and since is not None:
        raise UsageError("--month and --since are two spans of time", hint="give one")
    if since is not None:
        return (from_s := begin_of(since)), max(from_s, now_s)
    try:
        return month_span(month_of(now_s) if month is None else month)
    except ValueError as error:
        raise UsageError(f"--month {month}: expected {error}") from error


def begin_of(since: str) -> float:
    """Return the begin of a day such as `2026-11-03`, or the time so long ago, `7d`. Raises UsageError."""
    try:
        if not _DAY.match(since):
            return time.time() - parse_duration(since)
        if (from_s := seconds(f"{since}T00:00:00Z")) is None:
            raise ValueError("a day that there is")
    except ValueError as error:
        raise UsageError(f"--since {since}: expected {error}", hint="or a day, as in --since 2026-11-03") from error
    return from_s


def require_by(by: str | None) -> None:
    """Raise UsageError for sums that `grouped` cannot form."""
    if by is not None and not _BY.match(by):
        from difflib import get_close_matches  # 3 ms, only for a fault

        close = get_close_matches(by, ["project", "backend", "name"], 1) or [f"tag:{by}"]
        hint = f"did you mean `{close[0]}`?"
        raise UsageError(f"--by {by}: expected `tag:NAME`, `project`, `backend` or `name`", hint=hint)


def _sum_json(group: Group) -> dict[str, Any]:
    least = as_usd(group.spent_micro)
    return {
        "spend_usd": None if group.unknown else least,
        "at_least_usd": least,
        "jobs_without_a_price": group.unknown,
        "job_count": group.jobs,
        "node_hours": round(group.node_s / 3600, 4),
    }


def _job_json(job: Spent) -> dict[str, Any]:
    return {
        "job": job.job_id,
        "name": job.name,
        "backend": job.backend,
        "state": job.state,
        "project": job.project or None,
        "tags": job.tags,
        "created_s": job.created_s,
        "spend_usd": None if job.unknown else as_usd(job.spent_micro),
        "node_hours": round(job.node_s / 3600, 4),
    }


def _add(job: Spent, legs: Iterable[meter.Leg], from_s: float, to_s: float, now_s: float) -> bool:
    """Add the cost of an attempt's legs in the span; return whether the attempt ran in the span."""
    was_there = False
    for leg in legs:
        begin_s, end_s = leg.started_s, leg.end_s(now_s)
        if begin_s is None and not leg.billed_s:
            continue
        part = meter.part_micro(leg, from_s, to_s, now_s)
        overlap_s = max(0.0, min(end_s, to_s) - max(end_s if begin_s is None else begin_s, from_s))
        if not overlap_s and not part and part is not None:
            continue
        was_there = True
        job.unknown |= part is None
        job.spent_micro += part or 0
        job.node_s += overlap_s * leg.instances
    return was_there


def _key(job: Spent, by: str) -> str:
    if by.startswith("tag:"):
        return str(job.tags.get(by[4:], ""))
    return {"project": job.project, "backend": job.backend, "name": job.name}.get(by, "")

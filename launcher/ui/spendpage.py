"""The cost page: twelve months, a month in groups, and the remaining budgets; the same figures as `cost`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..money import period
from ..money.period import Spent
from ..store import ledger
from ..store.budgets import OVERALL, Standing, month_of
from ..store.database import Database
from ..text.money import as_usd

MONTHS = 12
MOST_ROWS = 20


def spend(database: Database, month: str, by: str) -> dict[str, Any]:
    """Return the page's values for a month (`2026-11`; if invalid, the current month), grouped by `by`."""
    now_s = time.time()
    names = _months(now_s)
    month = month if month in names else names[-1]
    spans = {name: period.month_span(name) for name in names}
    # A read for each month; only the chosen month needs labels.
    sums = {name: period.spent_between(database, *spans[name], now_s, labels=name == month) for name in names}
    chosen = sums[month]
    listed = [job for job in chosen if job.state != "removed"]  # a removed job has no page
    tags = sorted({name for job in chosen for name in job.tags})
    kinds = ["backend", "project", "name", *(f"tag:{name}" for name in tags)]
    by = by if by in kinds else "backend"
    whole = period.total(chosen)
    groups = period.grouped(chosen, by)
    totals = {name: period.total(sums[name]) for name in names}
    most = max((each.spent_micro for each in totals.values()), default=0)
    return {
        "month": month,
        "by": by,
        "kinds": kinds,
        "months": [
            {
                "name": name,
                "usd": as_usd(each.spent_micro),
                "unknown": each.unknown,
                "jobs": each.jobs,
                "share": each.spent_micro / most if most else 0.0,
            }
            for name, each in totals.items()
        ],
        "whole": _row(whole.key, whole, whole.spent_micro),
        "groups": [_row(each.key, each, whole.spent_micro) for each in groups[:MOST_ROWS]],
        "more_groups": max(0, len(groups) - MOST_ROWS),
        "jobs": [_job(job, whole.spent_micro) for job in listed[:MOST_ROWS]],
        "more_jobs": max(0, len(listed) - MOST_ROWS),
        "budgets": _budgets(ledger.standings(database, now_s)),
        "shared": sorted(set(ledger.ledgers(database).values())),
        "unpriced": ledger.unpriced(database),
    }


def _months(now_s: float) -> list[str]:
    """Return the current month and the months before, the oldest first."""
    year, month = (int(part) for part in month_of(now_s).split("-"))
    found = []
    for back in range(MONTHS - 1, -1, -1):
        count = year * 12 + month - 1 - back
        found.append(f"{count // 12:04d}-{count % 12 + 1:02d}")
    return found


def _row(key: str, group: period.Group, whole_micro: int) -> dict[str, Any]:
    return {
        "key": key,
        "jobs": group.jobs,
        "unknown": group.unknown,
        "usd": as_usd(group.spent_micro),
        "node_hours": group.node_s / 3600,
        "share": group.spent_micro / whole_micro if whole_micro else 0.0,
    }


def _job(job: Spent, whole_micro: int) -> dict[str, Any]:
    return {
        "job": job.job_id,
        "backend": job.backend,
        "state": job.state,
        "tags": job.tags,
        "node_hours": job.node_s / 3600,
        "usd": None if job.unknown else as_usd(job.spent_micro),
        "share": job.spent_micro / whole_micro if whole_micro else 0.0,
    }


def _budgets(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    found = []
    for each in sorted(standings, key=lambda one: (one.budget.project, one.budget.period)):
        limit = each.budget.limit_micro
        found.append(
            {
                "whose": "all jobs" if each.budget.project == OVERALL else each.budget.project,
                "period": each.month if each.budget.period == "month" else "ever",
                "limit_usd": as_usd(limit),
                "spent_usd": as_usd(each.spent_micro),
                "reserved_usd": as_usd(each.reserved_micro),
                "left_usd": as_usd(each.left_micro),
                "spent_share": min(1.0, each.spent_micro / limit) if limit else 1.0,
                "taken_share": min(1.0, (each.spent_micro + each.reserved_micro) / limit) if limit else 1.0,
                "unknown": [held.job_id for held in each.unknown],
            }
        )
    return found

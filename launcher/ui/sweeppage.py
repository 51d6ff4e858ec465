"""The sweeps of the page: a line for each above the jobs, and a sweep's own page, from the JSON of `status`."""

from __future__ import annotations

from typing import Any

from ..jobs.list_cache import JobFilter
from ..store import sweeps
from ..store.registry import Registry
from ..store.sweeps import SweepRecord
from ..sweeps import driving, overview, summary
from .joblist import JobListQuery
from .site import Pages
from .sse import Shown

MOST = 10  # sweeps above the list of jobs; `cloudtrain list` has all


def listed(registry: Registry, choice: JobListQuery) -> list[dict[str, Any]]:
    """Return the newest sweeps for the first page of all jobs, each as in `list --json`; no sweep below a filter."""
    if choice.is_narrow or choice.page > 1:
        return []
    return [summary.as_json(each) for each in summary.chosen(registry.database, JobFilter(limit=MOST))]


def found(registry: Registry, sweep_id: str) -> SweepRecord:
    """Return the sweep. Raises NoSuchJobError."""
    return sweeps.find(registry.database, sweep_id)


def shown(pages: Pages, registry: Registry, sweep_id: str) -> Shown:
    """Return the page's parts that update themselves. Raises NoSuchJobError."""
    sweep = found(registry, sweep_id)
    html = pages.render(
        "_sweep.html",
        sweep=overview.as_json(registry.database, sweep),
        created_s=sweep.created_s,
        plan=overview.plan_lines(sweep.config),
        cause=overview.cause_of(registry, sweep),
        place_of=overview.place_of,
        values_text=overview.values_text,
        figure=overview.figure,
    )
    return Shown({"sweep": html}, is_live=driving.is_going_on(registry.database, sweep))

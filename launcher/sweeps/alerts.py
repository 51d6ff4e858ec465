"""Alerts of a sweep's budget, at the percents of `budget.alert_at`: sent once each, by the channels of the config.

The measure is the money that is spent, not the money that is held: a held worst case comes back at a trial's end.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cloudtrain.entrypoints.format import dollars
from cloudtrain.entrypoints.notices.facts import JobFacts
from cloudtrain.entrypoints.notices.message import Notice, compose
from cloudtrain.entrypoints.sweep.search import Allowance, decide

from .. import channels
from ..job import StoredConfig
from ..notices import outbox
from ..planning import search_spec
from ..store import sweeps
from . import searching

if TYPE_CHECKING:
    from ..store.database import Database
    from ..store.registry import Registry
    from ..store.sweeps import SweepRecord


def look(registry: Registry, sweep: SweepRecord) -> list[Notice]:
    """Print and send the alert that is due; return the alert if no process has printed the alert before.

    Deliveries are stored under the first trial's job, because a delivery belongs to a job.
    """
    database, now_s = registry.database, time.time()
    sweep = sweeps.find(database, sweep.id)
    notice = due(database, sweep, now_s)
    if notice is None:
        return []
    job_id = sweeps.segments(database, sweep.id)[0].job_id
    places = [outbox.TERMINAL, *(each.id for each in channels.entries(sweep.config) if "budget" in each.on)]
    if not any(outbox.is_open(database, job_id, place, notice.key, now_s) for place in places):
        return []
    from ..notices.notifier import Notifier

    notifier = Notifier(registry)
    try:
        return notifier.tell(job_id, sweep.config, [notice])
    finally:
        notifier.close()


def due(database: Database, sweep: SweepRecord, now_s: float) -> Notice | None:
    """Return the alert of the highest percent that is reached; None without a limit, or below all percents.

    A sweep that ends because no trial fits into the rest of the money has reached the last percent up to 100.
    """
    limit, (spent, held) = sweep.limit_micro, sweeps.spent_and_held(database, sweep.id)
    asked = StoredConfig.load(sweep.config)
    percents = [int(str(each).strip().rstrip("%")) for each in asked.alert_at]  # stored as text such as `80%`
    if not limit or not percents or not spent:
        return None
    reached = max((each for each in percents if spent * 100 >= limit * each), default=0)
    last = max((each for each in percents if each <= 100), default=0)
    words = f"{reached} % of the budget is spent: {dollars(spent)} of {dollars(limit)}"
    if reached < last and sweep.state == "ended" and _wants_more(database, sweep):
        reached = last
        words = f"ended at its budget, {dollars(spent)} of {dollars(limit)} spent: no further trial fits into the rest"
    elif reached >= 100:
        words += "; no further trial can be sent"
    if not reached:
        return None
    is_over = sweep.state != "running"
    state, backend = "stopped" if is_over else "running", str(sweep.config["backend"])
    facts = JobFacts(sweep.id, backend, 0, state, spent_micro=spent, limit_micro=limit)
    found = compose(f"budget:{reached}@{limit}", "budget", words, facts, now_s)
    lines = [f"spent       {dollars(spent)} of {dollars(limit)}, {dollars(held)} held"]
    lines += [] if is_over else [f"stop it     cloudtrain stop {sweep.id}"]
    lines.append(f"more money  cloudtrain resume {sweep.id} --budget +{limit / 2e6:.2f}USD")
    return replace(found, lines=tuple(lines), fields={**found.fields, "checkpoint_step": None, "resume": None})


def _wants_more(database: Database, sweep: SweepRecord) -> bool:
    """Return whether the search would start a segment if money were unlimited."""
    results = searching.results_of(sweeps.segments(database, sweep.id))
    return bool(decide(search_spec.search_of(sweep.config), results, (), Allowance()))

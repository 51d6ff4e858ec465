"""More trials and more money for a sweep, and the continuation of a sweep that was stopped or has ended.

A trial's values depend on the seed and the trial's number, so more trials leave the known trials unchanged.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cloudtrain.entrypoints.format import counted, up, usd

from .. import config as configs
from ..errors import BudgetError, NoSuchJobError, UsageError
from ..jobs import retry
from ..jobs.refresh import refresh
from ..planning import search_spec
from ..planning.search_spec import is_packed
from ..store import sweeps
from ..text.units import format_money

if TYPE_CHECKING:
    from ..store.database import Database
    from ..store.registry import Registry
    from ..store.sweeps import SegmentRecord, SweepRecord

_DRIVER_S = 0.2  # between two looks at the lease of a concurrent driver


def grown(database: Database, sweep: SweepRecord, trials: str | None, budget: str | None) -> SweepRecord:
    """Return the sweep as running, with `+40` or `67` trials, and a limit of `+50USD` or `200USD`; None keeps a value.

    The function stores no row. Raises UsageError and BudgetError for values that the sweep cannot take, ConfigError
    for values against the rules of the section.
    """
    if trials is None and budget is None:
        if sweep.state == "ended":
            hint = f"cloudtrain resume {sweep.id} --trials +10, or --budget +5USD"
            raise UsageError(f"{sweep.id} has ended", hint=hint)
        return replace(sweep, state="running")
    limit_micro = _limit_micro(database, sweep, budget)
    settings = [] if trials is None else [f"sweep.trials={trials_after(database, sweep, trials)}"]
    if limit_micro is not None:
        settings.append(f"budget.limit={format_money(limit_micro)}")
    config = configs.stored(sweep.config, overrides=settings).model_dump(mode="json")
    return replace(sweep, state="running", config=config, limit_micro=limit_micro)


def words(database: Database, sweep: SweepRecord) -> str:
    """Return the trials and the money of the sweep, in words."""
    trials = counted(search_spec.search_of(sweep.config).trials, "trial")
    if sweep.limit_micro is None:
        return f"{trials}, no budget"
    spent, _ = sweeps.spent_and_held(database, sweep.id)
    return f"{trials}, {usd(up(spent))} of {usd(sweep.limit_micro)} spent"


def go_on(registry: Registry, sweep: SweepRecord) -> None:
    """Store the sweep as running with its new values; trials that the user has stopped become due again.

    The function waits for the lease, because a concurrent driver could store the end of the sweep with the old values.
    Raises UsageError while a trial still saves because of a stop.
    """
    database = registry.database
    end_s = time.monotonic() + sweeps.LEASE_S + 5.0
    while not (held_s := sweeps.lease(database, sweep.id)):
        if time.monotonic() > end_s:
            raise UsageError(f"another process drives {sweep.id} now", hint="resume the sweep again in half a minute")
        time.sleep(_DRIVER_S)
    try:
        rows = [] if is_packed(sweep.config) else _stopped(registry, sweep)
        with database.transaction():
            sweeps.change(database, sweep)
            for each in rows:
                sweeps.write(database, each)
    finally:
        sweeps.free(database, sweep.id, held_s)


def trials_after(database: Database, sweep: SweepRecord, text: str) -> int:
    """Return the sweep's number of trials after `+40` or `67`. Raises UsageError."""
    search, written = search_spec.search_of(sweep.config), text.strip()
    number = written.removeprefix("+")
    if not (number.isascii() and number.isdecimal()):
        raise UsageError(f"--trials {text}: expected a whole number", hint="+40 adds trials, 67 sets their number")
    if search.algorithm == "grid":
        hint = "submit a new sweep with more values in `sweep.space`"
        raise UsageError(f"--trials {text}: the grid has {search.trials} trials, all in the sweep", hint=hint)
    if search.algorithm == "pbt":
        hint = "submit a new sweep with another number of trials"
        raise UsageError(f"--trials {text}: a population keeps its {search.trials} trials", hint=hint)
    count = search.trials + int(number) if written.startswith("+") else int(number)
    begun = max((each.trial for each in sweeps.segments(database, sweep.id)), default=-1) + 1
    if count < max(1, begun):
        hint = f"at least --trials {max(1, begun)}"
        raise UsageError(f"--trials {text}: {counted(begun, 'trial')} of {sweep.id} began already", hint=hint)
    return count


def _limit_micro(database: Database, sweep: SweepRecord, budget: str | None) -> int | None:
    """Return the limit after `+50USD` or `200USD`. Raises UsageError; BudgetError if the limit is spent already."""
    if budget is None:
        return sweep.limit_micro
    limit_micro = retry.budget_after(sweep.id, sweep.limit_micro, budget)
    used_micro = sum(sweeps.spent_and_held(database, sweep.id))
    if limit_micro <= used_micro:
        message = f"--budget {budget}: {sweep.id} has spent and holds {usd(up(used_micro))}"
        raise BudgetError(message, hint="a higher limit, or +5USD to add money")
    return limit_micro


def _stopped(registry: Registry, sweep: SweepRecord) -> list[SegmentRecord]:
    """Return the rows of trials that the user has stopped, as due with the next attempt of their jobs."""
    found, was_stopped = [], sweeps.find(registry.database, sweep.id).state == "stopped"
    for each in sweeps.segments(registry.database, sweep.id):
        if each.state not in ("sent", "failed", "stopped") or each.value is not None:
            continue
        try:
            job = refresh(registry, registry.find(each.job_id))
        except NoSuchJobError:
            continue
        if was_stopped and job.active:
            raise UsageError(f"{job.id} still saves because of a stop", hint=f"wait for it: cloudtrain wait {job.id}")
        state = job.attempt.state
        if (state.state, state.reason) == ("stopped", "user"):
            found.append(replace(each, state="due", attempt=job.attempt.number + 1, tries=0))
    return found

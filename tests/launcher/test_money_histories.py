"""Never over a budget, and no cost forgotten: random histories of jobs and sweeps in two homes on one shared ledger.

After each command the bills are recounted from the platform's own jobs (doubles/billing.py).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cloudtrain.launcher.job import Job
from cloudtrain.launcher.jobs import reserve, stopping
from cloudtrain.launcher.jobs.view import read_view
from cloudtrain.launcher.money import period, shared_ledger
from cloudtrain.launcher.money.conditional import ConditionalObject
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import LedgerBudget
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.sweeps import costs
from doubles.billing import BilledJob
from doubles.twohomes import BEGIN_S, DAY_S, Budget, World, two_homes


def owned(world: World) -> Iterator[tuple[int, BilledJob]]:
    """Yield the platform's jobs with their homes."""
    for job in world.platform.jobs.values():
        yield world.homes.index(job.home), job


def audit(world: World) -> None:
    """Compare the bills with the budgets, and with the ledgers, which must count each attempt once."""
    bills = {job.name: job.bill_micro(world.now_s) for _, job in owned(world)}
    of_job = dict[str, list[BilledJob]]()
    for _, job in owned(world):
        of_job.setdefault(job.job_id, []).append(job)
    for attempts in of_job.values():
        limit = attempts[-1].request["budget"]
        assert limit is None or sum(bills[each.name] for each in attempts) <= limit, attempts
    for budget in world.budgets:
        jobs = [job for home, job in owned(world) if covers(budget, home, job)]
        assert not any(job.request["unpriced"] for job in jobs), budget
        if budget.period == "all":
            assert sum(bills[job.name] for job in jobs) <= budget.limit_micro, budget
        else:
            _audit_months(world, budget, jobs, bills)
    books = [_rows(world, home) for home in range(2)]
    shared = _shared_rows(world)
    for home, job in owned(world):
        counted = books[home][job.job_id, job.number]
        assert counted is None or counted >= bills[job.name], ("too little is counted", job)
        if any(budget.place is None and covers(budget, home, job) for budget in world.budgets):
            assert shared[home, job.job_id, job.number] >= bills[job.name], ("too little is shared", job)


def _audit_months(world: World, budget: Budget, jobs: list[BilledJob], bills: dict[str, Any]) -> None:
    first, last = (time.gmtime(at_s)[:2] for at_s in (BEGIN_S, world.now_s))
    for number in range(first[0] * 12 + first[1] - 1, last[0] * 12 + last[1]):
        from_s, to_s = period.month_span(f"{number // 12}-{number % 12 + 1:02}")
        billed = sum(float(bills[job.name]) * job.share(from_s, to_s, world.now_s) for job in jobs)
        assert billed <= budget.limit_micro + len(jobs), (budget, number)


def _rows(world: World, home: int) -> dict[tuple[str, int], int | None]:
    """Return what the home's ledger counts for each attempt, after a check of its sums."""
    database = world.opened(home).database
    held = {(each.job_id, each.attempt): each.amount_micro for each in ledger.held(database)}
    found = dict(held)
    for row in database.execute("SELECT job_id, attempt, SUM(spent_micro) AS spent FROM spends GROUP BY 1, 2"):
        assert (row["job_id"], row["attempt"]) not in held, "counted twice"
        found[row["job_id"], row["attempt"]] = row["spent"]
    for row in database.execute("SELECT job_id, attempt, spent_micro FROM reservations WHERE state = 'settled'"):
        assert found.setdefault((row[0], row[1]), row[2]) == row[2]
    for standing in ledger.standings(database, world.now_s):
        limit = _limit(world, home, standing.budget)
        assert standing.money.spent_micro + standing.money.held_micro <= limit, standing
    assert sum(sum(each.values()) for each in ledger.months(database).values()) + sum(
        each or 0 for each in held.values()
    ) == sum(each or 0 for each in found.values())
    return found


def _shared_rows(world: World) -> dict[tuple[int, str, int], int]:
    """Return what the shared ledger counts for each attempt, after a check of its sums."""
    book = shared_ledger.read(ConditionalObject(world.place)) or shared_ledger.Book()
    found = {key: each.amount_micro or 0 for key, each in book.held.items()}
    for key, end in book.closed.items():
        assert key not in found, "counted twice"
        found[key] = sum(end.months.values())
    for standing in shared_ledger.accounts(book).standings(world.now_s):
        assert standing.money.spent_micro + standing.money.held_micro <= _limit(world, None, standing.budget), standing
    rows = [(key.split("/"), micro) for key, micro in found.items()]
    assert len({tuple(parts[:3]) for parts, _ in rows}) == len(rows), "counted twice"
    return {(world.own.index(parts[0]), parts[1], int(parts[2])): micro for parts, micro in rows}


def _limit(world: World, place: int | None, stored: LedgerBudget) -> int:
    key = (place, stored.project, stored.period)
    return next(each.limit_micro for each in world.budgets if (each.place, each.project, each.period) == key)


def finish(world: World) -> None:
    """Let all jobs end, and look at them: no money is held, and each cost is exactly the reported one."""
    world.is_well = False
    for _ in range(2):
        world.now_s = max([world.now_s, *(job.over_s for job in world.platform.jobs.values())]) + DAY_S
        for home in range(2):
            world.command(home, _settle)
    audit(world)
    shared = _shared_rows(world)
    for home in range(2):
        rows = _rows(world, home)
        registry = world.opened(home)
        assert (ledger.held(registry.database), ledger.unsynced(registry.database)) == ([], [])
        for name, job in ((job.name, job) for owner, job in owned(world) if owner == home):
            _require_exact(world, rows[job.job_id, job.number], job)
            assert shared.get((home, job.job_id, job.number), 0) in (0, rows[job.job_id, job.number]), name
        for job in registry.jobs():
            _require_bill(world, registry, job)
    assert not (shared_ledger.read(ConditionalObject(world.place)) or shared_ledger.Book()).held


def _settle(registry: Registry) -> None:
    failures = reserve.reconcile(registry)
    assert not failures, failures
    for job in registry.jobs(active=True):
        if job.attempt.phase == "queued":
            stopping.ask(registry, job.id)


def _require_exact(world: World, counted: int | None, job: BilledJob) -> None:
    """Assert that an ended attempt counts at the reported seconds and the highest price; None at an unknown price."""
    platform, told_s = world.platform, job.told_s
    if job.request["unpriced"]:
        assert counted == (0 if told_s is None else None)
        return
    expected = 0 if told_s is None else math.ceil(platform.worst_micro(told_s, job.instances))
    assert counted is not None
    if platform.form == "no end" and told_s is not None:
        most = platform.worst_micro(job.request["cap_s"] + platform.stop_s, job.instances)
        assert expected <= counted <= math.ceil(most), (counted, expected, job)
    else:
        assert counted == expected, (counted, expected, job)


def _require_bill(world: World, registry: Registry, job: Job) -> None:
    """Assert that `cost` has the reported seconds at the list price, of a sweep also by trial, and by month."""
    view = read_view(registry, job)
    spent = view.money.spent_micro
    told = [each for each in world.platform.jobs.values() if each.job_id == job.id and each.told_s is not None]
    if spent is None:
        assert "unpriced" in job.config["tags"]
        return
    expected = sum(each.instances * (each.told_s or 0.0) for each in told) * world.platform.list_micro / 3600
    is_upper = world.platform.form == "no end" and bool(told)
    assert expected - 1 <= spent, (job.id, expected, spent)
    assert is_upper or spent <= expected + 1 + len(told), (job.id, expected, spent)
    months = period.spent_between(registry.database, 0.0, world.now_s, world.now_s)
    assert abs(sum(each.spent_micro for each in months if each.job_id == job.id) - spent) <= len(told)
    if job.config.get("sweep"):
        shares = costs.costs_of(registry.database, view)
        parts = (costs.total(shares.segments) or 0) + shares.idle_micro
        assert shares.money.spent_micro == spent
        assert abs(parts - spent) <= len(shares.segments)


def covers(budget: Budget, home: int, job: BilledJob) -> bool:
    """Return whether the budget is over the job."""
    return budget.place in (None, home) and budget.project in ("", job.request["project"])


def play(seed: int) -> None:
    """Play a history, and recount after each command."""
    random.seed(seed)  # for the pauses of the product
    with two_homes(seed) as world:
        world.begin()
        for _ in range(world.rnd.randint(3, 9)):
            world.act()
            audit(world)
        finish(world)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 10_060), marks=pytest.mark.soak)], ids=len)
def test_no_history_is_over_a_budget_or_forgets_a_cost(seeds: range) -> None:
    """Jobs, sweeps, refusals, kills, lost answers, retries, resumes and growth: each sum is the platform's."""
    for seed in seeds:
        try:
            play(seed)
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error

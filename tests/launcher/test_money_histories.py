"""Never over a budget, and no cost forgotten: random histories of jobs and sweeps in two homes on one shared ledger.

After each command the bills are recounted from the platform's own jobs (doubles/billing.py).
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest

from cloudtrain.launcher.job import Job
from cloudtrain.launcher.jobs import reserve, stopping
from cloudtrain.launcher.jobs.view import read_view
from cloudtrain.launcher.money import period, shared_ledger
from cloudtrain.launcher.money.conditional import ConditionalObject
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import Standing, month_span
from cloudtrain.launcher.store.home import identity
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.sweeps import costs
from doubles.billing import BilledJob
from doubles.twohomes import BEGIN_S, DAY_S, World, two_homes


def audit(world: World) -> None:
    """Compare the bills with the budgets, and with the ledgers, which must count each attempt once."""
    bills, of_job = list[tuple[BilledJob, Fraction]](), defaultdict[str, list[tuple[BilledJob, Fraction]]](list)
    for job in world.platform.jobs.values():
        bills.append((job, world.platform.bill_micro(job)))
        of_job[job.job_id].append(bills[-1])
    for attempts in of_job.values():
        limit = attempts[-1][0].asked["budget"]
        assert limit is None or sum(bill for _, bill in attempts) <= limit, attempts
    for place, project, each in world.limits:
        limit = world.limits[place, project, each]
        covered = [(job, bill) for job, bill in bills if covers(place, project, job)]
        assert not any(job.asked["unpriced"] for job, _ in covered), (place, project)
        if each == "all":
            assert sum(bill for _, bill in covered) <= limit, (place, project)
            continue
        first, last = (time.gmtime(at_s)[:2] for at_s in (BEGIN_S, world.now_s))
        for month in range(first[0] * 12 + first[1] - 1, last[0] * 12 + last[1]):
            span = month_span(f"{month // 12}-{month % 12 + 1:02}")
            billed = sum(float(bill) * share(job, *span, world.now_s) for job, bill in covered)
            assert billed <= limit + len(covered), (place, project, month)
    rows, shared = {home: own_rows(world, home) for home in world.homes}, shared_rows(world)
    for job, bill in bills:
        counted = rows[job.home].get((job.job_id, job.number), -1)
        assert counted is None or counted >= bill, ("too little is counted", job)
        if any(place is None and covers(place, project, job) for place, project, _ in world.limits):
            assert shared.get((job.home, job.job_id, job.number), -1) >= bill, ("too little is shared", job)


def covers(place: Path | None, project: str, job: BilledJob) -> bool:
    """Return whether the budget is over the job."""
    return place in (None, job.home) and project in ("", job.asked["project"])


def share(job: BilledJob, from_s: float, to_s: float, now_s: float) -> float:
    """Return the share of the bill that falls between two times, by the time from the first start to the end."""
    if not job.lengths(now_s):
        return 0.0
    begin, end = job.runs[0][0], min(now_s, job.runs[-1][1])
    return max(0.0, min(end, to_s) - max(begin, from_s)) / (end - begin)


def own_rows(world: World, home: Path) -> dict[tuple[str, int], int | None]:
    """Return what the home's ledger counts for each attempt, after a check of its sums."""
    database = world.opened(home).database
    accounts = ledger.accounts(database, world.now_s)
    rows = {(each.job_id, each.attempt): each.amount_micro for each in accounts.held}
    total = sum(micro or 0 for micro in rows.values()) + sum(sum(each.values()) for each in accounts.months.values())
    for row in database.execute("SELECT job_id, attempt, SUM(spent_micro) FROM spends GROUP BY 1, 2"):
        assert (row[0], row[1]) not in rows, "counted twice"
        rows[row[0], row[1]] = row[2]
    for row in database.execute("SELECT job_id, attempt, spent_micro FROM reservations WHERE state = 'settled'"):
        assert rows.setdefault((row[0], row[1]), row[2]) == row[2]
    assert total == sum(micro or 0 for micro in rows.values())
    _require_within(world, home, accounts.standings(world.now_s))
    return rows


def shared_rows(world: World) -> dict[tuple[Path, str, int], int]:
    """Return what the shared ledger counts for each attempt, after a check of its sums."""
    book, homes = book_of(world), {identity(home)[:12]: home for home in world.homes}
    _require_within(world, None, shared_ledger.accounts(book).standings(world.now_s))
    rows = dict[tuple[Path, str, int], int]()
    held = [(key, each.amount_micro or 0) for key, each in book.held.items()]
    for key, micro in [*held, *((key, sum(end.months.values())) for key, end in book.closed.items())]:
        owner, job_id, number, _ = key.split("/")
        assert rows.setdefault((homes[owner], job_id, int(number)), micro) is micro, "counted twice"
    assert len(rows) == len(book.held) + len(book.closed), "counted twice"
    return rows


def book_of(world: World) -> shared_ledger.Book:
    """Return the content of the shared ledger."""
    return shared_ledger.read(ConditionalObject(world.place)) or shared_ledger.Book()


def _require_within(world: World, place: Path | None, standings: Iterable[Standing]) -> None:
    for each in standings:
        limit = world.limits[place, each.budget.project, each.budget.period]
        assert (each.money.spent_micro or 0) + (each.money.held_micro or 0) <= limit, each


def finish(world: World) -> None:
    """Let all jobs end, and look at them: no money is held, and each cost is exactly the reported one."""
    world.is_well = False
    for _ in range(2):
        world.now_s = max([world.now_s, *(job.over_s for job in world.platform.jobs.values())]) + DAY_S
        for home in world.homes:
            world.command(home, _settle)
    audit(world)
    shared, rows = shared_rows(world), {home: own_rows(world, home) for home in world.homes}
    for job in world.platform.jobs.values():
        counted = rows[job.home][job.job_id, job.number]
        _require_exact(world, counted, job)
        assert shared.get((job.home, job.job_id, job.number), 0) in (0, counted), job
    for home in world.homes:
        registry = world.opened(home)
        assert (ledger.held(registry.database), ledger.unsynced(registry.database)) == ([], [])
        for each in registry.jobs():
            _require_bill(world, registry, each)
    assert not book_of(world).held


def _settle(registry: Registry) -> None:
    failures = reserve.reconcile(registry)
    assert not failures, failures
    for job in registry.jobs(active=True):
        if job.attempt.phase == "queued":
            stopping.ask(registry, job.id)


def _require_exact(world: World, counted: int | None, job: BilledJob) -> None:
    """Assert that an ended attempt counts at the reported seconds and the highest price; None at an unknown price."""
    platform, told_s, instances = world.platform, job.told_s, job.asked["instances"]
    if job.asked["unpriced"]:
        assert counted == (0 if told_s is None else None)
        return
    expected = 0 if told_s is None else math.ceil(platform.worst_micro(told_s, instances))
    most = expected
    if platform.form == "no end" and told_s is not None:
        most = math.ceil(platform.worst_micro(job.asked["cap_s"] + platform.stop_s, instances))
    assert counted is not None
    assert expected <= counted <= most, (counted, expected, job)


def _require_bill(world: World, registry: Registry, job: Job) -> None:
    """Assert that `cost` has the reported seconds at the list price, of a sweep also by trial, and by month."""
    view = read_view(registry, job)
    spent = view.money.spent_micro
    ran = [each for each in world.platform.jobs.values() if each.job_id == job.id and each.told_s is not None]
    if spent is None:
        assert "unpriced" in job.config["tags"]
        return
    seconds = sum(each.asked["instances"] * (each.told_s or 0.0) for each in ran)
    expected, is_upper = seconds * world.platform.list_micro / 3600, world.platform.form == "no end" and ran
    assert expected - 1 <= spent, (job.id, expected, spent)
    assert is_upper or spent <= expected + 1 + len(ran), (job.id, expected, spent)
    months = period.spent_between(registry.database, 0.0, world.now_s, world.now_s)
    assert abs(sum(each.spent_micro for each in months if each.job_id == job.id) - spent) <= len(ran)
    if job.config.get("sweep"):
        shares = costs.costs_of(registry.database, view)
        parts = (costs.total(shares.segments) or 0) + shares.idle_micro
        assert shares.money.spent_micro == spent
        assert abs(parts - spent) <= len(shares.segments)


def play(seed: int) -> None:
    """Play a history, and recount after each command."""
    random.seed(seed)  # for the pauses of the product
    with two_homes(seed) as world:
        world.begin()
        for _ in range(world.rnd.randint(3, 9)):
            world.act()
            audit(world)
        finish(world)


@pytest.mark.parametrize(
    "seeds",
    [range(60), *(pytest.param(range(at, at + 2000), marks=pytest.mark.soak) for at in range(60, 10_060, 2000))],
    ids=str,
)
def test_no_history_is_over_a_budget_or_forgets_a_cost(seeds: range) -> None:
    """Jobs, sweeps, refusals, kills, lost answers, retries, resumes and growth: each sum is the platform's."""
    for seed in seeds:
        try:
            play(seed)
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error

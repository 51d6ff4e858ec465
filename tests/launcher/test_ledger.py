"""The ledger of a home folder: held, settled and freed sums, by month and project, after any crash."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import BudgetError, ConfigError, UnreachableError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import reserve
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import LedgerBudget
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job, plan_of

USD = 1_000_000
NOVEMBER_S = 1_795_348_800.0  # 2026-11-22 12:00 UTC
PRICED = {"instances": 1, "nproc_per_node": 1, "ranks": 1, "hourly_usd": 10.0, "price_micro": 10 * USD, "cap_s": 3600}


@pytest.fixture
def submit(registry: Registry) -> Callable[..., Job]:
    """Return a function that journals a job with its worst case, as submit does."""

    def add(name: str, amount_usd: float | None = 10, project: str = "vision") -> Job:
        worst_micro = None if amount_usd is None else round(amount_usd * USD)
        plan = plan_of(**PRICED, worst_case_micro=worst_micro)

        def make(job_id: str, number: int) -> Job:
            job = make_job(job_id, number, plan=plan, config={"project": {"name": project}})
            reserve.reserve(registry, job.attempt, job.config)
            return job

        return registry.add(name, make, exclusive=True, key=None)[0]

    return add


def limit(registry: Registry, usd: float, project: str = "vision", period: Any = "all") -> None:
    """Set a budget."""
    ledger.set_budget(registry.database, LedgerBudget(project, period, round(usd * USD)))


def test_refused_job_is_not_journalled(registry: Registry, submit: Callable[..., Job]) -> None:
    """Reservation and journal entry are a single transaction."""
    limit(registry, 15)
    submit("one")
    with pytest.raises(BudgetError, match="reserved 10 USD by one"):
        submit("two")
    assert [job.id for job in registry.jobs()] == ["one"]
    assert [held.job_id for held in ledger.held(registry.database)] == ["one"]


def test_unknown_price_is_refused_if_a_budget_applies(registry: Registry, submit: Callable[..., Job]) -> None:
    """Without a budget the job runs, and then blocks every later budget that would count the job."""
    submit("before", None)
    limit(registry, 100)
    with pytest.raises(BudgetError, match="without a known price: before"):
        submit("one")
    with pytest.raises(BudgetError, match="price of this job is unknown"):
        submit("two", None)
    registry.mark_never_sent(registry.find("before").attempt, State("failed", "error"))
    submit("one")


def test_end_of_an_attempt_is_split_over_months(registry: Registry, submit: Callable[..., Job]) -> None:
    """A day on each side of the border between two past months: each month has half, the present month has 0.

    A project's name is never a part of an SQL statement.
    """
    project = "'; DROP TABLE budgets; --"
    job = submit("one", 480, project)
    border_s = 1_790_812_800.0  # 2026-10-01 00:00 UTC
    state = State("succeeded", started_s=border_s - 86_400, ended_s=border_s + 86_400)
    registry.set_state(job.attempt, state, {})
    assert ledger.months(registry.database) == {project: {"2026-09": 240 * USD, "2026-10": 240 * USD}}


def test_reservation_counts_in_every_month_for_any_clock(registry: Registry, submit: Callable[..., Job]) -> None:
    """The worst case counts in the queried month, for any start; a cost in a future month counts in the present one."""
    limit(registry, 100, period="month")
    job = submit("one", 80)
    for days in (0, 40, 400):
        standing = ledger.standings(registry.database, time.time() + days * 86_400, "vision")[0]
        assert (standing.money.spent_micro, standing.money.left_micro) == (0, 20 * USD)
    ledger.settle(registry.database, job.id, 1, 70 * USD, NOVEMBER_S + 40 * 86_400)
    assert ledger.standings(registry.database, NOVEMBER_S, "vision")[0].money.left_micro == 30 * USD
    assert ledger.standings(registry.database, NOVEMBER_S + 90 * 86_400, "vision")[0].money.left_micro == 100 * USD


def test_end_at_an_unknown_cost_counts_as_the_worst_case(registry: Registry, submit: Callable[..., Job]) -> None:
    """An unknown cost is never 0; if the worst case is unknown too, the job is listed."""
    limit(registry, 20)
    job = submit("one")
    ledger.settle(registry.database, job.id, 1, None, time.time())
    assert ledger.standings(registry.database, time.time())[0].money.left_micro == 10 * USD
    ledger.remove_budget(registry.database, "vision", "all")
    other = submit("two", None)
    ledger.settle(registry.database, other.id, 1, None, time.time())
    assert ledger.unpriced(registry.database) == ["two"]


def test_full_disk_refuses_and_changes_nothing(registry: Registry, submit: Callable[..., Job]) -> None:
    """Without room for the reservation the submit is refused with a message, and the journal has no partial entry."""
    limit(registry, 100)
    pages = registry.database.execute("PRAGMA page_count")[0][0]
    registry.database.execute(f"PRAGMA max_page_count = {pages}")

    def fill() -> None:
        for number in range(200):
            submit(f"job{number}", 0.001)

    with pytest.raises(ConfigError, match="full"):
        fill()
    registry.database.execute("PRAGMA max_page_count = 100000")
    jobs, held = registry.jobs(), ledger.held(registry.database)
    assert {job.id for job in jobs} == {each.job_id for each in held}
    submit("after")


def test_reconcile_continues_past_jobs_that_cannot_be_asked(
    registry: Registry, submit: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent backend tells nothing about its job's money; a removed plug-in blocks no further job's budget."""

    class Away:
        def state(self, ref: Any) -> State:
            raise UnreachableError("no answer")

    registry.mark_sent(submit("one").attempt, {"x": 1})
    with monkeypatch.context() as outage:
        outage.setattr(backends, "load", lambda name: Away())
        failures = reserve.reconcile(registry)
    assert failures == ["one: local does not answer; its worst case stays reserved"]
    assert [held.job_id for held in ledger.held(registry.database)] == ["one"]
    registry.database.execute("UPDATE jobs SET backend = 'gone'")
    failures = reserve.reconcile(registry)
    assert [failure.startswith("one: ") and "`gone`" in failure for failure in failures] == [True], failures
    assert [held.job_id for held in ledger.held(registry.database)] == ["one"]


def test_slow_poll_returns_the_end_stored_meanwhile(
    registry: Registry, submit: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend reported `running`, and a second process stored the end meanwhile: the end is right."""

    class Slow:
        def state(self, ref: Any) -> State:
            return State("running", started_s=1000.0)

        def pace(self, ref: Any) -> backends.Pace:
            return backends.Pace(0.01, 0.01)

        def logs(self, ref: Any, cursor: Any, ranks: Any) -> backends.LogPage:
            registry.set_state(job.attempt, State("failed", "error", started_s=1000.0, ended_s=1060.0), {})
            return backends.LogPage([], {"at": 1})

    monkeypatch.setattr(backends, "load", lambda name: Slow())
    job = submit("one")
    registry.mark_sent(job.attempt, {"x": 1})
    assert refresh(registry, registry.find("one")).attempt.state.state == "failed"
    assert registry.find("one").attempt.state.state == "failed"


@pytest.mark.parametrize(("spent_usd", "rest_usd"), [(0, 10), (3, 7)])
def test_moved_reservation_keeps_the_sum(
    registry: Registry, submit: Callable[..., Job], spent_usd: int, rest_usd: int
) -> None:
    """What the earlier attempt has cost stays with it, and the later attempt has the rest."""
    submit("one")
    database = registry.database
    ledger.settle(database, "one", 1, spent_usd * USD, NOVEMBER_S)
    ledger.move(database, "one", 1, 2, NOVEMBER_S)
    held = [(each.attempt, each.amount_micro) for each in ledger.held(database)]
    assert held == [(2, rest_usd * USD)]
    assert sum(sum(each.values()) for each in ledger.months(database).values()) == spent_usd * USD


def test_reservation_shrinks_and_grows_within_the_budget(registry: Registry, submit: Callable[..., Job]) -> None:
    """Money that was given back may be gone when more is needed again."""
    limit(registry, 15)
    submit("one")
    database = registry.database
    ledger.shrink(database, "one", 1, 4 * USD)
    submit("two", 9)
    ledger.cover(database, "one", 1, 6 * USD, NOVEMBER_S)
    with pytest.raises(BudgetError):
        ledger.cover(database, "one", 1, 7 * USD, NOVEMBER_S)
    assert sorted(each.amount_micro or 0 for each in ledger.held(database)) == [6 * USD, 9 * USD]

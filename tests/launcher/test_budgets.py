"""The sum left in a budget, and refusals, without a ledger."""

import calendar
import random
from dataclasses import replace

import pytest

from cloudtrain.entrypoints.format import amount, up
from cloudtrain.launcher.errors import BudgetError
from cloudtrain.launcher.money import budget_text
from cloudtrain.launcher.store.budgets import Accounts, Held, LedgerBudget, Standing, by_month, require_room

USD = 1_000_000


def at(text: str) -> float:
    """Return the time of a text in UTC, such as `2026-11-30 12:00`."""
    day, clock = text.split()
    parts = [*map(int, day.split("-")), *map(int, clock.split(":")), 0]
    return float(calendar.timegm(tuple(parts)))  # type: ignore[arg-type]


def standing(limit: int, spent: int = 0, reserved: tuple[int | None, ...] = (), **details: int) -> Standing:
    """Return the state of a project's budget with sums in whole dollars."""
    held = tuple(
        Held(f"job{number}", 1, "vision", None if each is None else each * USD, 0.0)
        for number, each in enumerate(reserved)
    )
    percent = details.pop("overcommit_percent", 100)
    means = (details.get("count", 0), details.get("settled", 0) * USD, details.get("expected", 0) * USD)
    return state_of(LedgerBudget("vision", "all", limit * USD, percent), spent * USD, held, means)


def state_of(
    budget: LedgerBudget, spent: int = 0, held: tuple[Held, ...] = (), means: tuple[int, int, int] = (0, 0, 0)
) -> Standing:
    """Return the state of a budget with these sums in micro-dollars, in November."""
    accounts = Accounts([budget], held, {budget.project: {"2026-11": spent}}, {budget.project: means})
    return accounts.standing(budget, at("2026-11-29 12:00"))


def test_refusal_names_limit_spent_reserved_left_and_needed() -> None:
    """A line has all facts of each budget that is too small, and the hint has the fix."""
    with pytest.raises(BudgetError) as caught:
        require_room([standing(100, 50, (30, 10))], 12_300_000)
    said = str(caught.value)
    for part in ("project vision's 100 USD", "12.30 USD", "spent 50 USD", "40 USD by job0, job1", "left 10 USD"):
        assert part in said, said
    assert caught.value.exit_code == 6
    assert caught.value.hint.endswith("or raise the budget: cloudtrain budget set vision 102.30USD")
    levels = [standing(10), standing(1000), standing(5)]
    with pytest.raises(BudgetError) as caught:
        require_room(levels, 20 * USD)
    assert caught.value.message.count("does not hold") == 2


def test_jobs_without_a_cost_hold_no_money() -> None:
    """A free job is not named as a holder, and its end frees no money; a smaller budget of the job may fit."""
    budget, free = LedgerBudget("vision", "all", 5 * USD), Held("mine", 1, "vision", 0, 0.0)
    with pytest.raises(BudgetError, match="spent 0 USD, left 5 USD") as found:
        require_room([state_of(budget, 0, (free,))], 6 * USD)
    assert found.value.hint.startswith(
        "take a shorter limits.max_duration, fewer instances or a smaller budget.limit, or"
    )


def test_hint_raises_each_budget_that_is_short_by_just_enough() -> None:
    """The commands can be pasted: month and overcommitment stay, and with the raised limits the job fits."""
    levels = [
        state_of(LedgerBudget("", "all", 10 * USD), 3 * USD),
        state_of(LedgerBudget("vision", "month", 5 * USD, 150), 3_140_001),
        state_of(LedgerBudget("vision", "all", 100 * USD)),
    ]
    with pytest.raises(BudgetError) as caught:
        require_room(levels, 20 * USD)
    raised = "cloudtrain budget set 23USD && cloudtrain budget set vision 23.15USD --month --overcommit 1.5"
    assert caught.value.hint.endswith(f"or raise the budget: {raised}")
    enough = [LedgerBudget("", "all", 23 * USD), LedgerBudget("vision", "month", 23_150_000, 150)]
    require_room([replace(each, budget=more) for each, more in zip(levels, enough, strict=False)], 20 * USD)


def test_overcommitment_raises_the_room_for_many_jobs() -> None:
    """The sum left and the spent sum stay; of many jobs few cost their worst case, a single job might."""
    found = standing(20, 3, overcommit_percent=500)
    assert (found.money.left_micro, found.room_micro) == (17 * USD, 85 * USD)
    require_room([standing(100, 50, (30,), overcommit_percent=120)], 30 * USD)
    with pytest.raises(BudgetError, match=r"overcommitted 1\.2 times"):
        require_room([standing(100, 50, (30,), overcommit_percent=120)], 30 * USD + 1)
    require_room([standing(100, 50, overcommit_percent=120)], 50 * USD)
    with pytest.raises(BudgetError, match=r"the 50 USD that is unspent") as caught:
        require_room([standing(100, 50, overcommit_percent=120)], 50 * USD + 1)
    assert caught.value.hint.endswith("or raise the budget: cloudtrain budget set vision 100.01USD --overcommit 1.2")


def test_budget_is_usable_up_to_the_last_micro_dollar() -> None:
    """An exact fit is accepted, and a micro-dollar more is refused."""
    require_room([standing(100, 50, (10,))], 40 * USD)
    with pytest.raises(BudgetError):
        require_room([standing(100, 50, (10,))], 40 * USD + 1)


def test_unknown_price_fits_into_no_budget_and_blocks_the_budget() -> None:
    """Neither a new job nor a running job of unknown price counts as 0; a free machine may run with the money spent."""
    with pytest.raises(BudgetError, match="price of this job is unknown"):
        require_room([standing(100)], None)
    with pytest.raises(BudgetError, match="without a known price: job0"):
        require_room([standing(100, 0, (None,))], USD)
    require_room([], None)
    require_room([standing(100, 150)], 0)


def test_sums_near_the_limit_are_told_apart() -> None:
    """12.301 USD do not fit into 12.30 USD, as the message shows; ended jobs have cost half of their worst cases."""
    with pytest.raises(BudgetError, match=r"12\.31 USD.*left 12\.30 USD"):
        require_room([state_of(LedgerBudget("vision", "all", 12_300_000))], 12_301_000)
    known = standing(100, 0, (90,), settled=50, expected=100, count=5)
    assert (known.mean_percent, known.money.projected_micro) == (50, 45 * USD)
    assert standing(100, 0, (90,), settled=50, expected=100, count=2).money.projected_micro is None


def test_spend_is_split_over_months_in_utc() -> None:
    """36 hours before midnight and 12 after are three quarters in November; no micro-dollar is lost for any span."""
    parts = by_month(100 * USD, at("2026-11-29 12:00"), at("2026-12-01 12:00"))
    assert parts == {"2026-11": 75 * USD, "2026-12": 25 * USD}
    rng = random.Random(7)
    for _ in range(2000):
        start_s = rng.uniform(-1e9, 3e9)
        total, end_s = rng.randrange(0, 10**12), start_s + rng.choice([1.0, 1e5, 1e7, 1e8]) * rng.random()
        parts = by_month(total, start_s, end_s)
        assert sum(parts.values()) == total
        assert min(parts.values(), default=0) >= 0
    assert by_month(7, at("2026-11-30 12:00"), at("2026-12-01 00:00") + 1e-6) == {"2026-11": 7}
    assert by_month(7, 1e300, 1e301) == {"9999-12": 7}


def test_cost_with_invalid_times_is_not_split() -> None:
    """For an end before its start, or without a start, the sum counts in the month of the end."""
    for start_s in (None, at("2026-12-05 00:00")):
        assert by_month(5, start_s, at("2026-11-05 00:00")) == {"2026-11": 5}
    assert by_month(5, 0.0, 0.0) == {"1970-01": 5}


@pytest.mark.parametrize("micro", [0, 432, 4_149, 52_340, 995_000, 12_300_000, 999_999_000_000, 1_500_000_000_000])
def test_budget_show_and_cost_show_a_sum_alike(micro: int) -> None:
    """`budget show` writes a spent sum as `cost` does: 0.0041, 0.052, 12.30."""
    row = state_of(LedgerBudget("vision", "all", 10**15), micro)
    assert budget_text.as_lines([row])[1].split()[3] == amount(up(micro))

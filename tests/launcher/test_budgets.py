"""What is left of a budget, and what it refuses: without a ledger."""

from __future__ import annotations

import calendar
import random
from dataclasses import replace

import pytest

from cloudtrain.launcher.errors import BudgetError
from cloudtrain.launcher.store.budgets import Held, LedgerBudget, Standing, by_month, month_of, require_room

USD = 1_000_000


def at(text: str) -> float:
    """Return the moment, UTC: `2026-11-30 12:00`."""
    day, clock = text.split()
    parts = [*map(int, day.split("-")), *map(int, clock.split(":")), 0]
    return float(calendar.timegm(tuple(parts)))  # type: ignore[arg-type]


def standing(limit: int, spent: int = 0, reserved: tuple[int | None, ...] = (), **details: int) -> Standing:
    """Return a project's budget with sums in whole dollars."""
    held = tuple(
        Held(f"job{number}", 1, "vision", None if each is None else each * USD, 0.0)
        for number, each in enumerate(reserved)
    )
    percent = details.pop("overcommit_percent", 100)
    budget = LedgerBudget("vision", "all", limit * USD, percent)
    return Standing(budget, "2026-11", spent * USD, held, **{key: value * USD for key, value in details.items()})


def test_refusal_names_limit_spent_reserved_left_and_needed() -> None:
    """One line says all that there is to know, and the hint what to do."""
    with pytest.raises(BudgetError) as caught:
        require_room([standing(100, 50, (30, 10))], 12_300_000)
    said = str(caught.value)
    for part in ("project vision's 100 USD", "12.30 USD", "spent 50 USD", "40 USD by job0, job1", "left 10 USD"):
        assert part in said, said
    assert caught.value.exit_code == 6
    assert caught.value.hint.endswith("or raise the budget: cloudtrain budget set vision 102.30USD")


def test_hint_raises_each_budget_that_is_short_by_just_enough() -> None:
    """The commands can be pasted: month and overcommitment stay, and with these limits the job fits."""
    levels = [
        Standing(LedgerBudget("", "all", 10 * USD), "2026-11", 3 * USD),
        Standing(LedgerBudget("vision", "month", 5 * USD, 150), "2026-11", 3_140_001),
        Standing(LedgerBudget("vision", "all", 100 * USD), "2026-11", 0),
    ]
    with pytest.raises(BudgetError) as caught:
        require_room(levels, 20 * USD)
    raised = "cloudtrain budget set 23USD && cloudtrain budget set vision 23.15USD --month --overcommit 1.5"
    assert caught.value.hint.endswith(f"or raise the budget: {raised}")
    enough = [LedgerBudget("", "all", 23 * USD), LedgerBudget("vision", "month", 23_150_000, 150)]
    require_room([replace(each, budget=more) for each, more in zip(levels, enough, strict=False)], 20 * USD)


def test_left_is_money_and_room_is_what_may_be_promised() -> None:
    """An overcommitment makes no money: of 20 USD with 3 spent 17 are left, though 85 may be promised."""
    found = standing(20, 3, overcommit_percent=500)
    assert (found.left_micro, found.room_micro) == (17 * USD, 85 * USD)


def test_every_level_that_refuses_is_named() -> None:
    """Overall, month and project are each checked, and each that is too small is told."""
    levels = [standing(10), standing(1000), standing(5)]
    with pytest.raises(BudgetError) as caught:
        require_room(levels, 20 * USD)
    assert caught.value.message.count("does not hold") == 2


@pytest.mark.parametrize("left_micro", [0, 1, -1])
def test_budget_is_used_up_to_the_last_micro_dollar(left_micro: int) -> None:
    """What fits exactly fits; a millionth more does not."""
    amount = 40 * USD - left_micro
    if left_micro < 0:
        with pytest.raises(BudgetError):
            require_room([standing(100, 50, (10,))], amount)
    else:
        require_room([standing(100, 50, (10,))], amount)


def test_unknown_price_fits_into_no_budget_and_shuts_it() -> None:
    """It is never taken for nothing: neither what is to be sent, nor what runs."""
    with pytest.raises(BudgetError, match="price of this job is unknown"):
        require_room([standing(100)], None)
    with pytest.raises(BudgetError, match="without a known price: job0"):
        require_room([standing(100, 0, (None,))], USD)
    require_room([], None)


def test_what_costs_nothing_fits_into_a_full_budget() -> None:
    """A free machine may be used when the money is gone."""
    require_room([standing(100, 150)], 0)


def test_overcommit_lets_worst_cases_exceed_what_is_left_by_its_factor() -> None:
    """Of 100 USD with 50 spent, 60 may be held at 1.2 times; what is spent is never overcommitted."""
    require_room([standing(100, 50, (30,), overcommit_percent=120)], 30 * USD)
    with pytest.raises(BudgetError, match=r"overcommitted 1\.2 times"):
        require_room([standing(100, 50, (30,), overcommit_percent=120)], 30 * USD + 1)


def test_overcommit_is_not_for_one_job_alone() -> None:
    """Of many one seldom costs its worst case; one that may cost more than there is breaks the budget by itself."""
    require_room([standing(100, 50, overcommit_percent=120)], 50 * USD)
    with pytest.raises(BudgetError, match=r"the 50 USD that is unspent") as caught:
        require_room([standing(100, 50, overcommit_percent=120)], 50 * USD + 1)
    assert caught.value.hint.endswith("or raise the budget: cloudtrain budget set vision 100.01USD --overcommit 1.2")


def test_refusal_tells_what_a_mean_estimate_would_admit() -> None:
    """Where ended jobs have cost half of their worst cases, and so counted it would fit, that is said with the way."""
    known = standing(100, 0, (90,), settled_micro=50, expected_micro=100)
    known = Standing(**{**vars(known), "settled_count": 5})
    with pytest.raises(BudgetError) as caught:
        require_room([known], 20 * USD)
    assert "50 % of their worst cases" in caught.value.hint
    assert ": cloudtrain budget set vision 100USD --overcommit 1.1\n" in caught.value.hint


def test_needed_and_left_never_look_alike() -> None:
    """12.301 USD do not fit into 12.30 USD, and the sentence shows why."""
    with pytest.raises(BudgetError, match=r"12\.31 USD.*left 12\.30 USD"):
        require_room([Standing(LedgerBudget("vision", "all", 12_300_000), "2026-11", 0)], 12_301_000)


def test_spend_is_split_at_the_months_border_in_utc() -> None:
    """36 hours to midnight and 12 after it: three quarters in November."""
    parts = by_month(100 * USD, at("2026-11-29 12:00"), at("2026-12-01 12:00"))
    assert parts == {"2026-11": 75 * USD, "2026-12": 25 * USD}


@pytest.mark.parametrize(
    ("start_s", "end_s"),
    [(None, at("2026-11-05 00:00")), (at("2026-12-05 00:00"), at("2026-11-05 00:00")), (0.0, 0.0)],
)
def test_spend_of_clocks_that_make_no_sense_is_kept_whole(start_s: float | None, end_s: float) -> None:
    """An end before its start, or no start at all: the sum counts, in the month of the end."""
    assert by_month(5, start_s, end_s) == {month_of(end_s): 5}


def test_parts_of_a_spend_add_up_to_it() -> None:
    """Whatever the span, no micro-dollar is lost or made; no part is negative."""
    rng = random.Random(7)
    for _ in range(2000):
        start_s = rng.uniform(-1e9, 3e9)
        total, end_s = rng.randrange(0, 10**12), start_s + rng.choice([1.0, 1e5, 1e7, 1e8]) * rng.random()
        parts = by_month(total, start_s, end_s)
        assert sum(parts.values()) == total
        assert min(parts.values(), default=0) >= 0
    assert by_month(7, 1e300, 1e301) == {"9999-12": 7}

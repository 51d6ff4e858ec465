"""The time limit from a budget: never above the money, never below the affordable time, or a sufficient sum."""

import random
from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.entrypoints.notices.facts import StepFacts
from cloudtrain.entrypoints.notices.resume_cost import cap_s, more
from cloudtrain.entrypoints.terms import CostRate, Terms, worst_case_micro
from cloudtrain.launcher.metering import limit as caps
from cloudtrain.launcher.metering.limit import Cap, LimitRefusal
from cloudtrain.launcher.prices import catalog

LOCAL = Terms(tail_s=20)
# The terms of the backends, with additions from a config: warm machines, an idling cluster, new starts.
TERMS = {
    "sagemaker": lambda draw: Terms(300 + draw.choice([0, 0, 600, 21_600]), lead_s=300, warns=True),
    "azureml": lambda draw: Terms(60 + draw.choice([0, 120, 1800]), 60, minimum_bill_s=60, lead_s=300),
    "vertex": lambda draw: Terms(60, unit_s=30, starts=draw.choice([1, 1, 4]), lead_s=300),
    "ssh": lambda draw: Terms(draw.choice([0, 20, 120])),
    "local": lambda draw: Terms(20),
}


def billed(cap_s: int, rate: CostRate, terms: Terms) -> Fraction:
    """Return the worst case in micro-dollars, computed with a second method."""
    seconds = max(Fraction(terms.minimum_bill_s), -(-Fraction(cap_s + terms.tail_s) // terms.unit_s) * terms.unit_s)
    hours = Fraction(seconds, 3600) * terms.starts * rate.instances
    return hours * rate.price_micro * Fraction(str(rate.uncertainty))


def prices() -> list[tuple[str, int]]:
    """Return each price of the table with its backend; own machines have arbitrary prices."""
    found = [(name, round(float(row["usd_per_hour"]) * 1e6)) for name in TERMS for row in catalog.rows(name)
             if row["usd_per_hour"]]  # fmt: skip
    return found + [(name, price) for name in ("ssh", "local") for price in (10_000, 2_500_000, 98_000_000)]


def test_cap_respects_the_budget_in_ten_thousand_cases() -> None:
    """For random types, nodes, budgets, earlier attempts and graces: never over, tight to a unit, or enough money."""
    draw, table, refused = random.Random(8), prices(), 0
    for _ in range(10_000):
        backend, price = draw.choice(table)
        terms = TERMS[backend](draw)
        rate = CostRate(draw.randint(1, 64), price, draw.choice([1.0, 1.05, 1.1025, 1.21, 1.4]))
        limit, longest_s = round(10 ** draw.uniform(4, 12)), draw.choice([3600, 86_400, 30 * 86_400])
        spent = sum(round(limit * draw.uniform(0, 0.4)) for _ in range(draw.choice([0, 0, 1, 3])))
        found = caps.choose(limit, spent, rate, terms, longest_s)
        if isinstance(found, Cap):
            assert billed(found.cap_s, rate, terms) <= found.worst_case_micro <= limit - spent
            assert terms.least_s <= found.cap_s <= longest_s
            if found.reason == "budget":
                assert found.cap_s % terms.unit_s == 0
                assert worst_case_micro(found.cap_s + terms.unit_s, rate, terms) > limit - spent
            else:
                assert found.cap_s == longest_s
            continue
        refused += 1
        assert found.enough_micro > limit
        assert isinstance(caps.choose(found.enough_micro, spent, rate, terms, longest_s), Cap)
        assert isinstance(caps.choose(found.enough_micro - 1, spent, rate, terms, longest_s), LimitRefusal)
    assert 1_000 < refused < 9_000  # both outcomes occur


@pytest.mark.parametrize(
    ("terms", "limit_usd", "cap_s"),
    [
        (Terms(), 2, 3600),
        (Terms(tail_s=300), 2, 3300),
        (Terms(tail_s=60, unit_s=30), 2.01, 3540),
        (Terms(tail_s=60, starts=4), 2, 840),
        (Terms(minimum_bill_s=600), 1, 1800),
    ],
    ids=["plain", "tail", "unit", "starts", "minimum"],
)
def test_cap_counts_the_platform_bill(terms: Terms, limit_usd: float, cap_s: int) -> None:
    """Two dollars at two per hour are an hour, less the tail, in whole units, once for each start."""
    assert caps.choose(round(limit_usd * 1e6), 0, CostRate(1, 2_000_000), terms, 86_400) == Cap(
        cap_s, "budget", worst_case_micro(cap_s, CostRate(1, 2_000_000), terms)
    )


@pytest.mark.parametrize(
    ("spent_micro", "rate", "cap_s"),
    [(1_000_000, CostRate(1, 2_000_000), 1800), (0, CostRate(1, 2_000_000, 1.25), 2880)],
)
def test_spent_money_and_uncertain_prices_buy_less(spent_micro: int, rate: CostRate, cap_s: int) -> None:
    """After half of the money half of the time is left; of an uncertain price the worst counts."""
    found = caps.choose(2_000_000, spent_micro, rate, Terms(), 86_400)
    assert isinstance(found, Cap)
    assert (found.cap_s, found.worst_case_micro) == (cap_s, 2_000_000 - spent_micro)


def test_limits_of_the_user_and_of_the_price() -> None:
    """A useful run has a lead, saves and some steps; a user's shorter limit is accepted, and its lead is less."""
    found = caps.choose(100_000, 0, CostRate(1, 3_600_000), Terms(tail_s=10, lead_s=300), 86_400)
    assert found == LimitRefusal(100_000, 90, 380, 390_000)
    assert caps.choose(10**9, 0, CostRate(1, 3_600_000), LOCAL, 30) == Cap(30, "time_limit", 50_000)
    with pytest.raises(ValueError, match="above 0"):
        caps.choose(1, 0, CostRate(1, 0), LOCAL, 60)
    assert worst_case_micro(35 * 60, CostRate(2, 821_800, 1.1025), Terms()) == 1_057_041
    found = [caps.own_limit_s(cap_s, Terms(60, lead_s=300)) for cap_s in (10, 31, 80, 89, 120, 300, 380, 381)]
    assert found == [9, 28, 72, 80, 80, 80, 80, 81]


@pytest.mark.parametrize("cap_s", [1, 7, 60, 100, 480, 3000, 86_400])
@pytest.mark.parametrize("terms", [LOCAL, Terms(lead_s=300, warns=True)], ids=["own", "warned"])
def test_margins_leave_most_of_a_short_cap(cap_s: int, terms: Terms) -> None:
    """The lead takes at most a tenth if the platform warns in time, the time to save a quarter of the rest."""
    limit_s = caps.own_limit_s(cap_s, terms)
    assert cap_s - min(terms.lead_s, cap_s // 10) == limit_s
    assert 0.66 * cap_s <= caps.deadline_s(limit_s) + 1 <= cap_s + 1
    assert limit_s - caps.deadline_s(limit_s) <= 120


@pytest.mark.parametrize("cap_s", [380, 600, 1200, 1800, 2400, 86_400])
def test_deadline_comes_before_a_kill_without_a_signal(cap_s: int) -> None:
    """The platform sends no signal, so by its own clock the job must leave before the kill, after some useful work."""
    terms = Terms(60, lead_s=300)
    limit_s = caps.own_limit_s(cap_s, terms)
    assert cap_s >= caps.least_useful_s(terms) == 380
    assert limit_s == cap_s - 300
    assert 60 <= caps.deadline_s(limit_s) <= limit_s - 20


@given(
    terms=st.builds(
        Terms,
        tail_s=st.integers(0, 22_000),
        least_s=st.sampled_from([1, 60]),
        unit_s=st.sampled_from([1, 30, 60]),
        starts=st.integers(1, 4),
        minimum_bill_s=st.sampled_from([0, 60, 600]),
        lead_s=st.sampled_from([0, 300]),
    ),
    rate=st.builds(
        CostRate, st.integers(1, 64), st.integers(1, 10**8), st.sampled_from([1.0, 1.05, 1.1025, 1.21, 1.000_000_1])
    ),
    limit_micro=st.integers(1, 10**12),
    spent_micro=st.integers(0, 10**12),
    eta_s=st.floats(0, 1e6),
)
def test_alert_advises_a_budget_that_the_limit_accepts(
    terms: Terms, rate: CostRate, limit_micro: int, spent_micro: int, eta_s: float
) -> None:
    """The advised sum, or the budget without an addition, buys the advised run, up to a unit of time."""
    advised = replace(terms, least_s=caps.least_useful_s(terms))
    steps = StepFacts(eta_s=eta_s)
    extra, needs_s = more(limit_micro, spent_micro, rate, advised, steps), ceil(cap_s(steps, advised) or 0)
    whole_micro = limit_micro + (0 if extra is None else extra.micro)
    found = caps.choose(whole_micro, spent_micro, rate, terms, needs_s)
    assert isinstance(found, Cap)
    assert needs_s - terms.unit_s < found.cap_s <= needs_s
    assert found.worst_case_micro <= worst_case_micro(needs_s, rate, terms) <= whole_micro - spent_micro
    assert (extra is None) == (worst_case_micro(needs_s, rate, terms) <= limit_micro - spent_micro)

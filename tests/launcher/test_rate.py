"""A price's uncertainty depends on the price's age, its origin, and the gaps in the vendor's list."""

import datetime

import pytest

from cloudtrain.launcher.metering import rate as rating
from cloudtrain.launcher.metering.rate import Kind, Machine, Rate, age_days, stale

TODAY = datetime.date(2026, 11, 22)


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix today's date."""
    monkeypatch.setattr(rating, "today", lambda: TODAY)


def of_age(days: int, usd: float = 10.0, **more: object) -> Rate:
    """Return a price that is so many days old."""
    return Rate(usd, (TODAY - datetime.timedelta(days=days)).isoformat(), "list", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "factor"),
    [
        *((of_age(0, is_own=True), 1.0), (of_age(90), 1.0), (of_age(91), 1.05), (of_age(91, is_own=True), 1.05)),
        *((of_age(10, is_derived=True), 1.05), (of_age(180), 1.05), (of_age(181), 1.10)),
        *((of_age(400, is_derived=True), 1.2075), (of_age(690), 1.20), (of_age(9000), 1.45)),
        *((of_age(0, factor=1.25), 1.25), (of_age(100, factor=1.2), 1.26), (Rate(10.0, "undated", "list"), 1.45)),
    ],
)
def test_uncertainty_grows_with_age_and_inference(rate: Rate, factor: float) -> None:
    """The factor is never below 1, and each reason multiplies the factor."""
    machine = Machine("m", "X", 8, {"on_demand": rate})
    assert machine.uncertainty_of() == factor
    assert Machine("m", "X", 8).uncertainty_of() == 1.0


@pytest.mark.parametrize(("days", "factor"), [(30, 1.05), (31, 4.1)])
def test_on_demand_price_bounds_an_old_spot_price(days: int, factor: float) -> None:
    """A spot price moves without notice, at most up to the on-demand price."""
    rates: dict[Kind, Rate] = {"on_demand": of_age(1, 8.2), "spot": of_age(days, 2.0, is_derived=True)}
    assert Machine("m", "X", 8, rates).uncertainty_of("spot") == factor


@pytest.mark.parametrize(
    ("as_of", "days"),
    [("2026-11-20", 2), ("2026-09", 82), ("2021?", 2151), ("<=2025 (undated)", 690), ("2999-01-01", 0), ("-", None)],
)
def test_age_counts_from_the_earliest_possible_day(as_of: str, days: int | None) -> None:
    """A price dated by a year or a month alone counts from the first day of the period."""
    assert age_days(Rate(1.0, as_of, "list")) == days


def test_stale_price_gets_a_note() -> None:
    """The note gives age and command; without a valid date there is no note, and a missing price is not 0."""
    assert stale("2025-01-01") == "price 690 days old"
    assert (stale("2026-05-27"), stale("2026-05-26")) == (None, None)
    assert stale("2026-05-25") is not None
    assert (stale(None), stale("2026-99-99")) == (None, None)
    machine = Machine("m", "X", 8)
    assert (machine.hourly_usd, machine.iso_day(), machine.price_source) == (None, None, "no list price")

"""A price with its origin, its age, and its uncertainty: how much the price may be too low."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["on_demand", "spot", "flex_start", "reservation"]  # the way of renting, which sets the price
KINDS: tuple[Kind, ...] = ("on_demand", "spot", "flex_start", "reservation")

# A list price read recently from the vendor equals the bill: factor 1.00. Factors of other prices are multiplied. A
# list price older than OLD_DAYS gets 5 % for each started half year since it was read, at most 45 %. The percentage is
# an allowance, not a measurement; the largest sudden change so far is 44 % (p5, June 2025). A price without a date gets
# the maximum.
OLD_DAYS = 90
OLD_STEP, OLD_STEP_DAYS, OLD_MOST = 0.05, 180, 0.45
# Prices derived by a rule. SageMaker: EC2's price x 1.15 to 1.40, by size; no exception in 54 comparisons of 41 types
# (2026-10), and the next class is 4 % away. Vertex AI: Compute Engine's price x 1.15, seen on a bill of 2025-08 for a
# card; an article states 1.20, 4.3 % more. So 1.05 covers both. (Before the bill the factor was 1.21.)
DERIVED = 1.05
# A spot price moves without notice, up to the price on demand. An old spot price is no bound, the price on demand is.
SPOT_OLD_DAYS = 30
# EC2 prices of SageMaker types would be up to 40 % too low; no factor corrects them, so they are never used.

# A plan warns about older prices. In June 2025 a single announcement changed p4d by a third and p5 by 44 %, so a year
# without a check is too long; users would ignore a quarterly warning. Reading the prices again takes a single command.
STALE_DAYS = 180

_DATE = re.compile(r"(\d{4})(?:-(\d{2}))?(?:-(\d{2}))?")


@dataclass(frozen=True)
class Rate:
    """An hour's price of one machine in US dollars, and its origin.

    `as_of`: the day of reading, or the known part (`2026-09`, `<=2025 (undated)`). `is_derived`: computed by a rule
    from other figures. `is_own`: read from the vendor by the user. `factor`, at least 1: the uncertainty of the
    vendor's own list. `passed_over`: the day of the user's own price if the newer price of the table was used instead.
    """

    usd: float
    as_of: str
    source: str
    is_derived: bool = False
    is_own: bool = False
    factor: float = 1.0
    passed_over: str = ""

    @property
    def day(self) -> datetime.date | None:
        """The first day that `as_of` may mean; None without a date."""
        return _first_day(self.as_of)

    @property
    def when(self) -> str:
        """The day in words: `2025 or earlier` where the vendor's table is undated."""
        return re.sub(r"<=(\d+) \(undated\)", r"\1 or earlier", self.as_of)

    @property
    def words(self) -> str:
        """The provenance: `list price of 2026-08-20`."""
        own = ", read from the vendor's list" if self.is_own else ""
        older = f", newer than your own of {self.passed_over}" if self.passed_over else ""
        return f"{'derived from a ' if self.is_derived else ''}list price of {self.when}{own}{older}"


@dataclass(frozen=True)
class Machine:
    """A machine type of a backend, with its accelerators and its prices in a region, by kind."""

    instance_type: str
    accelerator: str
    count: int
    rates: Mapping[Kind, Rate] = field(default_factory=dict)

    @property
    def hourly_usd(self) -> float | None:
        """The price on demand; None if unknown."""
        return self.rates["on_demand"].usd if "on_demand" in self.rates else None

    @property
    def price_source(self) -> str:
        """The provenance of the price on demand, as text."""
        return self.rates["on_demand"].words if "on_demand" in self.rates else "no list price"

    def iso_day(self, kind: Kind = "on_demand") -> str | None:
        """Return the ISO day of a kind's price, the first possible day."""
        day = self.rates[kind].day if kind in self.rates else None
        return None if day is None else day.isoformat()

    def uncertainty_of(self, kind: Kind = "on_demand") -> float:
        """Return the highest possible cost divided by the kind's price, at least 1; 1 without a price."""
        return uncertainty(self.rates, kind) if kind in self.rates else 1.0


def today() -> datetime.date:
    """Return the day in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date()


def age_days(rate: Rate) -> int | None:
    """Return the maximum age of the price, in days; None if unknown."""
    return None if rate.day is None else max(0, (today() - rate.day).days)


def uncertainty(rates: Mapping[Kind, Rate], kind: Kind) -> float:
    """Return the highest possible cost divided by the kind's price, at least 1, by the rules above."""
    rate, on_demand = rates[kind], rates.get("on_demand")
    age = age_days(rate)
    found = rate.factor * (DERIVED if rate.is_derived else 1.0)
    if kind == "spot" and on_demand is not None and (age is None or age > SPOT_OLD_DAYS):
        found = max(found, on_demand.usd * uncertainty(rates, "on_demand") / rate.usd)
    elif age is None:
        found *= 1 + OLD_MOST
    elif age > OLD_DAYS:
        found *= 1 + min(OLD_MOST, OLD_STEP * -(-age // OLD_STEP_DAYS))
    return round(found, 4)


def stale(as_of: str | None) -> str | None:
    """Return a plan's words on the age of a price of the given day; None if recent or without a date."""
    day = _first_day(as_of or "")
    age = 0 if day is None else (today() - day).days
    return f"price {age} days old" if age > STALE_DAYS else None


def _first_day(text: str) -> datetime.date | None:
    found = _DATE.search(text)
    if found is None:
        return None
    try:
        return datetime.date(int(found[1]), int(found[2] or 1), int(found[3] or 1))
    except ValueError:
        return None


class Key(NamedTuple):
    """The identity of a price."""

    backend: str
    instance_type: str
    region: str
    kind: Kind


@dataclass(frozen=True)
class Quote:
    """A price read from the vendor, or the `reason` for its absence. `key.instance_type` is "" for a whole list."""

    key: Key
    rate: Rate | None
    reason: str = ""

"""A price with where it is from, how old it is, and by how much it may be too low."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["KINDS", "STALE_DAYS", "Kind", "Machine", "Rate", "age_days", "stale", "today", "uncertainty"]

Kind = Literal["on_demand", "spot", "flex_start", "reservation"]  # how a machine is had, which sets its price
KINDS: tuple[Kind, ...] = ("on_demand", "spot", "flex_start", "reservation")

# A list price that was read from the vendor lately is what the bill says: 1.00. The others' factors are multiplied.
# A list price older than OLD_DAYS counts 5 % more for each half year that has begun since it was read, at most 45 %: an
# allowance, not a measured figure. The largest change seen at once is 44 % (p5, June 2025). A price without a day has
# the share of the oldest.
OLD_DAYS = 90
OLD_STEP, OLD_STEP_DAYS, OLD_MOST = 0.05, 180, 0.45
# By a rule from another figure. SageMaker's, EC2's price x 1.15 to 1.40 by the size: no exception in 54 comparisons of
# 41 types (2026-10), and the next class is 4 % away. Vertex AI's, Compute Engine's x 1.15: seen on a bill of 2025-08
# for one card, while one article has 1.20, which is 4.3 % more. So 1.05 covers both. (Before that bill it was 1.21.)
DERIVED = 1.05
# A spot price moves without notice, up to the price on demand: an older one bounds nothing, the other does.
SPOT_OLD_DAYS = 30
# An EC2 price for a SageMaker type would be up to 40 % too little: there is no factor for it, it is never taken.

# From then on a plan warns: in June 2025 one announcement changed p4d by a third and p5 by 44 %, so a year without a
# look is too long, while a new warning each quarter would be passed over. Reading them anew is one command.
STALE_DAYS = 180

_DATE = re.compile(r"(\d{4})(?:-(\d{2}))?(?:-(\d{2}))?")


@dataclass(frozen=True)
class Rate:
    """An hour's price of one machine in US dollars, and its origin.

    `as_of` is when it was read: a day, or as little of one as is known (`2026-09`, `<=2025 (undated)`). `derived`: by a
    rule from other figures. `is_own`: the user has had it read from the vendor. `factor`, from 1 up: what the vendor's
    own list leaves open. `passed_over`: the day of the user's own price where this one, the table's, is newer.
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
        """The first day that `as_of` may mean; None where it names none."""
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
    """A machine type of a backend, with its accelerators, and what it costs in one region, by the way it is had."""

    instance_type: str
    accelerator: str
    count: int
    rates: Mapping[Kind, Rate] = field(default_factory=dict)

    @property
    def hourly_usd(self) -> float | None:
        """The price on demand; None where it is not known."""
        return self.rates["on_demand"].usd if "on_demand" in self.rates else None

    @property
    def price_source(self) -> str:
        """The provenance of the price on demand, in words."""
        return self.rates["on_demand"].words if "on_demand" in self.rates else "no list price"

    @property
    def as_of(self) -> str | None:
        """The ISO day from which the price on demand is, the first that it may be."""
        return self.iso_day("on_demand")

    @property
    def uncertainty(self) -> float:
        """How much more than the price on demand it may cost, from 1 up."""
        return self.uncertainty_of("on_demand")

    def iso_day(self, kind: Kind) -> str | None:
        """Return the ISO day of a kind's price."""
        day = self.rates[kind].day if kind in self.rates else None
        return None if day is None else day.isoformat()

    def uncertainty_of(self, kind: Kind) -> float:
        """Return how much more than the kind's price it may cost, from 1 up; 1 where there is no price."""
        return uncertainty(self.rates, kind) if kind in self.rates else 1.0


def today() -> datetime.date:
    """Return the day in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date()


def age_days(rate: Rate) -> int | None:
    """Return how old the price is at most, in days; None where nothing says."""
    return None if rate.day is None else max(0, (today() - rate.day).days)


def uncertainty(rates: Mapping[Kind, Rate], kind: Kind) -> float:
    """Return how much more than the kind's price it may cost, from 1 up, by the rules above."""
    rate, on_demand = rates[kind], rates.get("on_demand")
    age = age_days(rate)
    found = rate.factor * (DERIVED if rate.is_derived else 1.0)
    if kind == "spot" and on_demand is not None and (age is None or age > SPOT_OLD_DAYS):
        found = max(found, on_demand.usd * uncertainty(rates, "on_demand") / rate.usd)
    else:
        found *= 1 + _old_share(age)
    return round(found, 4)


def _old_share(age: int | None) -> float:
    """Return how much more than a list price of that age may cost, as a share."""
    if age is None:
        return OLD_MOST
    return min(OLD_MOST, OLD_STEP * -(-age // OLD_STEP_DAYS)) if age > OLD_DAYS else 0.0


def stale(as_of: str | None) -> str | None:
    """Return the warning that a plan gives for a price of that day; None where it is young enough, or has no day."""
    day = _first_day(as_of or "")
    age = 0 if day is None else (today() - day).days
    return f"price {age} days old: cloudtrain prices refresh" if age > STALE_DAYS else None


def _first_day(text: str) -> datetime.date | None:
    found = _DATE.search(text)
    if found is None:
        return None
    try:
        return datetime.date(int(found[1]), int(found[2] or 1), int(found[3] or 1))
    except ValueError:
        return None

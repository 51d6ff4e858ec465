"""The price of a job's time, the rules of the platform's limit and bill, and the worst case of a run, in micro-dollars.

The plan, the ledger, the job's own alerts and the launcher's alerts reckon with this one formula, in whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .records import Record

PARTS = 1_000_000  # an uncertainty is counted in millionths, as exactly as given
MICRO_HOUR = 3600 * PARTS  # a scaled rate is in millionths of a micro-dollar an hour


@dataclass(frozen=True)
class Terms(Record, checks=True):
    """The rules of a platform's time limit and of its bill, by which a sum of money becomes a limit."""

    tail_s: int = 0
    """Seconds billed after the limit at worst: the grace of a stop, an upload, idle machines until their release."""
    least_s: int = 1
    """The shortest limit that the field takes; `check` reports a limit that is too long."""
    unit_s: int = 1
    """The unit of rounding of limit and bill."""
    starts: int = 1
    """How often the platform may begin the limit again; 1 if the limit spans all starts."""
    minimum_bill_s: int = 0
    """The bill of the shortest run."""
    lead_s: int = 0
    """Seconds of the limit that may pass, at worst, before the job's own clock begins."""
    warns: bool = False
    """At the limit the platform asks the job to save, and waits for the save."""


@dataclass(frozen=True)
class CostRate(Record, checks=True):
    """The price of time: `price_micro` for an hour of one instance, times `instances`, at most times `uncertainty`."""

    instances: int
    price_micro: int
    uncertainty: float = 1.0

    @property
    def hourly_micro(self) -> int:
        """The price of all instances for an hour."""
        return self.instances * self.price_micro

    @property
    def scaled(self) -> int:
        """Millionths of a micro-dollar an hour, of all instances, at the worst price."""
        return self.hourly_micro * parts(self.uncertainty)


def parts(uncertainty: float) -> int:
    """Return an uncertainty in whole millionths, rounded up."""
    return ceil(round(uncertainty * PARTS, 3))


def worst_case_micro(cap_s: int, rate: CostRate, terms: Terms) -> int:
    """Return the cost of a run that ends at its cap, if the platform makes each restart as late as possible."""
    billed_s = max(terms.minimum_bill_s, rounded_up(cap_s + terms.tail_s, terms.unit_s))
    return -(-rate.scaled * billed_s * terms.starts // MICRO_HOUR)


def rounded_up(seconds: int, unit_s: int) -> int:
    """Return the seconds rounded up to whole units."""
    return -(-seconds // unit_s) * unit_s

"""From money to a time limit and back, in whole micro-dollars and seconds: no clock, no file, no network.

A platform knows no money, so the most that a job may cost becomes the seconds that its platform lets it run. What the
platform bills beyond its own limit is taken off first (`Terms.tail_s`); what it rounds up is rounded up here; what it
may begin anew is counted as often. So the worst case of a cap is never more than the money, and one unit more would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.launcher.backend import Terms  # `status` needs a few of the figures below, and no backend

__all__ = [
    "PARTS",
    "Cap",
    "Rate",
    "Refusal",
    "choose",
    "deadline_s",
    "least_useful_s",
    "own_limit_s",
    "parts",
    "worst_case_micro",
]

# What a run needs to be of use beyond its lead: torchrun and the import of torch take about 20 s on a busy machine, two
# saves 15 s each (a gigabyte at 100 MB/s and its checksums), ten steps a second each.
USEFUL_S = 60
# Between the job's deadline, when its agent sends the signal to save, and the end of its own clock: what SageMaker
# leaves between SIGTERM and the kill. A trainer whose saves take longer leaves earlier, by its own margin (agree.py).
STOP_MARGIN_S = 120
MARGIN_SHARE = 4  # no margin takes more than a quarter of a short cap,
NOTICE_SHARE = 10  # where the platform itself asks to save in time, no lead takes more than a tenth

PARTS = 1_000_000  # an uncertainty is counted in millionths: as exactly as it is told
_MICRO_HOUR = 3600 * PARTS  # a rate is in micro-dollars an hour times those


@dataclass(frozen=True)
class Rate:
    """What time costs: an hour of one instance, of which there are so many, at most so much dearer than listed."""

    instances: int
    price_micro: int
    uncertainty: float = 1.0

    @property
    def scaled(self) -> int:
        """Millionths of a micro-dollar an hour, of all instances, at the worst price."""
        return self.instances * self.price_micro * parts(self.uncertainty)


@dataclass(frozen=True)
class Cap:
    """The seconds after which the platform ends the job, because of `reason` (time_limit or budget), and their cost."""

    cap_s: int
    reason: str
    worst_case_micro: int


@dataclass(frozen=True)
class Refusal:
    """Why no cap can be: the money left buys `affordable_s`, and a run of use takes `least_s`.

    `enough_micro` is the smallest budget of the job, earlier attempts counted, that would do.
    """

    left_micro: int
    affordable_s: int
    least_s: int
    enough_micro: int


def parts(uncertainty: float) -> int:
    """Return an uncertainty in whole millionths, rounded up."""
    return ceil(round(uncertainty * PARTS, 3))


def choose(limit_micro: int, spent_micro: int, rate: Rate, terms: Terms, longest_s: int) -> Cap | Refusal:
    """Return the longest cap that the money left holds, or why there is none.

    `spent_micro` is what all earlier attempts have cost, at worst. `longest_s` is the time limit beside the money.
    Raises ValueError for a rate of 0: no money limits what costs nothing.
    """
    if rate.scaled <= 0:
        raise ValueError("a price above 0")
    left_micro = limit_micro - spent_micro
    affordable_s = _affordable_s(left_micro, rate, terms)
    least_s = min(least_useful_s(terms), longest_s)  # whether the field takes a short `longest_s` the check says
    if affordable_s >= longest_s:
        return Cap(longest_s, "time_limit", worst_case_micro(longest_s, rate, terms))
    if affordable_s >= least_s:
        return Cap(affordable_s, "budget", worst_case_micro(affordable_s, rate, terms))
    enough_micro = max(spent_micro, 0) + worst_case_micro(least_s, rate, terms)
    return Refusal(left_micro, max(affordable_s, 0), least_s, enough_micro)


def worst_case_micro(cap_s: int, rate: Rate, terms: Terms) -> int:
    """Return what a run can cost that ends at its cap, each of the platform's new starts as late as it can."""
    billed_s = max(terms.minimum_bill_s, _rounded_up(cap_s + terms.tail_s, terms.unit_s))
    return -(-rate.scaled * billed_s * terms.lives // _MICRO_HOUR)


def least_useful_s(terms: Terms) -> int:
    """Return the shortest cap that is worth its money: the lead, a start, two saves and some steps between them."""
    return _rounded_up(max(terms.least_s, terms.lead_s + _least_own_s(terms)), terms.unit_s)


def own_limit_s(cap_s: int, terms: Terms) -> int:
    """Return how long the job's own clock may run: it begins later than the platform's, which counts image and data.

    All that may be gone is taken off, else the kill could come before the deadline. A user's own limit that is too
    short for that leaves the time of the shortest run of use, and of one shorter still nine tenths.
    """
    share_s = cap_s // NOTICE_SHARE
    most_s = share_s if terms.warns else max(cap_s - _least_own_s(terms), share_s)
    return cap_s - min(terms.lead_s, most_s)


def deadline_s(limit_s: int) -> int:
    """Return when, by its own clock, the job is told to save and leave."""
    return limit_s - min(STOP_MARGIN_S, limit_s - limit_s * (MARGIN_SHARE - 1) // MARGIN_SHARE)


def _least_own_s(terms: Terms) -> int:
    """Return the shortest time of its own clock in which a job does something: up to its deadline, or the notice."""
    is_exposed = terms.lead_s > 0 and not terms.warns
    return USEFUL_S * MARGIN_SHARE // (MARGIN_SHARE - 1) if is_exposed else USEFUL_S


def _affordable_s(left_micro: int, rate: Rate, terms: Terms) -> int:
    """Return the longest cap in whole units whose worst case the money covers, below 1 where there is none."""
    billed_s = left_micro * _MICRO_HOUR // (rate.scaled * terms.lives)
    if billed_s < terms.minimum_bill_s:
        return 0
    whole_s = billed_s // terms.unit_s * terms.unit_s
    return (whole_s - terms.tail_s) // terms.unit_s * terms.unit_s


def _rounded_up(seconds: int, unit_s: int) -> int:
    return -(-seconds // unit_s) * unit_s

"""Convert money to a time limit and back, in whole micro-dollars and seconds; no clock, file or network access.

Platforms limit time, not money, so a budget becomes the seconds that the platform lets the job run. Time billed beyond
the platform's limit is subtracted first (`Terms.tail_s`), billing units are rounded up, and restarts by the platform
are counted. So the worst case of a cap never exceeds the money, and one more unit would exceed it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.entrypoints.terms import MICRO_HOUR, CostRate, Terms, rounded_up, worst_case_micro

# Useful time of a run beyond its lead: torchrun and the import of torch take about 20 s on a busy machine, two saves 15
# s each (a gigabyte at 100 MB/s, with checksums), and ten steps one second each.
USEFUL_S = 60
# From the job's deadline, when its agent sends the signal to save, to the end of its own clock. SageMaker leaves the
# same time between SIGTERM and the kill. A trainer with longer saves leaves earlier, by its own margin (agree.py).
STOP_MARGIN_S = 120
MARGIN_SHARE = 4  # no margin takes more than a quarter of a short cap,
NOTICE_SHARE = 10  # if the platform itself asks for a save in time, no lead takes more than a tenth


@dataclass(frozen=True)
class Cap:
    """The seconds after which the platform ends the job, their worst-case cost, and the limit: time_limit or budget."""

    cap_s: int
    reason: str
    worst_case_micro: int


@dataclass(frozen=True)
class LimitRefusal:
    """No cap is possible: the remaining money buys `affordable_s`, and a useful run takes `least_s`.

    `enough_micro` is the smallest sufficient budget of the job, including earlier attempts.
    """

    left_micro: int
    affordable_s: int
    least_s: int
    enough_micro: int


def choose(limit_micro: int, spent_micro: int, rate: CostRate, terms: Terms, longest_s: int) -> Cap | LimitRefusal:
    """Return the longest cap that the remaining money covers, or a LimitRefusal.

    `spent_micro` is the worst-case cost of earlier attempts. `longest_s` is the time limit apart from the money. Raises
    ValueError at a rate of 0: money does not limit a run without a cost.
    """
    if rate.scaled <= 0:
        raise ValueError("a price above 0")
    left_micro = limit_micro - spent_micro
    affordable_s = _affordable_s(left_micro, rate, terms)
    least_s = min(least_useful_s(terms), longest_s)  # the config check reports a `longest_s` that is too short
    if affordable_s >= longest_s:
        return Cap(longest_s, "time_limit", worst_case_micro(longest_s, rate, terms))
    if affordable_s >= least_s:
        return Cap(affordable_s, "budget", worst_case_micro(affordable_s, rate, terms))
    enough_micro = max(spent_micro, 0) + worst_case_micro(least_s, rate, terms)
    return LimitRefusal(left_micro, max(affordable_s, 0), least_s, enough_micro)


def least_useful_s(terms: Terms) -> int:
    """Return the shortest useful cap: the lead, a start, two saves and some steps between them."""
    return rounded_up(max(terms.least_s, terms.lead_s + _least_own_s(terms)), terms.unit_s)


def own_limit_s(cap_s: int, terms: Terms) -> int:
    """Return the limit of the job's own clock, which starts later than the platform's (image and data come first).

    The whole possible delay is subtracted, or the kill could come before the deadline. If a user's limit is too short
    for the delay, the time of the shortest useful run remains; of an even shorter limit, nine tenths.
    """
    share_s = cap_s // NOTICE_SHARE
    most_s = share_s if terms.warns else max(cap_s - _least_own_s(terms), share_s)
    return cap_s - min(terms.lead_s, most_s)


def deadline_s(limit_s: int) -> int:
    """Return the time on its own clock at which the job must save and leave."""
    return limit_s - min(STOP_MARGIN_S, limit_s - limit_s * (MARGIN_SHARE - 1) // MARGIN_SHARE)


def _least_own_s(terms: Terms) -> int:
    """Return the shortest useful time on the job's own clock: until its deadline, or until the platform's notice."""
    is_exposed = terms.lead_s > 0 and not terms.warns
    return USEFUL_S * MARGIN_SHARE // (MARGIN_SHARE - 1) if is_exposed else USEFUL_S


def _affordable_s(left_micro: int, rate: CostRate, terms: Terms) -> int:
    """Return the longest cap, in whole units, with a worst case within the money; below 1 if no cap is."""
    billed_s = left_micro * MICRO_HOUR // (rate.scaled * terms.starts)
    if billed_s < terms.minimum_bill_s:
        return 0
    whole_s = billed_s // terms.unit_s * terms.unit_s
    return (whole_s - terms.tail_s) // terms.unit_s * terms.unit_s

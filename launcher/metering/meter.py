"""The cost of attempts: exact sums over legs. A leg is a number of instances at the same price for the same time span.

Start and end, and the count of billed seconds if available, come from the platform; the local clock only gives the
current time for a running leg. A span that ends before it begins counts zero. Each leg is rounded up.

The error of a sum is at most, for each leg: instances x price x (2 x the difference of the two clocks + the platform's
billing unit + its minimum) + 1 micro-dollar; the local clock matters only for a running leg. While its backend is
unreachable a leg keeps counting, up to the maximum that the platform's own time limit allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from cloudtrain.entrypoints.terms import PARTS, parts

from ..job import ACTIVE, CLOCKS, Attempt, State

_MICRO = 1_000_000
_HOUR_US = 3600 * _MICRO
STEADY_S = 1.0  # billed seconds of a running job are stored again only if they differ by more from the expected value


@dataclass(frozen=True)
class Leg:
    """Instances of an attempt that are billed for the same time; times in unix seconds by the platform's clock.

    `price_micro`: for one instance and one hour; None if unknown. `billed_s`: billed seconds of each instance by the
    platform's count, if available; of a running leg, until `told_s` by the local clock. Without a count, start and end
    give the seconds. `most_s`: upper bound of the seconds while the leg runs. `ended_s` is None while the leg runs.
    """

    job_id: str
    attempt: int
    instances: int
    price_micro: int | None
    started_s: float | None
    ended_s: float | None
    billed_s: float | None = None
    told_s: float | None = None
    most_s: float | None = None

    @property
    def runs(self) -> bool:
        """Whether the leg is still running."""
        return self.started_s is not None and self.ended_s is None

    def end_s(self, now_s: float) -> float:
        """Return the leg's end; of a running leg `now_s`, or if unreachable, at the latest when `most_s` is used up."""
        if self.ended_s is not None:
            return self.ended_s
        if self.started_s is None or self.most_s is None:
            return now_s
        return min(now_s, self.started_s + max(self.most_s, self.seconds(now_s)))

    def seconds(self, now_s: float) -> float:
        """Return the billed seconds of each instance until `now_s`."""
        if self.billed_s is not None:
            more_s = now_s - self.told_s if self.runs and self.told_s is not None else 0.0
            seconds = self.billed_s + max(0.0, more_s)
        elif self.started_s is None:
            return 0.0
        else:
            seconds = (now_s if self.ended_s is None else self.ended_s) - self.started_s
        if self.runs and self.most_s is not None:
            seconds = min(seconds, max(self.most_s, self.billed_s or 0.0))
        return max(0.0, seconds)


def legs_of(attempts: Iterable[Attempt]) -> tuple[Leg, ...]:
    """Return the legs of these attempts; an attempt that was never sent has no legs."""
    return tuple(leg for attempt in attempts for leg in _legs(attempt))


def held_s(attempt: Attempt, now_s: float) -> float | None:
    """Return for how many seconds the attempt has held its machines, until now while it runs; None before its start.

    By the nodes' clocks, if they count: the wait between two runs is no time of the job, and no limit counts it.
    """
    state = attempt.state
    if state.billed_by == CLOCKS and (legs := legs_of([attempt])):
        return legs[0].seconds(now_s)  # of the nodes that are left
    return None if state.started_s is None else (state.ended_s or now_s) - state.started_s


def spent_micro(legs: Iterable[Leg], now_s: float, from_s: float = -inf, to_s: float = inf) -> int | None:
    """Return the cost of the legs until `now_s`, or its part between two times; None if a price is unknown."""
    return sum_micro(part_micro(leg, from_s, to_s, now_s) for leg in legs)


def sum_micro(costs: Iterable[int | None]) -> int | None:
    """Return the sum; None if a cost is unknown."""
    found = list(costs)
    return None if None in found else sum(cost or 0 for cost in found)


def cost_micro(leg: Leg, now_s: float) -> int | None:
    """Return the leg's cost until `now_s`, rounded up; None if the price is unknown and time was billed."""
    return _cost_micro(leg, leg.price_micro, leg.seconds(now_s))


def burn_micro_h(legs: Sequence[Leg]) -> int | None:
    """Return the cost of the running legs per hour; 0 if no leg runs, None if a price is unknown."""
    return sum_micro(leg.price_micro and leg.instances * leg.price_micro for leg in legs if leg.runs)


def part_micro(leg: Leg, from_s: float, to_s: float, now_s: float) -> int | None:
    """Return the part of the leg's cost until `now_s` between two times, spread evenly over its span.

    The parts of adjacent spans add up to the whole. A leg without a span counts at the only time that is known.
    """
    cost = cost_micro(leg, now_s)
    end_s = leg.end_s(now_s)
    begin_s = end_s if leg.started_s is None else leg.started_s
    if cost is None:
        return None if begin_s < to_s and max(begin_s, end_s) >= from_s else 0
    until = [share_micro(cost, begin_s, end_s, border_s) for border_s in (from_s, to_s)]
    return max(0, until[1] - until[0])


def steady(known: State, report: State, now_s: float) -> State:
    """Return the state just reported by a backend, with the time of the report; an unchanged state keeps its old time.

    So a job that waits or runs as expected is not stored at each poll, and its cost keeps counting while its backend is
    unreachable.
    """
    if report.billed_s is None or report.state not in ACTIVE or report.waits_again:
        return report
    if known.state == report.state and known.billed_s is not None and known.told_s is not None:
        expected_s = known.billed_s + now_s - known.told_s
        if abs(expected_s - report.billed_s) <= STEADY_S and known.gone_s == report.gone_s:
            return replace(report, billed_s=known.billed_s, told_s=known.told_s)
    return replace(report, told_s=now_s)


def spent_at_worst_micro(attempts: Sequence[Attempt], now_s: float, price_micro: int | None = None) -> int | None:
    """Return the most that the attempts may have cost, at the price's uncertainty; None at an unknown price.

    Seconds are rounded up to billing units, and the idle time of machines after the end is added. `price_micro`, for
    one instance and one hour, is used for an attempt without a price.
    """
    return sum_micro(_at_worst(attempt, now_s, price_micro) for attempt in attempts)


def share_micro(cost: int, begin_s: float, end_s: float, border_s: float) -> int:
    """Return the part of a cost before a time, rounded up."""
    if border_s <= begin_s:
        return 0
    if border_s >= end_s:
        return cost
    begin, end, border = (round(each * _MICRO) for each in (begin_s, end_s, border_s))
    return -(-cost * (border - begin) // (end - begin)) if end > begin else cost


def _legs(attempt: Attempt) -> list[Leg]:
    state, plan = attempt.state, attempt.plan
    if attempt.phase == "never_sent":
        return []
    instances = plan.instances
    runs = state.state in ACTIVE
    whole = Leg(
        attempt.job_id,
        attempt.number,
        instances,
        _price_micro(attempt),
        state.started_s,
        state.ended_s if not runs or state.waits_again else None,
        state.billed_s,
        state.told_s if runs and state.billed_s is not None else None,
        # The most seconds that an instance can be billed: the platform's limit plus its tail, for each start.
        float((plan.cap_s + plan.terms.tail_s) * plan.terms.starts),
    )
    if not runs and whole.ended_s is None:  # an unknown end: as the platform counted, else at most its limit
        began_s = attempt.created_s if state.started_s is None else state.started_s
        used_s = 0.0 if state.started_s is None else whole.most_s or 0.0
        whole = replace(whole, ended_s=began_s + (used_s if state.billed_s is None else state.billed_s))
    joined = min(len(state.joined_s or {}), len(state.gone_s or {}))  # each in the place of a dropped node
    gone = list((state.gone_s or {}).values())[: max(0, instances + joined - 1)]
    if not gone or state.started_s is None:
        return [whole]
    left = instances + joined - len(gone)
    if state.billed_s is not None:  # the mean of all instances
        whole = replace(whole, billed_s=max(0.0, (state.billed_s * instances - sum(gone)) / left))
    early = [
        replace(whole, instances=1, ended_s=state.started_s + held_s, billed_s=held_s, told_s=None) for held_s in gone
    ]
    return [replace(whole, instances=left), *early]


def _price_micro(attempt: Attempt) -> int | None:
    """Return an instance's price as frozen in the plan, else as the platform reports (it may choose machines)."""
    if attempt.plan.price_micro is not None and not attempt.is_chosen:
        return attempt.plan.price_micro
    return None if attempt.hourly_usd is None else round(attempt.hourly_usd * _MICRO / attempt.plan.instances)


def _at_worst(attempt: Attempt, now_s: float, price_micro: int | None) -> int | None:
    """Return the cost by the price and the billed seconds of each leg, rounded up once, as the worst case is."""
    terms, scale, costs = attempt.plan.terms, parts(attempt.plan.uncertainty), []
    for leg in legs_of([attempt]):
        if (seconds := leg.seconds(now_s)) > 0:
            units = -(-ceil(seconds + (attempt.state.idle_s or 0.0)) // terms.unit_s)
            billed_s = float(max(terms.minimum_bill_s, units * terms.unit_s))
            price = price_micro if leg.price_micro is None else leg.price_micro
            costs.append(_cost_micro(leg, None if price is None else price * scale, billed_s))
    cost = sum_micro(costs)
    return None if cost is None else -(-cost // PARTS)


def _cost_micro(leg: Leg, price_micro: int | None, seconds: float) -> int | None:
    used_us = round(seconds * _MICRO)
    if price_micro is None:
        return None if used_us or leg.runs or not leg.instances else 0  # a damaged row has no instances
    return -(-leg.instances * price_micro * used_us // _HOUR_US)

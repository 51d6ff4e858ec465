"""What attempts have cost: exact sums over legs, each some instances at one price for one span of time.

Start and end are the platform's word, and its own count of billed seconds where it has one; our clock tells nothing
but what "now" is for a leg that runs. A span that ends before it begins counts nothing. Each leg is rounded up.

How far a sum may be off: for each leg, instances x price x (2 x the difference of two clocks + the platform's unit of
billing + its minimum) + 1 micro-dollar; only of a leg that runs does our own clock matter. While its backend is out of
reach a leg goes on counting, up to the most that the platform's own time limit lets it cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cloudtrain.launcher.job import ACTIVE

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Attempt, State

__all__ = ["Leg", "burn_micro_h", "cost_micro", "legs_of", "part_micro", "spent_micro", "steady"]

_MICRO = 1_000_000
_HOUR_US = 3600 * _MICRO
STEADY_S = 1.0  # by which what a running job was billed may differ from what was expected, before it is stored anew


@dataclass(frozen=True)
class Leg:
    """Some instances of an attempt that are billed for the same time; times in unix seconds by the platform's clock.

    `price_micro`: one instance, one hour; None where nobody knows. `billed_s`: the seconds that each instance costs as
    the platform counts them, else those from start to end; of a leg that runs, until `told_s` by our clock.
    `most_s`: what it cannot exceed while it runs. `ended_s` is None while it runs.
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
        """Whether it may still grow."""
        return self.started_s is not None and self.ended_s is None

    def end_s(self, now_s: float) -> float:
        """Return when it ends, for one that runs by now: one out of reach ends unseen, at the most that it can cost."""
        if self.ended_s is not None:
            return self.ended_s
        if self.started_s is None or self.most_s is None:
            return now_s
        return min(now_s, self.started_s + max(self.most_s, self.seconds(now_s)))

    def seconds(self, now_s: float) -> float:
        """Return for how long each of its instances is billed until `now_s`."""
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
    """Return the legs of these attempts; what was never sent has none."""
    return tuple(leg for attempt in attempts for leg in _legs(attempt))


def spent_micro(legs: Iterable[Leg], now_s: float) -> int | None:
    """Return what the legs have cost until `now_s`, None where a price is unknown."""
    costs = [cost_micro(leg, now_s) for leg in legs]
    return None if None in costs else sum(cost or 0 for cost in costs)


def cost_micro(leg: Leg, now_s: float) -> int | None:
    """Return what the leg has cost until `now_s`, rounded up; None where its price is unknown and it was billed."""
    used_us = round(leg.seconds(now_s) * _MICRO)
    if leg.price_micro is None:
        return 0 if leg.ended_s is not None and used_us == 0 else None
    return -(-leg.instances * leg.price_micro * used_us // _HOUR_US)


def burn_micro_h(legs: Sequence[Leg]) -> int | None:
    """Return what an hour of the legs that run costs; 0 where none runs, None where a price is unknown."""
    rates = [
        leg.price_micro if leg.price_micro is None else leg.instances * leg.price_micro for leg in legs if leg.runs
    ]
    return None if None in rates else sum(rate or 0 for rate in rates)


def part_micro(leg: Leg, from_s: float, to_s: float, now_s: float) -> int | None:
    """Return what of the leg's cost until `now_s` falls between two times, spread evenly over its span.

    The parts of adjoining spans add up to the whole. What has no span falls to the moment that is known of it.
    """
    cost = cost_micro(leg, now_s)
    end_s = leg.end_s(now_s)
    begin_s = end_s if leg.started_s is None else leg.started_s
    if cost is None:
        return None if begin_s < to_s and max(begin_s, end_s) >= from_s else 0
    until = [_share_micro(cost, begin_s, end_s, border_s) for border_s in (from_s, to_s)]
    return max(0, until[1] - until[0])


def steady(known: State, told: State, now_s: float) -> State:
    """Return what a backend has told just now, with when it was told; as it was, where that says the same.

    So a job that waits or runs as expected is not written again at each look, and counts on where its backend is out of
    reach.
    """
    if told.billed_s is None or told.state not in ACTIVE:
        return told
    if known.state == told.state and known.billed_s is not None and known.told_s is not None:
        expected_s = known.billed_s + now_s - known.told_s
        if abs(expected_s - told.billed_s) <= STEADY_S and known.gone_s == told.gone_s:
            return replace(told, billed_s=known.billed_s, told_s=known.told_s)
    return replace(told, told_s=now_s)


def _share_micro(cost: int, begin_s: float, end_s: float, border_s: float) -> int:
    """Return the part of a cost before a border, rounded up."""
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
    instances: int = plan.get("instances", 1)
    runs = state.state in ACTIVE
    whole = Leg(
        attempt.job_id,
        attempt.number,
        instances,
        _price_micro(attempt),
        state.started_s,
        # One that is over and does not say since when costs what its platform counted.
        state.ended_s if not runs else None,
        state.billed_s,
        _told_s(state),
        _most_s(attempt),
    )
    gone = list((state.gone_s or {}).values())[: max(0, instances - 1)]
    if not gone or state.started_s is None:
        return [whole]
    left = instances - len(gone)
    if state.billed_s is not None:  # the mean of all
        whole = replace(whole, billed_s=max(0.0, (state.billed_s * instances - sum(gone)) / left))
    early = [
        replace(whole, instances=1, ended_s=state.started_s + held_s, billed_s=held_s, told_s=None) for held_s in gone
    ]
    return [replace(whole, instances=left), *early]


def _price_micro(attempt: Attempt) -> int | None:
    """Return one instance's price as it was frozen; else as the platform tells, where only that knows the machines."""
    if (frozen := attempt.plan.get("price_micro")) is not None:
        return int(frozen)
    hourly_usd = attempt.plan.get("hourly_usd")
    hourly_usd = attempt.state.hourly_usd if hourly_usd is None else hourly_usd
    return None if hourly_usd is None else round(hourly_usd * _MICRO / attempt.plan.get("instances", 1))


def _told_s(state: State) -> float | None:
    if state.billed_s is None or state.state not in ACTIVE:
        return None
    if state.told_s is None and state.started_s is not None:  # stored by an earlier version
        return state.started_s + state.billed_s
    return state.told_s


def _most_s(attempt: Attempt) -> float | None:
    """Return what each instance can be billed for at most: the platform's own limit, each of its lives with a tail."""
    plan = attempt.plan
    if plan.get("cap_s") is None:
        return None
    return float((plan["cap_s"] + (plan.get("tail_s") or 0)) * (plan.get("attempts") or 1))

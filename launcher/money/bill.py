"""A job's bill: planned, metered and billed costs, leg by leg, and unit costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ..job import Attempt, Job
from ..metering import meter
from ..text.units import as_usd
from . import unit_cost
from .forecast import limit_micro


@dataclass(frozen=True)
class BillLine:
    """A leg's cost: metered from start to end, or billed by the platform's count (`source`), which has precedence."""

    leg: meter.Leg
    seconds: float
    metered_micro: int | None
    billed_micro: int | None  # None until the platform has reported its count
    cost_micro: int | None
    source: str


@dataclass(frozen=True)
class Bill:
    """A job's bill; None is an unknown figure. `estimate_micro`: forecast at `estimate_step`, by the job's own pace.

    `idle_micro`: the most that its machines may cost in addition while idle after the job's ends; 0 if they never idle.
    """

    lines: tuple[BillLine, ...]
    spent_micro: int | None
    metered_micro: int | None
    limit_micro: int | None
    worst_micro: int | None
    estimate_micro: int | None
    estimate_step: int | None
    idle_micro: int
    paid: unit_cost.Achieved


def bill(job: Job, attempts: Sequence[Attempt], now_s: float) -> Bill:
    """Return the job's bill until `now_s`; `attempts` are all attempts of the job."""
    lines = tuple(_line(attempt, leg, now_s) for attempt in attempts for leg in meter.legs_of([attempt]))
    estimate, step = _estimate(attempts, now_s)
    return Bill(
        lines,
        meter.sum_micro(line.cost_micro for line in lines),
        meter.sum_micro(line.metered_micro for line in lines),
        limit_micro(job),
        _worst_micro(attempts, now_s),
        estimate,
        step,
        sum(ceil((attempt.idle_usd or 0.0) * 1e6) for attempt in attempts),
        unit_cost.achieved(attempts, now_s),
    )


def as_json(found: Bill) -> dict[str, Any]:
    """Return the bill with stable names: money in dollars, times in unix seconds."""
    return {
        "spend_usd": as_usd(found.spent_micro),
        "metered_usd": as_usd(found.metered_micro),
        "billed_usd": as_usd(meter.sum_micro(line.billed_micro for line in found.lines) if found.lines else None),
        "limit_usd": as_usd(found.limit_micro),
        "worst_case_usd": as_usd(found.worst_micro),
        "estimate_usd": as_usd(found.estimate_micro),
        "estimate_step": found.estimate_step,
        "idle_usd": as_usd(found.idle_micro),
        **unit_cost.as_json(found.paid),
        "legs": [line_json(line) for line in found.lines],
    }


def line_json(line: BillLine) -> dict[str, Any]:
    """Return a leg with stable names."""
    leg = line.leg
    return {
        "job": leg.job_id,
        "attempt": leg.attempt,
        "instances": leg.instances,
        "price_usd_per_hour": as_usd(leg.price_micro),
        "started_s": leg.started_s,
        "ended_s": leg.ended_s,
        "seconds": round(line.seconds, 3),
        "metered_usd": as_usd(line.metered_micro),
        "billed_usd": as_usd(line.billed_micro),
        "cost_usd": as_usd(line.cost_micro),
        "source": line.source,
    }


def _line(attempt: Attempt, leg: meter.Leg, now_s: float) -> BillLine:
    cost, by = meter.cost_micro(leg, now_s), attempt.state.billed_by
    # The other nodes counted the time of a node that the job lost; only its time span is known.
    span = replace(leg, billed_s=None, told_s=None)
    metered = cost if leg.started_s is None else meter.cost_micro(span, now_s)
    if leg.runs or leg.started_s is None:
        source = "it runs" if leg.runs else "it has not begun"
    else:
        source = by or "start and end"
    return BillLine(leg, leg.seconds(now_s), metered, cost if by and not leg.runs else None, cost, source)


def _worst_micro(attempts: Sequence[Attempt], now_s: float) -> int | None:
    """Return the job's worst case at its last send: the earlier attempts' cost plus the last attempt's worst case."""
    sent = [attempt for attempt in attempts if attempt.phase != "never_sent"]
    if not sent:
        return None
    before = meter.spent_micro(meter.legs_of(sent[:-1]), now_s)
    worst = sent[-1].plan.worst_case_micro
    return None if before is None or worst is None else before + worst


def _estimate(attempts: Sequence[Attempt], now_s: float) -> tuple[int | None, int | None]:
    """Return the job's cost by its first reported remaining time, and the step of that report."""
    before = 0
    for attempt in attempts:
        legs = meter.legs_of([attempt])
        forecast = attempt.progress.get("forecast")
        if forecast and attempt.state.started_s is not None:
            step, end_s = forecast
            whole = replace(legs[0], instances=attempt.plan.instances, ended_s=max(end_s, attempt.state.started_s))
            cost = meter.cost_micro(replace(whole, billed_s=None, told_s=None), now_s)
            return (None if cost is None else before + cost), step
        spent = meter.spent_micro(legs, now_s)
        if spent is None:
            return None, None
        before += spent
    return None, None

"""The worst-case cost of a job's earlier attempts; budgets are checked against this figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from cloudtrain.launcher.metering import meter
from cloudtrain.launcher.metering.limit import PARTS, CostRate, Terms, parts, worst_case_micro

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Attempt
    from cloudtrain.launcher.plan import Plan

__all__ = ["metered_at_worst_micro", "spent_at_worst_micro"]


def spent_at_worst_micro(attempts: Sequence[Attempt], now_s: float, price_micro: int | None = None) -> int | None:
    """Return the most that the attempts may have cost, at the price's uncertainty; None at an unknown price.

    Seconds are rounded up to billing units, and the idle time of machines after the end is added. `price_micro`, for
    one instance and one hour, is used for an attempt without a price.
    """
    costs = [_at_worst(attempt, now_s, price_micro) for attempt in attempts]
    return None if None in costs else sum(cost or 0 for cost in costs)


def metered_at_worst_micro(plan: Plan, attempt: int, spent_micro: int) -> int:
    """Return the most that may have been billed if the meter counts `spent_micro`: one billing unit more per attempt.

    The last attempt's plan gives the unit and the uncertainty. A stored plan without a price gives the meter's sum.
    """
    if not plan.price_micro:
        return spent_micro
    rate = CostRate(plan.instances, plan.price_micro, plan.uncertainty)
    rounding_micro = worst_case_micro(plan.unit_s + plan.minimum_bill_s, rate, Terms()) * attempt
    return -(-spent_micro * parts(rate.uncertainty) // PARTS) + rounding_micro


def _at_worst(attempt: Attempt, now_s: float, price_micro: int | None) -> int | None:
    plan, idle_s = attempt.plan, attempt.state.idle_s or 0.0
    billed = _billed(meter.legs_of([attempt]), now_s, plan.unit_s, plan.minimum_bill_s, idle_s, price_micro)
    return _sum(billed, parts(plan.uncertainty))


def _billed(
    legs: Iterable[meter.Leg], now_s: float, unit_s: int, least_s: int, idle_s: float, price_micro: int | None
) -> list[int | None]:
    """Return the cost of each leg by its price and its billed seconds."""
    found: list[int | None] = []
    for leg in legs:
        seconds = leg.seconds(now_s)
        if seconds <= 0:
            found.append(0)
            continue
        billed_s = max(least_s, -(-ceil(seconds + idle_s) // unit_s) * unit_s)
        price = price_micro if leg.price_micro is None else leg.price_micro
        whole = replace(leg, price_micro=price, billed_s=float(billed_s), ended_s=leg.ended_s or now_s, most_s=None)
        found.append(meter.cost_micro(whole, now_s))
    return found


def _sum(costs: Sequence[int | None], scale: int) -> int | None:
    return None if None in costs else -(-sum(cost or 0 for cost in costs) * scale // PARTS)

"""What a job's earlier attempts have cost at worst, and what a further one needs: so a budget is counted on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.backend import Terms
from cloudtrain.launcher.money import meter
from cloudtrain.launcher.money.cap import Rate, worst_case_micro

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Attempt

__all__ = ["least_more_micro", "spent_at_worst_micro"]


def spent_at_worst_micro(attempts: Sequence[Attempt], now_s: float, price_micro: int | None = None) -> int | None:
    """Return what the attempts may have cost, None where nobody knows: the meter's sum at their prices' uncertainty.

    Seconds are rounded as their platform bills them, and machines that idle on after the end are counted.
    `price_micro`, of one instance and an hour, stands in where an attempt had no price.
    """
    costs = [_at_worst(attempt, now_s, price_micro) for attempt in attempts]
    return None if None in costs else sum(cost or 0 for cost in costs)


def least_more_micro(plan: dict[str, Any], attempt: int, limit_micro: int, spent_micro: int) -> int:
    """Return what the budget must grow by, at least, for one more run of use like that of the plan; 0 where none.

    `spent_micro` is what the meter says of all `attempt` attempts, which may have been billed by a unit more each.
    """
    price_micro, useful_s = plan.get("price_micro"), plan.get("useful_s")
    if not price_micro or useful_s is None:
        return 0
    rate = Rate(plan["instances"], price_micro, plan["uncertainty"])
    unit_s, least_s = plan["unit_s"], plan["minimum_bill_s"]
    terms = Terms(plan["tail_s"], unit_s=unit_s, lives=plan["attempts"], minimum_bill_s=least_s)
    rounding_micro = worst_case_micro(unit_s + least_s, rate, Terms()) * attempt
    spent_worst_micro = -(-spent_micro * ceil(round(rate.uncertainty * 1000, 6)) // 1000) + rounding_micro
    return max(0, spent_worst_micro + worst_case_micro(useful_s, rate, terms) - limit_micro)


def _at_worst(attempt: Attempt, now_s: float, price_micro: int | None) -> int | None:
    plan, idle_s = attempt.plan, attempt.state.idle_s or 0.0
    unit_s, least_s = plan.get("unit_s", 1), plan.get("minimum_bill_s", 0)
    scale = ceil(round(plan.get("uncertainty", 1.0) * 1000, 6))
    return _sum(_billed(meter.legs_of([attempt]), now_s, unit_s, least_s, idle_s, price_micro), scale)


def _billed(
    legs: Iterable[meter.Leg], now_s: float, unit_s: int, least_s: int, idle_s: float, price_micro: int | None
) -> list[int | None]:
    """Return what each leg costs by its price, its seconds as they are billed."""
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
    return None if None in costs else -(-sum(cost or 0 for cost in costs) * scale // 1000)

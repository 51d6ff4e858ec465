"""A plan in words: what a dry run, `plan` and the question before a submit show."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import TYPE_CHECKING

from cloudtrain.entrypoints.figures import dollars, span, up
from cloudtrain.launcher.units import format_money

if TYPE_CHECKING:
    from cloudtrain.launcher.plan import Plan

__all__ = ["age", "lines"]


def lines(plan: Plan) -> list[str]:
    """Return the plan for people, a subject a line."""
    return [*_machines(plan), _time(plan), *_money(plan)]


def age(as_of: str | None, today: date | None = None) -> str:
    """Return how old a price is, `94 days old`; empty where its date is not known."""
    try:
        days = ((today or date.today()) - date.fromisoformat(as_of or "")).days
    except ValueError:
        return ""
    return f"{days} days old" if days != 1 else "1 day old"


def _machines(plan: Plan) -> Iterator[str]:
    device = "GPU" if plan.gpus_per_instance else "CPU"
    ranks = f"{plan.ranks} rank{'s' if plan.ranks != 1 else ''}"
    yield f"{_instances(plan)} x {plan.nproc_per_node} = {ranks} ({device})"
    if plan.batch is not None:
        b = plan.batch
        yield f"global batch {b.global_size} = {b.micro_size} x {ranks} x {b.accumulation} accumulated"


def _time(plan: Plan) -> str:
    why = ", what the budget buys" if plan.cap_reason == "budget" else ""
    if plan.deadline_s >= plan.own_limit_s:
        return f"at most {span(plan.cap_s)}{why}; there it is ended as it is, without a save (on_limit: stop)"
    if plan.saves:
        return f"at most {span(plan.cap_s)}{why}; after {span(plan.deadline_s)} it saves and stops"
    then = "the script gets SIGTERM, and nothing is saved unless the script saves by itself"
    return f"at most {span(plan.cap_s)}{why}; after {span(plan.deadline_s)} {then}"


def _money(plan: Plan) -> Iterator[str]:
    if plan.price_micro is None or plan.worst_case_micro is None:
        yield f"price unknown: {plan.price_source}"
        return
    if plan.price_micro == 0:
        yield f"no cost: {plan.price_source}"
        if plan.unpriced_budget_micro is not None:
            budget = format_money(plan.unpriced_budget_micro)
            yield f"budget {budget}: does not apply to your own machines without `price_per_hour`; the time limit does"
        return
    hourly = f"{plan.instances * plan.price_micro / 1e6:.2f} USD an hour"
    each = f": {plan.instances} x {_exact(plan.price_micro)}" if plan.instances > 1 else ""
    old = age(plan.price_as_of)
    worst = dollars(up(plan.worst_case_micro))
    yield f"{hourly}{each} ({plan.price_source}{', ' if old else ''}{old}), at worst {worst}"
    if counted := "; ".join(_counted(plan)):
        yield f"  that worst case counts {counted}"
    yield from _budget(plan)


def _exact(micro: int) -> str:
    """Return a price so that its multiples can be checked: cents, and up to four decimals where it has them."""
    whole, _, decimals = f"{micro / 1e6:.4f}".partition(".")
    return f"{whole}.{decimals.rstrip('0').ljust(2, '0')}"


def _counted(plan: Plan) -> Iterator[str]:
    """Yield what the worst case holds beyond price times time."""
    if plan.uncertainty > 1:
        yield f"prices up to {plan.uncertainty:g} times the list's"
    if plan.tail_s:
        yield f"{span(plan.tail_s)} billed beyond the end"
    if plan.attempts > 1:
        yield f"{plan.attempts} starts by the platform, each with the whole time; a budget allows one"


def _budget(plan: Plan) -> Iterator[str]:
    if plan.budget_micro is None or plan.price_micro is None:
        return
    spent = f", of which {dollars(up(plan.spent_micro))} may have been billed already" if plan.spent_micro else ""
    budget, ends_micro = format_money(plan.budget_micro), _ends_micro(plan)
    if plan.on_limit == "alert":
        over_micro = plan.spent_micro + (plan.worst_case_micro or 0) - plan.budget_micro
        over = f"; the worst case is {dollars(up(over_micro))} over it" if over_micro > 0 else ""
        yield f"budget {budget}{spent}; it only alerts (on_limit: alert), and ends nothing{over}"
    else:
        does = "is ended" if plan.deadline_s >= plan.own_limit_s else "leaves"
        rest = dollars(up(max(0, plan.budget_micro - ends_micro)))
        kept = f"the other {rest} is kept for {_reserve(plan)}" if plan.cap_reason == "budget" else "by its time limit"
        yield f"budget {budget}{spent}; {does} at about {dollars(up(ends_micro))} of it, {kept}"
    if told := _told(plan, ends_micro):
        yield f"  told at {told}"


def _ends_micro(plan: Plan) -> int:
    """Return what will have been spent, at the list's price, when the job leaves."""
    began_s = plan.cap_s - plan.own_limit_s
    hourly_micro = plan.instances * (plan.price_micro or 0)
    ends_micro = plan.spent_micro + hourly_micro * (began_s + plan.deadline_s) // 3600
    return -(-ends_micro // 10_000) * 10_000 if ends_micro >= 1_000_000 else ends_micro


def _reserve(plan: Plan) -> str:
    """Return what the part of the budget is for that a job leaves unused."""
    saving = [] if plan.deadline_s >= plan.own_limit_s else ["saving" if plan.saves else "leaving"]
    tail = ["the platform's tail"] if plan.tail_s else []
    dearer = ["dearer prices"] if plan.uncertainty > 1 else []
    *first, last = [*saving, *tail, *dearer] or ["rounding"]
    return f"{', '.join(first)} and {last}" if first else last


def _told(plan: Plan, ends_micro: int) -> str:
    """Return at which sums people are told while it runs; the last one before the budget is told at its end."""
    most_micro = plan.spent_micro + (plan.worst_case_micro or 0) if plan.on_limit == "alert" else ends_micro
    sums = [micro for micro in plan.alert_micro if plan.spent_micro < micro <= most_micro]
    at = ", ".join(format_money(up(micro)).removesuffix(" USD") for micro in sums)
    is_at_end = plan.on_limit != "alert" and plan.cap_reason == "budget"
    return " and ".join([*([f"{at} USD"] if at else []), *(["when it ends the job"] if is_at_end else [])])


def _instances(plan: Plan) -> str:
    return f"{plan.instances} instance{'s' if plan.instances != 1 else ''}"

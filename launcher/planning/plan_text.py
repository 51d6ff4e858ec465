"""A plan in words, for a dry run, `plan` and the question before a submit."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from cloudtrain.entrypoints.format import counted, dollars, span, up

from ..metering import rate
from ..plan import Plan
from ..text.units import format_money


def lines(plan: Plan, backend: str = "this backend", before: Plan | None = None) -> list[str]:
    """Return the plan for people, a line for each subject; after the plan `before`, the cost and the changed lines."""
    plan_lines = [*_machines(plan), _time(plan), *_money(plan, backend)]
    known = {*lines(before, backend)} - {next(_money(plan, backend))} if before else set()
    return [line for line in plan_lines if line not in known]


def age(as_of: str | None) -> str:
    """Return the age of a price, `94 days old`; empty if the date is unknown."""
    try:
        days = (rate.today() - date.fromisoformat(as_of or "")).days
    except ValueError:
        return ""
    return f"{days} days old" if days != 1 else "1 day old"


def provenance(plan: Plan) -> str:
    """Return the source of the price with its age."""
    counted = "counted as " * ("or earlier" in plan.price_source)
    return plan.price_source + (f", {counted}{old}" if (old := age(plan.price_as_of)) else "")


def _machines(plan: Plan) -> Iterator[str]:
    device = "GPU" if plan.gpus_per_instance else "CPU"
    ranks = counted(plan.slot_ranks * plan.slot_instances or plan.ranks, "rank")
    if plan.slot_instances > 1:
        count, width = counted(plan.instances // plan.slot_instances, "trial"), plan.slot_instances
        yield f"{counted(plan.instances, 'instance')}: {count} of {width} instances and {ranks} at once ({device})"
    elif plan.slots:
        yield f"{counted(plan.instances, 'instance')} x {counted(plan.slots, 'trial')} of {ranks} at once ({device})"
    else:
        yield f"{counted(plan.instances, 'instance')} x {plan.nproc_per_node} = {ranks} ({device})"
    if plan.batch is not None:
        b = plan.batch
        shared = f" / {b.tensor} that share each layer" * (b.tensor > 1) + f" / {b.pipeline} stages" * (b.pipeline > 1)
        yield f"global batch {b.global_size} = {b.micro_size} x {ranks}{shared} x {b.accumulation} accumulated"
        if b.pipeline > 1 and not b.bubble:
            yield f"pipeline: weights are up to {b.pipeline - 1} micro-batches old, which costs accuracy; no bubble"
        elif b.pipeline > 1:
            more = f"; {4 * b.pipeline} micro-batches or more would waste less" * (b.accumulation < 4 * b.pipeline)
            yield f"pipeline: each stage waits at least {100 * b.bubble:.0f} % of a step{more}"


def _time(plan: Plan) -> str:
    most = f"at most {span(plan.cap_s)}" + ", as long as the budget allows" * (plan.cap_reason == "budget")
    if plan.own_limit_s < plan.cap_s:
        most += f", up to {span(plan.cap_s - plan.own_limit_s)} of it for image and data"
    leaves = span(plan.deadline_s, 3 if plan.deadline_s >= 86_400 else 2)  # `1d 11h` would hide 58 minutes
    if plan.deadline_s >= plan.own_limit_s:
        return f"{most}; then the job ends without a save (on_limit: stop)"
    if plan.saves:
        return f"{most}; after {leaves} it saves and stops"
    folder = "only files in CLOUDTRAIN_CHECKPOINT_DIR are saved; `keep` names others"
    stays = "the files of `keep` are saved" if plan.keeps else folder
    return f"{most}; after {leaves} the script gets {plan.stop_signal}, and {stays}"


def _money(plan: Plan, backend: str) -> Iterator[str]:
    if plan.price_micro is None or plan.worst_case_micro is None:
        yield f"price unknown: {plan.price_source}"
        return
    if plan.price_micro == 0:
        gpus = plan.instances * plan.gpus_per_instance
        hours = f", at most {gpus * plan.cap_s / 3600:,.2f} GPU-hours" if gpus else ""
        yield f"no cost: {plan.price_source}{hours}"
        if plan.unpriced_budget_micro is not None:
            yield f"no price for {plan.machine or 'this machine'}: the budget does not apply on {backend}"
        return
    hourly = f"{plan.instances * plan.price_micro / 1e6:.2f} USD an hour"
    each = f": {plan.instances} x {_exact(plan.price_micro)}" if plan.instances > 1 else ""
    worst = dollars(up(plan.worst_case_micro))
    yield f"{hourly}{each} ({provenance(plan)}), at worst {worst}"
    if counted := "; ".join(_counted(plan)):
        yield f"  includes {counted}"
    yield from _budget(plan)


def _exact(micro: int) -> str:
    """Return a price that users can multiply: with cents, and up to four decimals if necessary."""
    whole, _, decimals = f"{micro / 1e6:.4f}".partition(".")
    return f"{whole}.{decimals.rstrip('0').ljust(2, '0')}"


def _counted(plan: Plan) -> Iterator[str]:
    """Yield the parts of the worst case beyond price times time."""
    if plan.uncertainty > 1:
        yield f"prices up to {plan.uncertainty:g} times the list price"
    if plan.terms.tail_s:
        tail = f"{plan.terms.tail_s} s" if plan.terms.tail_s < 60 else span(plan.terms.tail_s)
        yield f"{tail} that {'are billed' if plan.price_as_of else 'count'} after the job ends"
    if plan.terms.starts > 1:
        yield f"{plan.terms.starts} starts by the platform, each with the whole time; a budget allows one start"


def _budget(plan: Plan) -> Iterator[str]:
    if plan.budget_micro is None or plan.price_micro is None:
        return
    spent = f", of which {dollars(up(plan.spent_micro))} may have been billed already" if plan.spent_micro else ""
    budget, ends_micro = format_money(plan.budget_micro), _ends_micro(plan)
    by_list = " at the list price" if plan.uncertainty > 1 else ""
    if plan.on_limit == "alert":
        over_micro = plan.spent_micro + (plan.worst_case_micro or 0) - plan.budget_micro
        over = f"; the worst case is {dollars(up(over_micro))} over it" if over_micro > 0 else ""
        yield f"budget {budget}{spent}: it only sends alerts (on_limit: alert), and ends no job{over}"
    elif plan.cap_reason == "budget":
        does = "ends" if plan.deadline_s >= plan.own_limit_s else "leaves"
        rest = dollars(up(max(0, plan.budget_micro - ends_micro)))
        used = f"the job {does} at about {dollars(up(ends_micro))}{by_list}"
        yield f"budget {budget}{spent}: {used}; {rest} is the reserve for {_reserve(plan)}"
    else:
        most = dollars(up(ends_micro))
        yield f"budget {budget}{spent}: at most about {most} will be used{by_list}, because the time limit comes first"
    if alerts := _alerts(plan, ends_micro):
        yield f"  alerts {alerts}"


def _ends_micro(plan: Plan) -> int:
    """Return the cost, at the list price, when the job leaves."""
    began_s = plan.cap_s - plan.own_limit_s
    hourly_micro = plan.instances * (plan.price_micro or 0)
    ends_micro = plan.spent_micro + hourly_micro * (began_s + plan.deadline_s) // 3600
    return -(-ends_micro // 10_000) * 10_000 if ends_micro >= 1_000_000 else ends_micro


def _reserve(plan: Plan) -> str:
    """Return the purposes of the part of the budget that a job does not use."""
    saving = [] if plan.deadline_s >= plan.own_limit_s else ["saving" if plan.saves else "leaving"]
    tail = ["billing after the end" if plan.price_as_of else "the time after the end"] if plan.terms.tail_s else []
    higher = ["higher prices"] if plan.uncertainty > 1 else []
    *first, last = [*saving, *tail, *higher] or ["rounding"]
    return f"{', '.join(first)} and {last}" if first else last


def _alerts(plan: Plan, ends_micro: int) -> str:
    """Return when alerts are sent, `at 50 USD`; the last alert below the budget is sent at the job's end."""
    most_micro = plan.spent_micro + (plan.worst_case_micro or 0) if plan.on_limit == "alert" else ends_micro
    sums = [micro for micro in plan.alert_micro if plan.spent_micro < micro <= most_micro]
    at = ", ".join(format_money(up(micro)).removesuffix(" USD") for micro in sums)
    is_at_end = plan.on_limit != "alert" and plan.cap_reason == "budget"
    return " and ".join([*([f"at {at} USD"] if at else []), *(["when the budget ends the job"] if is_at_end else [])])

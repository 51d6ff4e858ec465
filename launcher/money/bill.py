"""A job's bill: planned, metered and billed costs, leg by leg, and unit costs.

The text of bills and of sums over jobs: tables and lines for people, rows for spreadsheets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from cloudtrain.entrypoints.format import amount, cell, counted, dollars, most, span

from ..job import Attempt
from ..metering import meter
from ..metering.money import Money
from ..text.tables import labelled
from ..text.units import as_usd, moment
from . import unit_cost
from .period import Group, Spent, total

LEG_HEAD = ("ATTEMPT", "NODES", "USD/H", "FROM (UTC)", "TO", "TIME", "METERED", "BILLED", "COUNTED BY")
SPENT_HEAD = ("JOB", "BACKEND", "STATE", "NODE-HOURS", "USD")
GROUP_HEAD = ("JOBS", "NODE-HOURS", "USD")


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

    money: Money
    lines: tuple[BillLine, ...]
    metered_micro: int | None
    worst_micro: int | None
    estimate_micro: int | None
    estimate_step: int | None
    idle_micro: int
    paid: unit_cost.Achieved


def bill(money: Money, attempts: Sequence[Attempt], now_s: float) -> Bill:
    """Return the bill of a job with the money until `now_s`; `attempts` are all attempts of the job."""
    lines = tuple(_line(attempt, leg, now_s) for attempt in attempts for leg in meter.legs_of([attempt]))
    estimate, step = _estimate(attempts, now_s)
    return Bill(
        money,
        lines,
        meter.sum_micro(line.metered_micro for line in lines),
        _worst_micro(attempts, now_s),
        estimate,
        step,
        sum(ceil((attempt.idle_usd or 0.0) * 1e6) for attempt in attempts),
        unit_cost.achieved(attempts, now_s),
    )


def as_json(found: Bill) -> dict[str, Any]:
    """Return the bill with stable names: money in dollars, times in unix seconds."""
    return {
        "spend_usd": as_usd(found.money.spent_micro),
        "metered_usd": as_usd(found.metered_micro),
        "billed_usd": as_usd(meter.sum_micro(line.billed_micro for line in found.lines) if found.lines else None),
        "limit_usd": as_usd(found.money.limit_micro),
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


def bill_lines(found: Bill) -> list[str]:
    """Return the lines below the table of a job's legs: sum, plan, unit costs."""
    idle = f"up to {dollars(found.idle_micro)} more while its machines idle after it; not in spent"
    fall = f"{dollars(found.paid.loss_micro)} for each 1.0 that it fell" if found.paid.loss_micro else ""
    rows = (
        ("spent", found.money.words),
        ("idle", idle if found.idle_micro else ""),
        ("planned", _planned(found)),
        ("paid for", unit_cost.in_words(found.paid)),
        ("loss", "; ".join(filter(None, (fall, unit_cost.last_words(found.paid))))),
    )
    return labelled((label, words) for label, words in rows if words)


def leg_rows(lines: Sequence[BillLine]) -> list[list[str]]:
    """Return the rows of LEG_HEAD."""
    return [
        [
            str(line.leg.attempt),
            str(line.leg.instances),
            "unknown" if line.leg.price_micro is None else amount(line.leg.price_micro),
            moment(line.leg.started_s),
            _until(line),
            span(line.seconds),
            cell(line.metered_micro),
            "-" if line.billed_micro is None else cell(line.billed_micro),
            line.source,
        ]
        for line in lines
    ]


def spent_rows(spent: Sequence[Spent]) -> list[list[str]]:
    """Return the rows of SPENT_HEAD, the sum last."""
    rows = [
        [job.job_id, job.backend, job.state, _hours(job.node_s), "unknown" if job.unknown else cell(job.spent_micro)]
        for job in spent
    ]
    return [*rows, [f"total of {counted(total(spent).jobs, 'job')}", "", "", *_sum_cells(total(spent))]]


def group_rows(groups: Sequence[Group], whole: Group) -> list[list[str]]:
    """Return the rows below the group's title and GROUP_HEAD, the sum last."""
    rows = [[group.key or "(none)", str(group.jobs), *_sum_cells(group)] for group in groups]
    return [*rows, ["total", str(whole.jobs), *_sum_cells(whole)]]


def leg_cells(lines: Sequence[BillLine]) -> tuple[list[str], list[list[Any]]]:
    """Return head and rows for a spreadsheet; times in UTC, an empty cell for an unknown value."""
    head = ["job", "attempt", "instances", "usd_per_hour", "from_utc", "to_utc", "seconds"]
    rows: list[list[Any]] = [
        [
            *(line.leg.job_id, line.leg.attempt, line.leg.instances, _plain(line.leg.price_micro)),
            *(_time_cell(line.leg.started_s), _time_cell(line.leg.ended_s), round(line.seconds, 3)),
            *(_plain(line.metered_micro), _plain(line.billed_micro), _plain(line.cost_micro), line.source),
        ]
        for line in lines
    ]
    return [*head, "metered_usd", "billed_usd", "cost_usd", "counted_by"], rows


def spent_cells(spent: Sequence[Spent]) -> tuple[list[str], list[list[Any]]]:
    """Return head and rows for a spreadsheet; the cost cell of a job without a price is empty."""
    names = sorted({name for job in spent for name in job.tags})
    rows: list[list[Any]] = [
        [
            *(job.job_id, job.name, job.backend, job.state, job.project, round(job.node_s / 3600, 4)),
            *("" if job.unknown else _plain(job.spent_micro), *(str(job.tags.get(name, "")) for name in names)),
        ]
        for job in spent
    ]
    head = ["job", "name", "backend", "state", "project", "node_hours", "usd", *(f"tag:{name}" for name in names)]
    return head, rows


def group_cells(groups: Sequence[Group], by: str) -> tuple[list[str], list[list[Any]]]:
    """Return head and rows for a spreadsheet; `usd` excludes jobs without a price, counted separately."""
    head = [by, "jobs", "node_hours", "usd", "jobs_without_a_price"]
    return head, [
        [group.key, group.jobs, round(group.node_s / 3600, 4), _plain(group.spent_micro), group.unknown]
        for group in groups
    ]


def _line(attempt: Attempt, leg: meter.Leg, now_s: float) -> BillLine:
    cost, by = meter.cost_micro(leg, now_s), attempt.state.billed_by
    # The other nodes counted the time of a node that the job lost; only its time span is known.
    metered = cost if leg.started_s is None else meter.cost_micro(replace(leg, billed_s=None, told_s=None), now_s)
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
    return meter.sum_micro([before, sent[-1].plan.worst_case_micro])


def _estimate(attempts: Sequence[Attempt], now_s: float) -> tuple[int | None, int | None]:
    """Return the job's cost by its first reported remaining time, and the step of that report."""
    for place, attempt in enumerate(attempts):
        forecast, started_s = attempt.progress.get("forecast"), attempt.state.started_s
        if forecast and started_s is not None:
            step, end_s = forecast
            (first, *_), before = meter.legs_of([attempt]), meter.legs_of(attempts[:place])
            whole = replace(first, instances=attempt.plan.instances, ended_s=max(end_s, started_s))
            cost = meter.spent_micro([*before, replace(whole, billed_s=None, told_s=None)], now_s)
            return cost, None if cost is None else step
    return None, None


def _planned(found: Bill) -> str:
    parts = [f"at worst {most(found.worst_micro)}"] if found.worst_micro is not None else []
    if found.estimate_micro is not None:
        parts.append(f"at step {found.estimate_step} its pace promised {dollars(found.estimate_micro)}")
    return "; ".join(parts)


def _until(line: BillLine) -> str:
    start_s, end_s = line.leg.started_s, line.leg.ended_s
    if end_s is None or start_s is None:
        return "now" if line.leg.runs else "-"
    day, at = moment(end_s).split(" ")
    return at if moment(start_s).startswith(day) else f"{day} {at}"


def _sum_cells(group: Group) -> list[str]:
    least = f"at least {cell(group.spent_micro)}: {counted(group.unknown, 'job')} without a price"
    return [_hours(group.node_s), least if group.unknown else cell(group.spent_micro)]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f}"


def _plain(micro: int | None) -> str:
    """Return an amount without an exponent, so that a spreadsheet reads a number."""
    return "" if micro is None else f"{micro // 1_000_000}.{micro % 1_000_000:06d}"


def _time_cell(time_s: float | None) -> str:
    return "" if time_s is None else moment(time_s)

"""Text of bills: tables and lines for people, rows for spreadsheets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cloudtrain.entrypoints.format import amount, counted, dollars, span, up

from ..text.tables import labelled
from ..text.units import moment, of_limit
from . import unit_cost
from .bill import Bill, BillLine
from .period import Group, Spent, total

LEG_HEAD = ("ATTEMPT", "NODES", "USD/H", "FROM (UTC)", "TO", "TIME", "METERED", "BILLED", "COUNTED BY")
SPENT_HEAD = ("JOB", "BACKEND", "STATE", "NODE-HOURS", "USD")
GROUP_HEAD = ("JOBS", "NODE-HOURS", "USD")


def bill_lines(found: Bill) -> list[str]:
    """Return the lines below the table of a job's legs: sum, plan, unit costs."""
    idle = f"up to {dollars(found.idle_micro)} more while its machines idle after it; not in spent"
    fall = f"{dollars(found.paid.loss_micro)} for each 1.0 that it fell" if found.paid.loss_micro else ""
    rows = (
        ("spent", of_limit(found.spent_micro, found.limit_micro)),
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
            _amount(line.leg.price_micro),
            moment(line.leg.started_s),
            _until(line),
            span(line.seconds),
            _amount(line.metered_micro),
            "-" if line.billed_micro is None else _amount(line.billed_micro),
            line.source,
        ]
        for line in lines
    ]


def spent_rows(spent: Sequence[Spent]) -> list[list[str]]:
    """Return the rows of SPENT_HEAD, the sum last."""
    rows = [
        [job.job_id, job.backend, job.state, _hours(job.node_s), "unknown" if job.unknown else _amount(job.spent_micro)]
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


def _planned(found: Bill) -> str:
    parts = [f"at worst {dollars(up(found.worst_micro))}"] if found.worst_micro is not None else []
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
    least = f"at least {_amount(group.spent_micro)}: {counted(group.unknown, 'job')} without a price"
    return [_hours(group.node_s), least if group.unknown else _amount(group.spent_micro)]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f}"


def _amount(micro: int | None) -> str:
    return "unknown" if micro is None else amount(micro)


def _plain(micro: int | None) -> str:
    """Return an amount without an exponent, so that a spreadsheet reads a number."""
    return "" if micro is None else f"{micro // 1_000_000}.{micro % 1_000_000:06d}"


def _time_cell(time_s: float | None) -> str:
    return "" if time_s is None else moment(time_s)

"""Text of `budget show`: a JSON object with stable names for scripts, lines of 80 columns for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from cloudtrain.entrypoints.format import amount, down, up

from ..store.budgets import OVERALL, Held, Standing
from ..text.tables import table
from ..text.terminal import when
from ..text.units import as_usd

WIDTH = 80
MOST_BAR, LEAST_BAR = 24, 8
MOST_NAME = 22
ALL_JOBS = "(all jobs)"
COUNTED = (
    "spent and reserved are worst cases: prices with their uncertainty, whole billing units, idle machines;"
    " `cloudtrain cost` counts seconds at list prices"
)
_HEAD = ("PROJECT", "PERIOD", "LIMIT", "SPENT", "RESERVED", "LEFT")


@dataclass(frozen=True)
class BudgetRow:
    """The state of a budget, and its ledger: `place` is the address of a shared ledger, None for this machine.

    If `is_limited` is False, the project has no budget, and only spent and reserved money is shown.
    """

    standing: Standing
    place: str | None = None
    is_limited: bool = True


def as_json(
    rows: Sequence[BudgetRow], months: Mapping[str, Mapping[str, int]], unpriced: Sequence[str]
) -> dict[str, Any]:
    """Return the whole report; money in US dollars, times in unix seconds. A null project stands for all jobs.

    `months`: cost of each project's ended jobs in each month; `unpriced`: jobs that ended at an unknown price.
    `counted`: spent money is a worst case, see COUNTED.
    """
    return {
        "budgets": [_budget_json(row) for row in rows],
        "reservations": [
            {
                "job": held.job_id,
                "attempt": held.attempt,
                "project": held.project or None,
                "amount_usd": as_usd(held.amount_micro),
                "created_s": held.created_s,
                "by": held.by or None,
                "ledger": place,
            }
            for place, held in _holders(rows)
        ],
        "spent_usd": [
            {"project": project or None, "months": {month: as_usd(micro) for month, micro in each.items()}}
            for project, each in months.items()
        ],
        "unpriced": list(unpriced),
        "counted": "at_worst",
    }


def as_lines(rows: Sequence[BudgetRow], columns: int | None = None) -> list[str]:
    """Return a table of the budgets of each ledger, and below the table the jobs that hold reservations.

    On a terminal narrower than 80 columns the bars are dropped first, then the reservations and the period.
    """
    lines: list[str] = []
    for place in dict.fromkeys(row.place for row in rows):
        here = [row for row in rows if row.place == place]
        lines += ["", f"shared at {place}"] if place and lines else [f"shared at {place}"] if place else []
        lines += [*_table(here, columns), *_rooms(here), *_means(here)]
        held = [each for _, each in _holders(here)]
        lines += ["", *_held_table(held, columns)] if any(each.amount_micro != 0 for each in held) else []
    return lines


def _budget_json(row: BudgetRow) -> dict[str, Any]:
    standing, budget = row.standing, row.standing.budget
    limited = row.is_limited
    return {
        "project": budget.project or None,
        "period": budget.period,
        "month": standing.month if budget.period == "month" else None,
        "ledger": row.place,
        "limit_usd": as_usd(budget.limit_micro if limited else None),
        "overcommit": budget.overcommit_percent / 100 if limited else None,
        "spent_usd": as_usd(standing.spent_micro),
        "reserved_usd": as_usd(standing.reserved_micro),
        "left_usd": as_usd(standing.left_micro if limited else None),
        "room_usd": as_usd(standing.room_micro if limited else None),
        "mean_left_usd": as_usd(standing.mean_left_micro if limited else None),
        "price_unknown": [held.job_id for held in standing.unknown],
    }


def _table(rows: Sequence[BudgetRow], columns: int | None) -> list[str]:
    cells = [_HEAD, *map(_cells, rows)]
    head, *lines = _aligned(cells, range(2, len(_HEAD)))
    if columns is not None and len(head) > columns:
        return table(_HEAD, cells[1:], drop=("RESERVED", "PERIOD"), columns=columns)
    bar = min(MOST_BAR, (columns or WIDTH) - len(head) - 4)
    bars = [f"  {_bar(row.standing, bar)}" if row.is_limited and bar >= LEAST_BAR else "" for row in rows]
    return [head, *(line + drawn for line, drawn in zip(lines, bars, strict=True))]


def _aligned(cells: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Return the lines of a table whose columns in `right` are aligned to the right; `cells` has the head first."""
    widths = [max(map(len, column)) if i in right else 0 for i, column in enumerate(zip(*cells, strict=True))]
    head, *rows = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in cells)
    return table(head, rows)


def _cells(row: BudgetRow) -> tuple[str, ...]:
    standing, budget = row.standing, row.standing.budget
    limit, left = "-", "-"
    if row.is_limited:
        more = f" x{budget.overcommit_percent / 100:g}" if budget.overcommit_percent != 100 else ""
        limit, left = amount(budget.limit_micro) + more, amount(down(standing.left_micro))
    reserved = amount(up(standing.reserved_micro)) + ("+?" if standing.unknown else "")
    return _short(budget.project), _period(row), limit, amount(standing.spent_micro), reserved, left


def _period(row: BudgetRow) -> str:
    return row.standing.month if row.standing.budget.period == "month" else "ever"


def _rooms(rows: Sequence[BudgetRow]) -> list[str]:
    """Return the worst cases that still fit, for budgets with an overcommitment."""
    return [
        f"{_short(row.standing.budget.project)}, {_period(row)}: worst cases of"
        f" {amount(down(max(0, row.standing.room_micro)))} may still be promised"
        for row in rows
        if row.is_limited and row.standing.budget.overcommit_percent != 100
    ]


def _means(rows: Sequence[BudgetRow]) -> list[str]:
    """Return the remaining money if active jobs cost the mean share of their worst cases, where a mean is known."""
    return [
        f"{_short(row.standing.budget.project)}: {amount(down(left_micro))} left if what runs costs"
        f" {row.standing.mean_percent} % of its worst, as before"
        for row in rows
        if row.is_limited and row.standing.held and (left_micro := row.standing.mean_left_micro) is not None
    ]


def _held_table(held: Sequence[Held], columns: int | None) -> list[str]:
    """Return the jobs that hold reservations, the largest first; jobs without cost hold no reservation."""
    ordered = sorted(
        (each for each in held if each.amount_micro != 0),
        key=lambda each: (-(each.amount_micro or 0), each.created_s, each.job_id),
    )
    rows = [
        (
            "?" if each.amount_micro is None else amount(up(each.amount_micro)),
            f"{each.job_id} ({each.attempt})" if each.attempt > 1 else each.job_id,
            _short(each.project) if each.project else "-",
            when(each.created_s) + (f", {each.by}" if each.by else ""),
        )
        for each in ordered
    ]
    cells = [("RESERVED", "BY JOB", "PROJECT", "SINCE"), *rows]
    if columns is not None and max(sum(map(len, row)) for row in cells) + 6 > columns:
        return table(cells[0], rows, drop=("PROJECT",), shorten={"SINCE": 8}, columns=columns)
    return _aligned(cells, (0,))


def _holders(rows: Iterable[BudgetRow]) -> list[tuple[str | None, Held]]:
    """Return all reservations without duplicates, though several budgets hold the same reservation."""
    found = {
        (row.place, held.by, held.job_id, held.attempt): (row.place, held) for row in rows for held in row.standing.held
    }
    return sorted(found.values(), key=lambda each: (each[0] or "", each[1].created_s, each[1].job_id))


def _bar(standing: Standing, width: int) -> str:
    """Return a bar: spent `#`, reserved `=`, left `.`; full as soon as no money is left, and never before."""
    limit = max(1, standing.budget.limit_micro)
    spent = min(width, round(width * standing.spent_micro / limit))
    taken = min(width, -(-width * (standing.spent_micro + standing.reserved_micro) // limit))
    if not standing.reserved_micro:
        taken = spent
    if standing.left_micro > 0:
        taken = min(taken, width - 1)
        spent = min(spent, taken)
    text = "#" * spent, "=" * max(0, taken - spent), "." * (width - max(taken, spent))
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return f"[{''.join(text)}]"
    full = "red" if standing.left_micro <= 0 else "green"
    return f"[{click.style(text[0], fg=full)}{click.style(text[1], fg='yellow')}{text[2]}]"


def _short(project: str) -> str:
    if project == OVERALL:
        return ALL_JOBS
    return project if len(project) <= MOST_NAME else f"{project[: MOST_NAME - 2]}.."

"""Text of `budget show`: a JSON object with stable names for scripts, lines of 80 columns for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from cloudtrain.entrypoints.format import amount, cell, left

from ..metering.money import Money
from ..store.budgets import OVERALL, Held, LedgerBudget, Standing
from ..text.tables import table
from ..text.terminal import when
from ..text.units import as_usd

if TYPE_CHECKING:
    from ..store.database import Database

WIDTH = 80
MOST_BAR, LEAST_BAR = 24, 8
MOST_NAME = 22
ALL_JOBS = "(all jobs)"
COUNTED = (
    "spent and reserved are worst cases: prices with their uncertainty, whole billing units, idle machines;"
    " `cloudtrain cost` counts seconds at list prices"
)
_HEAD = ("PROJECT", "PERIOD", "LIMIT", "SPENT", "RESERVED", "LEFT")


def own_rows(database: Database, now_s: float, project: str | None = None) -> list[Standing]:
    """Return the local machine's budgets; for a project without a budget, its spent and reserved sums."""
    from ..store import ledger  # a dry run without budgets needs no database

    known = ledger.accounts(database, now_s)
    limits = [each for each in known.budgets if project in (None, each.project)]
    wanted = {OVERALL, *ledger.projects(database)} if project is None else {project}
    bare = [LedgerBudget(name, "month", 0) for name in wanted - {each.project for each in limits}]
    rows = [known.standing(each, now_s, limited=each in limits) for each in (*limits, *bare)]
    return sorted(rows, key=lambda each: (each.budget.project, each.budget.period))


def as_json(
    rows: Sequence[Standing], months: Mapping[str, Mapping[str, int]], unpriced: Sequence[str]
) -> dict[str, Any]:
    """Return the whole report; money in US dollars, times in unix seconds. A null project stands for all jobs.

    `months`: cost of each project's ended jobs in each month; `unpriced`: jobs that ended at an unknown price.
    `counted`: spent money is a worst case, see COUNTED.
    """
    return {
        "budgets": [budget_json(row) for row in rows],
        "reservations": [
            {
                "job": held.job_id,
                "attempt": held.attempt,
                "project": held.project or None,
                "amount_usd": as_usd(held.held_micro),
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


def as_lines(rows: Sequence[Standing], columns: int | None = None) -> list[str]:
    """Return a table of the budgets of each ledger, and below the table the jobs that hold reservations.

    On a terminal narrower than 80 columns the bars are dropped first, then the reservations and the period.
    """
    lines: list[str] = []
    for place in dict.fromkeys(row.place for row in rows):
        here = [row for row in rows if row.place == place]
        lines += ["", f"shared at {place}"] if place and lines else [f"shared at {place}"] if place else []
        lines += [*_table(here, columns), *_rooms(here), *_means(here)]
        held = [each for _, each in _holders(here)]
        lines += ["", *_held_table(held, columns)] if any(each.held_micro != 0 for each in held) else []
    return lines


def budget_json(row: Standing) -> dict[str, Any]:
    """Return the budget with stable names; sums of a limit are null without a limit."""
    budget, money = row.budget, row.money
    limit_micro, projected_micro = money.limit_micro, money.projected_micro
    mean_left = None if limit_micro is None or projected_micro is None else limit_micro - projected_micro
    return {
        "project": budget.project or None,
        "period": budget.period,
        "month": row.month if budget.period == "month" else None,
        "ledger": row.place,
        "limit_usd": as_usd(limit_micro),
        "overcommit": budget.overcommit_percent / 100 if limit_micro is not None else None,
        "ask_above_usd": as_usd(budget.ask_above_micro),
        "spent_usd": as_usd(money.spent_micro),
        "reserved_usd": as_usd(money.held_micro),
        "left_usd": as_usd(money.left_micro),
        "room_usd": as_usd(row.room_micro if limit_micro is not None else None),
        "mean_left_usd": as_usd(mean_left),
        "price_unknown": [held.job_id for held in row.unknown],
    }


def _table(rows: Sequence[Standing], columns: int | None) -> list[str]:
    cells = [_HEAD, *map(cells_of, rows)]
    head, *lines = _aligned(cells, range(2, len(_HEAD)))
    if columns is not None and len(head) > columns:
        return table(_HEAD, cells[1:], drop=("RESERVED", "PERIOD"), columns=columns)
    bar = min(MOST_BAR, (columns or WIDTH) - len(head) - 4)
    bars = [f"  {_bar(row.money, bar)}" if row.money.limit_micro and bar >= LEAST_BAR else "" for row in rows]
    return [head, *(line + drawn for line, drawn in zip(lines, bars, strict=True))]


def _aligned(cells: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Return the lines of a table whose columns in `right` are aligned to the right; `cells` has the head first."""
    widths = [max(map(len, column)) if i in right else 0 for i, column in enumerate(zip(*cells, strict=True))]
    head, *rows = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in cells)
    return table(head, rows)


def cells_of(row: Standing) -> tuple[str, ...]:
    """Return the texts of the columns: project, period, limit, spent, reserved, left."""
    spent, held = cell(row.money.spent_micro), cell(row.money.held_micro)
    rest = "-" if row.money.left_micro is None else _rest(row.money.left_micro)
    more = f" x{row.budget.overcommit_percent / 100:g}" if row.budget.overcommit_percent != 100 else ""
    limit = "-" if row.money.limit_micro is None else amount(row.money.limit_micro) + more
    return _short(row.budget.project), _period(row), limit, spent, held + ("+?" if row.unknown else ""), rest


def _period(row: Standing) -> str:
    return row.month if row.budget.period == "month" else "ever"


def _rooms(rows: Sequence[Standing]) -> list[str]:
    """Return the worst cases that still fit, for budgets with an overcommitment."""
    return [
        f"{_short(row.budget.project)}, {_period(row)}: worst cases of {_rest(row.room_micro)} may still be promised"
        for row in rows
        if row.budget.overcommit_percent != 100
    ]


def _means(rows: Sequence[Standing]) -> list[str]:
    """Return the remaining money if active jobs cost the mean share of their worst cases, where a mean is known."""
    return [
        f"{_short(row.budget.project)}: {_rest(row.budget.limit_micro - (row.money.projected_micro or 0))} left if what"
        f" runs costs {row.mean_percent} % of its worst, as before"
        for row in rows
        if row.money.limit_micro is not None and row.held and row.mean_percent is not None
    ]


def _held_table(held: Sequence[Held], columns: int | None) -> list[str]:
    """Return the jobs that hold reservations, the largest first; jobs without cost hold no reservation."""
    ordered = sorted(
        (each for each in held if each.held_micro != 0),
        key=lambda each: (-(each.held_micro or 0), each.created_s, each.job_id),
    )
    rows = [
        (
            cell(each.held_micro),
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


def _holders(rows: Iterable[Standing]) -> list[tuple[str | None, Held]]:
    """Return all reservations without duplicates, though several budgets hold the same reservation."""
    found = {(row.place, held.by, held.job_id, held.attempt): (row.place, held) for row in rows for held in row.held}
    return sorted(found.values(), key=lambda each: (each[0] or "", each[1].created_s, each[1].job_id))


def _bar(money: Money, width: int) -> str:
    """Return a bar: spent `#`, reserved `=`, left `.`; full as soon as no money is left, and never before."""
    limit, spent_micro, held_micro = money.limit_micro or 1, money.spent_micro or 0, money.held_micro or 0
    spent = min(width, round(width * spent_micro / limit))
    taken = min(width, -(-width * (spent_micro + held_micro) // limit)) if held_micro else spent
    if money.left_micro:
        taken = min(taken, width - 1)
        spent = min(spent, taken)
    text = "#" * spent, "=" * max(0, taken - spent), "." * (width - max(taken, spent))
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return f"[{''.join(text)}]"
    full = "green" if money.left_micro else "red"
    return f"[{click.style(text[0], fg=full)}{click.style(text[1], fg='yellow')}{text[2]}]"


def _rest(micro: int) -> str:
    return left(micro).removesuffix(" USD")


def _short(project: str) -> str:
    if project == OVERALL:
        return ALL_JOBS
    return project if len(project) <= MOST_NAME else f"{project[: MOST_NAME - 2]}.."

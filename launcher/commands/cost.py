"""`cloudtrain cost`: the cost of a job, leg by leg, of a sweep, or of all jobs in a month or since a day."""

from __future__ import annotations

import time

import click

from ..errors import UsageError
from ..jobs.overview import try_lines
from ..jobs.refresh import refresh, refresh_active
from ..jobs.view import outcome, read_view
from ..money import bill, period
from ..store.registry import Registry
from ..text.tables import csv_text, table, width
from ..text.terminal import print_json, print_lines, print_text, say, say_each
from .options import cli_command, completes, flag, json_option


@cli_command("cost", "cloudtrain cost last", "cloudtrain cost --month 2026-11 --by tag:team")
@click.argument("job", required=False, shell_complete=completes("jobs"))
@click.option("--month", metavar="YYYY-MM", help="A calendar month, in UTC; the present one by default.")
@click.option("--since", metavar="WHEN", help="From then on: a day such as `2026-11-03`, or so long ago, `7d`.")
@click.option("--by", metavar="WORD", help="Sums by `tag:NAME`, `project`, `backend` or `name`.")
@flag("--csv", "as_csv", help="Print a table for spreadsheets.")
@json_option
def command(job: str | None, month: str | None, since: str | None, by: str | None, as_csv: bool, as_json: bool) -> None:
    """Show what a job has cost, planned against metered against billed; without JOB, what all have in a month.

    For a sweep also the cost by trial and rung, and an estimate of what the pauses have saved.
    """
    if as_csv and as_json:
        raise UsageError("--csv and --json are two forms of the same", hint="give one")
    if job is not None and any(option is not None for option in (month, since, by)):
        raise UsageError("a job is shown whole", hint="leave out --month, --since and --by, or the job")
    span_s = period.span_of(month, since)
    period.require_by(by)
    if job is not None:
        _one(Registry(), job, as_csv=as_csv, as_json=as_json)
    else:
        _many(Registry(), *span_s, by, as_csv=as_csv, as_json=as_json)


def _one(registry: Registry, key: str, *, as_csv: bool, as_json: bool) -> None:
    """Print the bill of a single job."""
    from ..sweeps import costs

    job = refresh(registry, registry.find(key))
    view = read_view(registry, job)
    found = bill.bill(view.money, view.runs, view.now_s)
    trials = costs.costs_of(registry.database, view) if job.config.get("sweep") else None
    if as_json:
        print_json(costs.bill_json(registry.database, view))
    elif as_csv:
        cells = bill.leg_cells(found.lines) if trials is None else costs.cells(trials, is_whole=True)
        print_lines([csv_text(*cells)])
    else:
        # On a narrow terminal the less important columns are left out.
        columns, drop = width(), ("COUNTED BY", "TO", "USD/H", "NODES", "FROM (UTC)")
        room = None if columns is None else columns - len("  ")
        rows = bill.leg_rows(found.lines)
        legs = table(bill.LEG_HEAD, rows, drop=drop, columns=room) if rows else ["nothing was ever sent"]
        searched = try_lines(view, columns)
        print_text([f"{job.id}  {outcome(job)}", *(f"  {line}" for line in legs), *searched, *bill.bill_lines(found)])
        if trials is not None:
            shown, notes = costs.lines(trials)
            print_lines(table(*costs.cells(trials, is_whole=False), columns=columns))
            print_text(shown)
            say_each(notes)


def _many(registry: Registry, from_s: float, to_s: float, by: str | None, *, as_csv: bool, as_json: bool) -> None:
    """Print the cost of the jobs between two times, in groups if `by` is given."""
    say_each(refresh_active(registry))
    labels = bool(as_csv or as_json or (by and by not in ("backend", "name")))
    spent = period.spent_between(registry.database, from_s, to_s, time.time(), labels=labels)
    groups = None if by is None else period.grouped(spent, by)
    by = by or ""
    if as_json:
        print_json({"from_s": from_s, "to_s": to_s, "by": by or None} | period.as_json(spent, groups))
    elif as_csv:
        cells = bill.spent_cells(spent) if groups is None else bill.group_cells(groups, by)
        print_lines([csv_text(*cells)])
    elif groups is None:
        drop = ("BACKEND", "NODE-HOURS")
        print_lines(table(bill.SPENT_HEAD, bill.spent_rows(spent), drop=drop, columns=width()))
    else:
        head = (by if by.startswith("tag:") else by.upper(), *bill.GROUP_HEAD)
        print_lines(table(head, bill.group_rows(groups, period.total(spent)), columns=width()))
        if by.startswith("tag:") and spent and [each.key for each in groups] == [""]:
            say(f"no job of these has the tag `{by.removeprefix('tag:')}`")

"""`cloudtrain list`: the jobs, the newest first."""

from __future__ import annotations

import gc
import time
from typing import Any

import click

from ..errors import UsageError
from ..job import ACTIVE
from ..jobs import listing
from ..jobs.view import JobView
from ..store.registry import Registry
from ..text.tables import hidden, table, width
from ..text.terminal import json_line, print_lines, say, say_each, when, write
from ..text.units import as_usd
from .options import cli_command, count_option, duration_option, flag, json_option

SHOWN = 20
STATES = ("pending", "running", "stopping", "succeeded", "failed", "stopped")
HEAD = ("JOB", "BACKEND", "RANKS", "STATE", "PROGRESS", "USD", "SUBMITTED")
CUT = {"PROGRESS": 8}
DROPPED = ("USD", "BACKEND", "SUBMITTED", "PROGRESS", "RANKS")  # on a narrow terminal, in this order


@cli_command(
    "list",
    "cloudtrain list --active",
    "cloudtrain list --state failed --since 7d",
    "cloudtrain list --tag team=vision --json",
)
@flag("--active", help="Only jobs that may still be running.")
@flag("--all", "everything", help=f"All jobs, not the newest {SHOWN}; with old unsent ones.")
@count_option("-n", "--limit", help="How many.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(STATES), help="Only jobs in this state; repeatable."
)
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Only jobs of this backend; repeatable.")
@duration_option("--since", help="Only jobs submitted within: `90m`, `7d`.")
@click.option("--project", metavar="NAME", help="Only jobs that count against this project.")
@click.option("--tag", "tags", multiple=True, metavar="KEY[=VALUE]", help="Only jobs with this tag; repeatable.")
@json_option
def command(
    active: bool,
    everything: bool,
    limit: int | None,
    states: tuple[str, ...],
    backends: tuple[str, ...],
    since: int | None,
    project: str | None,
    tags: tuple[str, ...],
    as_json: bool,
) -> None:
    """List jobs, the newest first. Those that may be running are asked for their state, all at once.

    What has not answered after ten seconds is listed as it was last seen.
    """
    if active and states:
        raise UsageError("--active and --state both choose states", hint="give one of them")
    choice = listing.JobFilter(
        states=frozenset(ACTIVE if active else states),
        backends=frozenset(backends),
        project=project,
        tags=tuple(map(_tag, tags)),
        since_s=None if since is None else time.time() - since,
        limit=limit or (None if everything or as_json else SHOWN),
        hides_unsent=not (everything or as_json),
    )
    gc.set_threshold(100_000)  # rows form no cycles, and the search for cycles takes a fifth of the time

    def ask(*of: Any) -> Any:
        from ..jobs.poller import ask

        return ask(*of)

    shown = listing.chosen(registry := Registry(), choice, ask, described=as_json)
    if choice.backends and not shown.lines:
        _see_that_they_exist(registry, choice.backends)
    if as_json:
        _print_json(shown)
    elif shown.lines:
        _print(registry, shown, choice.limit)
    else:
        say(_none(registry, choice, active=active))
    say_each(f"{job_id} is listed as it was last seen: {fault.message}" for job_id, fault in shown.faults.items())


def _print_json(listed: listing.Listing) -> None:
    """Print one JSON object; each job's JSON is text already, of ended jobs as stored."""
    rates = [view.money.burn_micro_h for view in listed.active]
    running = sum(view.state.state != "pending" for view in listed.active)
    burn = None if None in rates else as_usd(sum(rate or 0 for rate in rates))
    silent = {job_id: fault.message for job_id, fault in listed.faults.items()}
    more = json_line({"running": running, "burn_usd_per_hour": burn, "not_answered": silent})
    write(f'{{"jobs": [{", ".join([line.described for line in listed.lines])}], {more[1:]}\n')


def _print(registry: Registry, listed: listing.Listing, limit: int | None) -> None:
    """Print the table; then, on standard error, the cost of the running jobs per hour, and the jobs near a limit."""
    now_s = time.time()
    rows = [
        (each.job_id, each.backend, each.ranks, each.outcome, each.progress, each.money, when(each.created_s, now_s))
        for each in _below_parents(registry, listed.lines)[:limit]
    ]
    lines = table(HEAD, rows, drop=DROPPED, shorten=CUT, columns=width())
    print_lines(lines)
    say_each(hidden(HEAD, lines))
    if listed.active:
        _print_notes(listed.active)


def _below_parents(registry: Registry, lines: list[listing.ListRow]) -> list[listing.ListRow]:
    """Return the lines with each evaluation below its parent, indented, if the parent is listed."""
    seqs = [line.seq for line in lines if "-evaluate-" in line.job_id]
    if not seqs:
        return lines
    from ..jobs.evaluations import parents

    of, listed, found = parents(registry.numbered(seqs)), {line.job_id for line in lines}, list[listing.ListRow]()
    children = [line for line in lines if of.get(line.job_id) in listed]
    for line in lines:
        if line not in children:
            own = [child for child in children if of[child.job_id] == line.job_id]
            found += [line, *(child._replace(job_id=f"  {child.job_id}") for child in own)]
    return found


def _print_notes(views: list[JobView]) -> None:
    from cloudtrain.entrypoints.format import dollars

    if running := sum(view.state.state != "pending" for view in views):
        unknown = sum(view.money.burn_micro_h is None for view in views)
        least = f", and {unknown} without a price" if unknown else ""
        say(f"{running} running, {dollars(sum(view.money.burn_micro_h or 0 for view in views))}/h{least}")
    for view in views:
        job = view.job
        if view.limit_first:
            say(f"{job.id}: {view.limit_first}")
        if job.attempt.unreachable_since_s is not None:
            since = when(job.attempt.unreachable_since_s, view.now_s)
            say(f"{job.id} is listed as it was last seen: {job.backend} does not answer, first {since}")


def _see_that_they_exist(registry: Registry, backends: frozenset[str]) -> None:
    """Raise UsageError for an unknown backend: neither installed nor the backend of any job in the registry."""
    from ..backend_table import names

    known = {*names(), *(job.backend for job in registry.jobs())}
    if unknown := sorted(backends - known):
        raise UsageError(f"--backend {unknown[0]}: there is no such backend", hint=f"one of {', '.join(sorted(known))}")


def _none(registry: Registry, choice: listing.JobFilter, *, active: bool) -> str:
    """Return the reason for an empty list."""
    if active and not (choice.backends or choice.project or choice.tags or choice.since_s):
        return "no jobs are active"
    if choice.is_narrow and registry.jobs(limit=1):
        return "no job is like that: cloudtrain list --all shows every job"
    return "no jobs: cloudtrain submit"


def _tag(text: str) -> tuple[str, str | None]:
    """Return a tag's name and value; the value None matches any value."""
    key, sign, value = text.partition("=")
    if not key:
        raise UsageError(f"--tag {text}: expected KEY or KEY=VALUE")
    return key, value if sign else None

"""`cloudtrain list`: the jobs, the newest first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from cloudtrain.launcher.columns import table, width
from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.options import json_option
from cloudtrain.launcher.terminal import print_json, print_lines, say, when

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Attempt, Job
    from cloudtrain.launcher.registry import Registry

__all__ = ["command"]

SHOWN = 20
HEAD = ("JOB", "BACKEND", "RANKS", "STATE", "PROGRESS", "USD", "SUBMITTED")
CUT = {"STATE": 17, "PROGRESS": 13}
DROPPED = ("RANKS", "BACKEND", "SUBMITTED", "PROGRESS")  # where the terminal is narrow


@click.command("list")
@click.option("--active", is_flag=True, help="Only jobs that may still be running.")
@click.option("--all", "everything", is_flag=True, help=f"All jobs, not the newest {SHOWN}.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="How many.")
@json_option
def command(active: bool, everything: bool, limit: int | None, as_json: bool) -> None:
    """List jobs, the newest first. Those that may be running are asked for their state."""
    from cloudtrain.launcher.describe import as_json as describe
    from cloudtrain.launcher.registry import Registry

    registry = Registry()
    jobs = registry.jobs(active=active, limit=limit or (None if everything or as_json else SHOWN))
    jobs = [_seen(registry, job) for job in jobs]
    if active:
        jobs = [job for job in jobs if job.active]
    if as_json:
        told = [describe(job, _attempts(registry, job)) for job in jobs]
        rates = [each["burn_usd_per_hour"] for each in told if each["exit_code"] is None]
        running = sum(each["state"] in ("running", "stopping") for each in told)
        burn = None if None in rates else round(sum(rates), 6)
        print_json({"jobs": told, "running": running, "burn_usd_per_hour": burn})
        return
    if not jobs:
        say("no jobs" + (" are active" if active else " yet: cloudtrain submit"))
        return
    _print(registry, jobs)


def _print(registry: Registry, jobs: list[Job]) -> None:
    """Print the table; below it, on standard error, what the running ones cost an hour, and whose limit is near."""
    from cloudtrain.entrypoints.figures import amount, dollars
    from cloudtrain.launcher.describe import limit_words, outcome
    from cloudtrain.launcher.money.outlook import outlook
    from cloudtrain.launcher.progress import shown

    now_s, rows, notes = time.time(), [], []
    running, unknown, burn_micro_h = 0, 0, 0
    for job in jobs:
        money = outlook(job, _attempts(registry, job), now_s)
        share = ""
        if money.limit_micro and money.spent_micro is not None:
            share = f" {100 * money.spent_micro // money.limit_micro}%"
        rows.append(
            [
                job.id,
                job.backend,
                f"{job.attempt.plan['instances']} x {job.attempt.plan['nproc_per_node']}",
                outcome(job),
                shown(job.attempt.progress) or "-",
                "?" if money.spent_micro is None else amount(money.spent_micro) + share,
                when(job.created_s),
            ]
        )
        if job.active:
            running += job.attempt.state.state != "pending"
            unknown += money.burn_micro_h is None
            burn_micro_h += money.burn_micro_h or 0
        if job.active and money.hits_limit:
            notes.append(f"{job.id}: {limit_words(job, money)}")
    print_lines(table(HEAD, rows, drop=DROPPED, shorten=CUT, columns=width()))
    if running:
        least = f", and {unknown} without a price" if unknown else ""
        say(f"{running} running, {dollars(burn_micro_h)}/h{least}")
    for note in notes:
        say(note)


def _seen(registry: Registry, job: Job) -> Job:
    """Return the job as it is now, or as it was last seen where it cannot be asked; the others are listed as well."""
    from cloudtrain.launcher.refresh import refresh

    try:
        return refresh(registry, job)
    except CloudtrainError as error:
        say(f"{job.id} is listed as it was last seen: {error.message}")
        return job


def _attempts(registry: Registry, job: Job) -> list[Attempt]:
    """Return all attempts; of most jobs that is the one which is known already."""
    return [job.attempt] if job.attempt.number == 1 else registry.attempts(job)

"""`cloudtrain list`: the jobs, the newest first."""

from __future__ import annotations

import click

from cloudtrain.launcher.options import json_option
from cloudtrain.launcher.terminal import print_json, print_lines, say, table, when

__all__ = ["command"]

SHOWN = 20


@click.command("list")
@click.option("--active", is_flag=True, help="Only jobs that may still be running.")
@click.option("--all", "everything", is_flag=True, help=f"All jobs, not the newest {SHOWN}.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="How many.")
@json_option
def command(active: bool, everything: bool, limit: int | None, as_json: bool) -> None:
    """List jobs, the newest first. Those that may be running are asked for their state."""
    from cloudtrain.launcher.describe import as_json as describe
    from cloudtrain.launcher.describe import outcome
    from cloudtrain.launcher.progress import shown
    from cloudtrain.launcher.refresh import refresh
    from cloudtrain.launcher.registry import Registry

    registry = Registry()
    jobs = registry.jobs(active=active, limit=limit or (None if everything or as_json else SHOWN))
    jobs = [refresh(registry, job) if job.active else job for job in jobs]
    if active:
        jobs = [job for job in jobs if job.active]
    if as_json:
        print_json({"jobs": [describe(job, registry.spent_usd(job)) for job in jobs]})
        return
    if not jobs:
        say("no jobs" + (" are active" if active else " yet: cloudtrain submit"))
        return
    rows = [
        [
            job.id,
            job.backend,
            f"{job.attempt.plan['instances']} x {job.attempt.plan['nproc_per_node']}",
            outcome(job),
            shown(job.attempt.progress) or "-",
            "?" if (spend := registry.spent_usd(job)) is None else f"{spend:.2f}",
            when(job.created_s),
        ]
        for job in jobs
    ]
    print_lines(table(["JOB", "BACKEND", "RANKS", "STATE", "PROGRESS", "USD", "SUBMITTED"], rows))

"""`cloudtrain prune`: remove old ended jobs."""

from __future__ import annotations

import time

import click

from cloudtrain.launcher.commands.options import examples, json_option, yes_option
from cloudtrain.launcher.errors import UsageError

__all__ = ["command"]


@click.command("prune", epilog=examples("cloudtrain prune --older 30d"))
@click.option("--older", metavar="DURATION", help="Remove jobs that ended longer ago: `30d`.  [required]")
@yes_option
@json_option
def command(older: str | None, yes: bool, as_json: bool) -> int:
    """Remove all jobs that ended before the time of --older, like `rm`. Only `rm` removes damaged jobs."""
    from cloudtrain.launcher.commands.rm import removed
    from cloudtrain.launcher.store.registry import Registry
    from cloudtrain.launcher.text.units import parse_duration

    if older is None:
        raise UsageError("--older is missing: the age of the jobs to remove", hint="cloudtrain prune --older 30d")
    try:
        before_s = time.time() - parse_duration(older)
    except ValueError as error:
        raise UsageError(f"--older {older}: expected {error}") from error
    registry = Registry()
    ended = [job for job in registry.jobs() if not job.active and job.attempt.phase != "damaged"]
    found = [job for job in ended if (job.attempt.state.ended_s or job.attempt.created_s) < before_s]
    return removed(registry, found, yes=yes, as_json=as_json)

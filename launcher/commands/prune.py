"""`cloudtrain prune`: remove old ended jobs."""

from __future__ import annotations

import time

import click

from ..errors import UsageError
from ..store.registry import Registry
from .options import duration_s, examples, json_option, yes_option
from .rm import removed


@click.command("prune", epilog=examples("cloudtrain prune --older 30d"))
@click.option("--older", metavar="DURATION", help="Remove jobs that ended longer ago: `30d`.  [required]")
@yes_option
@json_option
def command(older: str | None, yes: bool, as_json: bool) -> int:
    """Remove all jobs that ended before the time of --older, like `rm`. Only `rm` removes damaged jobs."""
    if older is None:
        raise UsageError("--older is missing: the age of the jobs to remove", hint="cloudtrain prune --older 30d")
    before_s = time.time() - duration_s("--older", older)
    registry = Registry()
    ended = [job for job in registry.jobs() if not job.active and job.attempt.phase != "damaged"]
    found = [job for job in ended if (job.attempt.state.ended_s or job.attempt.created_s) < before_s]
    return removed(registry, found, yes=yes, as_json=as_json)

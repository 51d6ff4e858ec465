"""`cloudtrain prune`: remove old ended jobs."""

from __future__ import annotations

import time

from cloudtrain.entrypoints.format import counted

from ..errors import UsageError
from ..store.registry import Registry
from ..text.terminal import confirm, say_each
from .options import cli_command, duration_option, everywhere_option, json_option, yes_option
from .rm import removed


@cli_command("prune", "cloudtrain prune --older 30d")
@duration_option("--older", help="Remove jobs that ended longer ago: `30d`.  [required]")
@everywhere_option
@yes_option
@json_option
def command(older: int | None, everywhere: bool, yes: bool, as_json: bool) -> int:
    """Remove all jobs that ended before the time of --older, like `rm`. Only `rm` removes damaged jobs.

    It asks first about jobs that `resume` could go on with; without consent these jobs stay.
    """
    if older is None:
        raise UsageError("--older is missing: the age of the jobs to remove", hint="cloudtrain prune --older 30d")
    from ..jobs.view import outcome

    before_s = time.time() - older
    registry = Registry()
    ended = [job for job in registry.jobs() if not job.active and job.attempt.phase != "damaged"]
    found = [job for job in ended if (job.attempt.state.ended_s or job.attempt.created_s) < before_s]
    if resumable := [job for job in found if job.attempt.state.resumable]:
        say_each(f"{job.id}  {outcome(job)}" for job in resumable)
        if not confirm(f"Remove {counted(len(resumable), 'job')} that `resume` could go on with?", yes=yes):
            found = [job for job in found if job not in resumable]
    return removed(registry, found, everywhere=everywhere, yes=yes, as_json=as_json)

"""`cloudtrain resume`: a new attempt of a job, from its newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain.launcher.approval import approved
from cloudtrain.launcher.errors import ConfigError, UsageError
from cloudtrain.launcher.job import Job
from cloudtrain.launcher.options import job_argument, json_option, yes_option
from cloudtrain.launcher.terminal import print_json, say

__all__ = ["command"]


@click.command("resume")
@job_argument
@click.option("--instances", type=click.IntRange(min=1), help="Go on with another number of instances.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key; the value is YAML.")
@click.option("--update-code", is_flag=True, help="Take the code folder as it is now, not as it was submitted.")
@click.option("-d", "--detach", is_flag=True, help="Return once the job is sent; else follow it.")
@yes_option
@json_option
def command(
    job: str,
    instances: int | None,
    settings: tuple[str, ...],
    update_code: bool,
    detach: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Go on from a job's newest checkpoint, with the code and the config as they were submitted."""
    from cloudtrain.launcher import submit
    from cloudtrain.launcher.follow import follow, view_of
    from cloudtrain.launcher.logs import View
    from cloudtrain.launcher.refresh import refresh
    from cloudtrain.launcher.registry import Registry
    from cloudtrain.launcher.retry import prepare_next

    registry = Registry()
    found = refresh(registry, registry.find(job))
    _require_ended(found)
    if registry.never_ran(found):
        raise UsageError(f"{found.id} was never sent", hint="submit it again")
    typed = [f"resources.instances={instances}"] if instances is not None else []
    if not found.attempt.state.resumable:
        say("nothing was saved to go on from: it starts from step 0")
    prepared = prepare_next(registry, found, [*settings, *typed], update_code=update_code)
    if not approved(prepared, yes=yes, more=True):
        return 1
    found = submit.resend(registry, found, prepared)
    say(f"sent: {found.id}, attempt {found.attempt.number}")
    if as_json:
        print_json({"job": found.id, "backend": found.backend, "attempt": found.attempt.number})
    return 0 if detach else follow(registry, found, view_of(found, View(as_json=as_json)))


def _require_ended(job: Job) -> None:
    if job.active:
        raise UsageError(f"{job.id} has not ended", hint=f"cloudtrain logs -f {job.id}")
    if job.attempt.state.state == "succeeded":
        raise UsageError(f"{job.id} is done", hint="submit a new job, with more steps")
    if not Path(job.config_file).parent.is_dir():
        raise ConfigError("the job's folder is gone", where=Path(job.config_file).parent, hint="submit it anew")

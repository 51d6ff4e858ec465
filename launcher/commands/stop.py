"""`cloudtrain stop`: save, then stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cloudtrain.launcher.commands.options import job_argument, json_option, yes_option
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.text.terminal import confirm, say, when

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Job
    from cloudtrain.launcher.store.registry import Registry

__all__ = ["command"]

PATIENCE_S = 5.0  # before an explanation of the wait


@click.command("stop")
@job_argument
@click.option("--now", is_flag=True, help="Kill at once, without saving; goes on from the last checkpoint.")
@click.option("-d", "--detach", is_flag=True, help="Ask, and return; else wait until it has stopped.")
@click.option("--forget", is_flag=True, help="Give up a job whose backend does not answer, and free its money.")
@yes_option
@json_option
def command(job: str, now: bool, detach: bool, forget: bool, yes: bool, as_json: bool) -> int:
    """Have a job save and stop, wait until it has, and show it as `status` does. `resume` goes on from there.

    A script gets SIGTERM, and saves by itself or with `on_stop: save`. Without JOB, and for `last`, the command asks
    before it stops the newest job.
    """
    from cloudtrain.launcher.commands.status import show
    from cloudtrain.launcher.jobs import stopping
    from cloudtrain.launcher.jobs.refresh import refresh
    from cloudtrain.launcher.store.registry import Registry

    source = click.get_current_context().get_parameter_source("job")
    is_newest = source is click.core.ParameterSource.DEFAULT or job in ("last", "-")  # the user has named no job

    def agrees(wish: stopping.StopResult) -> bool:
        if wish.note:
            say(wish.note)
        job_words = f"{wish.job.id} ({wish.job.name}, submitted {when(wish.job.created_s)})"
        return confirm(f"Stop {job_words} {wish.how}?", yes=yes or (not now and not is_newest))

    def gives_up(wish: stopping.StopResult) -> bool:
        say(f"{wish.words}; if it does, it runs on and is billed. To look there:")
        say(f"  {stopping.where_to_look(wish.job)}")
        return confirm(f"Forget {wish.job.id}?", yes=yes)

    registry = Registry()
    asked = stopping.forget(registry, job, gives_up) if forget else stopping.ask(registry, job, now=now, agrees=agrees)
    if asked.verdict == "doubtful":
        hint = f"try again later, or look: {stopping.where_to_look(asked.job)}; cloudtrain stop --forget {asked.job.id}"
        raise UnreachableError(asked.words, hint=f"{hint} gives it up and frees its money")
    say(asked.words if asked.verdict != "asked" else f"stopping {asked.job.id} {asked.how}")
    if asked.verdict in ("unsent", "kept"):
        return 1
    if asked.verdict == "ended" and not as_json:
        return 0
    if asked.verdict == "asked" and not detach and not _see_it_stop(registry, asked.job):
        return 130
    show(registry, refresh(registry, registry.find(asked.job.id)), as_json=as_json)
    return 0


def _see_it_stop(registry: Registry, job: Job) -> bool:
    """Wait for the end of the job, and explain a long wait; return False if the user presses Ctrl-C."""
    from cloudtrain.launcher import backend as backends
    from cloudtrain.launcher.jobs.follow import wait

    try:
        if wait(registry, [job], PATIENCE_S, lambda _: None, quiet=True, retrying=False) == 124:
            does = "is saving, or does not listen" if job.saves else "has not left yet"
            say(f"it {does}; after two minutes it is killed")
            if job.attempt.ref and backends.load(job.backend).pace(job.attempt.ref).can_kill:
                say(f"  kill it now   cloudtrain stop --now {job.id}")
            wait(registry, [job], None, lambda _: None, retrying=False)
    except KeyboardInterrupt:
        say("no longer waiting; the stop goes on")
        return False
    return True

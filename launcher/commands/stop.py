"""`cloudtrain stop`: save, then stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..errors import CloudtrainError, UnreachableError
from ..job import Job
from ..store.registry import Registry
from ..text.terminal import confirm, say, say_each, when
from .options import completes, flag, json_option, yes_option

if TYPE_CHECKING:
    from ..jobs.stopping import StopResult

PATIENCE_S = 5.0  # before an explanation of the wait


@click.command("stop")
@click.argument("jobs", nargs=-1, metavar="[JOB...]", shell_complete=completes("jobs"))
@flag("--now", help="Kill at once, without saving; goes on from the last checkpoint.")
@flag("-d", "--detach", help="Ask, and return; else wait until it has stopped.")
@flag("--forget", help="Give up a job whose backend does not answer, and free its money.")
@yes_option
@json_option
def command(jobs: tuple[str, ...], now: bool, detach: bool, forget: bool, yes: bool, as_json: bool) -> int:
    """Have jobs save and stop, wait until they have, and show them as `status` does. `resume` goes on from there.

    A script gets SIGTERM, and saves by itself or with `on_stop: save`. Without JOB, and for `last`, the command asks
    before it stops the newest job. An unknown JOB stops no job; after another error the other jobs are still stopped.
    """
    from ..jobs.refresh import refresh
    from .status import show

    registry, names = Registry(), jobs or ("last",)
    found = dict.fromkeys(registry.find(name, sole=lambda job: job.active).id for name in names)
    is_sure = yes or (not now and {"last", "-"}.isdisjoint(names))  # the user has named the jobs
    asked: list[StopResult] = []
    errors: list[CloudtrainError] = []
    for job_id in found:
        try:
            asked.append(_ask(registry, job_id, now=now, forget=forget, yes=yes, is_sure=is_sure))
        except CloudtrainError as error:
            errors.append(error)
    stopping = {each.job.id: each.job for each in asked if each.verdict == "asked"}
    if stopping and not detach and not _see_them_stop(registry, stopping):
        return 130
    for each in asked:
        if each.verdict in ("asked", "forgotten") or (each.verdict == "ended" and as_json):
            show(registry, refresh(registry, registry.find(each.job.id)), as_json=as_json)
    say_each(f"error: {other}" for other in errors[1:])
    if errors:
        raise errors[0]
    return 1 if any(each.verdict in ("unsent", "kept") for each in asked) else 0


def _ask(registry: Registry, job_id: str, *, now: bool, forget: bool, yes: bool, is_sure: bool) -> StopResult:
    """Ask a job to stop, or forget it, and print the result; `is_sure`: without a question. Raises CloudtrainError."""
    from ..jobs import stopping

    def agrees(wish: StopResult) -> bool:
        if wish.note:
            say(wish.note)
        job_words = f"{wish.job.id} ({wish.job.name}, submitted {when(wish.job.created_s)})"
        return confirm(f"Stop {job_words} {wish.how}?", yes=is_sure)

    def gives_up(wish: StopResult) -> bool:
        say(f"{wish.words}; if it does, it runs on and is billed. To look there:")
        say(f"  {stopping.where_to_look(wish.job)}")
        return confirm(f"Forget {wish.job.id}?", yes=yes)

    if forget:
        asked = stopping.forget(registry, job_id, gives_up)
    else:
        asked = stopping.ask(registry, job_id, now=now, agrees=agrees)
    if asked.verdict == "doubtful":
        hint = f"try again later, or look: {stopping.where_to_look(asked.job)}; cloudtrain stop --forget {asked.job.id}"
        raise UnreachableError(asked.words, hint=f"{hint} gives it up and frees its money")
    say(asked.words if asked.verdict != "asked" else f"stopping {asked.job.id} {asked.how}")
    return asked


def _see_them_stop(registry: Registry, left: dict[str, Job]) -> bool:
    """Wait for the end of the jobs, and explain a long wait; return False if the user presses Ctrl-C."""
    from ..jobs.follow import wait
    from ..jobs.poller import pace_of

    def report(job: Job) -> None:
        del left[job.id]

    try:
        if wait(registry, list(left.values()), PATIENCE_S, report, quiet=True, retrying=False) == 124:
            for job in left.values():
                does = "is saving, or does not listen" if job.saves else "has not left yet"
                say(f"{job.id} {does}; after two minutes it is killed")
                if pace_of(job).can_kill:
                    say(f"  kill it now   cloudtrain stop --now {job.id}")
            wait(registry, list(left.values()), None, report, retrying=False)
    except KeyboardInterrupt:
        say("no longer waiting; the stop goes on")
        return False
    return True

"""`cloudtrain wait`: wait for the end of jobs, or of a sweep."""

from __future__ import annotations

import time

import click

from ..text.tables import labelled
from ..text.terminal import print_json, say
from .options import completes, duration_s, json_option

TIMED_OUT = 124


@click.command("wait")
@click.argument("jobs", nargs=-1, metavar="[JOB...]", shell_complete=completes("jobs"))
@click.option("--timeout", metavar="DURATION", help="Give up after this long, with exit code 124: `10m`.")
@json_option
def command(jobs: tuple[str, ...], timeout: str | None, as_json: bool) -> int:
    """Wait for jobs to end, the newest without JOB, and report each.

    The exit code is the job's; of several, the first that is not 0.
    With --json each job that has ended is one object on a line of its own, as `status --json` prints it.
    For a sweep, the command drives the sweep meanwhile; the exit code is 0 if a trial has finished.
    """
    from ..job import Job
    from ..jobs.follow import wait
    from ..jobs.view import failure_lines, outcome, read_view
    from ..store.progress import shown
    from ..store.registry import Registry
    from .status import drive, show_sweep, sweep_of

    timeout_s = None if timeout is None else duration_s("--timeout", timeout)
    registry = Registry()
    if sweep := sweep_of(registry, jobs, of_jobs=True):
        code = drive(registry, sweep, until_s=None if timeout_s is None else time.time() + timeout_s)
        if as_json and code != TIMED_OUT:
            show_sweep(registry, sweep, as_json=True)
        return code
    found = {job.id: job for job in map(registry.find, jobs or ("last",))}

    def report(job: Job) -> None:
        view = read_view(registry, job)
        if as_json:
            print_json(view.as_json())
            return
        how_far = shown(view.progress)
        say(f"{job.id}  {outcome(job)}{f', {how_far}' if how_far else ''}")
        if error := job.attempt.state.error:
            for line in labelled([("error", failure_lines(error)[0]), ("next", f"cloudtrain status {job.id}")]):
                say(line)

    try:
        return wait(registry, list(found.values()), timeout_s, report)
    except KeyboardInterrupt:
        say("no longer waiting; the jobs continue")
        return 130

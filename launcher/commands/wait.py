"""`cloudtrain wait`: wait for the end of jobs."""

from __future__ import annotations

import click

from ..text.tables import labelled
from ..text.terminal import print_json, say, say_each
from .options import completes, duration_option, json_option


@click.command("wait")
@click.argument("jobs", nargs=-1, metavar="[JOB...]", shell_complete=completes("jobs"))
@duration_option("--timeout", "timeout_s", help="Give up after this long, with exit code 124: `10m`.")
@json_option
def command(jobs: tuple[str, ...], timeout_s: int | None, as_json: bool) -> int:
    """Wait for jobs to end, the newest without JOB, and report each.

    The exit code is the job's; of several, the first that is not 0.
    With --json each job that has ended is one object on a line of its own, as `status --json` prints it.
    """
    from ..job import Job
    from ..jobs.follow import wait
    from ..jobs.view import failure_lines, outcome, read_view
    from ..store.progress import shown
    from ..store.registry import Registry
    from ..sweeps import overview

    registry = Registry()
    found = {job.id: job for job in map(registry.find, jobs or ("last",))}

    def report(job: Job) -> None:
        view = read_view(registry, job)
        if as_json:
            print_json(overview.whole_json(registry, view))
            return
        how_far = shown(view.progress)
        say(f"{job.id}  {outcome(job)}{f', {how_far}' if how_far else ''}")
        if error := job.attempt.state.error:
            say_each(labelled([("error", failure_lines(error)[0]), ("next", f"cloudtrain status {job.id}")]))

    try:
        return wait(registry, list(found.values()), timeout_s, report)
    except KeyboardInterrupt:
        say("no longer waiting; the jobs continue")
        return 130

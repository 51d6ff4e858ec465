"""`cloudtrain status`: a screen about each job."""

from __future__ import annotations

import click

from ..errors import CloudtrainError, UnreachableError
from ..job import Job
from ..store.registry import Registry
from ..text.tables import size
from ..text.terminal import print_json, print_lines, say
from .options import cli_command, completes, json_option

PATIENCE_S = 60.0  # longer than in `list`: after the end of a job a cloud may need half a minute to answer


@cli_command("status", "cloudtrain status last", "cloudtrain status digits --json")
@click.argument("jobs", nargs=-1, metavar="[JOB...]", shell_complete=completes("jobs"))
@json_option
def command(jobs: tuple[str, ...], as_json: bool) -> None:
    """Show how a job is: state, progress, spend, the first failing rank's exception, what to do next.

    A backend that has not answered after a minute is not waited for: the job is shown as it was last seen.
    Without JOB it is the last one. `cloudtrain watch JOB` shows it again and again.
    """
    registry, faults = Registry(), dict[str, CloudtrainError]()
    found = list({job.id: job for job in map(registry.find, jobs or ("last",))}.values())
    if any(job.active for job in found):
        from ..jobs.poller import ask

        answers = ask(registry, found, PATIENCE_S)
        found, faults = answers.jobs, answers.faults
    for place, job in enumerate(found):
        fault = faults.get(job.id)
        if fault is not None and not isinstance(fault, UnreachableError):
            raise fault
        if place and not as_json:
            print_lines([""])
        show(registry, job, as_json=as_json)
        if fault is not None:
            say(f"{job.id} is shown as it was last seen: {fault.message}")


def show(registry: Registry, job: Job, *, as_json: bool) -> None:
    """Print a screen about the job, or the job's JSON."""
    from ..jobs.evaluations import failure, headline, tests_of
    from ..jobs.overview import as_lines
    from ..jobs.view import lacking_budgets, lines_before, read_view
    from ..sweeps import overview

    view = read_view(registry, job)
    if as_json:
        print_json(overview.whole_json(registry, view))
    else:
        lacking = lacking_budgets(registry.database, view)
        tests = [*headline(tests_of(registry, job)), *failure(job.attempt)]
        trials = overview.trial_lines(registry.database, job)
        print_lines(as_lines(view, lines_before(registry, job), size(), lacking, tests, trials))

"""`cloudtrain status`: a screen about each job."""

from __future__ import annotations

import click

from ..errors import CloudtrainError, UnreachableError
from ..job import Job
from ..store import sweeps
from ..store.registry import Registry
from ..store.sweeps import SweepRecord
from ..text.tables import size
from ..text.terminal import print_json, print_lines, say
from .options import completes, examples, json_option

PATIENCE_S = 60.0  # longer than in `list`: after the end of a job a cloud may need half a minute to answer


@click.command("status", epilog=examples("cloudtrain status last", "cloudtrain status digits --json"))
@click.argument("jobs", nargs=-1, metavar="[JOB...]", shell_complete=completes("jobs"))
@json_option
def command(jobs: tuple[str, ...], as_json: bool) -> None:
    """Show how a job is: state, progress, spend, the first failing rank's exception, what to do next.

    A backend that has not answered after a minute is not waited for: the job is shown as it was last seen.
    Without JOB it is the last one. `cloudtrain watch JOB` shows it again and again.
    """
    registry, faults = Registry(), dict[str, CloudtrainError]()
    if sweep := sweep_of(registry, jobs or ("last",)):
        show_sweep(registry, sweep, as_json=as_json)
        return
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


def sweep_of(registry: Registry, names: tuple[str, ...], *, of_jobs: bool = False) -> SweepRecord | None:
    """Return the sweep if the only name is a sweep's id or name, else None; `last` is the sweep of the newest job.

    `of_jobs`: only a sweep whose trials are jobs; for most commands, a packed sweep is a job like others.
    """
    from ..planning.search_spec import is_packed

    if len(names) != 1:
        return None
    known = sweeps.sweeps(registry.database, sweep_id=names[0]) or _named(registry, names[0])
    return known[0] if known and not (of_jobs and is_packed(known[0].config)) else None


def _named(registry: Registry, name: str) -> list[SweepRecord]:
    """Return the sweep by its name, by the beginning of its id, or for `last`; empty for the name of a single trial."""
    try:
        job = registry.find(name)
    except CloudtrainError:  # the beginning of the id of many trials
        found = [each for each in sweeps.sweeps(registry.database) if name and each.id.startswith(name)]
        return found if len(found) == 1 else []
    found = sweeps.of_job(registry.database, job.id)
    is_trial = bool(found) and job.id != found[0].id and (name == job.id or name.startswith(found[0].id))
    return [] if is_trial else found


def show_sweep(registry: Registry, sweep: SweepRecord, *, as_json: bool) -> None:
    """Drive the sweep once, and print its screen or its JSON."""
    from ..sweeps import overview

    if sweep.state != "ended":
        from ..sweeps.driving import advance

        for line in advance(registry, sweep):
            say(line)
        sweep = sweeps.find(registry.database, sweep.id)
    if as_json:
        print_json(overview.as_json(registry.database, sweep))
    else:
        print_lines(overview.as_lines(registry.database, sweep, overview.cause_of(registry, sweep)))


def drive(registry: Registry, sweep: SweepRecord, *, once: bool = False, until_s: float | None = None) -> int:
    """Drive the sweep to its end, and print each change; return the exit code. Ctrl-C leaves the running trials."""
    from ..sweeps import driving

    try:
        return driving.follow(registry, sweep, say, once=once, until_s=until_s)
    except KeyboardInterrupt:
        hint = f"cloudtrain advance {sweep.id} goes on, cloudtrain stop {sweep.id} stops"
        raise KeyboardInterrupt(f"the running trials of {sweep.id} go on: {hint}") from None


def show(registry: Registry, job: Job, *, as_json: bool) -> None:
    """Print a screen about the job, or the job's JSON."""
    from ..jobs.evaluations import failure, headline, tests_of
    from ..jobs.overview import as_lines
    from ..jobs.view import lacking_budgets, lines_before, read_view

    view = read_view(registry, job)
    if as_json:
        print_json(view.as_json())
    else:
        lacking = lacking_budgets(registry.database, view)
        tests = [*headline(tests_of(registry, job)), *failure(job.attempt)]
        print_lines(as_lines(view, lines_before(registry, job), size(), lacking, tests))

"""`cloudtrain rm`: remove jobs that have ended."""

from __future__ import annotations

import click

from cloudtrain.entrypoints.format import counted

from ..errors import NoSuchJobError
from ..job import Job
from ..store.registry import Registry
from ..text.terminal import confirm, print_json, say, say_each
from ..text.units import size
from .options import completes, examples, json_option, yes_option


@click.command("rm", epilog=examples("cloudtrain rm digits-x4k2p", "cloudtrain rm -y one two"))
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=completes("jobs"))
@yes_option
@json_option
def command(jobs: tuple[str, ...], yes: bool, as_json: bool) -> int:
    """Remove ended jobs: rows of the registry, folders on this machine with checkpoints, cached logs, unused code.

    Code that no job uses is removed once an hour has passed since the last submit. Files in the cloud and on other
    machines stay. `budget show` and `cost` still count the cost. No new job gets the name of a removed job that has
    run. JOB is an id if several jobs have the name.
    """
    from ..jobs.refresh import refresh

    registry = Registry()
    found: dict[str, Job] = {}
    for name in jobs:
        try:
            job = refresh(registry, registry.find(name, sole=lambda _: True))
        except NoSuchJobError:
            if not registry.booked(name):
                raise
            say(f"{name} was removed before")  # by the same command, which was killed
        else:
            found[job.id] = job
    return removed(registry, list(found.values()), yes=yes, as_json=as_json)


def removed(registry: Registry, jobs: list[Job], *, yes: bool, as_json: bool) -> int:
    """Ask, remove the jobs and print the freed bytes; return the exit code. Raises UsageError for an active job."""
    from ..jobs import remove

    remove.require_over(jobs)
    sizes = {job.id: remove.size_of(registry, job) for job in jobs}
    say_each(f"{job.id}  {size(sizes[job.id])}" for job in jobs)
    freed = sum(sizes.values()) + (code := sum(remove.unused_bundles(registry, jobs).values()))
    if code:
        say(f"code that no other job uses  {size(code)}")
    total = f"{counted(len(jobs), 'job')}, {size(freed)}"
    if jobs and not confirm(f"Remove {total}?", yes=yes):
        return 1
    for job in jobs:
        remove.remove(registry, job)
    for path in remove.unused_bundles(registry, []):  # again: a submit may have packed the same code meanwhile
        path.unlink(missing_ok=True)
    say(f"removed {total}")
    if as_json:
        print_json({"removed": list(sizes), "freed_bytes": freed})
    return 0

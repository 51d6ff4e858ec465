"""`cloudtrain rm`: remove jobs that have ended."""

from __future__ import annotations

from dataclasses import asdict

import click

from cloudtrain.entrypoints.format import counted

from ..backend import LeftFiles
from ..errors import NoSuchJobError
from ..job import Job
from ..store.registry import Registry
from ..text.terminal import confirm, print_json, say, say_each
from ..text.units import size
from .options import cli_command, completes, everywhere_option, json_option, yes_option


@cli_command("rm", "cloudtrain rm digits-x4k2p", "cloudtrain rm -y one two")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=completes("jobs"))
@everywhere_option
@yes_option
@json_option
def command(jobs: tuple[str, ...], everywhere: bool, yes: bool, as_json: bool) -> int:
    """Remove ended jobs: rows of the registry, folders on this machine with checkpoints, cached logs, unused code.

    Code that no job uses is removed once an hour has passed since the last submit. Files in the cloud and on other
    machines are named, and stay without --everywhere. `budget show` and `cost` still count the cost. No new job gets
    the name of a removed job that has run. JOB is an id if several jobs have the name.
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
    return removed(registry, list(found.values()), everywhere=everywhere, yes=yes, as_json=as_json)


def removed(registry: Registry, jobs: list[Job], *, everywhere: bool, yes: bool, as_json: bool) -> int:
    """Ask, remove the jobs and print the freed bytes; return the exit code. Raises UsageError for an active job.

    With `everywhere`, a job with a folder that could not be removed stays in the list, which knows the place.
    """
    from ..jobs import remove

    remove.require_over(jobs)
    sizes = {job.id: remove.size_of(registry, job) for job in jobs}
    say_each(f"{job.id}  {size(sizes[job.id])}" for job in jobs)
    freed = sum(sizes.values()) + (code := sum(remove.unused_bundles(registry, jobs).values()))
    if code:
        say(f"code that no other job uses  {size(code)}")
    total = f"{counted(len(jobs), 'job')}, {size(freed)}"
    there = remove.elsewhere(registry, jobs)
    does = "is removed, too" if everywhere else "stays: --everywhere removes it, too"
    say_each(f"{each.place}  {shown(each)}  {does}" for each in there)
    beside = f", and {counted(len(there), 'folder')} elsewhere" if everywhere and there else ""
    if jobs and not confirm(f"Remove {total}{beside}?", yes=yes):
        return 1
    gone = remove.elsewhere(registry, jobs, remove=True) if beside else []
    stuck = [each for each in gone if each.kept]
    say_each(f"{each.job} stays in the list: {each.place} is not removed: {each.kept}" for each in stuck)
    jobs = [job for job in jobs if job.id not in {each.job for each in stuck}]
    total = f"{counted(len(jobs), 'job')}, {size(sum(sizes[job.id] for job in jobs) + code)}" if stuck else total
    for job in jobs:
        remove.remove(registry, job)
    for path in remove.unused_bundles(registry, []):  # again: a submit may have packed the same code meanwhile
        path.unlink(missing_ok=True)
    freed_there = sum(each.bytes or 0 for each in gone if not each.kept)
    say(f"removed {total}{f', and {size(freed_there)} elsewhere' if gone else ''}")
    if as_json:
        freed = sum(sizes[job.id] for job in jobs) + code
        elsewhere = [asdict(each) for each in (stuck if everywhere else there)]
        removed = {"removed": [job.id for job in jobs], "freed_bytes": freed, "freed_elsewhere_bytes": freed_there}
        print_json({**removed, "elsewhere": elsewhere})
    return 7 if stuck else 0


def shown(each: LeftFiles) -> str:
    """Return the size of a folder elsewhere, or why it is unknown."""
    return size(each.bytes) if each.bytes is not None else f"(size unknown{f': {each.kept}' if each.kept else ''})"

"""`cloudtrain advance`: send what is due, once: the next segments of sweeps, and jobs in line for a cloud."""

from __future__ import annotations

import click

from ..jobs.queue import advance_queue
from ..store import sweeps as rows
from ..store.registry import Registry
from ..sweeps.driving import advance
from ..text.terminal import say
from .options import examples


@click.command("advance", epilog=examples("cloudtrain advance", "cloudtrain advance digits-x7k2p"))
@click.argument("sweeps", nargs=-1, metavar="[SWEEP...]")
def command(sweeps: tuple[str, ...]) -> int:
    """Take the results of ended trials, send the trials that are due, and send queued jobs; then return.

    Without SWEEP, all running sweeps. Any number of calls may run at once: each trial and job is sent once. For cron.
    """
    registry = Registry()
    found = [rows.find(registry.database, each) for each in sweeps] or rows.sweeps(registry.database, active=True)
    for sweep in found:
        for line in advance(registry, sweep):
            say(line)
    if not sweeps:
        for line in advance_queue(registry):
            say(line)
    return 0

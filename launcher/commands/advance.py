"""`cloudtrain advance`: send the jobs in line for a cloud, once."""

from __future__ import annotations

from ..jobs.queue import advance_queue
from ..store.registry import Registry
from ..text.terminal import say_each
from .options import cli_command


@cli_command("advance", "cloudtrain advance")
def command() -> int:
    """Send the queued jobs that now find machines; then return.

    Any number of calls may run at once: each job is sent once. For cron.
    """
    say_each(advance_queue(Registry()))
    return 0

"""Keeping a job's lines here: to its end, and no more of all jobs than there is room for."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from cloudtrain.launcher.errors import UnreachableError, UsageError
from cloudtrain.launcher.job import ACTIVE, Attempt, Job
from cloudtrain.launcher.logs import kept

if TYPE_CHECKING:
    from cloudtrain.launcher.database import Database
    from cloudtrain.launcher.registry import Registry

__all__ = ["ROOM", "keep", "make_room", "room_bytes"]

ROOM, ROOM_GB = "CLOUDTRAIN_KEPT_LOGS_GB", 5.0


def room_bytes() -> int:
    """Return how much all kept logs may take, compressed: $CLOUDTRAIN_KEPT_LOGS_GB, else 5 GB; 0 keeps none.

    Raises UsageError.
    """
    text = os.environ.get(ROOM, "")
    try:
        found = float(text) if text else ROOM_GB
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e6:
        raise UsageError(f"{ROOM}={text} is no number of gigabytes", hint="set it to a number such as 5, or 0 for none")
    return int(found * 1e9)


def keep(registry: Registry, job: Job, attempt: Attempt | None = None, *, within_s: float = 30.0) -> bool:
    """Read the lines of an attempt (the job's last one) that has ended to their end, and keep them.

    Return whether they are all kept: not where time or room ran out, the backend cannot be reached, or another process
    keeps them just now; nor where they had to make room for others. What was read is kept, and the next call goes on
    from there. Raises ConfigError.
    """
    from cloudtrain.launcher.logs.stream import Stream

    chosen, until_s = attempt or job.attempt, time.monotonic() + within_s
    if chosen.ref is None or chosen.state.state in ACTIVE or not room_bytes():
        return False
    found = kept.place(registry.database, job.id, chosen.number)
    if found is not None and found.is_complete:
        return True
    if kept.is_dropped(registry.database, job.id, chosen.number):
        return False
    stream = Stream(registry, job, chosen)
    try:
        stream.skip_kept()
        while not stream.is_over and stream.is_keeping and time.monotonic() < until_s:
            stream.read()
            if not stream.is_behind and not stream.is_over:
                time.sleep(min(stream.pace.lines_s, max(0.0, until_s - time.monotonic())))
    except UnreachableError:
        return False
    finally:
        stream.close()
    found = kept.place(registry.database, job.id, chosen.number)
    return found is not None and found.is_complete


def anew(registry: Registry, job: Job, attempt: Attempt, least: int) -> bool:
    """Read the attempt's lines from their beginning, and put them in the place of what is kept and damaged.

    Return whether that was done: not where the backend has fewer than `least` lines by now, or another process writes.
    """
    from cloudtrain.launcher.logs.stream import Stream

    stream = Stream(registry, job, attempt, anew=True)
    count = 0
    try:
        while not stream.is_over and stream.is_keeping:
            count += len(stream.read())
            if not stream.is_behind:
                break
        is_whole = stream.is_keeping and count >= least
    except UnreachableError:
        is_whole = False
    stream.close(commit=is_whole)
    return is_whole


def make_room(database: Database, room: int) -> bool:
    """Drop the kept logs of ended attempts that were read the longest ago, until all that is kept fits.

    Return whether it does: those that are being written stay, and those of jobs that run.
    """
    total = database.execute("SELECT SUM(bytes) AS bytes FROM kept_logs")[0]["bytes"] or 0
    if total <= room:
        return True
    active = ", ".join(f"'{state}'" for state in ACTIVE)
    for row in database.execute(
        "SELECT k.job_id, k.attempt, k.bytes FROM kept_logs k JOIN attempts a ON a.job_id = k.job_id AND "
        f"a.number = k.attempt WHERE a.state NOT IN ({active}) AND k.bytes > 0 ORDER BY k.used_s"
    ):
        if total <= room:
            break
        if kept.discard(database, row["job_id"], row["attempt"]):
            total -= row["bytes"]
    return bool(total <= room)

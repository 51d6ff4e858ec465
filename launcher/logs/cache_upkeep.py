"""Caching of jobs' logs: completing an ended attempt's log, and dropping old logs for space."""

from __future__ import annotations

import os
import time

from ..errors import UnreachableError, UsageError
from ..job import ACTIVE, Attempt, Job
from ..store.database import Database
from ..store.registry import Registry
from . import cache

ROOM, ROOM_GB = "CLOUDTRAIN_KEPT_LOGS_GB", 5.0


def room_bytes() -> int:
    """Return the maximum size of all cached logs, compressed: $CLOUDTRAIN_KEPT_LOGS_GB, else 5 GB; 0 disables caching.

    Raises UsageError.
    """
    text = os.environ.get(ROOM, "")
    try:
        found = float(text) if text else ROOM_GB
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e6:
        hint = "set it to a number such as 5, or 0 for none"
        raise UsageError(f"{ROOM}={text} is not a number of gigabytes", hint=hint)
    return int(found * 1e9)


def keep(registry: Registry, job: Job, attempt: Attempt | None = None, *, within_s: float = 30.0) -> bool:
    """Read the log of an ended attempt (by default the last) to its end, and cache the lines.

    Return whether the whole log is cached. Returns False if time or space ran out, the backend is unreachable, another
    process writes the cache, or the log was dropped for space. The lines read so far stay, and the next call continues
    after them. Raises ConfigError.
    """
    from .stream import LogStream

    chosen, until_s = attempt or job.attempt, time.monotonic() + within_s
    if chosen.ref is None or chosen.state.state in ACTIVE or not room_bytes():
        return False
    found = cache.place(registry.database, job.id, chosen.number)
    if found is not None and found.is_complete:
        return True
    if cache.is_dropped(registry.database, job.id, chosen.number):
        return False
    stream = LogStream(registry, job, chosen)
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
    found = cache.place(registry.database, job.id, chosen.number)
    return found is not None and found.is_complete


def rewrite(registry: Registry, job: Job, attempt: Attempt, least: int) -> bool:
    """Read the attempt's log from the beginning and replace the damaged cache; return whether the cache was replaced.

    The cache stays if the backend has fewer than `least` lines now, or if another process writes.
    """
    from .stream import LogStream

    stream = LogStream(registry, job, attempt, rewrite=True)
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
    """Drop the least recently read logs of ended attempts until the cache is within `room` bytes.

    Return whether the cache fits; logs that are being written and logs of active jobs stay.
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
        if cache.discard(database, row["job_id"], row["attempt"]):
            total -= row["bytes"]
    return bool(total <= room)

"""Caching of an ended attempt's whole log."""

from __future__ import annotations

import time

from ..errors import UnreachableError
from ..job import ACTIVE, Attempt, Job
from ..store.registry import Registry
from . import cache
from .stream import LogStream


def keep(registry: Registry, job: Job, attempt: Attempt | None = None, *, within_s: float = 30.0) -> bool:
    """Read the log of an ended attempt (by default the last) to its end, and cache the lines.

    Return whether the whole log is cached. Returns False if time or space ran out, the backend is unreachable, another
    process writes the cache, or the log was dropped for space. The lines read so far stay, and the next call continues
    after them. Raises ConfigError.
    """
    chosen, until_s = attempt or job.attempt, time.monotonic() + within_s
    if chosen.ref is None or chosen.state.state in ACTIVE or not cache.room_bytes():
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

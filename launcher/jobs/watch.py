"""The choice of jobs to watch, and a look at a job: a poll by a single watcher at a time, with alerts and retries."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cloudtrain.entrypoints import processes

from ..job import Job
from ..notices import outbox
from ..notices.notifier import RECENT_S, Notifier
from ..store.registry import Registry
from . import retry
from .poller import Begin, Seen, as_fault
from .refresh import refresh
from .view import read_view

RETRY_S = 3600.0  # no retry for a job that ended longer ago
LOCK = "watch.lock"
MOST_JOBS = 500  # the newest; ended jobs among them are polled once


class Selection:
    """The watched jobs: the named jobs, or, without names, the jobs of `chosen`."""

    def __init__(self, registry: Registry, names: Sequence[str]) -> None:
        self._registry, self._names = registry, names
        self._known: object = None

    def news(self, now_s: float) -> list[Job] | None:
        """Return the jobs again after a submit, after a resume, and each minute; else None."""
        counts = self._registry.database.execute("SELECT (SELECT MAX(seq) FROM jobs), (SELECT COUNT(*) FROM attempts)")
        known = (tuple(counts[0]), int(now_s // 60))
        if known == self._known:
            return None
        self._known = known
        return chosen(self._registry, self._names, now_s)


def chosen(registry: Registry, names: Sequence[str], now_s: float) -> list[Job]:
    """Return the named jobs; without names, the jobs that are active, ended recently, or have notifications to send."""
    if names:
        return list({job.id: job for job in map(registry.find, names)}.values())
    waiting = set(outbox.pending(registry.database, now_s - RECENT_S))
    jobs = [*registry.jobs(active=True), *registry.jobs(limit=MOST_JOBS)]
    return [job for job in {job.id: job for job in jobs}.values() if _is_of_late(job, now_s) or job.id in waiting]


def notifying(poll: Callable[[Registry, Notifier, Job], Seen]) -> Begin:
    """Return the function with a notifier for each thread of a poller."""

    @contextmanager
    def begin(registry: Registry, close_s: Callable[[], float]) -> Iterator[Callable[[Job], Seen]]:
        notifier = Notifier(registry)
        try:
            yield lambda job: poll(registry, notifier, job)
        finally:
            notifier.close(close_s())

    return begin


def look(registry: Registry, notifier: Notifier, job: Job) -> Seen:
    """Refresh the job, send due notifications and a due retry, unless a concurrent watcher handles the job.

    An error is returned as `fault`, so that the polls of further jobs continue.
    """
    try:
        with processes.byte_locked(registry.folder / LOCK, zlib.crc32(job.id.encode())) as is_mine:
            return _look(registry, notifier, job) if is_mine else _seen(registry, registry.find(job.id), is_mine=False)
    except Exception as error:
        return Seen(job, fault=as_fault(error))


def _look(registry: Registry, notifier: Notifier, job: Job) -> Seen:
    was_active = job.active
    job = refresh(registry, registry.find(job.id))
    notices, again = notifier.look(job), None
    if not job.active and (was_active or _is_of_late(job, time.time(), RETRY_S)):
        again = retry.send_if_due(registry, job)
    seen = _seen(registry, again or job, notices=tuple(notices), is_again=again is not None, was_active=was_active)
    return seen if job.active else replace(seen, ended=job.attempt)


def _seen(registry: Registry, job: Job, **more: Any) -> Seen:
    return Seen(job, read_view(registry, job), **more)


def _is_of_late(job: Job, now_s: float, within_s: float = RECENT_S) -> bool:
    ended_s = job.attempt.state.ended_s
    return job.active or (ended_s is not None and now_s - ended_s <= within_s)

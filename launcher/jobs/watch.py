"""Watches jobs: their choice, looks by a single watcher at a time with alerts and retries, polls in the background.

The live view and the page use a `Watcher`, which also fetches the logs of ended jobs.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from cloudtrain.entrypoints import processes

from ..errors import PASSING, CloudtrainError
from ..job import ACTIVE, Job
from ..logs import stream
from ..notices import outbox
from ..notices.notifier import RECENT_S, Notifier
from ..store.registry import Registry
from . import queue, retry, stopping
from .poller import Begin, Lanes, Pacing, Poller, Seen, as_fault, refreshing
from .view import read_view

RETRY_S = 3600.0  # no retry for a job that ended longer ago
LOCK = "watch.lock"
MOST_JOBS = 500  # the newest; ended jobs among them are polled once
UNSEEN_S, UNSEEN_ROUND_S = 60.0, 5.0  # while nobody looks: between two polls of a job, and two readings of the registry
ROUND_S = 1.0
BACK_OFF_S = 5.0  # after a registry error


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
            now = registry.find(job.id)
            if not is_mine:
                return Seen(now, read_view(registry, now), is_mine=False)
            number, again, fault = now.attempt.number, None, None
            now = stopping.followed(registry, now)
            try:
                now = queue.drive(registry, now)
            except CloudtrainError as error:  # of a send: the job has ended, or stays in line
                now, fault = registry.find(job.id), error
            notices = tuple(notifier.look(now))
            if not now.active and (job.active or _is_of_late(now, time.time(), RETRY_S)):
                try:
                    again = retry.send_if_due(registry, now)
                except PASSING as error:  # the job is polled again, for RETRY_S
                    fault = error
            last = now.attempt if now.attempt.number == number else registry.attempt(now, number)
            ended, view = None if last.state.state in ACTIVE else last, read_view(registry, again or now)
            return Seen(again or now, view, notices, fault=fault, ended=ended, was_active=job.active)
    except Exception as error:
        return Seen(job, fault=as_fault(error))


def _is_of_late(job: Job, now_s: float, within_s: float = RECENT_S) -> bool:
    ended_s = job.attempt.state.ended_s
    return job.active or (ended_s is not None and now_s - ended_s <= within_s)


class Watcher(threading.Thread):
    """Polls the named jobs, or, without names, the jobs of `chosen`; call `close` at the end.

    In threads, `start` gets each job before its poll, and `show` each result. `step` gets a registry and, if changed,
    the chosen jobs, once a second. `tell` gets the registry's own error, and an empty text once solved. With `is_quiet`
    polls only update the registry. `is_seen` returns whether somebody looks at the result.
    """

    def __init__(
        self,
        folder: Path | None,
        names: Sequence[str],
        show: Callable[[Seen], None],
        tell: Callable[[str], None],
        *,
        start: Callable[[Job], None] = lambda job: None,
        step: Callable[[Registry, list[Job] | None], None] = lambda registry, jobs: None,
        every_s: float = 0.0,
        is_seen: Callable[[], bool] = lambda: True,
        is_quiet: bool = False,
    ) -> None:
        super().__init__(name="watcher", daemon=True)
        self._folder, self._names, self._show, self._tell, self._step = folder, names, show, tell, step
        self._is_seen, self._is_quiet = is_seen, is_quiet
        begin = refreshing if is_quiet else notifying(look)
        pacing = Pacing(every_s=lambda: every_s if is_seen() else UNSEEN_S)
        self.poller = Poller(folder, begin, self._take, pacing, start=start)
        self.logs = LogKeeper(folder)
        self._news = threading.Event()
        self._is_closing = False

    def wake(self) -> None:
        """Poll all jobs soon."""
        self.poller.hurry()
        self._news.set()

    def close(self, wait_s: float) -> None:
        """End the threads, waiting at most `wait_s` for deliveries; a thread that waits for a backend is abandoned."""
        self._is_closing = True
        self._news.set()
        end_s = time.monotonic() + wait_s
        if self.is_alive():  # else never started
            self.join(wait_s)
        self.poller.close(max(0.0, end_s - time.monotonic()))
        self.logs.close(max(0.0, end_s - time.monotonic()))

    def run(self) -> None:
        """Choose the jobs to poll, until `close`."""
        while not self._is_closing:
            try:
                with closing(Registry(self._folder)) as registry:
                    self._choose(registry)
            except Exception as error:  # busy for long, or a full disk
                self._tell(as_fault(error).message)
                self._pause(BACK_OFF_S)

    def _choose(self, registry: Registry) -> None:
        selection = Selection(registry, self._names)
        while not self._is_closing:
            jobs = selection.news(time.time())
            self._step(registry, jobs)
            if jobs is not None:
                self.poller.watch(jobs)
            self._tell("")
            self._pause(ROUND_S if self._is_seen() else UNSEEN_ROUND_S)

    def _pause(self, wait_s: float) -> None:
        self._news.wait(wait_s)
        self._news.clear()

    def _take(self, seen: Seen) -> None:
        self._show(seen)
        if not self._is_quiet:
            self.logs.take(seen)


class LogKeeper:
    """Fetches the logs of ended attempts, a thread for each backend, so that no poll waits. Call `close` at the end."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lanes = Lanes(self._fetch, "logs")

    def take(self, seen: Seen) -> None:
        """Fetch the log of the attempt that has ended, if any."""
        if seen.ended is not None:
            self._lanes.put(seen.job.backend, f"{seen.job.id} {seen.ended.number}", seen)

    def close(self, wait_s: float | None = None) -> None:
        """Wait at most `wait_s` seconds for all fetches; a fetch that has not begun by then is dropped."""
        self._lanes.drain(wait_s)
        self._lanes.close(0.0)

    def _fetch(self, ended: Iterator[Seen]) -> None:
        for seen in ended:
            with suppress(Exception), closing(Registry(self._folder)) as registry:  # the next reader can fetch the log
                attempt = seen.ended
                # The machines of an attempt that ended recently, or the platform, still have the log.
                if attempt is not None and (attempt.state.ended_s or 0.0) >= time.time() - RECENT_S:
                    stream.keep_whole(registry, seen.job, attempt)

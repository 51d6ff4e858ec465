"""Polls backends while the page is up: each backend at its own pace, for all open pages together.

Each backend has a thread, so a slow or unreachable backend delays only its own jobs. A poll does the same as in
`watch`: alerts and `retry` attempts are sent, by a single watcher among all processes. With `is_quiet` a poll only
updates the registry.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.job import Job
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.store.registry import Registry

if TYPE_CHECKING:
    from cloudtrain.launcher.jobs.watch import Seen

__all__ = ["Refresher"]

LEAST_S = 0.5  # minimum seconds between two polls of a job, for any backend
UNSEEN_S = 60.0  # without an open page: the pace of `watch`
BACK_OFF_S = 5.0
ROUND_S = 0.5
MANY = 20  # above this number of a backend's active jobs, each is polled less often


class Refresher:
    """Runs until closed. `is_seen` returns whether a page is open."""

    def __init__(self, is_seen: Callable[[], bool], *, is_quiet: bool, folder: Path | None = None) -> None:
        self._is_seen = is_seen
        self._is_quiet = is_quiet
        self._folder = folder
        self._news = threading.Event()
        self._is_closed = False
        self._workers: dict[str, _Worker] = {}
        self._fault = ""
        self._thread = threading.Thread(target=self._run, name="refresher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Poll all jobs soon: an action was taken, or a page was opened."""
        for worker in list(self._workers.values()):
            worker.hurry()
        self._news.set()

    def faults(self) -> dict[str, str]:
        """Return the error of the last poll of each job; the registry's own error has the key ""."""
        own = {"": self._fault} if self._fault else {}
        return own | {job: words for worker in list(self._workers.values()) for job, words in worker.faults.items()}

    def close(self) -> None:
        """Stop; polls in progress are not awaited."""
        self._is_closed = True
        self._news.set()
        for worker in list(self._workers.values()):
            worker.close()

    def _run(self) -> None:
        """Start a worker for each backend with an active job, or with a recently ended job."""
        registry = Registry(self._folder)
        try:
            for job in [] if self._is_quiet else _ended_of_late(registry):
                self._worker(job.backend).offer(job)
            seen = None
            while not self._is_closed:
                try:
                    version = registry.database.execute("PRAGMA data_version")[0][0]
                    if version != seen:
                        for (name,) in registry.database.execute(_ACTIVE_BACKENDS):
                            self._worker(name)
                        seen = version
                    self._fault = ""
                except CloudtrainError as error:  # busy for long, or a full disk
                    self._fault = error.message
                self._news.wait(ROUND_S if self._is_seen() else BACK_OFF_S)
                self._news.clear()
        except CloudtrainError as error:
            self._fault = error.message
        finally:
            registry.close()

    def _worker(self, name: str) -> _Worker:
        if name not in self._workers:
            self._workers[name] = _Worker(name, self._is_seen, is_quiet=self._is_quiet, folder=self._folder)
            self._workers[name].start()
        return self._workers[name]


def _ended_of_late(registry: Registry) -> list[Job]:
    """Return the recently ended jobs, which may still need alerts or a retry."""
    from cloudtrain.launcher.jobs import watch

    return [job for job in watch.chosen(registry, (), time.time()) if not job.active]


_ACTIVE_BACKENDS = (
    "SELECT DISTINCT jobs.backend FROM attempts a JOIN jobs ON jobs.id = a.job_id"
    " WHERE a.state IN ('pending', 'running', 'stopping')"
)


class _Worker:
    """A backend's thread."""

    def __init__(self, name: str, is_seen: Callable[[], bool], *, is_quiet: bool, folder: Path | None) -> None:
        self._name = name
        self._is_seen = is_seen
        self._is_quiet = is_quiet
        self._folder = folder
        self._news = threading.Event()
        self._is_closed = False
        self._due_s: dict[str, float] = {}
        self._ended: list[Job] = []
        self.faults: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name=f"refresher-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, job: Job) -> None:
        """Poll an ended job once."""
        self._ended.append(job)
        self._news.set()

    def hurry(self) -> None:
        self._due_s = {}
        self._news.set()

    def close(self) -> None:
        self._is_closed = True
        self._news.set()

    def _run(self) -> None:
        from cloudtrain.launcher.notices.notifier import Notifier

        registry = Registry(self._folder)
        notifier = None if self._is_quiet else Notifier(registry)
        jobs: dict[str, Job] = {}
        while not self._is_closed:
            try:
                jobs = self._round(registry, notifier, jobs)
                self.faults.pop("", None)
            except CloudtrainError as error:  # from the registry, for example a full disk
                self.faults[""] = error.message
            next_s = min((self._due_s.get(name, 0.0) for name in jobs), default=time.monotonic() + BACK_OFF_S)
            self._news.wait(min(max(next_s - time.monotonic(), LEAST_S / 5), BACK_OFF_S))
            self._news.clear()
        if notifier is not None:
            notifier.close(0.0)
        registry.close()

    def _round(self, registry: Registry, notifier: object, before: dict[str, Job]) -> dict[str, Job]:
        """Poll jobs that are due, and jobs whose end a different command has seen; return the active jobs."""
        jobs = {job.id: job for job in registry.jobs(active=True) if job.backend == self._name}
        gone = [job for name, job in before.items() if name not in jobs]
        ended, self._ended = [*self._ended, *gone], []
        for job in ended:
            self._look(registry, notifier, job, 1)
        for job in jobs.values():
            if not self._is_closed and self._due_s.get(job.id, 0.0) <= time.monotonic():
                self._look(registry, notifier, job, len(jobs))
        self._due_s = {name: due_s for name, due_s in self._due_s.items() if name in jobs}
        return jobs

    def _look(self, registry: Registry, notifier: object, job: Job, many: int) -> None:
        """Poll the job; store the error and the time of the next poll."""
        begun_s = time.monotonic()
        seen = _seen(registry, notifier, job)
        if seen.fault:
            self.faults[job.id] = seen.fault
        else:
            self.faults.pop(job.id, None)
        if notifier is not None and seen.ended is not None:
            threading.Thread(target=_keep, args=(self._folder, seen), name=f"keep-{job.id}", daemon=True).start()
        took_s = time.monotonic() - begun_s
        is_away = bool(seen.fault) or seen.job.attempt.unreachable_since_s is not None
        wait_s = BACK_OFF_S if is_away else _pace_s(seen.job)
        # Polls take at most a tenth of the time; with many jobs each waits longer.
        wait_s = max(wait_s, LEAST_S * max(1, many / MANY), 10 * took_s)
        self._due_s[job.id] = time.monotonic() + (wait_s if self._is_seen() else max(wait_s, UNSEEN_S))


def _seen(registry: Registry, notifier: object, job: Job) -> Seen:
    """Return the result of a poll: as in `watch`, or without a notifier only the job's state."""
    from cloudtrain.launcher.jobs.watch import Seen, look
    from cloudtrain.launcher.notices.notifier import Notifier

    if isinstance(notifier, Notifier):
        return look(registry, notifier, job) or Seen(job)  # None: a different watcher polls the job
    try:
        return Seen(refresh(registry, job))
    except (CloudtrainError, OSError) as error:
        return Seen(job, fault=str(error))
    except Exception as error:
        return Seen(job, fault=f"cloudtrain itself failed: {type(error).__name__}: {error}")


def _keep(folder: Path | None, seen: Seen) -> None:
    """Cache the log of an ended attempt."""
    from cloudtrain.launcher.jobs import watch

    registry = Registry(folder)
    watch.keep(registry, seen)
    registry.close()


def _pace_s(job: Job) -> float:
    try:
        pace = backends.load(job.backend).pace(job.attempt.ref) if job.attempt.ref else backends.Pace()
    except CloudtrainError:
        return BACK_OFF_S
    return pace.state_s

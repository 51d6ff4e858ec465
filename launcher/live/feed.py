"""Poll the watched jobs: a thread for each backend, so that a slow backend delays no job of a different backend.

Each thread has its own registry. Drawing code is elsewhere and asks no backend.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.job import Job
from cloudtrain.launcher.jobs import stopping
from cloudtrain.launcher.jobs import watch as watching
from cloudtrain.launcher.jobs.log_fetcher import LogKeeper
from cloudtrain.launcher.live.curves import curves_of
from cloudtrain.launcher.live.model import Scene, WatchedJob
from cloudtrain.launcher.money.forecast import forecast
from cloudtrain.launcher.notices import outbox
from cloudtrain.launcher.notices.notifier import Notifier
from cloudtrain.launcher.store.database import WRITING
from cloudtrain.launcher.store.quiesce import QuiesceLock
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.store.series import read as read_series
from cloudtrain.launcher.text.remote import in_words

__all__ = ["JobFeed", "pause_s"]

_LEAST_S = 1.0  # minimum seconds between two polls of a job: figures change no faster
_AT_ONCE = 5  # up to so many jobs of a backend are polled at full pace; more jobs share the pace
_SILENT_S, _MOST_SILENT_S = 5.0, 60.0  # seconds between two polls of a job whose backend does not answer
_REST = 12.0  # least pause after a poll, times its processor time: 8 % of a core, for any number of jobs
_CHOOSE_S = 1.0
_BACK_OFF_S = 5.0  # after a registry error
_STILL_S = 2.0  # for a poll to end before the process is suspended


def pause_s(pace_s: float, jobs: int, silences: int, least_s: float = 0.0) -> float:
    """Return the seconds between two polls of a job, with `jobs` jobs on its backend.

    `silences`: consecutive polls without an answer.
    """
    usual_s = max(_LEAST_S, least_s, pace_s * max(1.0, jobs / _AT_ONCE))
    if silences:
        return max(usual_s, min(_SILENT_S * 2.0 ** min(silences - 1, 8), _MOST_SILENT_S))
    return usual_s


class JobFeed:
    """All watched jobs: the named jobs, or, without names, the jobs of `watch.chosen`. Call `close` at the end."""

    def __init__(self, names: Sequence[str], least_s: float = 0.0, folder: Path | None = None) -> None:
        """Raises NoSuchJobError for an unknown name, ConfigError if the registry cannot be used."""
        self._names, self._least_s = tuple(names), least_s
        registry = Registry(folder)
        self.folder = registry.folder
        self._watched = {job.id: WatchedJob(job) for job in watching.chosen(registry, names, time.time())}
        registry.close()
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._opened = self._marked = ""
        self._notes: list[tuple[float, str]] = []
        self._stops: list[_Stop] = []
        self.logs = LogKeeper(self.folder)
        self.looks = QuiesceLock()
        self.is_closing = threading.Event()
        self._chooser = threading.Thread(target=self._choose, name="registry", daemon=True)
        self._chooser.start()

    def scene(self, now_s: float) -> Scene:
        """Return the current picture: active jobs first, then ended jobs, in both groups the newest submit first."""
        with self._lock:
            jobs = list(self._watched.values())
            notes = tuple(self._notes)
        if not self._names:
            jobs.sort(key=lambda watched: (not watched.job.active, -watched.job.created_s))
        return Scene(tuple(jobs), now_s, notes)

    def open(self, job_id: str) -> None:
        """Also read this job's curves and alerts; of no job if the id is empty."""
        self._opened = job_id

    def mark(self, job_id: str) -> None:
        """Keep this job in the picture even if it ended long ago, since the user has selected it."""
        self._marked = job_id

    def note(self, words: str) -> None:
        """Store a message of cloudtrain itself for the view."""
        with self._lock:
            self._notes = [*self._notes[-99:], (time.time(), words)]

    def stop(self, job_id: str) -> None:
        """Ask the job to save and stop, in a separate thread; the result goes to the notes and to `stops`."""
        self._stops.append(_Stop(self, job_id))

    def asked(self) -> set[str]:
        """Return the jobs that this view has asked to stop."""
        return {stop.job_id for stop in self._stops}

    def stopping(self) -> list[str]:
        """Return the jobs with a stop request in progress."""
        return [stop.job_id for stop in self._stops if not stop.words]

    def stops(self, wait_s: float) -> list[str]:
        """Return the result of each stop request, after waiting at most `wait_s`."""
        end_s = time.monotonic() + wait_s
        for stop in self._stops:
            stop.thread.join(max(0.0, end_s - time.monotonic()))
        return [stop.words or f"it is not known whether {stop.job_id} was asked to stop" for stop in self._stops]

    @contextmanager
    def still(self) -> Iterator[None]:
        """Pause polling and writing in this block: a process suspended while it holds a lock blocks all processes."""
        with self.looks.shut(_STILL_S), WRITING.shut(_STILL_S):
            yield

    def close(self, wait_s: float) -> None:
        """End the threads, waiting at most `wait_s` for deliveries; a thread that waits for a backend is abandoned."""
        self.is_closing.set()
        end_s = time.monotonic() + wait_s
        for thread in (self._chooser, *(lane.thread for lane in list(self._lanes.values()))):
            thread.join(max(0.0, end_s - time.monotonic()))
        self.logs.close(max(0.0, end_s - time.monotonic()))

    # -- for the threads ----------------------------------------------------------------------------------------------

    def put(self, job_id: str, **changes: object) -> None:
        """Change the picture of a watched job."""
        with self._lock:
            if (before := self._watched.get(job_id)) is not None:
                self._watched[job_id] = replace(before, **changes)  # type: ignore[arg-type]

    def _choose(self) -> None:
        while not self.is_closing.is_set():
            try:
                self._choose_on()
            except Exception as error:
                self.note(in_words(error))
                self.is_closing.wait(_BACK_OFF_S)

    def _choose_on(self) -> None:
        registry = Registry(self.folder)
        known: object = None
        drawn: object = None
        try:
            while not self.is_closing.is_set():
                known = self._look_through(registry, known)
                drawn = self._gather(registry, drawn)
                self.is_closing.wait(_CHOOSE_S)
        finally:
            registry.close()

    def _look_through(self, registry: Registry, known: object) -> object:
        """Update the list of jobs after a submit or resume, or each minute; assign jobs to their backends' threads."""
        counted = registry.database.execute("SELECT (SELECT MAX(seq) FROM jobs), (SELECT COUNT(*) FROM attempts)")[0]
        now_s = time.time()
        is_new = (tuple(counted), int(now_s // 60))
        if is_new == known:
            return known
        jobs = watching.chosen(registry, self._names, now_s)
        self._drop_all_but({job.id for job in jobs} | {self._opened, self._marked})
        for job in jobs:
            before = self._watched.get(job.id)
            if before is None or before.job.attempt.number != job.attempt.number or before.forecast is None:
                attempts = tuple(registry.attempts(job))
                with self._lock:
                    self._watched[job.id] = WatchedJob(job, attempts, forecast(job, attempts, now_s))
            lane = self._lanes.get(job.backend)
            if lane is None:
                lane = self._lanes[job.backend] = _Lane(self, self._least_s)
            lane.take(job)
        return is_new

    def _drop_all_but(self, ids: set[str]) -> None:
        """Remove jobs that ended too long ago; named jobs stay."""
        if self._names:
            return
        with self._lock:
            self._watched = {job_id: watched for job_id, watched in self._watched.items() if job_id in ids}
        for lane in self._lanes.values():
            lane.drop_all_but(ids)

    def _gather(self, registry: Registry, drawn: object) -> object:
        """Read the opened job's curves, if changed, and its alerts."""
        job_id = self._opened
        watched = self._watched.get(job_id)
        if watched is None:
            return None
        database = registry.database
        row = database.execute("SELECT COUNT(*), MAX(rowid) FROM points WHERE job_id = ?", (job_id,))[0]
        newest = (job_id, *row, watched.job.attempt.progress.get("step"))
        self.put(job_id, alerts=tuple(outbox.sent(database, job_id)))
        if newest != drawn or watched.curves is None:
            self.put(job_id, curves=curves_of(read_series(database, job_id)))
        return newest


class _Stop:
    """A stop request for a job, in a separate thread."""

    def __init__(self, feed: JobFeed, job_id: str) -> None:
        self.job_id, self.words = job_id, ""
        self._feed = feed
        self.thread = threading.Thread(target=self._run, name=f"stop {job_id}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            registry = Registry(self._feed.folder)
            try:
                self.words = stopping.ask(registry, self.job_id).words
            finally:
                registry.close()
        except Exception as error:
            self.words = f"{self.job_id} was not asked to stop: {in_words(error)}"
        self._feed.note(self.words)


class _Lane:
    """The jobs of a backend, polled by a single thread in sequence."""

    def __init__(self, feed: JobFeed, least_s: float) -> None:
        self._feed, self._least_s = feed, least_s
        self._jobs: dict[str, Job] = {}
        self._due_s: dict[str, float] = {}
        self._silences: dict[str, int] = {}
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="looks", daemon=True)
        self.thread.start()

    def take(self, job: Job) -> None:
        """Poll the job from now on until its end was seen."""
        with self._lock:
            before = self._jobs.get(job.id)
            if before is None or before.attempt.number != job.attempt.number:
                self._jobs[job.id] = job
                self._due_s[job.id] = 0.0

    def drop_all_but(self, ids: set[str]) -> None:
        """Forget jobs that are no longer watched."""
        with self._lock:
            for known in (self._jobs, self._due_s, self._silences):
                for job_id in known.keys() - ids:
                    del known[job_id]

    def _run(self) -> None:
        while not self._feed.is_closing.is_set():
            try:
                self._watch()
            except Exception as error:  # for example a registry that may recover soon
                self._fault(in_words(error))
                self._feed.is_closing.wait(_BACK_OFF_S)

    def _watch(self) -> None:
        registry = Registry(self._feed.folder)
        try:
            notifier = Notifier(registry)
            try:
                while not self._feed.is_closing.is_set():
                    self._look_at_next(registry, notifier)
            finally:
                notifier.close()
        finally:
            registry.close()

    def _look_at_next(self, registry: Registry, notifier: Notifier) -> None:
        job = self._next(time.monotonic())
        if job is None:
            self._feed.is_closing.wait(0.1)
            return
        used_s = time.thread_time()
        try:
            self._look(registry, notifier, job)
        except Exception as error:  # for example from the registry; errors of the poll itself are in `Seen`
            self._feed.put(job.id, fault=in_words(error), asks_since_s=None)
            self._plan(job)
        self._feed.is_closing.wait(_REST * (time.thread_time() - used_s))

    def _fault(self, words: str) -> None:
        """Show the error for each job of the thread."""
        with self._lock:
            due = list(self._due_s)
        for job_id in due:
            self._feed.put(job_id, fault=words, asks_since_s=None)

    def _next(self, now_s: float) -> Job | None:
        """Return the job with the most overdue poll."""
        with self._lock:
            due = [(due_s, job_id) for job_id, due_s in self._due_s.items() if due_s <= now_s]
            return self._jobs[min(due)[1]] if due else None

    def _look(self, registry: Registry, notifier: Notifier, job: Job) -> None:
        self._feed.put(job.id, asks_since_s=time.time())
        with self._feed.looks.passing():
            seen = watching.look(registry, notifier, job)
        if seen is None:  # a different watcher is polling the job and stores the result
            self._show(registry, registry.find(job.id), watching.Seen(job))
            self._plan(job)
            return
        self._show(registry, seen.job, seen)
        self._plan(seen.job, is_over=not seen.fault and not seen.job.active)
        self._feed.logs.take(seen)

    def _show(self, registry: Registry, job: Job, seen: watching.Seen) -> None:
        attempts = tuple(registry.attempts(job))
        now_s = time.time()
        money = seen.forecast or forecast(job, attempts, now_s)
        self._feed.put(
            job.id, job=job, attempts=attempts, forecast=money, fault=seen.fault, seen_s=now_s, asks_since_s=None
        )

    def _plan(self, job: Job, *, is_over: bool = False) -> None:
        """Schedule the job's next poll; never again once its end was seen."""
        is_silent = job.attempt.unreachable_since_s is not None
        with self._lock:
            self._jobs[job.id] = job
            if is_over:
                self._due_s.pop(job.id, None)
                return
            silences = self._silences[job.id] = self._silences.get(job.id, 0) + 1 if is_silent else 0
            pace_s = backends.load(job.backend).pace(job.attempt.ref).state_s if job.attempt.ref else _LEAST_S
            self._due_s[job.id] = time.monotonic() + pause_s(pace_s, len(self._due_s), silences, self._least_s)

"""The watched jobs, polled in the background, as a picture for the views, and the end of a job's log. No drawing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from ..backend import Chosen, LogLine
from ..errors import in_words
from ..job import Attempt, Job
from ..jobs import stopping
from ..jobs import watch as watching
from ..jobs.poller import Seen
from ..jobs.view import read_view, view_of
from ..jobs.watch import Watcher
from ..logs.reader import read_on
from ..logs.stream import LogStream
from ..logs.view import View
from ..notices import outbox
from ..store.database import WRITING
from ..store.progress import fold_newest
from ..store.registry import Registry
from ..store.series import read as read_series
from ..sweeps.overview import trial_lines
from .model import Scene, TailShot, WatchedJob, curves_of

_STILL_S = 2.0  # for a poll to end before the process is suspended
MOST = 2000  # lines that the user can scroll back
_LEAST_PAUSE_S = 0.25  # minimum seconds between two reads: no picture comes more often
_MANY = 500  # a page with so many lines: read on immediately
_STATE_S = 1.0  # seconds between two reads of the registry, where the polling thread stores the job's state
_BACK_OFF_S = 5.0
_READING = threading.BoundedSemaphore(8)  # an abandoned reader waits while its backend hangs; so many readers at most


class JobFeed:
    """All watched jobs: the named jobs, or, without names, the jobs of `watch.chosen`.

    Start the `watcher` once the view has the terminal, because a poll may print; close the watcher at the end.
    """

    def __init__(self, names: Sequence[str], every_s: float = 0.0) -> None:
        """Raises NoSuchJobError for an unknown name, ConfigError if the registry cannot be used."""
        self._names = tuple(names)
        with closing(Registry()) as registry:
            self.folder = registry.folder
            jobs = watching.chosen(registry, names, time.time())
            self._watched = {job.id: WatchedJob(read_view(registry, job)) for job in jobs}
        self._lock = threading.Lock()
        self.opened = ""  # the job whose curves and alerts are read, too
        self.marked = ""  # the selected job, which stays in the picture even if it ended long ago
        self._notes: list[tuple[float, str]] = []
        self._stops: list[_Stop] = []
        self._drawn: object = None

        def begin(job: Job) -> None:
            self.put(job.id, asks_since_s=time.time())

        self.watcher = Watcher(self.folder, names, self._show, self.note, start=begin, step=self._step, every_s=every_s)

    def scene(self, now_s: float) -> Scene:
        """Return the current picture: active jobs first, then ended jobs, in both groups the newest submit first."""
        with self._lock:
            jobs = list(self._watched.values())
            notes = tuple(self._notes)
        if not self._names:
            jobs.sort(key=lambda watched: (not watched.job.active, -watched.job.created_s))
        return Scene(tuple(jobs), now_s, notes)

    def note(self, words: str) -> None:
        """Store a message of cloudtrain itself for the view, if not empty."""
        with self._lock:
            if words:
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
        with self.watcher.poller.polls.shut(_STILL_S), WRITING.shut(_STILL_S):
            yield

    def put(self, job_id: str, **changes: object) -> None:
        """Change the picture of a watched job."""
        with self._lock:
            if (before := self._watched.get(job_id)) is not None:
                self._watched[job_id] = replace(before, **changes)  # type: ignore[arg-type]

    def _show(self, seen: Seen) -> None:
        watched = self._watched.get(seen.job.id)
        view = seen.view or view_of(seen.job, watched.view.attempts if watched is not None else ())
        changes: dict[str, object] = {"view": view, "fault": str(seen.fault or ""), "seen_s": time.time()}
        if seen.job.id == self.opened:  # the trials as read before this poll would contradict the view
            with closing(Registry(self.folder)) as registry:
                changes["trials"] = trial_lines(registry.database, seen.job)
        self.put(seen.job.id, asks_since_s=None, **changes)

    def _step(self, registry: Registry, jobs: list[Job] | None) -> None:
        """Take in the chosen jobs, if changed; read the opened job's curves, if changed, and its alerts."""
        for job in jobs or ():
            before = self._watched.get(job.id)
            if before is None or before.job.attempt.number != job.attempt.number:
                view = read_view(registry, job)
                with self._lock:
                    self._watched[job.id] = WatchedJob(view)
        if jobs is not None and not self._names:  # a job that ended too long ago leaves, unless in view
            ids = {job.id for job in jobs} | {self.opened, self.marked}
            with self._lock:
                self._watched = {job_id: watched for job_id, watched in self._watched.items() if job_id in ids}
        job_id = self.opened
        watched = self._watched.get(job_id)
        if watched is None:
            return
        database = registry.database
        row = database.execute("SELECT COUNT(*), MAX(rowid) FROM points WHERE job_id = ?", (job_id,))[0]
        newest = (job_id, *row, watched.job.attempt.progress.get("step"))
        self.put(job_id, alerts=tuple(outbox.sent(database, job_id)), trials=trial_lines(database, watched.job))
        if newest != self._drawn or watched.curves is None:
            self.put(job_id, curves=curves_of(read_series(database, job_id)))
        self._drawn = newest


class _Stop:
    def __init__(self, feed: JobFeed, job_id: str) -> None:
        self.job_id, self.words = job_id, ""
        self._feed = feed
        self.thread = threading.Thread(target=self._run, name=f"stop {job_id}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with closing(Registry(self._feed.folder)) as registry:
                self.words = stopping.ask(registry, self.job_id).words
        except Exception as error:
            self.words = f"{self.job_id} was not asked to stop: {in_words(error)}"
        self._feed.note(self.words)


class LogTail:
    """Starts to read at once; call `close` at the end. `ranks`: only lines of these ranks."""

    def __init__(self, folder: Path, job_id: str, ranks: Chosen = None) -> None:
        self.job_id = job_id
        self._folder, self._ranks = folder, ranks
        self._lines: deque[LogLine] = deque(maxlen=MOST)
        self._running: dict[tuple[int, int | None], LogLine] = {}  # current states of progress bars
        self._shot = TailShot()
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"log of {job_id}", daemon=True)
        self._thread.start()

    def shot(self) -> TailShot:
        """Return the current lines."""
        with self._lock:
            return replace(self._shot, lines=(*self._lines, *self._running.values()))

    def close(self, wait_s: float = 0.0) -> None:
        """Ask the thread to end, and wait at most `wait_s`."""
        self._is_closing.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            if not _READING.acquire(timeout=_STATE_S):
                self._tell(fault="earlier logs still wait for their backends")
                continue
            try:
                self._follow()
            except Exception as error:
                self._tell(fault=in_words(error))
            else:
                return
            finally:
                _READING.release()
            self._is_closing.wait(_BACK_OFF_S)

    def _follow(self) -> None:
        """Read the attempts in sequence, until the view is closed."""
        with closing(Registry(self._folder)) as registry:
            while not self._is_closing.is_set():
                job = registry.find(self.job_id)
                with self._lock:
                    self._lines.clear()
                    self._running.clear()
                attempt = job.attempt
                newest, number = fold_newest(attempt.progress, ()), attempt.number
                is_prefixed = attempt.plan.ranks > 1
                self._tell(newest=newest, number=number, is_prefixed=is_prefixed, is_read=False, is_over=False)
                with closing(LogStream(registry, job, attempt, View(ranks=self._ranks))) as stream:
                    self._read(registry, stream, attempt)

    def _read(self, registry: Registry, stream: LogStream, attempt: Attempt) -> None:
        """Read until the next attempt exists."""
        number, looked_s = attempt.number, 0.0

        def update() -> Attempt | None:
            nonlocal attempt, looked_s
            if time.monotonic() - looked_s >= _STATE_S:
                looked_s = time.monotonic()
                attempt = registry.find(self.job_id).attempt
            return None if self._is_closing.is_set() or attempt.number != number else attempt

        def pause(wait_s: float) -> None:
            self._is_closing.wait(max(_LEAST_PAUSE_S, wait_s))

        for news in read_on(stream, update, pause, tail=MOST // 4, many=_MANY):
            self._take(View().chosen(news.lines))
            fault = news.fault.message if news.fault is not None else ""
            self._tell(fault=fault, is_read=self._shot.is_read or not fault, is_over=stream.is_over)
        while update() is not None:
            self._is_closing.wait(_STATE_S)

    def _take(self, lines: list[LogLine]) -> None:
        with self._lock:
            for line in lines:
                source = (line.node, line.rank)
                self._running.pop(source, None)
                if line.text.endswith("\r"):
                    self._running[source] = line
                else:
                    self._lines.append(line)
            of_rank_0 = [(line.text, line.time_s) for line in lines if line.node == 0 and line.rank in (0, None)]
            self._shot = replace(self._shot, newest=fold_newest(dict(self._shot.newest), of_rank_0))

    def _tell(self, **changes: object) -> None:
        with self._lock:
            self._shot = replace(self._shot, **changes)  # type: ignore[arg-type]

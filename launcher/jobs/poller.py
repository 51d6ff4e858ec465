"""Polls jobs in the background: threads for each backend, so that a slow backend delays no job of a different backend.

`list` and `status` ask once, within a time limit (`ask`). `wait`, `watch`, the live view and the page poll until the
end of the jobs (`Poller`). Each thread has its own registry. `Lanes` runs the tasks of each backend.
"""

from __future__ import annotations

import contextvars
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from cloudtrain.entrypoints.notices.message import Notice

from .. import backend as backends
from ..errors import CloudtrainError, UnreachableError, in_words
from ..job import Attempt, Job
from ..store.database import QuiesceLock
from ..store.registry import Registry
from .refresh import refresh
from .view import JobView

PATIENCE_S = 10.0  # a working backend answers within 2 s, the import of the SDK included
CLOSE_S = 2.5  # for deliveries at the end of a command
_REPORT_S = 0.3  # for a thread without deliveries to end, and to report alerts that were not delivered
_AT_ONCE = 16  # threads for each backend, if each job is polled only once
_FOLLOWED_AT_ONCE = 4  # threads for each backend of a follower: a host that does not answer holds one
_FULL_PACE = 5  # up to so many jobs of a backend are polled at full pace; more jobs share the pace
_SILENT_S, _MOST_SILENT_S = 5.0, 60.0  # seconds between two polls of a job whose backend does not answer

Task = TypeVar("Task")


@dataclass(frozen=True)
class Seen:
    """The result of a poll."""

    job: Job
    view: JobView | None = None
    notices: tuple[Notice, ...] = ()
    fault: CloudtrainError | None = None
    """The reason for a failed or partial poll."""
    ended: Attempt | None = None
    """The attempt that has ended, even if the job continues with a retry."""
    was_active: bool = True
    """Whether the job was active before the poll."""
    is_mine: bool = True
    """No concurrent watcher handles the job."""


@dataclass(frozen=True)
class Answers:
    """The result of asking about several jobs."""

    jobs: list[Job]
    """In the order of the request."""
    faults: dict[str, CloudtrainError]
    """By job id, why a job is returned as last seen; of a job that took too long an UnreachableError."""


@dataclass(frozen=True)
class Pacing:
    """How often a job is polled."""

    least_s: float = 1.0
    """Minimum seconds between two polls; figures change no faster."""
    every_s: Callable[[], float] = lambda: 0.0
    """Returns the seconds that the user has asked for, 0 for the pace of the backend."""
    rest: float = 12.0
    """Least pause after a poll, times the processor time of the poll; 12 is 8 % of a core, for any number of jobs."""

    def pause_s(self, pace_s: float, jobs: int, silences: int) -> float:
        """Return the seconds between two polls of one of `jobs` jobs, after `silences` polls without an answer."""
        shared_s = pace_s * max(1.0, jobs / _FULL_PACE)
        usual_s = max(self.least_s, max(every_s, pace_s) if (every_s := self.every_s()) else shared_s)
        if silences:
            return max(usual_s, min(_SILENT_S * 2.0 ** min(silences - 1, 8), _MOST_SILENT_S))
        return usual_s


Poll = Callable[[Job], Seen]
# Returns the poll function of a thread. The second argument returns the seconds for deliveries at the end.
Begin = Callable[[Registry, Callable[[], float]], AbstractContextManager[Poll]]


def as_fault(error: Exception) -> CloudtrainError:
    """Return the error as a fault of a poll; an unexpected exception is named as a failure of cloudtrain."""
    if isinstance(error, CloudtrainError):
        return error
    fault = CloudtrainError(in_words(error))
    fault.__cause__ = error
    return fault


@contextmanager
def refreshing(registry: Registry, close_s: Callable[[], float]) -> Iterator[Poll]:
    """Yield a poll function that only updates the registry."""
    yield lambda job: Seen(refresh(registry, job))


class Poller:
    """Polls the jobs given to `take` until their ends were seen, with up to `at_once` threads for each backend.

    Call `close` at the end; as a context manager the poller does so, and does not wait after an exception. `start` gets
    each job before its poll, and `show` each result, in the thread of the backend. `once`: each job is polled a single
    time. `polls` is closed before the process is suspended, because a process that is suspended while a poll holds a
    lock blocks all processes.
    """

    def __init__(
        self,
        folder: Path | None,
        begin: Begin,
        show: Callable[[Seen], object],
        pacing: Pacing = Pacing(),
        *,
        start: Callable[[Job], object] = lambda job: None,
        once: bool = False,
        at_once: int = _FOLLOWED_AT_ONCE,
    ) -> None:
        self._folder, self._begin, self._show, self._pacing, self._start = folder, begin, show, pacing, start
        self._once, self._close_s, self._at_once = once, 0.0, at_once
        self._attempts: dict[str, int] = {}  # by job, the number of the attempt that is polled
        self._silences: dict[str, int] = {}
        self.polls = QuiesceLock()
        self._lanes = Lanes(self._work, "polls", at_once)

    def take(self, *jobs: Job) -> None:
        """Poll the jobs from now on; an attempt that is or was polled already does not start again."""
        for job in jobs:
            if self._attempts.get(job.id) != job.attempt.number:
                self._attempts[job.id] = job.attempt.number
                self._lanes.put(job.backend, job.id, job)

    def watch(self, jobs: Sequence[Job]) -> None:
        """Poll these jobs from now on, and forget all other jobs."""
        ids = {job.id for job in jobs}
        for job_id in self._attempts.keys() - ids:
            del self._attempts[job_id]
        self._lanes.keep_only(ids)
        self.take(*jobs)

    def hurry(self) -> None:
        """Poll all jobs now."""
        self._lanes.hurry()

    def __enter__(self) -> Poller:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(0.0 if kind else CLOSE_S)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """End the threads, waiting at most `wait_s` for deliveries; a thread that waits for a backend is abandoned."""
        self._close_s = wait_s
        self._lanes.close(wait_s + _REPORT_S)

    def _work(self, jobs: Iterator[Job]) -> None:
        with ExitStack() as opened:
            poll: Poll | None = None
            for job in jobs:
                used_s, is_first = time.thread_time(), poll is None
                try:
                    poll = poll or opened.enter_context(self._opened())
                    self._start(job)
                    with self.polls.passing():
                        seen = poll(job)
                    self._show(seen)
                except Exception as error:  # for example a registry that may recover soon
                    seen = Seen(job, fault=as_fault(error))
                    self._show(seen)
                if not self._once:
                    self._plan(seen)
                    if not is_first:  # the first poll imports modules
                        rest = self._pacing.rest * self._at_once
                        self._lanes.is_closing.wait(rest * (time.thread_time() - used_s))

    @contextmanager
    def _opened(self) -> Iterator[Poll]:
        with closing(Registry(self._folder)) as registry, self._begin(registry, lambda: self._close_s) as poll:
            yield poll

    def _plan(self, seen: Seen) -> None:
        """Schedule the job's next poll; never again once its end was seen."""
        job = seen.job
        if self._attempts.get(job.id, math.inf) > job.attempt.number:  # forgotten, or a later attempt was taken
            return
        self._attempts[job.id] = job.attempt.number
        if seen.is_mine and not seen.fault and not job.active:
            return
        is_silent = seen.fault is not None or job.attempt.unreachable_since_s is not None
        silences = self._silences[job.id] = self._silences.get(job.id, 0) + 1 if is_silent else 0
        pause_s = self._pacing.pause_s(pace_of(job).state_s, self._lanes.count(job.backend) + 1, silences)
        self._lanes.put(job.backend, job.id, job, pause_s)


def ask(registry: Registry, jobs: Sequence[Job], patience_s: float = PATIENCE_S) -> Answers:
    """Return the jobs as their backends describe them now.

    A job is returned as last seen if its backend fails, or does not answer within `patience_s` for all jobs together.
    The thread of a silent backend is not stopped: the thread ends by itself, or with the process.
    """
    found: queue.SimpleQueue[Seen] = queue.SimpleQueue()
    asked: set[str] = set()
    poller = Poller(
        registry.folder, refreshing, found.put, start=lambda job: asked.add(job.id), once=True, at_once=_AT_ONCE
    )
    active = [job for job in jobs if job.active]  # a silent backend holds a thread: jobs without an answer come last
    active.sort(key=lambda job: job.attempt.unreachable_since_s is not None)
    waiting = {job.id: job for job in active}
    poller.take(*waiting.values())
    end_s = time.monotonic() + patience_s
    answers = {job.id: job for job in jobs}
    faults: dict[str, CloudtrainError] = {}
    while waiting and (left_s := end_s - time.monotonic()) > 0:
        with suppress(queue.Empty):
            seen = found.get(timeout=left_s)
            last_seen = waiting.pop(seen.job.id)
            answers[seen.job.id] = last_seen if seen.fault else seen.job
            if seen.fault:
                faults[seen.job.id] = seen.fault
    for job in waiting.values():
        was = "has not answered within" if job.id in asked else "was not asked for it, as its other jobs took all of"
        faults[job.id] = UnreachableError(f"{job.backend} {was} {patience_s:.0f} s")
    poller.close(0.0)
    return Answers([answers[job.id] for job in jobs], faults)


def pace_of(job: Job) -> backends.Pace:
    """Return the pace of the job's backend; a job that was not sent, or without its backend, cannot be killed."""
    try:
        ref, name = job.attempt.ref, job.backend_of(job.attempt)
        return backends.load(name).pace(ref) if ref else backends.Pace(can_kill=False)
    except CloudtrainError:  # the backend is not installed
        return backends.Pace(state_s=_SILENT_S, can_kill=False)


@dataclass
class _Lane(Generic[Task]):
    tasks: dict[str, tuple[float, Task]] = field(default_factory=dict)  # by key; with the time when the task is due
    threads: list[threading.Thread] = field(default_factory=list)
    busy: int = 0


class Lanes(Generic[Task]):
    """Runs tasks when due, with up to `at_once` threads for each lane; call `close` at the end.

    `work` runs once in each thread: it iterates over the tasks, and may `put` a task again. A task replaces a waiting
    task with the same key.
    """

    def __init__(self, work: Callable[[Iterator[Task]], None], name: str, at_once: int = 1) -> None:
        self._work, self._name, self._at_once = work, name, at_once
        self._lanes: dict[str, _Lane[Task]] = {}
        self._changed = threading.Condition()
        self.is_closing = threading.Event()

    def put(self, name: str, key: str, task: Task, in_s: float = 0.0) -> None:
        """Run the task in the lane in so many seconds."""
        with self._changed:
            lane = self._lanes.setdefault(name, _Lane())
            lane.tasks.pop(key, None)
            lane.tasks[key] = (time.monotonic() + in_s, task)
            if len(lane.threads) < min(self._at_once, len(lane.tasks) + lane.busy) and not self.is_closing.is_set():
                title = f"{self._name} of {name}"
                run = contextvars.copy_context().run  # messages go where the caller's messages go
                thread = threading.Thread(target=run, args=(self._work, self._due(lane)), name=title, daemon=True)
                thread.start()
                lane.threads.append(thread)  # only now: Ctrl-C may come in between, and `close` joins started threads
            self._changed.notify_all()

    def count(self, name: str) -> int:
        """Return the number of the lane's waiting tasks."""
        return len(self._lanes[name].tasks)

    def keep_only(self, keys: set[str]) -> None:
        """Drop all waiting tasks with different keys."""
        with self._changed:
            for lane in self._lanes.values():
                lane.tasks = {key: task for key, task in lane.tasks.items() if key in keys}

    def hurry(self) -> None:
        """Make all waiting tasks due now."""
        with self._changed:
            for lane in self._lanes.values():
                lane.tasks = {key: (0.0, task) for key, (_, task) in lane.tasks.items()}
            self._changed.notify_all()

    def drain(self, wait_s: float | None = None) -> None:
        """Wait at most `wait_s` for the end of all tasks."""
        with self._changed:
            self._changed.wait_for(lambda: not any(lane.tasks or lane.busy for lane in self._lanes.values()), wait_s)

    def close(self, wait_s: float) -> None:
        """End the threads, waiting at most `wait_s`; tasks that have not begun are dropped."""
        end_s = time.monotonic() + wait_s
        self.is_closing.set()
        with self._changed:
            self._changed.notify_all()
        for thread in [thread for lane in list(self._lanes.values()) for thread in lane.threads]:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _due(self, lane: _Lane[Task]) -> Iterator[Task]:
        """Yield the lane's tasks when due, first the task that has waited longest, until `close`."""
        while True:
            with self._changed:
                while (key := _first(lane)) is None and not self.is_closing.is_set():
                    next_s = min((due_s for due_s, _ in lane.tasks.values()), default=None)
                    self._changed.wait(None if next_s is None else max(0.0, next_s - time.monotonic()))
                if key is None or self.is_closing.is_set():
                    return
                task = lane.tasks.pop(key)[1]
                lane.busy += 1
            try:
                yield task
            finally:
                with self._changed:
                    lane.busy -= 1
                    self._changed.notify_all()


def _first(lane: _Lane[Task]) -> str | None:
    now_s = time.monotonic()
    return next((key for key, (due_s, _) in lane.tasks.items() if due_s <= now_s), None)

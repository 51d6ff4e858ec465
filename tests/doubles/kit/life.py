"""A job's state and orders, and the steps that the courses of jobs share in all clouds."""

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from doubles import sandbox


class Abandoned(Exception):
    """Raised when a test orders the stand-in to forget the job."""


@dataclass(kw_only=True)
class Job:
    """One job; `changed` guards the mutable fields and wakes waiting threads."""

    ENDS: ClassVar[tuple[str, ...]] = ()
    CANCELLING: ClassVar[str] = ""
    RUNNING: ClassVar[str] = ""
    created: float
    number: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    orders: dict[str, dict[str, Any]] = field(default_factory=dict)  # requested and not done yet
    status: str
    history: list[tuple[str, float]] = field(default_factory=list)
    started: float | None = None  # first time in RUNNING
    ended: float | None = None
    attempts: int = 0  # of the whole job
    has: str = ""  # machines, as capacity.Row has it
    error: Any = None
    thread: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether the status is final."""
        return self.status in self.ENDS

    def enter_first(self) -> None:
        """Enter the first status."""
        self.history.append((self.status, self.created))

    def enter(self, status: str, error: Any = None) -> None:
        """Enter the next status, unless a cancel has overtaken the status."""
        with self.changed:
            if self.status == status or self.has_ended:
                return
            if self.status == self.CANCELLING and status not in self.ENDS:
                return
            now = time.time()
            self.status, self.error = status, error
            self.history.append((status, now))
            if status == self.RUNNING and self.started is None:
                self.started = now
            if status in self.ENDS:
                self.ended = now
            self.changed.notify_all()

    def order(self, name: str, **details: Any) -> None:
        """Order a change, for example cancel, end, abandon."""
        with self.changed:
            self.orders[name] = details
            self.changed.notify_all()

    def wake(self) -> None:
        """Wake all threads that wait for a change."""
        with self.changed:
            self.changed.notify_all()


class Machine:
    """A machine that runs a container of a job, with its disk below `root`."""

    root: Path
    running: sandbox.Running | None

    @property
    def is_running(self) -> bool:
        """Return whether the container runs, or a part of its output has not been read."""
        raise NotImplementedError

    def terminate(self) -> None:
        """Send SIGTERM to the container's first process."""
        if self.running is not None:
            self.running.terminate()

    def kill(self) -> None:
        """Kill all processes of the container."""
        if self.running is not None:
            self.running.kill()

    def remove(self) -> None:
        """Remove the disk."""
        shutil.rmtree(self.root, ignore_errors=True)


def begin(job: Job, live: Callable[[], None]) -> None:
    """Start the job's thread, with which its containers die."""
    job.thread = threading.Thread(target=live, name=f"job-{job.number}", daemon=True)
    job.thread.start()


def sleep_anyhow(job: Job, wait_s: float) -> None:
    """Wait for some seconds, or until the job is abandoned."""
    until = time.time() + wait_s
    with job.changed:
        while time.time() < until and "abandon" not in job.orders:
            job.changed.wait(max(until - time.time(), 0.001))


def end(job: Job, machines: Sequence[Machine], grace_s: float) -> None:
    """End the running containers: SIGTERM, the grace, SIGKILL; return when all their output has been read."""
    running = [machine for machine in machines if machine.is_running]
    if grace_s > 0:
        for machine in running:
            machine.terminate()
    until = time.time() + grace_s
    with job.changed:
        while any(one.is_running for one in running) and time.time() < until and "abandon" not in job.orders:
            job.changed.wait(max(until - time.time(), 0.001))
    for machine in running:
        if machine.is_running:
            machine.kill()
    with job.changed:
        while any(machine.is_running for machine in running):
            job.changed.wait(1.0)

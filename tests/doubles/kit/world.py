"""The base of a stand-in's state: settings, faults, the journal of calls, and the jobs."""

import contextlib
import itertools
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Generic, TypeVar

from doubles.kit.capacity import Capacity
from doubles.kit.differences import Changes, Listing
from doubles.kit.faults import Fault, Faults
from doubles.kit.life import Job
from doubles.kit.settings import Settings
from doubles.sandbox import Switch

END_S = 30.0  # the longest time until the threads of all jobs have ended
JobT = TypeVar("JobT", bound=Job)
SettingsT = TypeVar("SettingsT", bound=Settings)
FaultT = TypeVar("FaultT", bound=Fault)


class World(Generic[SettingsT, FaultT, JobT]):
    """The account; each server has one account. A subclass adds its services' state, and calls `clear`."""

    def __init__(self, state: Path, switch: Switch | None, settings: type[SettingsT], fault: type[FaultT]) -> None:
        self.state, self.switch = state, switch
        self.lock = threading.RLock()
        self.faults = Faults(fault)
        self.capacity = Capacity()
        self.changes = Changes()
        self.listing = Listing(lambda: self.settings.list_lag_s)
        self._settings_type = settings

    def clear(self) -> None:
        """Forget all state."""
        self.settings = self._settings_type()
        self.faults.clear()
        self.capacity.clear()
        self.changes.clear()
        self.killed: set[str] = set()  # jobs with a container that was killed by `kill_at`
        self.journal: list[dict[str, Any]] = []
        self.jobs: dict[Any, JobT] = {}
        self.late: list[JobT] = []  # that run although their end was told
        self._numbers = itertools.count(1)

    def set(self, values: dict[str, Any]) -> None:
        """Change settings. Raises ValueError for an unknown setting or choice."""
        self.settings = self.settings.changed(values)
        for job in self.all_jobs():
            job.wake()

    def all_jobs(self) -> list[JobT]:
        """Return the jobs in the order of their creation."""
        with self.lock:
            return list(self.jobs.values())

    def reset(self) -> None:
        """Kill all jobs and forget all state."""
        jobs = [*self.all_jobs(), *self.late]
        for job in jobs:
            job.order("abandon")
        end = time.monotonic() + END_S
        for job in jobs:
            if job.thread is not None:
                job.thread.join(max(0.0, end - time.monotonic()))
        with self.lock:
            self.clear()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.state / "jobs")

    def close(self) -> None:
        """Kill all jobs and remove the folder."""
        self.reset()
        if self.switch is not None:
            self.switch.close()
        shutil.rmtree(self.state, ignore_errors=True)

"""The state of the stand-in: settings, faults, the journal of calls, tokens, jobs, and the services' state."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.cloud.aiplatform_v1 import types
from google.protobuf import json_format

from doubles.google.faults import Faults
from doubles.google.jobs import ENDS, Job
from doubles.google.logs import LogStore
from doubles.google.names import NUMBER, REGION
from doubles.google.secretmanager import Secrets
from doubles.google.settings import Settings, checked
from doubles.google.storage import Storage
from doubles.google.tokens import Tokens
from doubles.sandbox import Switch

__all__ = ["World"]

FIRST_ID = 10**18  # job ids have up to 19 digits


class World:
    """The project; each server has one project."""

    def __init__(self, state: Path, switch: Switch | None, ca: Path) -> None:
        self.state, self.switch, self.ca = state, switch, ca
        self.container_url = ""  # of the proxy, from inside a replica
        self.lock = threading.RLock()
        self.settings = Settings()
        self.faults, self.tokens = Faults(), Tokens()
        self.logs = LogStore(lambda: self.settings)
        self.storage = Storage(state / "storage", lambda: self.settings)
        self.secrets = Secrets()
        self._timers: list[threading.Timer] = []
        self._ids = random.SystemRandom()  # ids are never repeated, even after a reset
        self._clear()

    def _clear(self) -> None:
        self.settings = Settings()
        self.faults.clear()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.journal: list[dict[str, Any]] = []
        self.jobs: dict[str, Job] = {}
        self.operations: dict[str, Any] = {}  # long-running, by name
        self.persistent: dict[str, Any] = {}  # resources, by id
        self._numbers = itertools.count(1)
        for service in (self.logs, self.storage, self.secrets):
            service.clear()

    def set(self, values: dict[str, Any]) -> None:
        """Change settings. Raises ValueError for an unknown setting."""
        self.settings = replace(self.settings, **checked(values))
        with self.lock:
            jobs = list(self.jobs.values())
        for job in jobs:
            job.wake()

    def later(self, delay_s: float, act: Callable[[], Any]) -> None:
        """Call `act` after the delay, unless the world is reset."""
        timer = threading.Timer(delay_s, act)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def add(self, region: str, asked: Any) -> Job:
        """Store a new job."""
        with self.lock:
            identity = str(self._ids.randrange(FIRST_ID, 9 * FIRST_ID))
            job = Job(identity, region, asked, time.time(), next(self._numbers))
            is_queued = self.settings.execute and (self.settings.queued or self.settings.queued_s > 0)
            job.enter_first("JOB_STATE_QUEUED" if is_queued else "JOB_STATE_PENDING")
            self.jobs[identity] = job
            return job

    def find(self, name: str) -> Job:
        """Return the job with the id, resource name or display name, the newest of several. Raises KeyError."""
        with self.lock:
            for job in reversed(self.jobs.values()):
                if name in (job.id, job.name, job.asked.display_name):
                    return job
        raise KeyError(f"no job {name}")

    def set_persistent(self, name: str, told: dict[str, Any] | None) -> None:
        """Make or remove a persistent resource."""
        if told is None:
            self.persistent.pop(name, None)
            return
        full = f"projects/{NUMBER}/locations/{REGION}/persistentResources/{name}"
        made = types.PersistentResource.pb()()
        self.persistent[name] = json_format.ParseDict({"name": full, "state": "RUNNING", **told}, made)

    def reset(self) -> None:
        """Kill all jobs and forget all state."""
        with self.lock:
            jobs = list(self.jobs.values())
        for job in jobs:
            job.order("abandon")
        end = time.monotonic() + 30.0
        for job in jobs:
            if job.thread is not None:
                job.thread.join(max(0.0, end - time.monotonic()))
        with self.lock:
            self._clear()

    def active(self) -> list[Job]:
        """Return the jobs that have not ended."""
        with self.lock:
            return [job for job in self.jobs.values() if job.state not in ENDS]

    def close(self) -> None:
        """Kill all jobs and remove the folder."""
        self.reset()
        if self.switch is not None:
            self.switch.close()
        shutil.rmtree(self.state, ignore_errors=True)

"""The state of the stand-in: settings, faults, the journal of calls, tokens, jobs, and the services' state."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.cloud.aiplatform_v1 import types
from google.protobuf import json_format

from doubles.google.faults import Fault
from doubles.google.jobs import Job
from doubles.google.logs import LogStore
from doubles.google.names import NUMBER, REGION
from doubles.google.secretmanager import Secrets
from doubles.google.settings import Settings
from doubles.google.storage import Storage
from doubles.google.tokens import Tokens
from doubles.kit import world
from doubles.sandbox import Switch

FIRST_ID = 10**18  # job ids have up to 19 digits


class World(world.World[Settings, Fault, Job]):
    """The project; each server has one project."""

    def __init__(self, state: Path, switch: Switch | None, ca: Path) -> None:
        super().__init__(state, switch, Settings, Fault)
        self.ca = ca
        self.container_url = ""  # of the proxy, from inside a replica
        self.tokens = Tokens()
        self.logs = LogStore(lambda: self.settings)
        self.storage = Storage(state / "storage", lambda: self.settings)
        self.secrets = Secrets()
        self._timers: list[threading.Timer] = []
        self._ids = random.SystemRandom()  # ids are never repeated, even after a reset
        self.clear()

    def clear(self) -> None:
        """Forget all state."""
        super().clear()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.persistent: dict[str, Any] = {}  # resources, by id
        for service in (self.logs, self.storage, self.secrets):
            service.clear()

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
            job = Job(
                id=identity,
                region=region,
                asked=asked,
                created=time.time(),
                number=next(self._numbers),
                status="JOB_STATE_PENDING",
            )
            job.enter_first()
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

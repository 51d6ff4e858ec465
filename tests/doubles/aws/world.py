"""The state of the stand-in: settings, jobs, logs, faults, the journal of calls, quotas."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from doubles.aws.faults import Faults
from doubles.aws.jobs import TERMINAL, Job
from doubles.aws.logs import Logs
from doubles.aws.settings import Settings
from doubles.sandbox import Switch

__all__ = ["CONTAINER_KEY", "World"]

CONTAINER_KEY = "ASIACONTAINERROLE000"  # the access key of the role inside containers


class World:
    """The account, in every region; each server has one account."""

    def __init__(self, state: Path, url: str, switch: Switch | None) -> None:
        self.state, self.url, self.switch = state, url, switch
        self.container_url = url  # the URL inside a container
        self.lock = threading.RLock()
        self.faults = Faults(CONTAINER_KEY)
        self._clear()

    def _clear(self) -> None:
        self.settings = Settings()
        self.faults.clear()
        self.journal: list[dict[str, Any]] = []
        self.jobs: dict[tuple[str, str], Job] = {}
        self.quotas: dict[str, float] = {}
        self.running: set[str] = set()  # jobs that have machines
        self._logs: dict[str, Logs] = {}
        self._created = 0

    def set(self, values: dict[str, Any]) -> None:
        """Change settings. Raises TypeError for an unknown setting."""
        self.settings = replace(self.settings, **values)

    def logs(self, region: str) -> Logs:
        """Return the region's CloudWatch Logs."""
        with self.lock:
            return self._logs.setdefault(region, Logs(lambda: self.settings.log_lag_s))

    def add(self, job: Job) -> bool:
        """Store the job unless its name is taken; return whether the job was stored."""
        with self.lock:
            if (job.region, job.name) in self.jobs:
                return False
            self._created += 1
            job.number = self._created
            self.jobs[(job.region, job.name)] = job
            return True

    def job(self, name: str, region: str | None = None) -> Job | None:
        """Return the job with the name, in the region or in any region."""
        with self.lock:
            found = (job for job in self.jobs.values() if job.name == name and region in (None, job.region))
            return next(found, None)

    def active(self) -> list[Job]:
        """Return the jobs that have not ended."""
        with self.lock:
            return [job for job in self.jobs.values() if job.status not in TERMINAL]

    def reset(self) -> None:
        """Kill all jobs and forget all state, moto's state too."""
        from moto.moto_api._internal.models import moto_api_backend

        with self.lock:
            jobs = list(self.jobs.values())
        for job in jobs:
            job.order("abandon")
        end = time.monotonic() + 30.0
        for job in jobs:
            if job.thread is not None:
                job.thread.join(max(0.0, end - time.monotonic()))
        with self.lock:
            moto_api_backend.reset()
            self._clear()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.state / "jobs")

    def close(self) -> None:
        """Kill all jobs and remove the folder."""
        self.reset()
        if self.switch is not None:
            self.switch.close()
        shutil.rmtree(self.state, ignore_errors=True)

    def port(self) -> int:
        """Return the port that clients call."""
        return int(self.url.rsplit(":", 1)[1])

    def listen_for_containers(self) -> socket.socket | None:
        """Return a further socket to serve, on the containers' network, or None without such a network."""
        if self.switch is None:
            return None
        self.container_url = f"http://{self.switch.gateway}:{self.port()}"
        return self.switch.listen(self.port())

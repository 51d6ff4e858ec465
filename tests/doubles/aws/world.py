"""The state of the stand-in: settings, jobs, logs, faults, the journal of calls, quotas."""

import socket
from pathlib import Path

from moto.moto_api._internal.models import moto_api_backend

from doubles.aws.faults import Fault
from doubles.aws.jobs import Job
from doubles.aws.logs import Logs
from doubles.aws.settings import Settings
from doubles.kit import world
from doubles.sandbox import Switch


class World(world.World[Settings, Fault, Job]):
    """The account, in every region; each server has one account."""

    def __init__(self, state: Path, url: str, switch: Switch | None) -> None:
        super().__init__(state, switch, Settings, Fault)
        self.url = url
        self.container_url = url  # the URL inside a container
        self.clear()

    def clear(self) -> None:
        """Forget all state, moto's state too."""
        super().clear()
        moto_api_backend.reset()
        self.quotas: dict[str, float] = {}
        self._logs: dict[str, Logs] = {}

    def logs(self, region: str) -> Logs:
        """Return the region's CloudWatch Logs."""
        with self.lock:
            return self._logs.setdefault(region, Logs(lambda: self.settings.log_lag_s))

    def add(self, job: Job) -> bool:
        """Store the job unless its name is taken; return whether the job was stored."""
        with self.lock:
            if (job.region, job.name) in self.jobs:
                return False
            job.number = next(self._numbers)
            self.jobs[(job.region, job.name)] = job
            return True

    def job(self, name: str, region: str | None = None) -> Job | None:
        """Return the job with the name, in the region or in any region."""
        with self.lock:
            found = (job for job in self.jobs.values() if job.name == name and region in (None, job.region))
            return next(found, None)

    def port(self) -> int:
        """Return the port that clients call."""
        return int(self.url.rsplit(":", 1)[1])

    def listen_for_containers(self) -> socket.socket | None:
        """Return a further socket to serve, on the containers' network, or None without such a network."""
        if self.switch is None:
            return None
        self.container_url = f"http://{self.switch.gateway}:{self.port()}"
        return self.switch.listen(self.port())

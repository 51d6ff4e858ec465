"""A job: its request, its state, and its pending orders."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from doubles.kit import life


@dataclass(kw_only=True)
class Job(life.Job):
    """One job of the workspace."""

    ENDS = ("Completed", "Failed", "Canceled")
    CANCELLING, RUNNING = "CancelRequested", "Running"

    name: str
    body: dict[str, Any]  # as it was PUT
    status: str = "NotStarted"
    active_s: float = 0.0  # with nodes, over all attempts that have ended
    active_since: float | None = None  # start of the running attempt
    revision: int = 0
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    tags: dict[str, str] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    description: str | None = None
    compute: dict[str, Any] = field(default_factory=dict)  # vmSize, instanceCount, gpuCount, priority, region

    @property
    def properties_of_body(self) -> dict[str, Any]:
        """Return the properties of the request."""
        return self.body.get("properties") or {}

    @property
    def experiment(self) -> str:
        """Return the job's experiment."""
        return self.properties_of_body.get("experimentName") or "Default"

    @property
    def nodes(self) -> int:
        """Return the number of requested nodes."""
        return int((self.properties_of_body.get("resources") or {}).get("instanceCount") or 1)

    @property
    def folder(self) -> str:
        """Return the folder of the job's logs and artifacts, in the container of workspaceartifactstore."""
        return f"ExperimentRun/dcid.{self.name}"

    def output_uri(self, name: str) -> str:
        """Return the address of an output: from the request, else the service's default."""
        told = ((self.properties_of_body.get("outputs") or {}).get(name) or {}).get("uri")
        return told or f"azureml://datastores/workspaceblobstore/paths/azureml/{self.name}/{name}/"

    def active_now_s(self) -> float:
        """Return the seconds with nodes up to now."""
        since = self.active_since
        return self.active_s + (0.0 if since is None else time.time() - since)

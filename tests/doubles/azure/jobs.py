"""A job: its request, its state, and its pending orders."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

__all__ = ["IN_PROGRESS", "TERMINAL", "Job"]

TERMINAL = ("Completed", "Failed", "Canceled")
IN_PROGRESS = ("NotStarted", "Queued", "Preparing", "Starting", "Running", "Finalizing", "CancelRequested")


@dataclass
class Job:
    """One job; `changed` guards the mutable fields and wakes waiting threads."""

    name: str
    body: dict[str, Any]  # as it was PUT
    created: float
    number: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    orders: dict[str, dict[str, Any]] = field(default_factory=dict)  # requested and not done yet
    status: str = "NotStarted"
    history: list[tuple[str, float]] = field(default_factory=list)
    started: float | None = None  # first time Running
    ended: float | None = None
    active_s: float = 0.0  # with nodes, over all attempts that have ended
    active_since: float | None = None  # start of the running attempt
    revision: int = 0
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    attempts: int = 0
    error: dict[str, Any] | None = None
    tags: dict[str, str] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    description: str | None = None
    compute: dict[str, Any] = field(default_factory=dict)  # vmSize, instanceCount, gpuCount, priority, region
    is_archived: bool = False
    thread: threading.Thread | None = None

    @property
    def properties_of_body(self) -> dict[str, Any]:
        """Return the properties of the request."""
        asked: dict[str, Any] = self.body.get("properties") or {}
        return asked

    @property
    def experiment(self) -> str:
        """Return the job's experiment."""
        name: str = self.properties_of_body.get("experimentName") or "Default"
        return name

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

    def enter_first(self) -> None:
        """Enter the first status."""
        self.history.append((self.status, time.time()))

    def enter(self, status: str) -> None:
        """Enter the next status, unless a cancel has overtaken the status."""
        with self.changed:
            if self.status == status or self.status in TERMINAL:
                return
            if self.status == "CancelRequested" and status not in TERMINAL:
                return
            now = time.time()
            self.status = status
            self.history.append((status, now))
            if status == "Running" and self.started is None:
                self.started = now
            if status in TERMINAL:
                self.ended = now
            self.changed.notify_all()

    def order(self, name: str, **details: Any) -> None:
        """Order a change: cancel, preempt, begin, end, abandon."""
        with self.changed:
            self.orders[name] = details
            self.changed.notify_all()

    def wake(self) -> None:
        """Wake all threads that wait for a change."""
        with self.changed:
            self.changed.notify_all()

"""The base of a platform's backend: the methods call modules of the backend's folder, each imported on first use.

A dry run imports only the modules that plan and render, and every command only the modules that it calls.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    from cloudtrain.launcher.backend import (
        Capacity,
        Check,
        Chosen,
        Cursor,
        FoundAttempt,
        HostUse,
        JobRef,
        LogPage,
        Request,
        Shipment,
    )
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault
    from cloudtrain.launcher.job import State
    from cloudtrain.launcher.plan import Plan
    from cloudtrain.launcher.rehearsal.stage import Rehearsal, Stage

    from .channel.calls import Fleet

_T = TypeVar("_T")


class Adapter:
    """The methods of a backend that are calls of the duty modules, with the backend's connections."""

    FOLDER: str | None
    """The package with the duty modules."""
    SENDS = "jobs"
    """The module that sends and finds jobs."""

    @property
    def connections(self) -> Any:
        """What all calls to the platform share."""
        raise NotImplementedError

    def duty(self, module: str, function: str) -> Callable[..., _T]:
        """Return a function of a module of the backend's folder; it returns the type that the caller expects."""
        found: Callable[..., _T] = getattr(importlib.import_module(f".{module}", self.FOLDER), function)
        return found

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the GPUs and the price of an instance of the configured kind."""
        raise NotImplementedError

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        """Return the request, the same bytes for the same input."""
        return self.duty("request", "build")(plan, config, job_id, attempt, bundle_sha256)

    def check(self, request: Request) -> list[Fault]:
        """Return the faults for which the platform would refuse the request."""
        return list(self.duty("check", "faults")(request.body))

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        """Start the job."""
        return self.duty(self.SENDS, "send")(self.connections, request, shipment)

    def find(self, request: Request, home: Path) -> JobRef | None:
        """Return the job with the request's name on the platform, or None."""
        return self.duty(self.SENDS, "find")(self.connections, request, home)

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        """Return the running attempts; with a config, the attempts where the config's jobs run."""
        return self.duty(self.SENDS, "jobs")(self.connections, config, home)

    def state(self, ref: JobRef) -> State:
        """Return the platform's state of the job."""
        return self.duty("jobs", "state")(self.connections, ref)

    def stop(self, ref: JobRef, *, now: bool) -> None:
        """Ask the job to save and stop."""
        self.duty("jobs", "stop")(self.connections, ref, now=now)

    def doctor(self, config: JobConfig | None) -> list[Check]:
        """Return checks for jobs on this backend; with a config, for the config's job."""
        return self.duty("doctor", "checks")(self.connections, config)

    def rehearsal(self, request: Request, stage: Stage) -> Rehearsal:
        """Prepare the start of the job's nodes on this machine."""
        return self.duty("rehearsal", "rehearsal")(request, stage)


class HostsAdapter(Adapter):
    """A backend whose hosts are reached by ssh; holds the channels to all hosts."""

    SENDS = "jobs_send"

    def __init__(self) -> None:
        self._fleet: Fleet | None = None
        self._opening = threading.Lock()

    @property
    def connections(self) -> Fleet:
        """The channels, the same object in every thread."""
        from .channel import calls

        with self._opening:
            self._fleet = self._fleet or calls.open_fleet()
            return self._fleet

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Check that a send from here is possible. Raises ConfigError, CredentialError, UnreachableError."""
        self.duty(self.SENDS, "ready")(self.connections, request)

    def logs(self, ref: JobRef, cursor: Cursor | None, ranks: Chosen = None, *, now: bool = False) -> LogPage:
        """Return the lines after the cursor."""
        return self.duty("jobs", "logs")(self.connections, ref, cursor, ranks, now=now)

    def logs_with(
        self, pattern: str, ref: JobRef, cursor: Cursor | None, ranks: Chosen, *, now: bool = False
    ) -> LogPage:
        """Return the lines after the cursor that may match the pattern."""
        return self.duty("jobs", "logs")(self.connections, ref, cursor, ranks, now=now, pattern=pattern)

    def logs_from(self, ref: JobRef, ranks: Chosen, *, lines: int | None, since_s: float | None) -> Cursor | None:
        """Return a cursor before each file's last lines, or before the lines written since the time."""
        return self.duty("jobs", "logs_from")(self.connections, ref, ranks, lines=lines, since_s=since_s)

    def shell(self, ref: JobRef, node: int, argv: list[str]) -> list[str]:
        """Return the command that runs `argv`, or a shell if `argv` is empty, where the node's ranks run."""
        return self.duty("jobs", "shell")(self.connections, ref, node, argv)

    def doctor(self, config: JobConfig | None) -> list[Check]:
        """Return checks for jobs on this backend; with a config, for the config's job."""
        return self.duty("doctor", "checks")(self.connections, config, self._trial)

    def hosts(self, config: JobConfig) -> list[HostUse]:
        """Return the use of each GPU of the config's machines."""
        return self.duty("doctor", "hosts")(self.connections, config)

    def _trial(self, config: JobConfig) -> Request:
        """Return the config's request for a job name that no job has."""
        from cloudtrain.launcher.planning import planner

        return self.request(planner.make(config, self.capacity(config)), config, f"{config.name}-dddddddd", 1, "")

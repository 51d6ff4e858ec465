"""The base of a platform's backend: the methods call modules of the backend's folder, each imported on first use.

A dry run imports only the modules that plan and render, and every command only the modules that it calls.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from cloudtrain.launcher.backend import Backend, Cleans, HasCheckpoints, Lists, Machines, Ready, Seekable

if TYPE_CHECKING:
    from cloudtrain.launcher.backend import Capacity, Check, Chosen, Cursor, JobRef, LogPage, Request
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault
    from cloudtrain.launcher.rehearsal.stage import Rehearsal, Stage

    from .channel.calls import Fleet

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def handed(method: _Method, module: str, function: str = "", *, is_pure: bool = False) -> _Method:
    """Return the protocol's method as a call of a function of the same arguments in a module of the backend's folder.

    The function's name is the method's, unless `function` is given. The backend's connections come first, except in a
    pure function.
    """

    @functools.wraps(method)
    def call(self: Adapter, *given: Any, **named: Any) -> Any:
        shared = () if is_pure else (self.connections,)
        return self.duty(module, function or method.__name__)(*shared, *given, **named)

    return call  # type: ignore[return-value]


class Adapter:
    """The methods of a backend that are calls of the duty modules, with the backend's connections."""

    FOLDER: str | None
    """The package with the duty modules."""

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

    request = handed(Backend.request, "request", "build", is_pure=True)
    send = handed(Backend.send, "jobs")
    find = handed(Backend.find, "jobs")
    jobs = handed(Lists.jobs, "jobs")
    state = handed(Backend.state, "jobs")
    stop = handed(Backend.stop, "jobs")
    doctor = handed(Backend.doctor, "doctor", "checks")

    def check(self, request: Request) -> list[Fault]:
        """Return the faults for which the platform would refuse the request."""
        return list(self.duty("check", "faults")(request.body))

    def rehearsal(self, request: Request, stage: Stage) -> Rehearsal:
        """Prepare the start of the job's nodes on this machine."""
        return self.duty("rehearsal", "rehearsal")(request, stage)


class HostsAdapter(Adapter):
    """A backend whose hosts are reached by ssh; holds the channels to all hosts."""

    ready = handed(Ready.ready, "jobs_send")
    send = handed(Backend.send, "jobs_send")
    find = handed(Backend.find, "jobs_send")
    jobs = handed(Lists.jobs, "jobs_send")
    logs = handed(Backend.logs, "jobs")
    logs_from = handed(Seekable.logs_from, "jobs")
    artifacts = handed(Backend.artifacts, "jobs")
    checkpoints = handed(HasCheckpoints.checkpoints, "jobs")
    saved = handed(HasCheckpoints.saved, "jobs")
    shell = handed(Machines.shell, "jobs")
    hosts = handed(Machines.hosts, "doctor")
    held = handed(Machines.held, "doctor")
    left = handed(Cleans.left, "jobs")

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

    def logs_with(
        self, pattern: str, ref: JobRef, cursor: Cursor | None, ranks: Chosen, *, now: bool = False
    ) -> LogPage:
        """Return the lines after the cursor that may match the pattern."""
        return self.duty("jobs", "logs")(self.connections, ref, cursor, ranks, now=now, pattern=pattern)

    def doctor(self, config: JobConfig | None) -> list[Check]:
        """Return checks for jobs on this backend; with a config, for the config's job."""
        return self.duty("doctor", "checks")(self.connections, config, self._trial)

    def _trial(self, config: JobConfig) -> Request:
        """Return the config's request for a job name that no job has."""
        from cloudtrain.launcher.planning import planner

        plan = planner.make(config, self.capacity(config))
        return self.duty("request", "build")(plan, config, f"{config.name}-dddddddd", 1, "")

"""Backends: the interface, `Backend`, a protocol for each ability that only some backends have, and how to load one.

The launcher asks for an ability with `isinstance(backend, Priced)`. The table in launcher/backend_table.py names a
backend's class, which is imported on first use; a process has one object of each backend, which holds the backend's
connections and caches. The values that pass between the launcher and a backend are in values.py.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cloudtrain.entrypoints.terms import Terms

from ..backend_table import BUILT_IN, class_of, names, similar
from ..errors import ConfigError, Fault
from .values import (
    Bundle,
    Capacity,
    Check,
    DamagedRecordError,
    FoundAttempt,
    HostUse,
    JobRef,
    LogLine,
    LogPage,
    Pace,
    PushedModel,
    PushOutcome,
    Request,
    Sending,
    ServedModel,
    ServingFiles,
    Shipment,
    StoredRecord,
    nodes_of,
    unasked,
)

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..job import State
    from ..metering.rate import Quote
    from ..plan import Plan

__all__ = [
    "BUILT_IN",
    "Backend",
    "Bundle",
    "Capacity",
    "Check",
    "DamagedRecordError",
    "FoundAttempt",
    "HasCheckpoints",
    "KnowsShapes",
    "HostUse",
    "JobRef",
    "Lists",
    "LogLine",
    "LogPage",
    "Machines",
    "Pace",
    "Priced",
    "PushOutcome",
    "PushedModel",
    "Ready",
    "ReceivesModels",
    "Request",
    "Seekable",
    "Sending",
    "ServedModel",
    "Serves",
    "ServingFiles",
    "Shipment",
    "Sought",
    "StoredRecord",
    "Terms",
    "load",
    "names",
    "nodes_of",
    "similar",
    "unasked",
]


class Backend(Protocol):
    """The methods of every backend. `request` and `check` are pure: no network, no SDK, no clock."""

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the GPUs and the price of an instance of the configured kind."""

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        """Return the request, the same bytes for the same input."""

    def check(self, request: Request) -> list[Fault]:
        """Return the faults for which the vendor would refuse the request."""

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        """Start the job. Raises CredentialError, CapacityError, UnreachableError, ConfigError."""

    def find(self, request: Request, home: Path) -> JobRef | None:
        """Return the job with the request's name on the platform, or None.

        After None, a send still in progress can no longer start the job, if the platform can refuse a late send.
        """

    def state(self, ref: JobRef) -> State:
        """Return the platform's state of the job. Raises UnreachableError."""

    def logs(
        self, ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
    ) -> LogPage:
        """Return the lines after the cursor, at most a page, in each stream's own order.

        With `ranks` only the ranks' lines, without the nodes' own messages. `now`: no line is held back for earlier
        lines of further nodes, which may come later.
        """

    def pace(self, ref: JobRef) -> Pace:
        """Return the poll intervals for the job."""

    def stop(self, ref: JobRef, *, now: bool) -> None:
        """Ask the job to save and stop; `now` does not wait for the save. Returns at once."""

    def doctor(self, config: JobConfig | None) -> list[Check]:
        """Return checks for jobs on this backend; with a config, for the config's job."""

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Copy the job's output files below `folder`; return the copied files."""


@runtime_checkable
class Ready(Protocol):
    """A backend that knows, before the job is journalled, whether a send from here is possible."""

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Check the libraries and the credentials. Raises ConfigError, CredentialError, UnreachableError."""


@runtime_checkable
class Sought(Protocol):
    """A backend whose jobs the vendor's own tools show."""

    def where_to_look(self, request: Request) -> str:
        """Return the vendor's command that shows whether the request's job exists."""


@runtime_checkable
class Lists(Protocol):
    """A backend that finds running jobs without the registry."""

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        """Return the running attempts; with a config, the attempts where the config's jobs run. Changes no state.

        Raises CredentialError, ConfigError, UnreachableError if the platform cannot be asked.
        """


@runtime_checkable
class HasCheckpoints(Protocol):
    """A backend that can fetch the files that a job has kept or saved."""

    def checkpoints(self, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
        """Copy the job's checkpoint folder, or the folder `inner` in it, below `folder`; return the files there."""

    def checkpoint_place(self, ref: JobRef) -> str | None:
        """Return the checkpoint folder's uri or path, for `inputs` of a later job; None outside the storage."""


@runtime_checkable
class KnowsShapes(Protocol):
    """A backend that reads the headers of a job's saved weights, and no weights."""

    def saved_shapes(self, ref: JobRef, *, averaged: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes by name, of the average if wanted and kept. Raises CloudtrainError, OSError, ValueError."""


@runtime_checkable
class Machines(Protocol):
    """A backend whose machines exist before the job, and can be entered."""

    def shell(self, ref: JobRef, node: int, argv: list[str]) -> list[str]:
        """Return the command that runs `argv`, or a shell if `argv` is empty, where the node's ranks run."""

    def hosts(self, config: JobConfig) -> list[HostUse]:
        """Return the use of each GPU of the config's machines."""


@runtime_checkable
class ReceivesModels(Protocol):
    """A backend whose machines keep model folders for servers."""

    def push_model(
        self, config: JobConfig | None, hosts: Sequence[str], place: str, model: PushedModel, *, replaces: bool
    ) -> dict[str, PushOutcome]:
        """Bring the model to the folder `place` of each host; return the outcome by host.

        Without `replaces`, a host whose current model has a different name refuses.
        """

    def restore_model(self, config: JobConfig | None, hosts: Sequence[str], place: str) -> dict[str, PushOutcome]:
        """Make the version before the current one current; return the outcome by host."""


@runtime_checkable
class Priced(Protocol):
    """A backend whose vendor publishes the prices of machines."""

    def price_region(self, config: JobConfig | None) -> str | None:
        """Return the region for prices: the config's, else the environment's; None if unknown."""

    def quotes(self, config: JobConfig | None, region: str, types: tuple[str, ...]) -> list[Quote]:
        """Return the vendor's prices of the types; without types, of all useful types, with the job's type.

        A type that the vendor does not list gets a quote without a price, with the reason. Raises CredentialError,
        ConfigError, UnreachableError if the list as a whole cannot be read.
        """


@runtime_checkable
class Seekable(Protocol):
    """A backend that finds the end of a long log without reading the lines before."""

    def logs_from(
        self, ref: JobRef, ranks: frozenset[int] | None, *, lines: int | None, since_s: float | None
    ) -> dict[str, Any] | None:
        """Return a cursor for `logs` before each stream's last `lines`, or before its lines since `since_s`.

        The cursor may be too early, never too late; None is the beginning. Raises UnreachableError.
        """


@runtime_checkable
class Serves(Protocol):
    """A backend whose vendor's own command line starts an endpoint from files."""

    def serving(self, model: ServedModel, config: JobConfig) -> ServingFiles:
        """Return the files for a model with the settings of the config; pure. Raises ConfigError for a wrong value."""


_making = threading.Lock()


def load(name: str) -> Backend:
    """Return the process's object of a backend, made on first use. Raises ConfigError for an unknown name."""
    path = class_of(name)
    if path is None:
        raise ConfigError([Fault(f"unknown backend `{name}`", "backend", hint=similar(name))])
    with _making:
        return _made(path)


@functools.cache
def _made(path: str) -> Backend:
    module, _, kind = path.partition(":")
    backend: Backend = getattr(importlib.import_module(module), kind)()
    return backend

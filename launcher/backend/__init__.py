"""Backends: the values that pass between the launcher and a backend, and how to load a backend by name.

A backend is an object with the methods of `Backend` (protocol.py). The table in launcher/backend_table.py names the
class, which is imported on first use; a process has one object of each backend, which holds the backend's connections
and caches.
"""

from __future__ import annotations

import functools
import importlib
import threading

from cloudtrain.entrypoints.terms import Terms

from ..backend_table import BUILT_IN, class_of, names, similar
from ..errors import ConfigError, Fault
from .protocol import (
    Backend,
    HasCheckpoints,
    KnowsShapes,
    Lists,
    Machines,
    Priced,
    Ready,
    ReceivesModels,
    Seekable,
    Serves,
    Sought,
)
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

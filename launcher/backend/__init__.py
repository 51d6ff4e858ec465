"""The interface of a backend, the values that pass, and how to load a backend by name.

A backend is an object with the methods of `Backend`. The table in launcher/backend_table.py names the class, which is
imported on first use; a process has one object of each backend, which holds the backend's connections and caches.
"""

from __future__ import annotations

import functools
import importlib
import threading

from cloudtrain.launcher.backend.protocol import (
    Backend,
    HasCheckpoints,
    Invoiced,
    Lists,
    Machines,
    Priced,
    Ready,
    Seekable,
    Sought,
)
from cloudtrain.launcher.backend.values import (
    Bundle,
    Capacity,
    Check,
    DamagedRecordError,
    FoundAttempt,
    HostUse,
    Invoice,
    JobRef,
    LogLine,
    LogPage,
    Pace,
    Request,
    Sending,
    Shipment,
    StoredRecord,
    Terms,
    nodes_of,
    unasked,
)
from cloudtrain.launcher.backend_table import BUILT_IN, class_of, names, similar
from cloudtrain.launcher.errors import ConfigError, Fault

__all__ = [
    "BUILT_IN",
    "Backend",
    "Bundle",
    "Capacity",
    "Check",
    "DamagedRecordError",
    "FoundAttempt",
    "HasCheckpoints",
    "HostUse",
    "Invoice",
    "Invoiced",
    "JobRef",
    "Lists",
    "LogLine",
    "LogPage",
    "Machines",
    "Pace",
    "Priced",
    "Ready",
    "Request",
    "Seekable",
    "Sending",
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

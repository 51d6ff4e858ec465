"""Faults of calls, set by a test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from doubles.google.errors import CODES, GoogleError, code_of

__all__ = ["KINDS", "Called", "Fault", "Faults"]

KINDS = ("drop", "lost", "late", "hang", "slow", "cut", *list(CODES)[1:], "400", "401", "403", "404", "409", "412")
KINDS += ("429", "500", "502", "503", "504")
_COUNTED = ("seen", "hits")
_MESSAGES = {
    "RESOURCE_EXHAUSTED": "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute' of service.",
    "UNAVAILABLE": "The service is currently unavailable.",
    "DEADLINE_EXCEEDED": "Deadline expired before operation could complete.",
    "INTERNAL": "Internal error encountered.",
    "UNAUTHENTICATED": "Request had invalid authentication credentials. Expected OAuth 2 access token.",
    "PERMISSION_DENIED": "The caller does not have permission",
}


@dataclass(frozen=True)
class Called:
    """The properties of a call that faults depend on."""

    operation: str
    protocol: str  # "rest" or "grpc"
    is_from_container: bool


@dataclass
class Fault:
    """A fault. A code ("503", "UNAVAILABLE") is answered and nothing executed, in both protocols.

    `drop` breaks the connection off, nothing executed; `lost` executes first; `late` breaks the connection off and
    executes `delay_s` later; `hang` never answers, until faults are cleared or the client has gone; `slow` answers
    after `delay_s`; `cut` breaks off in the middle of the answer's body (REST alone).
    """

    operations: list[str]  # "jobs.create", "storage.*", "*"
    kind: str
    count: int | None = None  # number of hits; None: until cleared
    every: int = 1  # only every n-th matching call
    after: int = 0  # calls let through first
    delay_s: float = 0.0
    message: str = ""
    protocol: str | None = None  # only "rest" or only "grpc"
    retry_after: str | None = None  # the header; Google sends none
    containers: bool = False  # whether calls from inside containers are hit, too
    seen: int = 0
    hits: int = 0

    def error(self) -> GoogleError | None:
        """Return the error to answer in place of executing, or None."""
        if self.kind in ("drop", "lost", "late", "hang", "slow", "cut"):
            return None
        status = int(self.kind) if self.kind.isdigit() else None
        code = self.kind if status is None else code_of(status)
        headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
        return GoogleError(code, self.message or _MESSAGES.get(code, code), status=status, headers=headers)


class Faults:
    """All active faults, in the order of their setting; the first that fires decides."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._faults: list[Fault] = []
        self._clears = 0

    def add(self, asked: dict[str, Any]) -> None:
        """Add a fault. Raises ValueError for an unknown kind or field."""
        names = {field.name for field in fields(Fault)} - set(_COUNTED)
        if asked.get("kind") not in KINDS or not set(asked) <= names:
            raise ValueError(f"a fault has {sorted(names)}, and kind is one of {KINDS}")
        with self._changed:
            self._faults.append(Fault(**asked))

    def clear(self) -> None:
        """Remove all faults, and end the calls that hang."""
        with self._changed:
            self._faults.clear()
            self._clears += 1
            self._changed.notify_all()

    def take(self, call: Called) -> Fault | None:
        """Return the fault that hits the call, and count the hit."""
        with self._changed:
            return next((fault for fault in self._faults if _fires(fault, call)), None)

    def hold(self, is_gone: Callable[[], bool]) -> None:
        """Return when faults are cleared or the client has gone."""
        with self._changed:
            clears = self._clears
            while self._clears == clears and not is_gone():
                self._changed.wait(0.1)


def _fires(fault: Fault, call: Called) -> bool:
    if not any(fnmatchcase(call.operation, name) for name in fault.operations):
        return False
    if call.is_from_container and not fault.containers:
        return False
    if fault.protocol not in (None, call.protocol):
        return False
    if fault.count is not None and fault.hits >= fault.count:
        return False
    fault.seen += 1
    if fault.seen <= fault.after or (fault.seen - fault.after) % fault.every:
        return False
    fault.hits += 1
    return True

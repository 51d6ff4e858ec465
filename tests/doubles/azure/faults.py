"""Faults of calls, set by a test."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from doubles.azure.errors import AzureError

__all__ = ["KINDS", "Fault", "Faults", "Called"]

KINDS = ("throttle", "500", "503", "drop", "lost", "cut", "expired", "sas_expired", "error", "slow")
_COUNTED = ("seen", "hits", "token_serial", "sas_serial")


@dataclass(frozen=True)
class Called:
    """The properties of a call that faults depend on."""

    operation: str
    is_from_container: bool
    token_serial: int | None  # None: no token
    sas_serial: int | None  # None: no signature; 0: a signature of unknown origin


@dataclass
class Fault:
    """A fault. `throttle`, `500`, `503`, `error` answer an error and execute nothing.

    `drop` closes the connection without an answer and executes nothing; `lost` executes, then closes it; `cut` closes
    it in the middle of the answer's body. `slow` answers after `delay_s`. `expired` answers 401 to tokens issued before
    the fault was set, `sas_expired` 403 to signatures issued before; newer credentials work.
    """

    operations: list[str]  # "jobs.put", "blob.*", "*"
    kind: str
    count: int | None = None  # number of hits; None: until cleared
    every: int = 1  # only every n-th matching call
    after: int = 0  # calls let through first
    code: str = ""
    message: str = ""
    status: int = 400
    delay_s: float = 0.0
    retry_after: str | None = "1"  # the header with throttle and 503; None: no header
    containers: bool = False  # whether calls from inside containers are hit, too
    seen: int = 0
    hits: int = 0
    token_serial: int = 0
    sas_serial: int = 0

    def error(self, service: str) -> AzureError | None:
        """Return the error to answer in place of executing, or None."""
        wait = {} if self.retry_after is None else {"Retry-After": self.retry_after}
        if self.kind == "throttle":
            code = "ServerBusy" if service == "blob" else "TooManyRequests"
            return AzureError(503 if service == "blob" else 429, code, "Too many requests. Retry later.", wait)
        if self.kind == "503":
            return AzureError(503, "ServerBusy", "The server is currently unable to receive requests.", wait)
        if self.kind == "500":
            code = "InternalError" if service == "blob" else "InternalServerError"
            return AzureError(500, code, "The server encountered an internal error. Please retry the request.")
        if self.kind == "expired":
            message = "The access token expiry UTC time is earlier than current UTC time."
            return AzureError(401, "ExpiredAuthenticationToken", message, {"WWW-Authenticate": "Bearer"})
        if self.kind == "sas_expired":
            message = "Server failed to authenticate the request. Signature not valid in the specified time frame."
            return AzureError(403, "AuthenticationFailed", message)
        if self.kind == "error":
            return AzureError(self.status, self.code, self.message, wait if self.status == 429 else {})
        return None


class Faults:
    """All active faults, in the order of their setting; the first that fires decides."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, asked: dict[str, Any], token_serial: int, sas_serial: int) -> None:
        """Add a fault. Raises ValueError for an unknown kind or field."""
        names = {field.name for field in fields(Fault)} - set(_COUNTED)
        if asked.get("kind") not in KINDS or not set(asked) <= names:
            raise ValueError(f"a fault has {sorted(names)}, and kind is one of {KINDS}")
        with self._lock:
            self._faults.append(Fault(**asked, token_serial=token_serial, sas_serial=sas_serial))

    def clear(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()

    def take(self, call: Called) -> Fault | None:
        """Return the fault that hits the call, and count the hit."""
        with self._lock:
            return next((fault for fault in self._faults if _fires(fault, call)), None)


def _fires(fault: Fault, call: Called) -> bool:
    if not any(fnmatchcase(call.operation, name) for name in fault.operations):
        return False
    if call.is_from_container and not fault.containers:
        return False
    if fault.kind == "expired" and (call.token_serial is None or call.token_serial > fault.token_serial):
        return False
    if fault.kind == "sas_expired" and (call.sas_serial is None or call.sas_serial > fault.sas_serial):
        return False
    if fault.count is not None and fault.hits >= fault.count:
        return False
    fault.seen += 1
    if fault.seen <= fault.after or (fault.seen - fault.after) % fault.every:
        return False
    fault.hits += 1
    return True

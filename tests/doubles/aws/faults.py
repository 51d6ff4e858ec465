"""Faults of calls, set by a test."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Any

from doubles.aws.wire import AwsError, Call

__all__ = ["KINDS", "Fault", "Faults"]

KINDS = ("throttle", "500", "drop", "lost", "expired", "empty", "error", "slow")


@dataclass
class Fault:
    """A fault. `throttle`, `500`, `error` and `expired` answer an error and execute nothing.

    `drop` closes the connection without an answer and executes nothing; `lost` executes, then closes the connection.
    `empty` makes a page of GetLogEvents empty, with a new token. `slow` answers after `delay_s`. `expired` holds for
    the first caller's access key only: calls with different credentials succeed.
    """

    operations: list[str]  # "CreateTrainingJob", "sagemaker:CreateTrainingJob", "sagemaker:*" or "*"
    kind: str
    count: int | None = None  # number of hits; None: until cleared
    every: int = 1  # only every n-th matching call
    after: int = 0  # calls let through first
    code: str = ""
    message: str = ""
    status: int = 400
    delay_s: float = 0.0
    containers: bool = False  # whether calls from inside containers are hit, too
    seen: int = 0
    hits: int = 0
    access_key: str | None = None

    def error(self, call: Call) -> AwsError | None:
        """Return the error to answer in place of executing, or None."""
        s3 = call.protocol == "s3"
        if self.kind == "throttle":
            if s3:
                return AwsError("SlowDown", "Please reduce your request rate.", 503)
            return AwsError("ThrottlingException", "Rate exceeded")
        if self.kind == "500":
            return AwsError("InternalError" if s3 else "InternalFailure", "We encountered an internal error.", 500)
        if self.kind == "expired":
            code = "ExpiredTokenException" if call.protocol == "json" else "ExpiredToken"
            status = 403 if call.protocol == "query" else 400
            return AwsError(code, "The security token included in the request is expired", status)
        return AwsError(self.code, self.message, self.status) if self.kind == "error" else None


class Faults:
    """All active faults, in the order of their setting; the first that fires decides."""

    def __init__(self, container_key: str) -> None:
        self._container_key = container_key
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, asked: dict[str, Any]) -> None:
        """Add a fault. Raises ValueError for an unknown kind or field."""
        names = {field.name for field in fields(Fault)} - {"seen", "hits", "access_key"}
        if asked.get("kind") not in KINDS or not set(asked) <= names:
            raise ValueError(f"a fault has {sorted(names)}, and kind is one of {KINDS}")
        with self._lock:
            self._faults.append(Fault(**asked))

    def clear(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()

    def take(self, call: Call) -> Fault | None:
        """Return the fault that hits the call, and count the hit."""
        with self._lock:
            return next((fault for fault in self._faults if self._fires(fault, call)), None)

    def _fires(self, fault: Fault, call: Call) -> bool:
        names = {call.operation, f"{call.service}:{call.operation}", f"{call.service}:*", "*"}
        if not names & set(fault.operations) or (call.access_key == self._container_key and not fault.containers):
            return False
        if fault.kind == "expired" and (fault.access_key or call.access_key) != call.access_key:
            return False
        if fault.count is not None and fault.hits >= fault.count:
            return False
        fault.seen += 1
        if fault.seen <= fault.after or (fault.seen - fault.after) % fault.every:
            return False
        fault.hits += 1
        fault.access_key = call.access_key
        return True

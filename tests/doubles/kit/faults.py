"""Faults of calls, set by a test."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Generic, TypeVar


@dataclass
class Fault:
    """The base of a cloud's fault, with the properties that are common to all kinds."""

    KINDS: ClassVar[tuple[str, ...]] = ()
    operations: list[str]  # names or patterns, for example "jobs.put", "blob.*", "*"
    kind: str
    count: int | None = None  # number of hits; None: until cleared
    every: int = 1  # only every n-th matching call
    after: int = 0  # calls let through first
    delay_s: float = 0.0
    message: str = ""
    containers: bool = False  # whether calls from inside containers are hit, too
    seen: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)

    def concerns(self, call: Any) -> bool:
        """Return whether the fault may hit the call, which has `names` and `is_from_container`."""
        if call.is_from_container and not self.containers:
            return False
        return any(fnmatchcase(name, pattern) for name in call.names for pattern in self.operations)

    def fires(self, call: Any) -> bool:
        """Return whether the fault hits the call, and count the call."""
        if not self.concerns(call) or (self.count is not None and self.hits >= self.count):
            return False
        self.seen += 1
        if self.seen <= self.after or (self.seen - self.after) % self.every:
            return False
        self.hits += 1
        return True


FaultT = TypeVar("FaultT", bound=Fault)


class Faults(Generic[FaultT]):
    """All active faults, in the order of their setting; the first that fires decides."""

    def __init__(self, kind: type[FaultT]) -> None:
        self._kind = kind
        self._changed = threading.Condition()
        self._faults: list[FaultT] = []
        self._clears = 0

    def add(self, asked: dict[str, Any], **marks: int) -> None:
        """Add a fault; `marks` are fields that a test cannot set. Raises ValueError for an unknown kind or field."""
        names = {field.name for field in fields(self._kind) if field.init}
        if asked.get("kind") not in self._kind.KINDS or not set(asked) <= names:
            raise ValueError(f"a fault has {sorted(names)}, and kind is one of {self._kind.KINDS}")
        fault = self._kind(**asked)
        for name, value in marks.items():
            setattr(fault, name, value)
        with self._changed:
            self._faults.append(fault)

    def clear(self) -> None:
        """Remove all faults, and end the calls that hang."""
        with self._changed:
            self._faults.clear()
            self._clears += 1
            self._changed.notify_all()

    def take(self, call: Any) -> FaultT | None:
        """Return the fault that hits the call, and count the hit."""
        with self._changed:
            return next((fault for fault in self._faults if fault.fires(call)), None)

    def hold(self, is_gone: Callable[[], bool]) -> None:
        """Return when faults are cleared or the client has gone."""
        with self._changed:
            clears = self._clears
            while self._clears == clears and not is_gone():
                self._changed.wait(0.1)

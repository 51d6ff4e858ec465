"""The steps of every call in both protocols: the journal, faults, and authorization."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from doubles.google.errors import GoogleError, code_of
from doubles.google.faults import Fault
from doubles.google.names import PROJECT, SERVICE_ACCOUNT
from doubles.google.objects import missing_right
from doubles.wire import HangUp

if TYPE_CHECKING:
    from doubles.google.world import World

UNSERVED = "unserved"
OPEN = ("token", "metadata", "locations", UNSERVED)  # without authorization
PERMISSIONS = {
    "jobs": "aiplatform.customJobs",
    "storage": "storage.objects",
    "logging": "logging.logEntries",
    "secrets": "secretmanager.versions",
}
# The fields of a call that the journal has under the same names.
JOURNALLED = ("service", "operation", "protocol", "host", "method", "path", "range", "is_from_container", "received")

Result = TypeVar("Result")


@dataclass
class Call:
    """One call; `entry` is its entry in the journal."""

    service: str
    operation: str
    protocol: str  # "rest" or "grpc"
    host: str
    method: str
    path: str
    authorization: str
    is_from_container: bool
    received: int
    range: str | None = None
    told: Any = None  # the request's body, for the journal
    query: dict[str, str] = field(default_factory=dict)
    is_gone: Callable[[], bool] = lambda: False
    entry: dict[str, Any] = field(default_factory=dict)
    is_cut: bool = False  # whether the answer must break off

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names for faults."""
        return (self.operation,)


def passed(world: World, call: Call, execute: Callable[[], Result]) -> Result:
    """Return the result of `execute`. Raises GoogleError for an error, HangUp if the connection must end."""
    query = {name: value for name, value in call.query.items() if name != "key"}
    call.entry |= {name: getattr(call, name) for name in JOURNALLED}
    call.entry |= {"query": query, "body": call.told, "time": time.time(), "sent": 0, "status": None, "outcome": "ok"}
    world.journal.append(call.entry)
    fault = world.faults.take(call)
    if fault is not None:
        call.entry["outcome"] = fault.kind
    try:
        result = _executed(world, call, fault, execute)
    except GoogleError as error:
        call.entry |= {"status": error.status, "outcome": call.entry["outcome"] if fault else error.code}
        if fault is not None and fault.kind == "lost":
            raise HangUp("on purpose") from None
        raise
    call.entry["status"] = getattr(result, "status", 200)
    if call.entry["status"] >= 300 and fault is None:
        call.entry["outcome"] = code_of(call.entry["status"])
    if fault is not None and fault.kind == "lost":
        raise HangUp("on purpose")
    call.is_cut = fault is not None and fault.kind == "cut"
    return result


def _executed(world: World, call: Call, fault: Fault | None, execute: Callable[[], Result]) -> Result:
    if fault is not None:
        error = fault.error()
        if error is not None:
            raise error
        if fault.kind == "drop":
            raise HangUp("on purpose")
        if fault.kind == "hang":
            world.faults.hold(call.is_gone)
            raise HangUp("on purpose")
        if fault.kind == "late":
            _authorize(world, call)
            world.later(fault.delay_s, execute)
            raise HangUp("on purpose")
        time.sleep(fault.delay_s)
    _authorize(world, call)
    return execute()


def _authorize(world: World, call: Call) -> None:
    if call.operation.partition(".")[0] in OPEN:
        return
    email = world.tokens.check(call.authorization, call.service)
    if not call.is_from_container and any(fnmatchcase(call.operation, one) for one in world.settings.denied):
        raise _forbidden(call, email)


def _forbidden(call: Call, email: str) -> GoogleError:
    kind, _, verb = call.operation.partition(".")
    permission = f"{PERMISSIONS.get(kind, f'{call.service}.{kind}')}.{'create' if verb == 'insert' else verb}"
    if call.service == "storage":
        return missing_right(permission, "object", email or SERVICE_ACCOUNT)
    resource = f"//{call.service}.googleapis.com/projects/{PROJECT}"
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "IAM_PERMISSION_DENIED",
        "domain": f"{call.service}.googleapis.com",
        "metadata": {"permission": permission, "resource": resource.removeprefix("//")},
    }
    message = f"Permission '{permission}' denied on resource '{resource}' (or it may not exist)."
    return GoogleError("PERMISSION_DENIED", message, [info])

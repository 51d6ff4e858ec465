"""Every served operation of Vertex AI, in both protocols; the request's message class defines how JSON is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from google.cloud.aiplatform_v1 import types
from google.protobuf import json_format

from doubles.google import jobservice
from doubles.google.calls import Call
from doubles.google.errors import GoogleError, invalid
from doubles.wire import Answer, BadJson, Request, json_answer

if TYPE_CHECKING:
    from doubles.google.world import World

__all__ = ["OPERATIONS", "Operation", "answer"]

_PLACE = "projects/[^/]+/locations/[^/]+"
_SYSTEM = ("$alt", "alt", "key", "fields", "prettyPrint", "quotaUser", "$prettyPrint", "$.xgafv")
_UNKNOWN = re.compile(r'has no field named "(?P<name>[^"]+)" at "(?P<at>[^"]*)"')


class Operation(NamedTuple):
    """One operation: its function has (world, call, request)."""

    name: str
    grpc: str
    request: Any  # message class, protobuf's own
    method: str
    pattern: str
    function: Callable[..., Any]
    body: str | None = None  # field that receives the JSON body


_JOB = rf"/v1/(?P<name>{_PLACE}/customJobs/[^/:]+)"
_JOBS = rf"/v1/(?P<parent>{_PLACE})/customJobs"
_POOL = rf"/v1/(?P<name>{_PLACE}/persistentResources/[^/:]+)"


def _operation(name: str, rpc: str, *rest: Any) -> Operation:
    """Return an operation by its gRPC service and method; `rest` are the fields from `method` on."""
    request = getattr(types, f"{rpc.partition('/')[2]}Request")
    return Operation(name, f"/google.cloud.aiplatform.v1.{rpc}", request.pb(), *rest)


OPERATIONS = [
    _operation("jobs.create", "JobService/CreateCustomJob", "POST", _JOBS, jobservice.create, "customJob"),
    _operation("jobs.list", "JobService/ListCustomJobs", "GET", _JOBS, jobservice.list_all),
    _operation("jobs.get", "JobService/GetCustomJob", "GET", _JOB, jobservice.get),
    _operation("jobs.cancel", "JobService/CancelCustomJob", "POST", f"{_JOB}:cancel", jobservice.cancel),
    _operation("jobs.delete", "JobService/DeleteCustomJob", "DELETE", _JOB, jobservice.delete),
    _operation(
        "resources.get", "PersistentResourceService/GetPersistentResource", "GET", _POOL, jobservice.get_resource
    ),
]


def answer(world: World, call: Call, operation: Operation, request: Request, groups: dict[str, str]) -> Answer:
    """Answer a REST request. Raises GoogleError."""
    told: dict[str, Any] = {name: value for name, value in request.query.items() if name not in _SYSTEM}
    told |= groups
    try:
        content = request.json() if request.body else {}
    except BadJson as error:
        raise invalid(f"Invalid JSON payload received. {error}") from None
    if operation.body is not None:
        told[operation.body] = content
    else:
        told |= content
    parsed = operation.request()
    try:
        json_format.ParseDict(told, parsed)
    except json_format.ParseError as error:
        raise _unreadable(str(error), operation.body) from None
    result = operation.function(world, call, parsed)
    is_by_number = "enum-encoding=int" in request.query.get("$alt", "")
    return json_answer(json.loads(json_format.MessageToJson(result, use_integers_for_enums=is_by_number)))


def _unreadable(text: str, body: str | None) -> GoogleError:
    """Return the service's error for the parser's message."""
    found = _UNKNOWN.search(text)
    if found is None:
        message = f"Invalid value: {text}"
    else:
        place = ".".join(re.sub(r"(?<!^)([A-Z])", r"_\1", part).lower() for part in found["at"].split(".")[1:])
        at = f" at '{place}'" if place else ""
        message = f'Invalid JSON payload received. Unknown name "{found["name"]}"{at}: Cannot find field.'
    violation = {"field": "" if body is None else body, "description": message}
    details = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}
    return invalid(message, [details])

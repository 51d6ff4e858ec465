"""Finds the operation of a REST request and answers the request; the same operations of Vertex AI as gRPC methods.

The request's message class defines how the JSON of an operation of Vertex AI is read.
"""

import json
import re
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from google.cloud.aiplatform_v1 import types
from google.protobuf import json_format

from doubles.google import accounts, billing, jobservice, logs, secretmanager
from doubles.google.calls import UNSERVED, Call, passed
from doubles.google.errors import GoogleError, error_answer, invalid
from doubles.google.grpcserver import Method
from doubles.google.world import World
from doubles.kit.differences import ANSWER
from doubles.kit.routing import Route, find
from doubles.wire import Answer, BadJson, HangUp, Request, json_answer

SERVICES = {
    "logging.googleapis.com": "logging",
    "storage.googleapis.com": "storage",
    "www.googleapis.com": "storage",
    "secretmanager.googleapis.com": "secretmanager",
    "cloudbilling.googleapis.com": "cloudbilling",
    "oauth2.googleapis.com": "oauth2",
    "iamcredentials.googleapis.com": "iamcredentials",
}
_AIPLATFORM = re.compile(r"([a-z]+-[a-z]+\d+-)?aiplatform\.googleapis\.com")
_ROUTES: dict[str, list[Route]] = {
    "logging": logs.ROUTES,
    "secretmanager": secretmanager.ROUTES,
    "cloudbilling": billing.ROUTES,
    "oauth2": accounts.ROUTES,
    "iamcredentials": accounts.LOCATIONS,
}
_SHOWN = ("aiplatform", "logging")  # services whose bodies the journal keeps: small, without secrets
_PLACE = "projects/[^/]+/locations/[^/]+"
_JOB = rf"/v1/(?P<name>{_PLACE}/customJobs/[^/:]+)"
_JOBS = rf"/v1/(?P<parent>{_PLACE})/customJobs"
_POOL = rf"/v1/(?P<name>{_PLACE}/persistentResources/[^/:]+)"
_SYSTEM = ("$alt", "alt", "key", "fields", "prettyPrint", "quotaUser", "$prettyPrint", "$.xgafv")
_UNKNOWN = re.compile(r'has no field named "(?P<name>[^"]+)" at "(?P<at>[^"]*)"')


class Found(NamedTuple):
    """The operation of a request."""

    service: str
    name: str
    execute: Callable[[Call], Answer]


def service_of(host: str) -> str | None:
    """Return the service of a host name, or None."""
    return "aiplatform" if _AIPLATFORM.fullmatch(host) else SERVICES.get(host)


class Application:
    """Answers REST requests."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, request: Request) -> Answer:
        """Answer one request. Raises HangUp if the connection must end."""
        found = self._find(request)
        call = Call(
            service=found.service,
            operation=found.name,
            protocol="rest",
            host=request.host,
            method=request.method,
            path=request.path,
            authorization=request.headers.get("authorization", ""),
            is_from_container=request.is_from_container,
            received=len(request.body),
            range=request.headers.get("range") or request.headers.get("content-range"),
            told=request.shown if found.service in _SHOWN else None,
            query=request.query,
        )
        try:
            told = passed(self._world, call, lambda: found.execute(call))
        except GoogleError as error:
            told = error_answer(error, found.service)
        except HangUp:
            raise
        except BadJson as error:
            told = error_answer(invalid(f"Invalid JSON payload received. {error}"))
        except Exception as error:  # a defect of the stand-in
            traceback.print_exc()
            call.entry["outcome"] = repr(error)
            told = error_answer(GoogleError("INTERNAL", f"the stand-in itself has failed: {error!r}"), found.service)
        length = len(told.body) if told.length is None else told.length
        call.entry |= {"status": told.status, "sent": 0 if request.method == "HEAD" else length}
        if call.is_cut:
            told.cut()
        return told

    def _find(self, request: Request) -> Found:
        world, service = self._world, service_of(request.host)
        if service is None:
            return Found(UNSERVED, UNSERVED, lambda call: Answer(502, body=b"no such host in the stand-in"))
        if service == "storage":
            name = world.storage.operation(request)
            return Found(service, name or UNSERVED, lambda call: world.storage.respond(request))
        is_vertex = service == "aiplatform"
        matched = find(OPERATIONS if is_vertex else _ROUTES[service], request.method, request.path)
        if matched is None:
            html = {"Content-Type": "text/html; charset=UTF-8"}
            text = b"<!DOCTYPE html>\n<title>Error 404 (Not Found)!!1</title>\n"
            return Found(service, UNSERVED, lambda call: Answer(404, html, text))
        route, groups = matched
        if is_vertex:
            return Found(service, route.name, lambda call: _answer(world, call, route, request, groups))
        return Found(service, route.name, lambda call: route.function(world, request, **groups))


def methods(world: World) -> dict[str, Method]:
    """Return the methods of the gRPC server, by their full names."""
    return {one.grpc: Method("aiplatform", one.name, one.request, partial(one.function, world)) for one in OPERATIONS}


class Operation(NamedTuple):
    """One operation: its function has (world, call, request)."""

    name: str
    grpc: str
    request: Any  # message class, protobuf's own
    method: str
    pattern: str
    function: Callable[..., Any]
    body: str | None = None  # field that receives the JSON body


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


def _answer(world: World, call: Call, operation: Operation, request: Request, groups: dict[str, str]) -> Answer:
    """Answer a REST request. Raises GoogleError."""
    asked: dict[str, Any] = {name: value for name, value in request.query.items() if name not in _SYSTEM}
    asked |= groups
    try:
        content = request.json() if request.body else {}
    except BadJson as error:
        raise invalid(f"Invalid JSON payload received. {error}") from None
    if operation.body is not None:
        asked[operation.body] = content
    else:
        asked |= content
    parsed = operation.request()
    try:
        json_format.ParseDict(asked, parsed)
    except json_format.ParseError as error:
        raise _unreadable(str(error), operation.body) from None
    result = operation.function(world, call, parsed)
    is_by_number = "enum-encoding=int" in request.query.get("$alt", "")
    told = json.loads(json_format.MessageToJson(result, use_integers_for_enums=is_by_number))
    return json_answer(world.changes.applied((operation.name,), ANSWER, told))


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

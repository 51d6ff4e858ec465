"""Finds the operation of a request; then journal, faults and authorization, before the operation is executed."""

import json
import re
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from xml.sax.saxutils import escape

from doubles.azure import blobs
from doubles.azure.arm import check_workspace
from doubles.azure.errors import AzureError
from doubles.azure.faults import Called, Fault
from doubles.azure.names import ACCOUNT, REGION, TENANT, VAULT
from doubles.azure.routes import BLOBS, ROUTES
from doubles.azure.world import World
from doubles.kit.differences import ANSWER
from doubles.kit.routing import Route, find
from doubles.wire import Answer, BadJson, HangUp, Request, json_answer

SERVICES = {
    "login.microsoftonline.com": "login",
    "management.azure.com": "arm",
    f"{REGION}.api.azureml.ms": "data",
    f"{ACCOUNT}.blob.core.windows.net": "blob",
    f"{VAULT}.vault.azure.net": "vault",
    "prices.azure.com": "prices",
}
UNSERVED = "unserved"
OPEN = ("openid", "instance", "keys", "token", "prices", UNSERVED)  # without authorization
VAULT_CHALLENGE = (
    f'Bearer authorization="https://login.microsoftonline.com/{TENANT}", resource="https://vault.azure.net"'
)

Operation = Callable[[], Answer]


@dataclass(frozen=True)
class Found:
    """The operation of a request."""

    service: str
    name: str
    execute: Operation


def service_of(host: str) -> str | None:
    """Return the service of a host name, or None."""
    return SERVICES.get(host)


class Application:
    """Answers requests."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, request: Request) -> Answer:
        """Answer one request. Raises HangUp if the connection must end."""
        world, found = self._world, self._find(request)
        entry = _entry(request, found)
        world.journal.append(entry)
        authorization = request.headers.get("authorization", "")
        token = world.tokens.serial(authorization) if authorization.lower().startswith("bearer ") else None
        signature = world.serial_of_sas(request.query.get("sig"))
        fault = world.faults.take(Called((found.name,), request.is_from_container, token, signature))
        if fault is not None:
            entry["outcome"] = fault.kind
        try:
            answer = self._answer(request, found, fault)
        except AzureError as error:
            entry["outcome"] = fault.kind if fault is not None else error.code
            answer = _error(found.service, error)
        except BadJson as error:
            entry["outcome"] = "InvalidRequestContent"
            message = f"The request content was invalid: {error}"
            answer = _error(found.service, AzureError(400, "InvalidRequestContent", message))
        except (ArithmeticError, AssertionError, LookupError, OSError, TypeError, ValueError) as error:  # our own fault
            traceback.print_exc()
            entry["outcome"] = repr(error)
            answer = _error(found.service, AzureError(500, "StandInError", repr(error)))
        answer.headers = {"x-ms-request-id": str(uuid.uuid4()), **answer.headers}
        entry |= {"status": answer.status, "sent": len(answer.body) if request.method != "HEAD" else 0}
        if fault is not None and fault.kind == "lost":
            raise HangUp("on purpose")
        if fault is not None and fault.kind == "cut":
            answer.cut()
        return answer

    def _answer(self, request: Request, found: Found, fault: Fault | None) -> Answer:
        if fault is not None:
            if fault.kind == "drop":
                raise HangUp("on purpose")
            error = fault.error(found.service)
            if error is not None:
                raise error
            time.sleep(fault.delay_s)
        if found.name not in OPEN:
            self._authorize(request, found)
        answer = found.execute()
        if found.service in ("arm", "data") and answer.body:
            answer.body = json.dumps(
                self._world.changes.applied((found.name,), ANSWER, json.loads(answer.body))
            ).encode()
        return answer

    def _authorize(self, request: Request, found: Found) -> None:
        if found.service == "blob":
            blobs.authorize(self._world, request, found.name)
            return
        try:
            claims = self._world.tokens.claims(request.headers.get("authorization", ""), found.service)
        except AzureError as error:
            challenge = VAULT_CHALLENGE if found.service == "vault" else "Bearer"
            raise AzureError(error.status, error.code, error.message, {"WWW-Authenticate": challenge}) from None
        request.headers["x-stand-in-client"] = claims["appid"]

    def _find(self, request: Request) -> Found:
        service = service_of(request.host)
        if service is None:
            return Found(UNSERVED, UNSERVED, lambda: Answer(502, body=b"no such host in the stand-in"))
        found = self._blob(request) if service == "blob" else self._route(service, request)
        if found is not None:
            return found

        def refuse() -> Answer:
            raise AzureError(404, "NotServed", f"the stand-in has no {request.method} {request.host}{request.path}")

        return Found(service, UNSERVED, refuse)

    def _route(self, service: str, request: Request) -> Found | None:
        found = find(ROUTES[service], request.method, request.path.rstrip("/") or "/", re.IGNORECASE)
        if found is None:
            return None
        route, groups = found
        given = {name: value for name, value in groups.items() if value is not None}
        return Found(service, route.name, partial(self._execute, route, request, given))

    def _execute(self, route: Route, request: Request, groups: dict[str, str]) -> Answer:
        subscription, group = groups.pop("subscription", None), groups.pop("group", None)
        if group is not None:
            check_workspace(subscription or "", group, groups.pop("workspace"))
        return route.function(self._world, request, **groups)

    def _blob(self, request: Request) -> Found | None:
        name = blobs.operation(request)
        if name is None:
            return None
        container, _, blob = request.path.lstrip("/").partition("/")
        function = BLOBS[name]
        arguments = (container,) if name == "blob.list" else (container, blob)
        return Found("blob", name, lambda: function(self._world, request, *arguments))


def _entry(request: Request, found: Found) -> dict[str, Any]:
    """Return the journal's entry of a call."""
    return {
        **{name: getattr(request, name) for name in ("host", "method", "path", "is_from_container")},
        "service": found.service,
        "operation": found.name,
        "query": {name: value for name, value in request.query.items() if name != "sig"},
        "range": request.headers.get("x-ms-range") or request.headers.get("range"),
        "body": request.shown if found.service in ("arm", "data") else None,  # JSON without secrets
        "received": len(request.body),
        "time": time.time(),
        "outcome": "ok",
        "status": None,
        "sent": 0,
    }


def _error(service: str, error: AzureError) -> Answer:
    """Return the error in the service's format."""
    if service == "blob":
        text = f"<Code>{escape(error.code)}</Code><Message>{escape(error.message)}</Message>"
        data = f'<?xml version="1.0" encoding="utf-8"?><Error>{text}</Error>'.encode()
        headers = {"Content-Type": "application/xml", "x-ms-error-code": error.code, **error.headers}
        return Answer(error.status, headers, data)
    if service == "login":
        told: dict[str, Any] = {"error": error.code, "error_description": error.message, "error_codes": []}
        return json_answer(told, error.status, error.headers)
    told = {"code": error.code, "message": error.message}
    if service == "data":
        told |= {"details": [], "innerError": {"code": error.code, "innerError": None}}
        told["code"] = "UserError" if error.status < 500 else "ServiceError"
        told["severity"] = None
    headers = {**error.headers, "x-ms-failure-cause": "gateway"} if service == "arm" else error.headers
    return json_answer({"error": told}, error.status, headers)

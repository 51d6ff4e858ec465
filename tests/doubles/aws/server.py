"""The HTTP server: the stand-in's own services and the control endpoint in front of moto's application."""

import contextlib
import json
import logging
import re
import socket
import threading
import time
from dataclasses import replace
from datetime import datetime
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import ThreadedWSGIServer, make_server

from doubles.aws import controlplane, pricelist, validate
from doubles.aws.control import Control
from doubles.aws.faults import Fault
from doubles.aws.wire import AwsError, Call, Environ, Reply, StartResponse, hang_up, parse, reply, reply_error
from doubles.aws.world import World
from doubles.kit.control import PREFIX
from doubles.kit.differences import ANSWER
from doubles.wire import HangUp


class Application:
    """The WSGI application: journal, faults, then the service itself."""

    def __init__(self, world: World) -> None:
        self._world, self._control = world, Control(world)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._conditional = threading.Lock()  # S3 compares and writes atomically; moto compares first, then writes

    def __call__(self, environ: Environ, start: StartResponse) -> Reply:
        """Answer one request."""
        if environ["PATH_INFO"].startswith(PREFIX):
            return self._controlled(environ, start)
        call = parse(environ)
        if environ["PATH_INFO"].startswith(pricelist.OFFERS):  # public: no credentials needed
            call = replace(call, service="pricing", operation="GetFile", params={"path": environ["PATH_INFO"]})
        told = ("service", "operation", "params", "region", "access_key", "is_from_container")
        entry = {**{name: getattr(call, name) for name in told}, "time": time.time(), "outcome": "ok"}
        self._world.journal.append(entry)
        fault = self._world.faults.take(call)
        if fault is not None:
            entry["outcome"] = fault.kind
        return self._answer(environ, start, call, fault, entry)

    def _controlled(self, environ: Environ, start: StartResponse) -> Reply:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        answer = self._control.answer(environ["REQUEST_METHOD"], environ["PATH_INFO"], body)
        return reply(start, json.loads(answer.body), f"{answer.status} Control")

    def _answer(
        self, environ: Environ, start: StartResponse, call: Call, fault: Fault | None, entry: dict[str, Any]
    ) -> Reply:
        if fault is not None:
            if fault.kind == "hang":
                self._world.faults.hold(lambda: False)
            if fault.kind in ("drop", "hang"):
                hang_up(environ)
            error = fault.error(call)
            if error is not None:
                return reply_error(start, call, error)
            time.sleep(fault.delay_s)
        try:
            answer = self._execute(environ, start, call, fault)
        except HangUp:
            entry["outcome"] = "lost"
            hang_up(environ)
        except AwsError as error:
            entry["outcome"] = error.code
            answer = reply_error(start if fault is None or fault.kind != "lost" else _nobody, call, error)
        if fault is not None and fault.kind == "lost":
            hang_up(environ)
        return answer

    def _execute(self, environ: Environ, start: StartResponse, call: Call, fault: Fault | None) -> Reply:
        is_lost = fault is not None and fault.kind == "lost"
        start = _nobody if is_lost else start
        if call.service == "sagemaker":
            return reply(start, controlplane.sagemaker(self._world, call))
        if call.service == "servicequotas" or call.service == "service-quotas":
            return reply(start, controlplane.quotas(self._world, call))
        if call.operation == "GetFile":
            return self._file(start, call)
        if call.service == "pricing":
            return reply(start, pricelist.get_products(self._world, call))
        if call.service == "logs":
            validate.check("logs", call.operation, call.params)
            is_empty = fault is not None and fault.kind == "empty"
            told = self._world.logs(call.region).execute(call.operation, call.params, is_empty)
            return reply(start, self._world.changes.applied(call.names, ANSWER, told))
        if call.operation == "ListObjectsV2":
            environ["QUERY_STRING"] += f"&max-keys={self._world.settings.s3_page_size}"
            if self._world.settings.list_lag_s:
                return self._listed(environ, start, call)
        with self._conditional if _has_condition(environ) else contextlib.nullcontext():
            answer: Reply = self._moto(environ, start)
        if fault is not None and fault.kind == "cut":
            return _half(answer, environ)
        return list(answer) if is_lost else answer

    def _listed(self, environ: Environ, start: StartResponse, call: Call) -> Reply:
        """Return the page of S3's list, which is consistent only later; for lists of one page."""
        begun: list[Any] = []
        text = b"".join(self._moto(environ, lambda *head: begun.append(head))).decode()
        entries = []
        for entry in re.findall("<Contents>.*?</Contents>", text, re.DOTALL):
            key, changed = re.search("<Key>(.*?)</Key>.*<LastModified>(.*?)</LastModified>", entry, re.DOTALL).groups()
            entries.append((key, entry, datetime.fromisoformat(changed.replace("Z", "+00:00")).timestamp()))
        told = self._world.listing.told(call.params["Bucket"], entries, call.params.get("prefix", ""))
        rest = re.sub("<Contents>.*</Contents>", "", text, flags=re.DOTALL)
        rest = re.sub("<KeyCount>.*?</KeyCount>", f"<KeyCount>{len(told)}</KeyCount>", rest)
        data = rest.replace("</ListBucketResult>", f"{''.join(one for _, one in told)}</ListBucketResult>").encode()
        headers = [(name, value) for name, value in begun[0][1] if name.lower() != "content-length"]
        start(begun[0][0], [*headers, ("Content-Length", str(len(data)))])
        return [data]

    def _file(self, start: StartResponse, call: Call) -> Reply:
        data = pricelist.file(self._world, call.params["path"])
        start("200 OK" if data else "404 Not Found", [("Content-Length", str(len(data or b"")))])
        return [data or b""]


class _Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        """Log no single requests: the journal has them."""


def serve(world: World, listening: socket.socket) -> None:
    """Serve until the process ends, on the containers' own network too."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server(
        "127.0.0.1", world.port(), Application(world), threaded=True, request_handler=_Handler, fd=listening.fileno()
    )
    assert isinstance(server, ThreadedWSGIServer)
    inner = world.listen_for_containers()
    if inner is not None:
        threading.Thread(target=_serve_too, args=(server, inner), daemon=True).start()
    server.serve_forever(poll_interval=0.5)


def _serve_too(server: ThreadedWSGIServer, listening: socket.socket) -> None:
    while True:
        with contextlib.suppress(OSError):
            server.process_request(*listening.accept())


def _half(answer: Reply, environ: Environ) -> Reply:
    body = b"".join(answer)
    yield body[: len(body) // 2]
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def _has_condition(environ: Environ) -> bool:
    """Return whether the request is a conditional write, which must be atomic."""
    return environ["REQUEST_METHOD"] == "PUT" and bool({"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys())


def _nobody(*args: Any) -> Any:
    """Discard the beginning of an answer that is never sent."""

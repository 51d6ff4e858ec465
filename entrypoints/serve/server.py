"""The server of a model: the bounds of a request, a thread for each prediction, and the drain at the end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .connections import Connection, ConnectionLimits, configured
from .routes import Answer, Routes

_BACKLOG = 128
_GRACE_S = 0.2  # of a drain: clients that ask again at once learn by the answer that their connection ends
_DISCARD_S = 2.0  # for the rest of a refused request, so that its client reads the answer
_MOST_DISCARDED_BYTES = 1 << 26
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h

_Packed = tuple[int, bytes, dict[str, str]]  # status, body, headers


@dataclass(frozen=True)
class ServeLimits:
    """The limits of the server."""

    body_bytes: int = 8_000_000
    concurrency: int = 32
    """Whole requests at once; more get a 503. The unfinished bodies together have at most as many largest bodies."""
    drain_s: float = 4.5
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


class RefusedRequest(Exception):
    """A request that ends its connection: the rest of its bytes is not read as a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.answer = Answer(status, {"error": message}, {"Connection": "close"})


class ModelServer(uvicorn.Server):
    """Listens at once; `routes` answers 503 until its engine is set. `run` serves until `should_exit` is set."""

    def __init__(self, routes: Routes, host: str, port: int, limits: ServeLimits) -> None:
        """Raises OSError if the address cannot be used."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self.unfinished = 0
        """Requests that the end of the drain has cut off."""
        self._routes = routes
        drain_s: int = limits.drain_s  # type: ignore[assignment]  # uvicorn waits with asyncio.wait_for
        options = {"lifespan": "off", "backlog": _BACKLOG, "timeout_graceful_shutdown": drain_s}
        super().__init__(configured(_Application(routes, limits), limits.connections, Connection, **options))

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve."""
        super().run([self._listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the caller."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and finish the requests under way; readiness is 503 from now on.

        Clients that wait in the listener's queue are connected: they are taken first.
        """
        self._routes.is_draining = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        _end_handshakes(self._listener)
        await asyncio.sleep(0)  # connections that the loop has just taken
        waiting: list[socket.socket] = []
        with contextlib.suppress(OSError):
            while len(waiting) < _BACKLOG:
                waiting.append(self._listener.accept()[0])
        for server in self.servers:
            server.close()
        kind: Any = self.config.http_protocol_class
        protocol = partial(kind, config=self.config, server_state=self.server_state, app_state={})
        for sock in waiting:
            await loop.connect_accepted_socket(protocol, sock)
        await asyncio.sleep(_GRACE_S)
        await super().shutdown(sockets)
        self.unfinished = len(self.server_state.tasks)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)


def _end_handshakes(listener: socket.socket) -> None:
    """Drop each packet to the listener from now on, so that no client connects between the last `accept` and the close.

    Such a client would be reset. Now its kernel tries again, and finds the port closed. A sandbox may have no filters.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of the packet
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(drop_all)))


class _Application:
    """The ASGI application."""

    def __init__(self, routes: Routes, limits: ServeLimits) -> None:
        self._routes = routes
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.concurrency, "predict")
        self._free = limits.concurrency
        self._unfinished: dict[anyio.CancelScope, int] = {}
        """The bytes of bodies that are still arriving, oldest first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            status, data, headers = await self._answer(request)
        except ClientDisconnect:
            return
        except RefusedRequest as refusal:
            if request.headers.get("expect", "").lower() != "100-continue":  # else the client waits before its body
                await self._discard(request)
            status, data, headers = _packed(refusal.answer)
        if self._routes.is_draining:
            headers["Connection"] = "close"
        await Response(data, status, headers, "application/json")(scope, receive, send)

    async def _answer(self, request: Request) -> _Packed:
        """Return the answer. Raises ClientDisconnect, RefusedRequest."""
        path = request.scope["raw_path"].decode("latin-1")
        if request.scope["http_version"] not in ("1.0", "1.1"):
            raise RefusedRequest(505, "the server speaks HTTP/1.1")
        if not path.startswith("/"):
            raise RefusedRequest(400, "the first line is no request of HTTP/1.1")
        if "transfer-encoding" in request.headers:
            raise RefusedRequest(411, "send the body with Content-Length, not in chunks")
        length = request.headers.get("content-length")
        if length is None and request.method == "POST":
            raise RefusedRequest(411, "a POST needs Content-Length")
        if length is not None and int(length) > self._limits.body_bytes:
            raise RefusedRequest(413, f"the body has {length} bytes; at most {self._limits.body_bytes} are taken")
        if request.method != "POST":
            return self._packed_answer(request.method, path, b"")
        body = await self._body(request)
        if not self._free:
            return _packed(Answer(503, {"error": "too many requests at once"}, {"Retry-After": "1"}))
        self._free -= 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._packed_answer, request.method, path, body)
        finally:
            self._free += 1

    async def _body(self, request: Request) -> bytes:
        """Return the body; of too many unfinished bytes, drop the oldest. Raises ClientDisconnect, RefusedRequest."""
        body = bytearray()
        with anyio.CancelScope() as reading:
            try:
                async for part in request.stream():
                    body += part
                    self._unfinished[reading] = len(body)
                    while sum(self._unfinished.values()) > self._limits.concurrency * self._limits.body_bytes:
                        oldest = next(iter(self._unfinished))
                        del self._unfinished[oldest]
                        oldest.cancel()
            finally:
                self._unfinished.pop(reading, None)
        if reading.cancelled_caught:
            raise RefusedRequest(503, "too many requests at once")
        return bytes(body)

    async def _discard(self, request: Request) -> None:
        """Read the rest of a request for a moment."""
        count = 0
        with anyio.move_on_after(_DISCARD_S), contextlib.suppress(ClientDisconnect, RuntimeError):
            async for part in request.stream():
                count += len(part)
                if count > _MOST_DISCARDED_BYTES:
                    return

    def _packed_answer(self, method: str, path: str, body: bytes) -> _Packed:
        try:
            return _packed(self._routes.answer(method, path, body))
        except Exception:  # our own fault: the server goes on
            traceback.print_exc(file=sys.stderr)
            return _packed(Answer(500, {"error": "the server failed; its log has the reason"}))


def _packed(answer: Answer) -> _Packed:
    try:
        return answer.status, answer.data, dict(answer.headers)
    except ValueError:
        return 500, b'{"error":"the model\'s result has NaN or infinity, which JSON cannot hold"}', {}

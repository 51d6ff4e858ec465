"""gRPC: the proxy ends TLS and passes HTTP/2 on to a server in the same process.

The server identifies a connection by its source address. From the address follow the requested host, whether the caller
is a container, and the socket to break off for a fault.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2

from doubles.google.calls import Call, passed
from doubles.google.errors import GoogleError
from doubles.google.world import World
from doubles.wire import HangUp

THREADS = 128  # one for every running call
READ_BYTES = 1 << 16
BUFFER_BYTES = 1 << 20
assert error_details_pb2  # registers the message types of error details
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Method(NamedTuple):
    """The implementation of a method: `function(call, request)` returns an answer."""

    service: str
    operation: str
    request: Any  # message class, protobuf's own
    function: Callable[..., Any]


@dataclass
class _Peer:
    host: str
    is_from_container: bool
    inner: socket.socket

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self.inner.shutdown(socket.SHUT_RDWR)


class GrpcServer:
    """Answers the methods by their full names."""

    def __init__(self, world: World, methods: dict[str, Method]) -> None:
        self._world, self._methods = world, methods
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grpc")
        sizes = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._server = grpc.server(pool, handlers=[_Handlers(self)], options=[*sizes, ("grpc.so_reuseport", 0)])
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def talk(self, connection: socket.socket, host: str, is_from_container: bool) -> None:
        """Pass HTTP/2 on, until either side ends."""
        with socket.create_connection(("127.0.0.1", self.port)) as inner:
            inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            name = f"ipv4:127.0.0.1:{inner.getsockname()[1]}"
            with self._lock:
                self._peers[name] = _Peer(host, is_from_container, inner)
            try:
                _pump(connection, inner)
            finally:
                with self._lock:
                    del self._peers[name]

    def find(self, name: str) -> Method:
        """Return the method with the name, or a method that refuses the call."""
        return self._methods.get(name) or Method("unserved", "unserved", None, _refuse)

    def answer(self, name: str, method: Method, raw: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer a call with one request."""
        call = self._call(name, method, context, len(raw))
        with self._mended(call, context):
            request: Any = raw
            if method.request is not None:
                request = method.request.FromString(raw)
                call.told = json_format.MessageToDict(request)
            told: bytes = passed(self._world, call, lambda: method.function(call, request)).SerializeToString()
            call.entry["sent"] = len(told)
            return told
        raise AssertionError("aborted")

    def _call(self, name: str, method: Method, context: grpc.ServicerContext, received: int) -> Call:
        with self._lock:
            peer = self._peers[context.peer()]
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        return Call(
            service=method.service,
            operation=method.operation,
            protocol="grpc",
            host=peer.host,
            method="POST",
            path=name,
            authorization=metadata.get("authorization", ""),
            is_from_container=peer.is_from_container,
            received=received,
            is_gone=lambda: not context.is_active(),
        )

    @contextlib.contextmanager
    def _mended(self, call: Call, context: grpc.ServicerContext) -> Iterator[None]:
        """Turn an error into gRPC's, and a break-off into a broken connection."""
        try:
            yield
        except GoogleError as error:
            details = [dict(one) for one in error.details]
            status = {"code": error.number, "message": error.message, "details": details}
            packed = json_format.ParseDict(status, status_pb2.Status()).SerializeToString()
            context.set_trailing_metadata((("grpc-status-details-bin", packed),))
            context.abort(_CODES[error.number], error.message)
        except HangUp:
            with self._lock:
                peer = self._peers.get(context.peer())
            if peer is not None:
                peer.cut()
            context.abort(grpc.StatusCode.UNAVAILABLE, "broken off on purpose")
        except (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            traceback.print_exc()
            call.entry |= {"outcome": repr(error), "status": 500}
            context.abort(grpc.StatusCode.INTERNAL, f"the stand-in itself has failed: {error!r}")


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, server: GrpcServer) -> None:
        self._server = server

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        name = details.method
        method, server = self._server.find(name), self._server
        return grpc.unary_unary_rpc_method_handler(lambda raw, at: server.answer(name, method, raw, at))


def _refuse(call: Call, request: bytes) -> Any:
    raise GoogleError("UNIMPLEMENTED", f"the stand-in has no {call.path}")


def _pump(outer: socket.socket, inner: socket.socket) -> None:
    """Pass bytes on in both directions. Only one thread may use a TLS connection."""
    ends = {outer.fileno(): (outer, inner), inner.fileno(): (inner, outer)}
    waiting: dict[socket.socket, bytearray] = {outer: bytearray(), inner: bytearray()}  # to be sent to the key
    outer.setblocking(False)
    inner.setblocking(False)
    poll = select.poll()
    while True:
        for here, other in ((outer, inner), (inner, outer)):
            wanted = (select.POLLOUT if waiting[here] else 0) | (
                select.POLLIN if len(waiting[other]) < BUFFER_BYTES else 0
            )
            poll.register(here.fileno(), wanted)
        for fd, event in poll.poll():
            here, other = ends[fd]
            if event & ~select.POLLOUT and not _receive(here, waiting[other]):
                _send(other, waiting[other])
                return
            _send(other, waiting[other])
            _send(here, waiting[here])


def _receive(source: socket.socket, into: bytearray) -> bool:
    """Read all available bytes; return False at the end."""
    while True:
        try:
            data = source.recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError:
            return False
        if not data:
            return False
        into.extend(data)


def _send(target: socket.socket, data: bytearray) -> None:
    if not data:
        return
    with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        del data[: target.send(data)]

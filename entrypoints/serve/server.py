"""HTTP/1.1 connections, a thread each, with limits on size, time and number.

The standard library's http.server parses a head with the module `email`, a third of the time of a small model, and
sends head and body in two packets: with Nagle's algorithm and delayed acknowledgement 44 ms a request. Here the head is
split at its lines, and an answer is one write.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field

from .routes import Answer, Routes

_MOST_HEAD_BYTES = 1 << 14
_RECV_BYTES = 1 << 16
_MOST_LINGER_BYTES = 1 << 26  # read after a refusal, so that the client can read the answer before the connection ends
_LINGER_S = 2.0
_ACCEPT_S = 0.1
_BACKLOG = 128
_WORDS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout"}
_WORDS |= {411: "Length Required", 413: "Content Too Large", 431: "Request Header Fields Too Large"}
_WORDS |= {500: "Internal Server Error", 503: "Service Unavailable", 505: "HTTP Version Not Supported"}


@dataclass(frozen=True)
class ServeLimits:
    """The limits of the server. `concurrency`: requests with a body in memory at once; more get a 503.

    `request_s`: from a request's first byte to its last; `idle_s`: between two requests of a connection.
    """

    body_bytes: int = 8_000_000
    concurrency: int = 32
    connections: int = 256
    request_s: float = 30.0
    idle_s: float = 120.0
    drain_s: float = 4.5


class RefusedRequest(Exception):
    """A request that ends its connection: what follows on the connection cannot be told apart."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.answer = Answer(status, {"error": message})


class ConnectionGone(Exception):
    """The client has closed the connection, or sends nothing any more."""


@dataclass
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    keeps: bool


@dataclass(eq=False)
class _Connection:
    """A connection with its unread bytes. `is_busy`: from a request's first byte until its answer is sent."""

    sock: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    is_busy: bool = False

    def head(self, limits: ServeLimits) -> list[str]:
        """Return the lines of the next head. Raises ConnectionGone, RefusedRequest."""
        end_s = time.monotonic() + limits.idle_s
        at = -1
        while (at := self.unread.find(b"\r\n\r\n", max(0, at))) < 0:
            if len(self.unread) > _MOST_HEAD_BYTES:
                raise RefusedRequest(431, f"the head of a request has at most {_MOST_HEAD_BYTES} bytes")
            at = len(self.unread) - 3
            self._receive(end_s)
            if not self.is_busy:
                self.is_busy, end_s = True, time.monotonic() + limits.request_s
        self.is_busy = True
        text = self.unread[:at].decode("latin-1")
        del self.unread[: at + 4]
        return text.split("\r\n")

    def body(self, length: int, limits: ServeLimits) -> bytes:
        """Return the next bytes. Raises ConnectionGone, RefusedRequest."""
        end_s = time.monotonic() + limits.request_s
        while len(self.unread) < length:
            self._receive(end_s)
        found = bytes(self.unread[:length])
        del self.unread[:length]
        return found

    def linger(self) -> None:
        """Close the sending side, and read for a moment."""
        end_s, count = time.monotonic() + _LINGER_S, 0
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while count < _MOST_LINGER_BYTES and (left_s := end_s - time.monotonic()) > 0:
                self.sock.settimeout(left_s)
                found = len(self.sock.recv(_RECV_BYTES))
                if not found:
                    return
                count += found

    def _receive(self, end_s: float) -> None:
        try:
            self.sock.settimeout(max(0.001, end_s - time.monotonic()))
            found = self.sock.recv(_RECV_BYTES)
        except TimeoutError:
            if self.is_busy:
                raise RefusedRequest(408, "the request did not arrive in time") from None
            raise ConnectionGone from None
        except OSError:
            raise ConnectionGone from None
        if not found:
            raise ConnectionGone
        self.unread += found


class ModelServer:
    """Listens at once; `routes` answers 503 until its engine is set."""

    def __init__(self, routes: Routes, host: str, port: int, limits: ServeLimits) -> None:
        """Raises OSError if the address cannot be used."""
        self._routes = routes
        self._limits = limits
        self._slots = threading.BoundedSemaphore(limits.concurrency)
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._is_draining = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._thread.start()

    def drain(self) -> int:
        """Take no more connections, finish the requests under way, and return the number of unfinished requests.

        A readiness path answers 503 from now on, and the listener is closed within 0.1 s, under any load.
        """
        end_s = time.monotonic() + self._limits.drain_s
        self._is_draining = self._routes.is_draining = True
        self._thread.join(max(0.0, end_s - time.monotonic()))
        self._listener.close()
        while (busy := self._end_idle()) and time.monotonic() < end_s:
            time.sleep(0.01)
        return busy

    def _end_idle(self) -> int:
        """End the connections without a request; return the number of connections left."""
        with self._lock:
            left = list(self._connections)
        for each in left:
            if not each.is_busy:
                with contextlib.suppress(OSError):  # bytes that have arrived are still read, and answered
                    each.sock.shutdown(socket.SHUT_RD)
        return len(left)

    def _accept(self) -> None:
        """Take connections until the drain; those that wait then are still taken, as their clients are connected."""
        self._listener.settimeout(_ACCEPT_S)
        while not self._is_draining:
            with contextlib.suppress(TimeoutError):
                self._take()
        self._listener.settimeout(0)
        end_s = time.monotonic() + _ACCEPT_S
        for _ in range(_BACKLOG):
            if time.monotonic() > end_s:
                return
            try:
                self._take()
            except BlockingIOError:
                return

    def _take(self) -> None:
        """Take a connection, and start its thread. Raises TimeoutError, BlockingIOError if no client waits."""
        try:
            sock, _ = self._listener.accept()
        except (TimeoutError, BlockingIOError):
            raise
        except OSError:  # a client has gone, or the process has too many files
            time.sleep(_ACCEPT_S)
            return
        connection = _Connection(sock)
        with self._lock:
            is_full = len(self._connections) >= self._limits.connections
            if not is_full:
                self._connections.add(connection)
        if is_full:
            with contextlib.suppress(OSError):
                sock.settimeout(_LINGER_S)
                sock.sendall(
                    _packed(Answer(503, {"error": "too many connections"}, {"Retry-After": "1"}), False, False)
                )
            sock.close()
            return
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self._one(connection):
                connection.is_busy = bool(connection.unread)
        except RefusedRequest as refusal:
            with contextlib.suppress(OSError):
                connection.sock.sendall(_packed(refusal.answer, False, False))
            connection.linger()
        except (ConnectionGone, OSError):
            pass
        finally:
            connection.sock.close()
            with self._lock:
                self._connections.discard(connection)

    def _one(self, connection: _Connection) -> bool:
        """Answer a request; return whether the connection goes on. Raises ConnectionGone, RefusedRequest, OSError."""
        request = _parsed(connection.head(self._limits))
        length = _length(request, self._limits.body_bytes)
        if request.method == "POST" and not self._slots.acquire(blocking=False):
            if length > len(connection.unread):
                raise RefusedRequest(503, "too many requests at once")
            connection.body(length, self._limits)
            answer = Answer(503, {"error": "too many requests at once"}, {"Retry-After": "1"})
        elif request.method == "POST":
            try:
                if request.headers.get("expect", "").lower() == "100-continue" and len(connection.unread) < length:
                    connection.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                answer = self._answer(request, connection.body(length, self._limits))
            finally:
                self._slots.release()
        else:
            answer = self._answer(request, connection.body(length, self._limits))
        keeps = request.keeps and not self._is_draining
        connection.sock.settimeout(self._limits.request_s)
        connection.sock.sendall(_packed(answer, keeps, request.method == "HEAD"))
        return keeps

    def _answer(self, request: _Request, body: bytes) -> Answer:
        try:
            return self._routes.answer(request.method, request.path, body)
        except Exception:  # our own fault: the server goes on
            traceback.print_exc(file=sys.stderr)
            return Answer(500, {"error": "the server failed; its log has the reason"})


def _parsed(lines: list[str]) -> _Request:
    """Return the head's request. Raises RefusedRequest."""
    words = lines[0].split(" ")
    if len(words) != 3 or not words[1].startswith("/") or not words[2].startswith("HTTP/"):
        raise RefusedRequest(400, "the first line is no request of HTTP/1.1")
    if words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise RefusedRequest(505, "the server speaks HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise RefusedRequest(400, "a header is no `name: value`")
        name, value = name.lower(), value.strip()
        if name == "content-length" and headers.get(name, value) != value:
            raise RefusedRequest(400, "the request has two different lengths")
        headers[name] = value
    wish = headers.get("connection", "").lower()
    keeps = "close" not in wish and (words[2] == "HTTP/1.1" or "keep-alive" in wish)
    return _Request(words[0], words[1], headers, keeps)


def _length(request: _Request, most: int) -> int:
    """Return the length of the body. Raises RefusedRequest."""
    if "transfer-encoding" in request.headers:
        raise RefusedRequest(411, "send the body with Content-Length, not in chunks")
    text = request.headers.get("content-length")
    if text is None:
        if request.method == "POST":
            raise RefusedRequest(411, "a POST needs Content-Length")
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise RefusedRequest(400, "Content-Length is no whole number")
    if int(text) > most:
        raise RefusedRequest(413, f"the body has {text} bytes; at most {most} are taken")
    return int(text)


def _packed(answer: Answer, keeps: bool, is_head: bool) -> bytes:
    try:
        data, status = answer.data, answer.status
    except ValueError:
        data, status = b'{"error":"the model\'s result has NaN or infinity, which JSON cannot hold"}', 500
    further = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
    head = f"HTTP/1.1 {status} {_WORDS[status]}\r\nContent-Type: application/json\r\n{further}"
    rest = f"Content-Length: {len(data)}\r\nConnection: {'keep-alive' if keeps else 'close'}\r\n\r\n"
    return (head + rest).encode() + (b"" if is_head else data)

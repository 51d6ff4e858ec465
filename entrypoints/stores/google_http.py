"""HTTP requests to Google's services with the standard library: kept connections, proxies, tokens, retries.

The reasons against urllib3 are in docs/architecture.md, "Libraries and their reasons".
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import ssl
import threading
import time
import traceback
import weakref
from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ..format import one_line
from .google_access import Identity
from .retries import drawn_s

# A server that accepts connections and never answers is given up after ATTEMPTS * READ_S and the pauses between. The
# pauses double from PAUSE_S to LONGEST_PAUSE_S, drawn from the upper half: a server that refuses connections, answers
# with errors or asks to slow down has 70 s on average to recover.
ATTEMPTS = 10
CONNECT_S, READ_S = 10.0, 30.0
PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0

_PASSING = (408, 429, 500, 502, 503, 504)
_SLOWER = ("rateLimitExceeded", "userRateLimitExceeded")  # reasons of a temporary 403


class ServiceError(Exception):
    """The service has answered with an error."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.reason, self.message = _reason_and_message(body)
        super().__init__(f"HTTP {status}: {self.message}" if self.message else f"HTTP {status}")

    @property
    def is_passing(self) -> bool:
        """Whether a retry may help."""
        return self.status in _PASSING or (self.status == 403 and self.reason in _SLOWER)


class Lost(Exception):
    """The answer is missing or incomplete."""


class Untrusted(Exception):
    """The server has no certificate that this machine trusts."""


@dataclass(frozen=True)
class HttpResponse:
    """A complete answer."""

    status: int
    body: bytes


class Reply:
    """An answer in progress."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.status, self.headers = response.status, response.headers

    def read(self, size: int | None = None) -> bytes:
        """Return at most `size` bytes, all without a size. Raises Lost."""
        try:
            return self._response.read() if size is None else self._response.read(size)
        except (OSError, http.client.HTTPException) as error:
            raise Lost(one_line(error)) from error

    def close(self) -> None:
        """Close the answer's file: without a length in the head, the file alone keeps the connection open."""
        self._response.close()


class Service:
    """One host of Google, or a stand-in. Thread-safe: each thread uses a separate connection, which is kept afterwards.

    `identity` None: requests carry no token.
    """

    def __init__(self, endpoint: str, identity: Identity | None, attempts: int | None = None) -> None:
        self.endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
        self.identity = identity
        self.attempts = attempts or ATTEMPTS
        self._idle: list[http.client.HTTPConnection] = []
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._idle)

    def ask(
        self,
        method: str,
        target: str,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        also: tuple[int, ...] = (),
    ) -> HttpResponse:
        """Return the complete answer, with retries if they may help.

        `also`: statuses that are no errors here. Raises Refused, Lost, Untrusted, or OSError if no token is available.
        """
        patience = Patience(self)
        while True:
            try:
                with self.once(method, target, headers, body, also=also) as reply:
                    return HttpResponse(reply.status, reply.read())
            except (ServiceError, Lost) as error:
                patience.failed(error)

    @contextlib.contextmanager
    def once(
        self,
        method: str,
        target: str,
        headers: dict[str, str] | None = None,
        body: bytes | Iterable[bytes] = b"",
        also: tuple[int, ...] = (),
    ) -> Iterator[Reply]:
        """Yield the answer to one request; a body in pieces needs a Content-Length. Raises as `ask`."""
        length = {"Content-Length": str(len(body))} if body and isinstance(body, bytes) else {}
        try:
            token = None if self.identity is None else self.identity.token()
        except ConnectionError as error:
            raise Lost(str(error)) from error
        if token is not None:
            length["Authorization"] = f"Bearer {token}"
        connection = self._take()
        reply: Reply | None = None
        try:
            reply = self._send(connection, method, target, {**length, **(headers or {})}, body)
            if not (200 <= reply.status < 300 or reply.status in also):
                if reply.status == 401 and token is not None and self.identity is not None:
                    self.identity.forget(token)
                raise ServiceError(reply.status, reply.read())
            yield reply
            reply.read()  # the rest, otherwise the connection cannot be kept
        except BaseException:
            connection.close()
            if reply is not None:
                reply.close()
            raise
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the kept connections; the next request opens a new connection."""
        with self._lock:
            _close(self._idle)
            self._idle.clear()

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes | Iterable[bytes],
    ) -> Reply:
        target = f"{urlsplit(self.endpoint).path.rstrip('/')}{target}"
        faults: list[OSError] = []  # errors of this machine's disk, while the body is read

        def pieces() -> Iterator[bytes]:
            try:
                yield from (body,) if isinstance(body, bytes) else body
            except OSError as error:
                faults.append(error)
                raise

        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(READ_S)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an answer may come before the end
                connection.request(method, target, body=pieces() if body else None, headers=headers)
            return Reply(connection.getresponse())
        except ssl.SSLCertVerificationError as error:
            raise Untrusted(one_line(error)) from error
        except (OSError, http.client.HTTPException) as error:
            traceback.clear_frames(error.__traceback__)  # Python 3.11.2's tunnel leaves its half answer open
            if faults:
                raise faults[0] from None
            raise Lost(one_line(error)) from error

    def _take(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                if not self._idle:
                    break
                connection = self._idle.pop()
            if connection.sock is not None and not _has_news(connection):
                return connection
            connection.close()  # the server has closed the connection meanwhile
        return self._connection()

    def _connection(self) -> http.client.HTTPConnection:
        about = urlsplit(self.endpoint)
        host = about.hostname or ""
        if about.scheme == "http":  # an emulator, never through a proxy
            return http.client.HTTPConnection(host, about.port or 80, timeout=CONNECT_S)
        if self._context is None:
            self._context = _trust()
        proxy = None if proxy_bypass(host) else getproxies().get("https")
        if proxy is None:
            return http.client.HTTPSConnection(host, about.port or 443, timeout=CONNECT_S, context=self._context)
        by = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        made = http.client.HTTPSConnection(by.hostname or "", by.port or 80, timeout=CONNECT_S, context=self._context)
        made.set_tunnel(host, about.port or 443, _login(by.username, by.password))
        return made


class Patience:
    """Counts consecutive failures, and waits between attempts."""

    def __init__(self, service: Service) -> None:
        self._count, self._most = 0, service.attempts
        self._has_renewed = service.identity is None

    def failed(self, error: ServiceError | Lost) -> None:
        """Wait, or raise the error if waiting is useless or exhausted. A refused token is renewed once."""
        if isinstance(error, ServiceError):
            if error.status == 401 and not self._has_renewed:
                self._has_renewed = True
                return
            if not error.is_passing:
                raise error
        self._count += 1
        if self._count >= self._most:
            raise error
        time.sleep(drawn_s(self._count, PAUSE_S, LONGEST_PAUSE_S))

    def got_on(self) -> None:
        """Reset the count."""
        self._count = 0


def _trust() -> ssl.SSLContext:
    """Return the trusted certificates: the system's list, or SSL_CERT_FILE's, and REQUESTS_CA_BUNDLE."""
    context = ssl.create_default_context()
    if more := os.environ.get("REQUESTS_CA_BUNDLE"):
        with contextlib.suppress(OSError):
            context.load_verify_locations(**({"capath": more} if Path(more).is_dir() else {"cafile": more}))
    return context


def _login(user: str | None, password: str | None) -> dict[str, str]:
    if user is None:
        return {}
    pair = f"{unquote(user)}:{unquote(password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {b64encode(pair).decode()}"}


def _has_news(connection: http.client.HTTPConnection) -> bool:
    """Return whether an idle connection has input, which can only be its end."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _close(connections: list[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()


def _reason_and_message(body: bytes) -> tuple[str, str]:
    """Return the reason (a word) and the message of an error's body, which may lack JSON."""
    try:
        error = json.loads(body)["error"]
        if isinstance(error, str):  # the form of a login error
            return error, ""
        reasons = [str(each.get("reason", "")) for each in error.get("errors", ()) if isinstance(each, dict)]
        reasons += [str(each.get("reason", "")) for each in error.get("details", ()) if isinstance(each, dict)]
        found = next(filter(None, reasons), "") or str(error.get("status", ""))
        return found, one_line(error.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", one_line(body[:1000].decode(errors="replace"))

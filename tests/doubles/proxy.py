"""The single port: a CONNECT proxy that ends TLS itself, and plain HTTP for the control and identity endpoints."""

import contextlib
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from doubles.certificates import Authority
from doubles.wire import Answer, HangUp, Request, read, write

IDLE_S = 600.0  # for a connection that is kept open
# First bytes of an answer that breaks off before its status line. Without any byte of an answer, urllib3 reports an
# error of the proxy, and azure-core a request that was never sent. With these bytes both report the broken connection.
BEGINNING = b"HTTP/1.1"
H2_PREFACE = b"PRI"  # the first bytes of HTTP/2 without TLS

# Speaks HTTP/2 with a host's client until the connection ends: (connection, host, is_from_container).
Http2 = Callable[[socket.socket, str, bool], None]


class Proxy:
    """Serves each connection in its own thread."""

    def __init__(
        self,
        authority: Authority,
        knows: Callable[[str], bool],
        respond: Callable[[Request], Answer],
        plain: Callable[[Request], Answer],
        http2: Http2 | None = None,
    ) -> None:
        self._authority, self._knows, self._respond, self._plain = authority, knows, respond, plain
        self._http2 = http2

    def serve(self, listening: socket.socket, is_from_container: bool = False) -> None:
        """Serve until the process ends."""
        self._accept(listening, lambda connection: self._first(connection, is_from_container))

    def serve_host(self, listening: socket.socket, host: str) -> None:
        """Answer for one host, without TLS, until the process ends."""
        self._accept(listening, lambda connection: self._direct(connection, host))

    def _accept(self, listening: socket.socket, talk: Callable[[socket.socket], None]) -> None:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                threading.Thread(target=self._talk, args=(connection, talk), daemon=True).start()

    def _talk(self, connection: socket.socket, talk: Callable[[socket.socket], None]) -> None:
        connection.settimeout(IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            talk(connection)
        except (HangUp, OSError, ssl.SSLError, ValueError):
            pass
        except Exception:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _first(self, connection: socket.socket, is_from_container: bool) -> None:
        with _files(connection) as (stream, reply):
            request = read(stream, reply, is_from_container)
            if request is None:
                return
            if request.method != "CONNECT":
                _converse(stream, reply, self._plain, is_from_container, request)
                return
            host = request.target.rpartition(":")[0].lower()
            if not self._knows(host):
                request.host = host
                write(reply, request, self._respond(request))
                return
            reply.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            reply.flush()
        with self._authority.context(host).wrap_socket(connection, server_side=True) as inner:
            try:
                if self._http2 is not None and inner.selected_alpn_protocol() == "h2":
                    self._http2(inner, host, is_from_container)
                    return
                with _files(inner) as (stream, reply):
                    _converse(stream, reply, self._respond, is_from_container)
            finally:
                with contextlib.suppress(OSError):  # the client must see a broken-off answer as broken
                    inner.shutdown(socket.SHUT_RDWR)

    def _direct(self, connection: socket.socket, host: str) -> None:
        if self._http2 is not None and connection.recv(len(H2_PREFACE), socket.MSG_PEEK) == H2_PREFACE:
            self._http2(connection, host, False)
            return

        def respond(request: Request) -> Answer:
            request.host = host
            return self._respond(request)

        with _files(connection) as (stream, reply):
            _converse(stream, reply, respond, False)


@contextlib.contextmanager
def _files(connection: socket.socket) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    stream, reply = connection.makefile("rb"), connection.makefile("wb")
    try:
        yield cast("BinaryIO", stream), cast("BinaryIO", reply)
    finally:
        with contextlib.suppress(OSError, ValueError):
            stream.close()
            reply.close()


def _converse(
    stream: BinaryIO,
    reply: BinaryIO,
    respond: Callable[[Request], Answer],
    is_from_container: bool,
    request: Request | None = None,
) -> None:
    """Answer the requests in order until the client has no more."""
    request = request or read(stream, reply, is_from_container)
    while request is not None:
        try:
            answer = respond(request)
        except HangUp:
            if not is_from_container:
                reply.write(BEGINNING)
            raise
        write(reply, request, answer)
        if answer.is_last or request.headers.get("connection", "").lower() == "close":
            return
        request = read(stream, reply, is_from_container)

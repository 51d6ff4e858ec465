"""Connections of the two HTTP servers, `serve` and the page of `cloudtrain ui`: uvicorn and h11, with limits.

A stranger may connect and send nothing, a half head, a body byte by byte, or never read an answer. Each of these waits
has a time limit. If all connections are in use, the connection that has been without a whole request for longest gives
way to a new one; a connection whose request is being answered never does.

h11 takes a lone line feed for the end of a line, and joins a folded line with the line before. A proxy in front may do
neither and see other requests than the server: both are refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

_LINGER_S = 2.0  # after a refusal: the client can read the answer before the connection ends
_HEAD_END = b"\r\n\r\n"
_FAULTY_LINE = re.compile(rb"(?<!\r)\n|\r\n[ \t]")


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a server's connections."""

    connections: int = 256
    """At the same time."""
    head_s: float = 10.0
    """From the connection to the end of the first head, and from the first byte of a later head to its end."""
    idle_s: int = 120
    """From an answer to the first byte of the next request."""
    body_s: float = 30.0
    """From the end of a head to the end of its body; also for a client to read on in an answer."""
    head_bytes: int = 1 << 14


class _Parser(h11.Connection):
    """A parser that accepts no lone line feed, no folded line and no long head. `fault`: the last error."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(h11.SERVER, most_bytes)
        self.most_bytes = most_bytes
        self.fault = h11.RemoteProtocolError("")

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError."""
        try:
            if self.their_state is h11.IDLE:
                head = self.trailing_data[0].partition(_HEAD_END)[0]
                if len(head) > self.most_bytes:
                    message = f"the head of a request has at most {self.most_bytes} bytes"
                    raise h11.RemoteProtocolError(message, error_status_hint=431)
                if _FAULTY_LINE.search(head):
                    raise h11.RemoteProtocolError("a line of a head must end with CR LF, and no line may be folded")
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.fault = error
            raise


def configured(app: ASGIApp, limits: ConnectionLimits, kind: type[Connection], **options: Any) -> uvicorn.Config:
    """Return uvicorn's settings for a server with these limits; the application reports its errors itself."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
    limited = type("Limited", (kind,), {"limits": limits, "waiting": {}})
    fixed: dict[str, Any] = {"http": limited, "loop": "asyncio", "ws": "none", "log_config": None}
    fixed |= dict.fromkeys(("access_log", "proxy_headers", "server_header"), False)
    return uvicorn.Config(app, timeout_keep_alive=limits.idle_s, **fixed, **options)


class Connection(H11Protocol):
    """A connection with limits."""

    limits: ConnectionLimits
    waiting: dict[Connection, None]
    """The connections of the server that give way, oldest first."""
    conn: _Parser

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser(self.limits.head_bytes)
        self._phase: tuple[str, Any] = ("", None)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_refused = False

    def is_trusted(self) -> bool:
        """Return whether the connection keeps its place while its request is answered."""
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection; if the server is full, another connection or this one ends."""
        super().connection_made(transport)
        # Head and body are two packets. Without this, asyncio waits 40 ms for the acknowledgement of the first: it sets
        # the option only for sockets that name their protocol.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.limits.connections:
            if not self.waiting:
                self.refuse(503, "too many connections")
                return
            next(iter(self.waiting)).end()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self.waiting.pop(self, None)
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; the bytes after a refusal are dropped."""
        if not self._is_refused:
            super().data_received(data)
            self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: a client that has ended its side still gets its answer."""
        if self._is_refused or self.phase != "answer":
            return False
        self.cycle.keep_alive = False
        return True

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._start("unread", self.limits.body_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._stop("unread")

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP."""
        self.refuse(self.conn.fault.error_status_hint, str(self.conn.fault))

    def shutdown(self) -> None:
        """End after the request under way. Bytes that have arrived are still read, and answered."""
        if self.phase == "idle":
            self.transport.get_extra_info("socket").shutdown(socket.SHUT_RD)
        elif self.phase != "head":
            self.cycle.keep_alive = False

    @property
    def phase(self) -> str:
        """`idle` before the first byte of a request, then `head`, `body`, `answer`."""
        if self.cycle is None or self.cycle.response_complete:
            return "head" if self.conn.trailing_data[0] else "idle"
        return "body" if self.cycle.more_body else "answer"

    def end(self) -> None:
        """Close the connection, with what its client has not read."""
        self.waiting.pop(self, None)
        (self.transport.abort if self.transport.get_write_buffer_size() else self.transport.close)()

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error, and end the connection."""
        self._is_refused = True
        self.waiting.setdefault(self)
        self._stop("phase")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": message}).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            answer = h11.Response(status_code=status, headers=list(headers.items()), reason=STATUS_PHRASES[status])
            events = (answer, h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self._start("linger", _LINGER_S, self.transport.abort)

    def _watch(self) -> None:
        """Start the time limit of a new phase, and note whether the connection may give way."""
        # The first head may take no more time than a later one.
        phase = self.phase if self.cycle is not None else "head"
        if phase == "answer" and self.is_trusted():
            self.waiting.pop(self, None)
        else:
            self.waiting.setdefault(self)
        if (phase, self.cycle) == self._phase:
            return
        self._phase = phase, self.cycle
        self._stop("phase")
        if phase in ("head", "body"):  # uvicorn ends idle connections
            self._start("phase", self.limits.head_s if phase == "head" else self.limits.body_s, self._late)

    def _late(self) -> None:
        if self.phase == "idle":
            self.end()
        else:
            self.refuse(408, "the request did not arrive in time")

    def _start(self, name: str, after_s: float, do: Callable[[], None]) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(after_s, do)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

"""Authenticated connections between nodes: JSON messages, each with an HMAC; a blocking face and a face for selectors.

Each end sends a nonce. The keys, one for each direction, come from the token, the purpose of the connection and both
nonces; the HMAC of a message covers the message and its number. So the token is never sent, and a message cannot be
altered, repeated, left out or sent back. A message without the right HMAC is never parsed. A connection of a different
purpose has different keys. **The content is not encrypted**: an observer of the training network can read the content.

A frame is a length of four bytes, the JSON object, and the HMAC-SHA256; the frame with the nonce has no HMAC. The
server sends its nonce first. All agents of a job have the same version of cloudtrain, so frames carry no version.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

STALL_S = 30.0  # for a block or a message to pass
_SLICE_S = 0.2  # between checks of `stop`
# The longest message: of a peer without a nonce, of a peer without a proof, and later.
_HELLO_BYTES, _FIRST_BYTES, _MESSAGE_BYTES = 1 << 10, 1 << 16, 1 << 20
_BUSY = {"refused": "busy"}


class WireError(OSError):
    """The peer fails the authentication, or breaks the protocol."""


class ServerBusy(WireError):
    """The server has its maximum number of connections."""


class Stopped(WireError):
    """This end was asked to stop."""


class Seal:
    """One end of the protocol, without the connection: packs messages, and opens the peer's frames in their order."""

    def __init__(self, token: str, purpose: str, *, is_server: bool) -> None:
        self._key = hmac.digest(token.encode(), purpose.encode(), "sha256")
        self._nonce = secrets.token_hex(16)
        self.is_server = is_server
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0

    @property
    def is_met(self) -> bool:
        """Whether the peer has sent its nonce, so that messages can be sent."""
        return self._keys is not None

    @property
    def is_proved(self) -> bool:
        """Whether the peer has the token."""
        return self._received > 0

    def hello(self) -> bytes:
        """Return the frame with this end's nonce."""
        return _frame(json.dumps({"nonce": self._nonce}).encode())

    def meet(self, frame: bytes) -> None:
        """Take the peer's nonce. Raises ServerBusy; WireError."""
        hello = _parsed(frame)
        if hello == _BUSY:
            raise ServerBusy("the server has its maximum number of connections")
        nonce = hello.get("nonce")
        if not isinstance(nonce, str) or not re.fullmatch("[0-9a-f]{32}", nonce):
            raise WireError("the peer is not cloudtrain")
        nonces = f"{self._nonce} {nonce}" if self.is_server else f"{nonce} {self._nonce}"
        down, up = (hmac.digest(self._key, f"{who} {nonces}".encode(), "sha256") for who in ("server", "client"))
        self._keys = (down, up) if self.is_server else (up, down)

    def pack(self, message: dict[str, Any]) -> bytes:
        """Return the frame of the next message."""
        assert self._keys is not None  # callers send after the peer's nonce
        body = json.dumps(message, separators=(",", ":")).encode()
        self._sent += 1
        return _frame(body, _code(self._keys[0], self._sent, body))

    def size(self, head: bytes) -> int:
        """Return the number of bytes in the next frame after its `head`, the length. Raises WireError."""
        (size,) = struct.unpack(">I", head)
        if size > (_MESSAGE_BYTES if self.is_proved else _FIRST_BYTES if self.is_met else _HELLO_BYTES):
            raise WireError("the peer is not cloudtrain")
        return int(size) + (hashlib.sha256().digest_size if self.is_met else 0)

    def open(self, frame: bytes) -> dict[str, Any]:
        """Return the message in the next frame, which is given without the length. Raises WireError."""
        assert self._keys is not None
        size = len(frame) - hashlib.sha256().digest_size
        if not hmac.compare_digest(frame[size:], _code(self._keys[1], self._received + 1, frame[:size])):
            if self.is_proved:
                raise WireError("a message was altered in transit")
            raise WireError(
                "the peer has a different token: the peer belongs to another job, or to this job before a new start"
            )
        self._received += 1
        return _parsed(frame[:size])


class Wire:
    """The blocking face: messages, and blocks of bytes. Every call raises OSError; TimeoutError after `stall_s`."""

    def __init__(self, sock: socket.socket, stall_s: float = STALL_S, stop: threading.Event | None = None) -> None:
        sock.settimeout(min(_SLICE_S, stall_s))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self.stall_s = stall_s
        self._stop = stop

    def meet(self, seal: Seal) -> None:
        """Exchange nonces and proofs, before any message. Raises ServerBusy; WireError if the peer's token differs."""
        self._seal = seal
        if seal.is_server:
            self.write(memoryview(seal.hello()))
        frame = self._next_frame()
        if not seal.is_server:
            self.write(memoryview(seal.hello()))
        seal.meet(frame)
        self.send({})
        self.receive()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self.write(memoryview(self._seal.pack(message)))

    def receive(self) -> dict[str, Any]:
        """Return the next message."""
        return self._seal.open(self._next_frame())

    def write(self, block: memoryview) -> None:
        """Send the whole block."""
        end_s = time.monotonic() + self.stall_s
        while block:
            block = block[self._patiently(lambda: self._sock.send(block), end_s) :]  # noqa: B023  # called at once

    def read(self, block: memoryview) -> None:
        """Fill the block."""
        end_s = time.monotonic() + self.stall_s
        while block:
            count = self._patiently(lambda: self._sock.recv_into(block), end_s)  # noqa: B023  # called at once
            if not count:
                raise ConnectionResetError("the peer closed the connection during a transfer")
            block = block[count:]

    def _next_frame(self) -> bytes:
        return self._exactly(self._seal.size(self._exactly(4)))

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self.read(memoryview(data))
        return bytes(data)

    def _patiently(self, once: Callable[[], int], end_s: float) -> int:
        while True:
            if self._stop is not None and self._stop.is_set():
                raise Stopped("stopped")
            try:
                if time.monotonic() < end_s:  # a few bytes now and then count as a stall too
                    return once()
            except TimeoutError:
                continue
            raise TimeoutError(f"the transfer has stalled for {self.stall_s:.0f} s")


class PolledWire:
    """The face for selectors: `read` whenever the socket is readable; `send` from any thread."""

    def __init__(self, sock: socket.socket, seal: Seal) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.seal = seal
        self.since_s = time.monotonic()
        self._pending = b""
        self._sending = threading.Lock()
        if seal.is_server:
            self._put(seal.hello())

    def read(self) -> list[dict[str, Any]] | None:
        """Return the messages that arrived, None if the peer is gone, has a different token, or sends invalid data."""
        try:
            data = self.sock.recv(1 << 16)
            self._pending += data
            return self._messages() if data else None
        except BlockingIOError:
            return []
        except OSError:
            return None

    def send(self, message: dict[str, Any]) -> None:
        """Send the message, if the peer has sent its nonce."""
        if self.seal.is_met:
            with self._sending:
                self._put(self.seal.pack(message))

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages whose frames are complete. Raises WireError."""
        found = []
        while len(self._pending) >= 4 and len(self._pending) >= (end := 4 + self.seal.size(self._pending[:4])):
            frame, self._pending = self._pending[4:end], self._pending[end:]
            if self.seal.is_met:
                found.append(self.seal.open(frame))
                continue
            if not self.seal.is_server:
                self._put(self.seal.hello())
            self.seal.meet(frame)
        return found

    def _put(self, frame: bytes) -> None:
        try:
            self.sock.sendall(frame)
        except OSError:
            # The full buffer of a peer that does not read may hold half a frame: the next read ends the connection.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


def turn_away(sock: socket.socket) -> None:
    """Ask a client to come again later, in place of the server's nonce."""
    with contextlib.suppress(OSError):
        sock.settimeout(1.0)
        sock.sendall(_frame(json.dumps(_BUSY).encode()))


def _frame(body: bytes, code: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + body + code


def _code(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", number) + body, "sha256")


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):  # 1 kB of brackets is nested too deeply
        message = None
    if not isinstance(message, dict):
        raise WireError("the peer is not cloudtrain")
    return message

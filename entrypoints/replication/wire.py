"""The connection for copies of files: authentication, messages with an HMAC, blocks with a time limit each.

Each end sends a nonce, and proves with HMAC-SHA256 over both nonces that it knows the token; the token itself is never
sent. The key of the proof is derived from the token for copies only. After that, every message carries an HMAC by a key
of this connection and a sequence number, and a file's SHA-256 comes in such a message: bytes altered by a fault or by
an attacker are detected. **The content is not encrypted**: an observer of the training network can read the content.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import re
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

__all__ = ["BLOCK", "STALL_S", "ServerBusy", "Stopped", "Sums", "Wire", "WireError", "greet", "introduce", "turn_away"]

BLOCK = 1 << 18  # bytes; 1.5 times the rate of 4 MiB blocks: a block is hashed and written while still in a CPU cache
STALL_S = 30.0  # for a block or a message to pass
_SLICE_S = 0.2  # between checks of `stop`
_HELLO_BYTES, _MESSAGE_BYTES = 1 << 10, 1 << 17
_BUSY = "busy"


class WireError(OSError):
    """The peer fails the authentication, or breaks the protocol."""


class ServerBusy(WireError):
    """The server has its maximum number of connections."""


class Stopped(WireError):
    """This end was asked to stop."""


class Wire:
    """One connection: JSON messages and blocks of bytes. Every call raises OSError; TimeoutError after `stall_s`."""

    def __init__(self, sock: socket.socket, stall_s: float = STALL_S, stop: threading.Event | None = None) -> None:
        sock.settimeout(min(_SLICE_S, stall_s))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self.stall_s = stall_s
        self._stop = stop
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0

    def seal(self, out: bytes, into: bytes) -> None:
        """Add an HMAC to every message from now on, with one key for each direction."""
        self._keys = out, into

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        body = json.dumps(message, separators=(",", ":")).encode()
        code = b"" if self._keys is None else _code(self._keys[0], self._sent, body)
        self._sent += 1
        self.write(memoryview(struct.pack(">I", len(body)) + body + code))

    def receive(self) -> dict[str, Any]:
        """Return the next message."""
        (size,) = struct.unpack(">I", self._exactly(4))
        if size > (_HELLO_BYTES if self._keys is None else _MESSAGE_BYTES):
            raise WireError("the peer is not cloudtrain")
        body = self._exactly(size)
        if self._keys is not None:
            code = self._exactly(hashlib.sha256().digest_size)
            if not hmac.compare_digest(code, _code(self._keys[1], self._received, body)):
                raise WireError("a message was altered in transit")
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):  # 1 kB of brackets is nested too deeply
            message = None
        if not isinstance(message, dict):
            raise WireError("the peer is not cloudtrain")
        return message

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


class Sums:
    """Computes the SHA-256 of one file after another, and the CRC-32 if requested, in parallel with the transfer.

    `block()` lends the next of three buffers, `add` takes the filled buffer; the last buffer but one is free again by
    then. A file of a single block is hashed in the caller's thread, because small files are many.
    """

    def __init__(self, *, with_crc: bool) -> None:
        self._with_crc = with_crc
        self._blocks = [memoryview(bytearray(BLOCK)) for _ in range(3)]
        self._next = 0
        self._todo: queue.Queue[memoryview | None] = queue.Queue(1)
        self._thread: threading.Thread | None = None
        self._begin()

    def block(self) -> memoryview:
        """Return the buffer for the next bytes."""
        self._next = (self._next + 1) % len(self._blocks)
        return self._blocks[self._next]

    def add(self, block: memoryview, *, is_all: bool = False) -> None:
        """Add a file's next bytes. `is_all`: the bytes are the whole file."""
        if is_all:
            self._update(block)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
            self._thread.start()
        self._todo.put(block)

    def take(self) -> tuple[str, str]:
        """Return the file's SHA-256 and CRC-32 in hexadecimal digits, and start the next file."""
        self._todo.join()
        found = self._sha256.hexdigest(), f"{self._crc32:08x}"
        self._begin()
        return found

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._todo.put(None)

    def _begin(self) -> None:
        self._sha256 = hashlib.sha256()
        self._crc32 = 0

    def _run(self) -> None:
        while (block := self._todo.get()) is not None:
            self._update(block)
            self._todo.task_done()

    def _update(self, block: memoryview) -> None:
        self._sha256.update(block)
        if self._with_crc:
            self._crc32 = zlib.crc32(block, self._crc32)


def greet(wire: Wire, token: str) -> None:
    """Run the server's part of the authentication. Raises WireError if the client does not know the token."""
    ours = secrets.token_hex(16)
    wire.send({"nonce": ours})
    received = wire.receive()
    nonces = f"{ours} {_nonce(received)}"
    if not hmac.compare_digest(str(received.get("proof")).encode(), _proof(token, "client", nonces).encode()):
        wire.send({"refused": "token"})
        raise WireError("the client does not know the token")
    wire.send({"proof": _proof(token, "server", nonces)})
    _seal(wire, token, nonces, is_server=True)


def turn_away(wire: Wire) -> None:
    """Ask the client to come again later."""
    with contextlib.suppress(OSError):
        wire.send({"refused": _BUSY})


def introduce(wire: Wire, token: str) -> None:
    """Run the client's part of the authentication. Raises WireError if the server does not know the token; Busy."""
    hello = wire.receive()
    if hello.get("refused") == _BUSY:
        raise ServerBusy("the server has its maximum number of connections")
    ours = secrets.token_hex(16)
    nonces = f"{_nonce(hello)} {ours}"
    wire.send({"nonce": ours, "proof": _proof(token, "client", nonces)})
    received = wire.receive()
    if "refused" in received:
        raise WireError("the server rejects this token: the token belongs to another job, or the job was started again")
    if not hmac.compare_digest(str(received.get("proof")).encode(), _proof(token, "server", nonces).encode()):
        raise WireError("the server does not know the token: this job did not start the server")
    _seal(wire, token, nonces, is_server=False)


def _nonce(received: dict[str, Any]) -> str:
    nonce = received.get("nonce")
    if not isinstance(nonce, str) or not re.fullmatch("[0-9a-f]{32}", nonce):
        raise WireError("the peer is not cloudtrain")
    return nonce


def _seal(wire: Wire, token: str, nonces: str, *, is_server: bool) -> None:
    down, up = (bytes.fromhex(_proof(token, f"key of what the {who} sends", nonces)) for who in ("server", "client"))
    wire.seal(*((down, up) if is_server else (up, down)))


def _proof(token: str, what: str, nonces: str) -> str:
    key = hmac.digest(token.encode(), b"copies", "sha256")  # not the key of the connection between agents
    return hmac.new(key, f"cloudtrain copies 1 {what} {nonces}".encode(), "sha256").hexdigest()


def _code(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", number) + body, "sha256")

"""The line between a job's agents: every node tells node 0 how it is, node 0 answers what should be.

One TCP connection a node, JSON lines, a beat every BEAT_S even when nothing changes. Silence is a finding: node 0
counts a node as lost, and a node that hears nothing fences itself. torchrun notices neither (a cut link: over 150 s,
measured with torch 2.13). The token keeps strangers out; it is no encryption.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from dataclasses import asdict
from typing import Any

from cloudtrain.entrypoints.coordinate import Desired, Report

__all__ = ["BEAT_S", "CLOSED_S", "SILENCE_S", "Head", "Member", "listen"]

BEAT_S = 1.0
SILENCE_S = 15.0  # several beats on a machine whose cores are all busy importing torch
CLOSED_S = 5.0  # a connection that was closed comes back at once, or its other end is gone
MAX_LINE = 1 << 20


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket on the address; on a free port where none is given."""
    server = socket.create_server((address, port))
    server.setblocking(False)
    return server


class _Wire:
    """One connection: bytes in, JSON objects out."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pending = b""
        self.node: int | None = None

    def read(self) -> list[dict[str, Any]] | None:
        """Return what has arrived, None where the other end is gone or talks nonsense."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self.pending = (self.pending + data).split(b"\n")
        if not data or len(self.pending) > MAX_LINE:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            # A full buffer, of a peer that does not read, may have taken half a line: the next read ends this wire.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


class Head:
    """Node 0's end: the last report of every other node, and the answer to all of them."""

    def __init__(self, server: socket.socket, token: str) -> None:
        self.token = token
        self.reports: dict[int, Report] = {}
        self._heard: dict[int, float] = {}
        self.address: tuple[str, int] = server.getsockname()[:2]
        self._server = server
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._wires: list[_Wire] = []
        self._sent: tuple[float, Desired | None] = (0.0, None)

    def listen(self, timeout_s: float) -> None:
        """Take in what arrives within the time; return as soon as something did."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept(key.fileobj)
            elif (messages := key.data.read()) is None:
                self._drop(key.data)
            else:
                for message in messages:
                    self._take(key.data, message)

    def lost(self) -> set[int]:
        """Return the nodes that joined and are gone: silent for SILENCE_S, or closed for CLOSED_S."""
        now = time.monotonic()
        connected = {wire.node for wire in self._wires}
        return {
            node
            for node, heard in self._heard.items()
            if now - heard > (SILENCE_S if node in connected else BEAT_S + CLOSED_S)
        }

    def tell(self, desired: Desired) -> None:
        """Send everyone what should be: at once when it changed, else every beat."""
        now = time.monotonic()
        if desired == self._sent[1] and now - self._sent[0] < BEAT_S:
            return
        self._sent = (now, desired)
        for wire in self._wires:
            if wire.node is not None:
                wire.send(desired.dump())

    def close(self, patience_s: float = 2.0) -> None:
        """Close every line after its other end has read what was sent: closing over unread input would reset it."""
        for wire in self._wires:
            with contextlib.suppress(OSError):
                wire.sock.shutdown(socket.SHUT_WR)
        end = time.monotonic() + patience_s
        while self._wires and time.monotonic() < end:
            self.listen(0.1)
        self.release()

    def release(self) -> None:
        """Close everything."""
        for wire in list(self._wires):
            self._drop(wire)
        self._selector.close()
        self._server.close()

    def _accept(self, server: Any) -> None:
        with contextlib.suppress(OSError):
            wire = _Wire(server.accept()[0])
            self._selector.register(wire.sock, selectors.EVENT_READ, wire)
            self._wires.append(wire)

    def _drop(self, wire: _Wire) -> None:
        self._selector.unregister(wire.sock)
        self._wires.remove(wire)
        wire.sock.close()

    def _take(self, wire: _Wire, message: dict[str, Any]) -> None:
        if message.pop("token", None) != self.token:
            return
        try:
            report = Report.load(message)
        except TypeError:  # another version of us
            return
        if wire.node is None:
            wire.node = report.node
            self._sent = (0.0, None)  # the newcomer learns at once where things stand
        self.reports[report.node] = report
        self._heard[report.node] = time.monotonic()


class Member:
    """The other nodes' end: what node 0 said last, and since when it is silent."""

    def __init__(self, head: tuple[str, int], token: str) -> None:
        self.head = head
        self.token = token
        self.desired: Desired | None = None
        self._heard = time.monotonic()
        self._wire: _Wire | None = None
        self._sent: tuple[float, Report | None] = (0.0, None)

    def listen(self, timeout_s: float) -> None:
        """Take in what arrives within the time."""
        if self._wire is None:
            time.sleep(timeout_s)
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._wire.sock, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return
        messages = self._wire.read()
        if messages is None:
            self.release()
            return
        for message in messages:
            self.desired, self._heard = Desired.load(message), time.monotonic()

    def silent_s(self) -> float:
        """Return the seconds since node 0 was last heard."""
        return time.monotonic() - self._heard

    def lost(self, join_timeout_s: float) -> bool:
        """Return whether node 0 is gone, or was never reached within the time to join."""
        if self.desired is None:
            return self.silent_s() > join_timeout_s
        return self.silent_s() > (SILENCE_S if self._wire is not None else BEAT_S + CLOSED_S)

    def tell(self, report: Report) -> None:
        """Send node 0 how this node is: at once when it changed, else every beat; connect, where that is needed."""
        now = time.monotonic()
        if self._wire is None and not self._connect():
            return
        if report == self._sent[1] and now - self._sent[0] < BEAT_S:
            return
        assert self._wire is not None
        self._sent = (now, report)
        self._wire.send({**asdict(report), "token": self.token})

    def release(self) -> None:
        """Close the connection."""
        if self._wire is not None:
            self._wire.sock.close()
            self._wire = None

    def _connect(self) -> bool:
        try:
            self._wire = _Wire(socket.create_connection(self.head, timeout=2.0))
        except OSError:
            return False
        self._sent = (0.0, None)
        return True

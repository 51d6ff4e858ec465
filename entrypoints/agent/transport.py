"""The connections between a job's agents: every node sends its report to node 0, node 0 sends the desired state.

One authenticated TCP connection per node (replication/wire.py), a beat every BEAT_S even without changes. After a
silence node 0 counts a node as lost, and a node without messages from node 0 fences itself. torchrun notices neither
case (a cut link: over 150 s, measured with torch 2.13). Beats continue while an agent waits for a disk or for dying
processes.
"""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..contract import AgentSpec
from ..replication.wire import PolledWire, Seal
from .coordinate import Desired, Report

PORTS = (20000, 27999)  # below the ephemeral range, the ports of outgoing connections
BEAT_S = 1.0
SILENCE_S = AgentSpec.silence_s
CLOSED_S = 5.0  # a closed connection returns at once, unless the peer is gone
STALLED_S = 2.0  # pause between two polls: after a longer pause, pending messages are read before nodes are judged
MAX_STALL_S = 60.0  # limit on the beats of an agent that makes no progress
PURPOSE = "agents"  # of the connections
STRANGERS, STRANGER_S = 64, 5.0  # limits on unauthenticated connections: number, time


_T = TypeVar("_T")


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket on the address; on a free port by default."""
    server = socket.create_server((address, port))
    server.setblocking(False)
    return server


def on_free_port(spec: AgentSpec, listen: Callable[[int], _T]) -> _T:
    """Return `listen(port)` for a free port of the job's range. Raises OSError as `reserved` and `listen` do."""
    with reserved(spec) as held:
        return listen(held.getsockname()[1])


def reserved(spec: AgentSpec) -> socket.socket:
    """Return a socket that reserves a free port of the job's range on all addresses, without listening.

    Until the socket is closed, no call in any job finds the port. torch's store can still listen on the port: Linux
    lets a socket with SO_REUSEADDR bind if all bound sockets have the option and do not listen. The first candidate
    is random, so jobs of the same name do not try the same port. Raises OSError if no port is free.
    """
    lowest, highest = spec.ports or PORTS
    count = highest - lowest + 1
    first = secrets.randbelow(count)
    for step in range(count):
        held = socket.socket()
        try:
            held.bind(("", lowest + (first + step) % count))
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return held
    raise OSError(errno.EADDRINUSE, f"no free port between {lowest} and {highest} on {spec.address}")


class LeaderEnd:
    """Node 0's end: every follower's last report, and the answer to all followers."""

    def __init__(self, server: socket.socket, token: str, silence_s: float = SILENCE_S) -> None:
        self._token = token
        self._silence_s = silence_s
        self.reports: dict[int, Report] = {}
        self._heard: dict[int, float] = {}
        self.address: tuple[str, int] = server.getsockname()[:2]
        self._server = server
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._wires: dict[PolledWire, int | None] = {}  # with the peer's node, once reported
        self._sent: tuple[float, Desired | None] = (0.0, None)

    def listen(self, timeout_s: float) -> None:
        """Receive the messages that arrive within the time; return after the first."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept(key.fileobj)
            elif (messages := key.data.read()) is None:
                self._drop(key.data)
            else:
                for message in messages:
                    self._take(key.data, message)

    def lost(self) -> set[int]:
        """Return the nodes that joined and are gone: silent for too long, or closed for BEAT_S + CLOSED_S."""
        now = time.monotonic()
        connected = set(self._wires.values())
        return {
            node
            for node, heard in self._heard.items()
            if now - heard > (self._silence_s if node in connected else BEAT_S + CLOSED_S)
        }

    def send(self, desired: Desired) -> None:
        """Send the desired state to all nodes: a changed state at once, else every beat."""
        now = time.monotonic()
        if desired == self._sent[1] and now - self._sent[0] < BEAT_S:
            return
        self._sent = (now, desired)
        self.beat()

    def beat(self) -> None:
        """Send the last state again; the beat's own thread calls this method."""
        desired = self._sent[1]
        if desired is not None:
            for wire in list(self._wires):
                wire.send(desired.dump())

    def extend_silence(self) -> None:
        """Give all nodes a moment to be heard: this agent did not read."""
        least_s = time.monotonic() - self._silence_s + BEAT_S + STALLED_S
        self._heard = {node: max(heard_s, least_s) for node, heard_s in self._heard.items()}

    def close(self, patience_s: float = 2.0) -> None:
        """Close every connection after the peer has read all messages: unread input would reset the connection."""
        for wire in self._wires:
            with contextlib.suppress(OSError):
                wire.sock.shutdown(socket.SHUT_WR)
        end = time.monotonic() + patience_s
        while self._wires and time.monotonic() < end:
            self.listen(0.1)
        self.release()

    def release(self) -> None:
        """Close all connections and the listener."""
        for wire in list(self._wires):
            self._drop(wire)
        self._selector.close()
        self._server.close()

    def _accept(self, server: Any) -> None:
        now_s = time.monotonic()
        strangers = [wire for wire in self._wires if not wire.seal.is_proved]
        late = [wire for wire in strangers if now_s - wire.since_s > STRANGER_S]
        for wire in late or strangers[STRANGERS:]:
            self._drop(wire)
        with contextlib.suppress(OSError):
            wire = PolledWire(server.accept()[0], Seal(self._token, PURPOSE, is_server=True))
            self._selector.register(wire.sock, selectors.EVENT_READ, wire)
            self._wires[wire] = None

    def _drop(self, wire: PolledWire) -> None:
        self._selector.unregister(wire.sock)
        self._wires.pop(wire)
        wire.sock.close()

    def _take(self, wire: PolledWire, message: dict[str, Any]) -> None:
        try:
            report = Report.load(message)
        except (TypeError, ValueError):  # the peer runs a different version of cloudtrain
            return
        if self._wires[wire] is None:
            self._wires[wire] = report.node
            self._sent = (0.0, None)  # the new node gets the current state at once
        self.reports[report.node] = report
        self._heard[report.node] = time.monotonic()


class FollowerEnd:
    """A follower's end: node 0's last answer, and the time since the last message."""

    def __init__(
        self,
        head: tuple[str, int],
        token: str,
        silence_s: float = SILENCE_S,
        join_timeout_s: float = SILENCE_S,
        refusal_s: float = math.inf,
    ) -> None:
        """`refusal_s`: node 0 counts as gone after it has refused all connections for so many seconds."""
        self.head = head
        self._refusal_s = refusal_s
        self._refused_s: float | None = None  # since when node 0 refuses connections, None if it does not
        self._silence_s = silence_s
        self._join_timeout_s = join_timeout_s
        self._token = token
        self.desired: Desired | None = None
        self._heard = time.monotonic()
        self._wire: PolledWire | None = None
        self._sent: tuple[float, Report | None] = (0.0, None)

    @property
    def is_connected(self) -> bool:
        """Whether a connection is open, authenticated or not."""
        return self._wire is not None

    def listen(self, timeout_s: float) -> None:
        """Receive the messages that arrive within the time."""
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
        """Return the seconds since node 0's last message."""
        return time.monotonic() - self._heard

    def lost(self) -> bool:
        """Return whether node 0 is gone, or was never reached within the time to join."""
        if self.desired is None:
            is_refused = self._refused_s is not None and time.monotonic() - self._refused_s > self._refusal_s
            return is_refused or self.silent_s() > self._join_timeout_s
        return self.silent_s() > (self._silence_s if self._wire is not None else BEAT_S + CLOSED_S)

    def send(self, report: Report) -> None:
        """Send node 0 this node's report: a changed report at once, else every beat; connect if necessary."""
        now = time.monotonic()
        if self._wire is None and not self._connect():
            return
        is_due = report != self._sent[1] or now - self._sent[0] >= BEAT_S
        if is_due and self._wire is not None and self._wire.seal.is_met:
            self._sent = (now, report)
            self.beat()

    def beat(self) -> None:
        """Send the last report again; the beat's own thread calls this method."""
        wire, report = self._wire, self._sent[1]
        if wire is not None and report is not None:
            wire.send(report.dump())

    def extend_silence(self) -> None:
        """Give the leader a moment to be heard: this agent did not read. The time to join node 0 continues."""
        if self.desired is None and self._join_timeout_s > self._silence_s:
            return
        self._heard = max(self._heard, time.monotonic() - self._silence_s + BEAT_S + STALLED_S)

    def release(self) -> None:
        """Close the connection."""
        if self._wire is not None:
            self._wire.sock.close()
            self._wire = None

    def _connect(self) -> bool:
        try:
            sock = socket.create_connection(self.head, timeout=2.0)
        except OSError as error:
            is_refusal = isinstance(error, ConnectionRefusedError)
            self._refused_s = (self._refused_s or time.monotonic()) if is_refusal else None
            return False
        self._wire = PolledWire(sock, Seal(self._token, PURPOSE, is_server=False))
        self._sent, self._refused_s = (0.0, None), None
        return True

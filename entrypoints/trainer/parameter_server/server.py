"""The server of a rank that hosts a shard: one thread a connection. The first shard's server hands out the tickets."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from ...replication.wire import Seal, Wire
from ..saving import MAX_SKIPPED
from . import wire
from .shard import WeightShard
from .wire import MessageKind, WireMessage

_MOST_TAU = 64  # entries of an event's histogram: an event is a line of 4096 bytes
_Rooms = tuple[torch.Tensor, torch.Tensor | None]  # for weights or a gradient, and for buffers
_STOPPED_LEASE_S = 10.0  # for a silent worker, once the job must stop: platforms give a job 30 s and more


@dataclass
class _Holder:
    """A living worker: the tickets it has taken, and its clock, the number of tickets it has finished."""

    clock: int
    held: set[int]


class Tickets:
    """The work of a run from ticket `first` on, handed out in order, each ticket applied exactly once.

    Ticket i of N ranks is the micro-batches that rank i mod N would compute in step i // N under ddp, so the samples
    are those of ddp. A worker takes a ticket, commits it with its gradient at the first shard, and finishes it when all
    shards have the gradient. The tickets of a lost worker are handed out again. `limit` is the end of the
    work, which the server moves. Pure bookkeeping: no clock, no thread.
    """

    def __init__(self, ranks: int, first: int = 0, *, max_lead: int | None = None, is_ordered: bool = False) -> None:
        """`max_lead`: how many tickets a worker may be ahead of the slowest (SSP, Ho et al. 2013), or None.

        `is_ordered`: ticket i needs the weights after ticket i - ranks, so later tickets wait for earlier ones.
        """
        self._ranks = ranks
        self._max_lead = max_lead
        self._is_ordered = is_ordered
        self._next = first
        self._freed: list[int] = []  # a heap
        self._workers: dict[str, _Holder] = {}
        self._committed: set[int] = set()  # at or above `done`
        self._finished: set[int] = set()  # above `done`
        self.done = first  # all tickets below are finished
        self.limit = first

    @property
    def is_complete(self) -> bool:
        """Whether all tickets below the limit are finished."""
        return self.done == self.limit

    @property
    def lead(self) -> int:
        """How many tickets the fastest living worker is ahead of the slowest."""
        clocks = [worker.clock for worker in self._workers.values()]
        return max(clocks) - min(clocks) if clocks else 0

    def close(self, *, least: int = 0) -> None:
        """Lower the limit to the end of the step whose tickets have been handed out, at least `least` steps on."""
        end = max(-(-self._next // self._ranks), self.done // self._ranks + least) * self._ranks
        self.limit = min(self.limit, end)

    def join(self, worker: str) -> None:
        """Add a worker; its clock begins at the slowest worker's."""
        self._workers[worker] = _Holder(min((other.clock for other in self._workers.values()), default=0), set())

    def leave(self, worker: str) -> None:
        """Remove a worker, and free its tickets. A worker that has left already is ignored."""
        gone = self._workers.pop(worker, None)
        for ticket in gone.held if gone else ():
            heapq.heappush(self._freed, ticket)

    def take(self, worker: str) -> int | None:
        """Return the next ticket for the worker, or None: the worker must wait. Raises KeyError after `leave`."""
        own = self._workers[worker]
        slowest = min(other.clock for other in self._workers.values())
        if self._max_lead is not None and own.clock - slowest > self._max_lead:
            return None
        ticket = self._freed[0] if self._freed else self._next
        if ticket >= self.limit or (self._is_ordered and ticket >= self.done + self._ranks):
            return None
        if self._freed:
            heapq.heappop(self._freed)
        else:
            self._next += 1
        own.held.add(ticket)
        return ticket

    def commit(self, worker: str, ticket: int) -> bool:
        """Record that the first shard gets the ticket's gradient; False if the shard has the gradient already."""
        if ticket not in self._workers[worker].held:
            raise KeyError(f"worker {worker} does not hold ticket {ticket}")
        is_new = ticket not in self._committed
        self._committed.add(ticket)
        return is_new

    def finish(self, worker: str, ticket: int) -> None:
        """Record that all shards have the ticket's gradient."""
        own = self._workers[worker]
        own.held.remove(ticket)
        own.clock += 1
        self._finished.add(ticket)
        while self.done in self._finished:
            self._finished.remove(self.done)
            self._committed.discard(self.done)
            self.done += 1


@dataclass
class ServerNews:
    """Progress since the last call: tickets done, the limit, the mean loss of each finished step, and faults.

    A loss is None if all tickets of the step were left out. `failure`: an error, in words; `is_sick`: loss or gradient
    are not finite. `left_out`: the steps of tickets without an update.
    """

    done: int = 0
    limit: int = 0
    losses: list[float | None] = field(default_factory=list)
    failure: str | None = None
    is_sick: bool = False
    left_out: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class ShardServer:
    """Serves a shard to the workers; of the first shard, also hands out the work. Close it at the end."""

    def __init__(
        self, shard: WeightShard, secret: str, ranks: int, lease_s: float, tickets: Tickets, *, skips: bool = False
    ) -> None:
        """`lease_s`: a worker without a sign of life for so long is lost, and its tickets are handed out again.

        `skips`: a gradient that is not finite leaves its ticket out; otherwise it is a failure.
        """
        self.shard = shard
        self._secret, self._ranks, self._lease_s, self._skips = secret, ranks, lease_s, skips
        self._tickets = tickets
        self._changed = threading.Condition()
        self._connections: dict[str, list[socket.socket]] = {}
        self._losses: dict[int, float] = {}
        self._told = tickets.done
        self.pending = ServerNews()  # to be told; a failure stays
        self._skipped = 0  # gradients in a row that were not finite
        self._most_lead = 0
        self._is_closed = False
        self._listener = socket.create_server(("", 0), backlog=2 * ranks)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="shard", daemon=True).start()

    def open(self, limit: int) -> None:
        """Hand out tickets up to the limit."""
        with self._changed:
            self._tickets.limit = limit
            self._changed.notify_all()

    def close_early(self, *, must_stop: bool) -> None:
        """End the work at the step whose tickets have been handed out. `must_stop`: do not wait long for a worker."""
        with self._changed:
            self._tickets.close(least=0 if must_stop else 1)  # a save without a new step would be asked for again
            if must_stop:
                self._lease_s = min(self._lease_s, _STOPPED_LEASE_S)
            self._changed.notify_all()

    def news(self, until: int, wait_s: float) -> ServerNews:
        """Return the progress; wait until the tickets below `until` are done, or for a failure, at most `wait_s`."""
        with self._changed:
            tickets = self._tickets

            def is_due() -> bool:
                return tickets.is_complete or tickets.done >= until or self.pending.failure is not None

            self._changed.wait_for(is_due, wait_s)
            news = self.pending
            self.pending = ServerNews(failure=news.failure, is_sick=news.is_sick)
            news.done, news.limit = tickets.done, tickets.limit
            while self._told + self._ranks <= tickets.done:
                own = range(self._told, self._told + self._ranks)
                known = [self._losses.pop(ticket) for ticket in own if ticket in self._losses]
                news.losses.append(sum(known) / len(known) if known else None)
                self._told = own.stop
            return news

    def figures(self) -> dict[str, Any]:
        """Return the living workers; since the last call the largest lead, and the staleness: mean, largest, counts."""
        with self.shard.lock:
            counts, self.shard.staleness = self.shard.staleness, Counter()
        with self._changed:
            found: dict[str, Any] = {"workers": len(self._connections), "lead": self._most_lead}
            self._most_lead = 0
        if counts:
            found["tau_mean"] = sum(tau * count for tau, count in counts.items()) / counts.total()
            found["tau_max"] = max(counts)
            listed = [counts[tau] for tau in range(min(max(counts) + 1, _MOST_TAU))]
            listed[-1] = sum(count for tau, count in counts.items() if tau >= len(listed) - 1)
            found["tau_counts"] = listed
        return found

    def close(self) -> None:
        """End all connections: the workers leave. Close the shard's log."""
        with self._changed:
            self._is_closed = True
            for connection in [self._listener, *itertools.chain(*self._connections.values())]:
                _shut(connection)
            self._changed.notify_all()
        self._listener.close()
        if self.shard.log is not None:
            self.shard.log.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or no file descriptors are left
                time.sleep(0.1)
                continue
            threading.Thread(target=self._greet, args=(connection,), name="worker", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Check the secret, and serve the connection until its end."""
        worker = ""
        with contextlib.suppress(OSError, EOFError, ValueError, KeyError), connection:
            end = Wire(connection, self._lease_s)
            end.meet(Seal(self._secret, wire.PURPOSE, is_server=True))
            first = wire.receive(end)
            name = bytearray(min(first.size, 256))
            end.read(memoryview(name))
            worker = name.decode()
            with self._changed:
                self._connections.setdefault(worker, []).append(connection)
            if first.kind is MessageKind.BEAT:
                self._watch(worker, end, connection)
            else:
                wire.wait(end, connection)
                self._serve(worker, end)
        if worker:
            self._lose(worker)

    def _watch(self, worker: str, end: Wire, connection: socket.socket) -> None:
        """Count the worker as living until its beats end, or stay out for a lease."""
        with self._changed:
            self._tickets.join(worker)
        wire.send(end, WireMessage(MessageKind.BEAT))  # the worker may take tickets from now on
        arrivals = select.poll()
        arrivals.register(connection, select.POLLIN)
        last_s = time.monotonic()
        while time.monotonic() - last_s < self._lease_s:
            if arrivals.poll(1000 * min(1.0, self._lease_s / 4)):
                wire.receive(end)
                last_s = time.monotonic()

    def _lose(self, worker: str) -> None:
        """Free the worker's tickets, and end its connections: a worker that was stopped must not go on unnoticed."""
        with self._changed:
            own = self._connections.pop(worker, [])
            if own and not self._is_closed:
                self.pending.lost.append(worker)
            self._tickets.leave(worker)
            for connection in own:
                _shut(connection)
            self._changed.notify_all()

    def _serve(self, worker: str, connection: Wire) -> None:
        shard = self.shard
        room = torch.empty_like(shard.weights)
        buffers = None if shard.buffers is None else torch.empty_like(shard.buffers)
        kept = memoryview(b"") if buffers is None else wire.memory(buffers)
        while True:
            message = wire.receive(connection)
            if message.kind is MessageKind.TAKE:
                wire.send(connection, WireMessage(MessageKind.TAKE, self._take(worker, message.ticket)))
            elif message.kind is MessageKind.PULL:
                version = shard.pull(message.ticket, room, buffers)
                wire.send(connection, WireMessage(MessageKind.PULL, message.ticket, version), wire.memory(room), kept)
            elif message.kind in (MessageKind.PUSH, MessageKind.LEFT_OUT):
                self._receive_gradient(worker, connection, message, (room, buffers))
                wire.send(connection, WireMessage(message.kind, message.ticket))
            elif message.kind is MessageKind.FAIL:
                text = bytearray(min(message.size, 1 << 16))
                connection.read(memoryview(text))
                self._fail(text.decode(errors="replace"))

    def _receive_gradient(self, worker: str, connection: Wire, message: WireMessage, rooms: _Rooms) -> None:
        """Receive the versions of all shards, the gradient if finite, and the buffers if sent; apply them."""
        room, buffers = rooms
        versions = torch.empty(message.version, dtype=torch.int64)
        connection.read(wire.memory(versions))
        rest, gradient = message.size - versions.nbytes, None
        if message.kind is MessageKind.PUSH:
            gradient, rest = room, rest - room.nbytes
            connection.read(wire.memory(room))
        sent = buffers if rest and buffers is not None and rest == buffers.nbytes else None
        if sent is not None:
            connection.read(wire.memory(sent))
        if self._commit(worker, message, gradient is not None):
            try:
                self.shard.push(message.ticket, tuple(versions.tolist()), gradient, sent)
            except Exception as error:  # the ticket counts as applied, and is not
                self._fail(f"a gradient cannot be applied: {type(error).__name__}: {error}")
                raise EOFError from error

    def _take(self, worker: str, finished: int) -> int:
        """Return the worker's next ticket; wait until there is one. Raises EOFError at the end."""
        with self._changed:
            if finished >= 0:
                self._tickets.finish(worker, finished)
                self._most_lead = max(self._most_lead, self._tickets.lead)
                self._changed.notify_all()
            while not self._is_closed:
                if (ticket := self._tickets.take(worker)) is not None:
                    return ticket
                self._changed.wait()
        raise EOFError("the run has ended")

    def _commit(self, worker: str, message: WireMessage, is_finite: bool) -> bool:
        """Return whether the ticket's gradient is to be applied."""
        with self._changed:
            step = message.ticket // self._ranks + 1
            if not is_finite and not self._skips:
                self._fail(f"loss or gradient of a worker is not finite in step {step}", is_sick=True)
                raise EOFError("the run has failed")
            if self.shard.number > 0:
                return True
            is_new = self._tickets.commit(worker, message.ticket)
            if is_new and is_finite:
                self._losses[message.ticket], self._skipped = message.value, 0
            elif is_new:
                self.pending.left_out.append(step)
                self._skipped += 1
                if self._skipped >= MAX_SKIPPED:
                    self._fail(f"{MAX_SKIPPED} gradients in a row were not finite", is_sick=True)
            return is_new

    def _fail(self, text: str, *, is_sick: bool = False) -> None:
        with self._changed:
            self.pending.failure, self.pending.is_sick = self.pending.failure or text, self.pending.is_sick or is_sick
            self._changed.notify_all()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

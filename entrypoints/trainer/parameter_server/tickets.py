"""Tickets: the work of an asynchronous run, handed out in order, each applied exactly once.

Ticket i of N ranks is the micro-batches that rank i mod N would compute in step i // N under ddp, so the samples are
those of ddp. A worker takes a ticket, commits it with its gradient at the first shard, and finishes it when all shards
have the gradient. The tickets of a lost worker are handed out again. Pure bookkeeping: no clock, no thread.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass
class _Holder:
    """A living worker: the tickets it has taken, and its clock, the number of tickets it has finished."""

    clock: int
    held: set[int]


class Tickets:
    """The tickets from `first` on. The limit is the end of the work until `open` moves it."""

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

    def open(self, limit: int) -> None:
        """Allow tickets below the limit."""
        self.limit = limit

    def close(self, *, least: int = 0) -> None:
        """Lower the limit to the end of the step whose tickets have been handed out, at least `least` steps on."""
        end = max(-(-self._next // self._ranks), self.done // self._ranks + least) * self._ranks
        self.limit = min(self.limit, end)

    def join(self, worker: str) -> None:
        """Add a worker; its clock begins at the slowest worker's."""
        clock = min((other.clock for other in self._workers.values()), default=0)
        self._workers[worker] = _Holder(clock, set())

    def leave(self, worker: str) -> None:
        """Remove a worker, and free its tickets. A worker that has left already is ignored."""
        gone = self._workers.pop(worker, None)
        for ticket in gone.held if gone else ():
            heapq.heappush(self._freed, ticket)

    def take(self, worker: str) -> int | None:
        """Return the next ticket for the worker, or None: the worker must wait. Raises KeyError after `leave`."""
        own = self._workers[worker]
        if self._max_lead is not None:
            slowest = min(other.clock for other in self._workers.values())
            if own.clock - slowest > self._max_lead:
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
        if ticket in self._committed:
            return False
        self._committed.add(ticket)
        return True

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

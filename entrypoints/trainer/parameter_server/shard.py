"""A shard: an equal range of all weights, with the optimizer's state, that gradients are applied to as they arrive.

The weights of all trainable parameters form one vector in the module's order; a shard is a range of this vector, its
pieces parts of parameters. With tau updates between a gradient's pull and its push, and c gradients averaged in an
update, a gradient weighs min(1, N / (1 + tau)), and the rate is c / N of ddp's (sqrt(c / N) for Adam's family).
Sources: Zhang et al. 2015 (arXiv:1511.05950) for rate / tau and softsync; the cap at 1, because an update with small
tau would otherwise move with the rate of a whole batch.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from .. import optim
from ..optimizer_facts import OPTIMIZERS
from ..settings import TrainingSettings

# In place of versions: a ticket without an update; an incomplete average is applied; the first ticket of the log.
LEFT_OUT, FLUSHED, STARTED = -1, -2, -3

Versions = tuple[int, ...]  # of the weights that a gradient was computed from, by shard


@dataclass(frozen=True)
class UpdateEntry:
    """An entry of an update log: a ticket, and the versions of all shards that its gradient was computed from."""

    ticket: int
    versions: Versions


def shard_range(elements: int, number: int, shards: int) -> range:
    """Return the elements of a shard: equal ranges, up to one element."""
    return range(elements * number // shards, elements * (number + 1) // shards)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose elements are the weights."""
    return [p for p in module.parameters() if p.requires_grad]


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the elements of the tensors as one vector on the CPU."""
    return torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors])


def pieces_of(module: nn.Module, number: int, shards: int) -> list[nn.Parameter]:
    """Return the parts of parameters in a shard, in the order of its elements: consecutive views of one vector."""
    ends = [0, *itertools.accumulate(p.numel() for p in trained(module))]
    own = shard_range(ends[-1], number, shards)
    cuts = sorted({own.start, own.stop, *(end for end in ends if end in own)})
    vector = flat(trained(module))[own.start : own.stop].clone()
    sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
    return [nn.Parameter(part) for part in torch.split(vector, sizes)]


def read_log(path: Path, shards: int) -> list[UpdateEntry]:
    """Return the entries of an update log, without an incomplete last entry."""
    entry, content = struct.Struct(f"<q{shards}q"), path.read_bytes()
    found = entry.iter_unpack(content[: len(content) // entry.size * entry.size])
    return [UpdateEntry(values[0], values[1:]) for values in found]


class UpdateLog:
    """A shard's update log, open for appending."""

    def __init__(self, path: Path, shards: int, first: int) -> None:
        """Continue the log at ticket `first`: later entries are cut off. A log that does not reach it begins anew.

        A log that cannot be written any more, on a full disk, ends with a line on standard output.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._shards = shards
        found = read_log(path, shards) if path.exists() else []
        kept, count = 0, found[0].ticket if found else -1
        for entry in found:
            is_ticket = entry.versions[0] not in (FLUSHED, STARTED)
            if count == first and is_ticket:
                break
            kept, count = kept + 1, count + is_ticket
        kept = kept if count == first else 0
        self.entries = found[:kept]  # before this start
        self._file: IO[bytes] | None = path.open("r+b" if kept else "wb")
        self._file.truncate(kept * 8 * (1 + shards))
        self._file.seek(0, os.SEEK_END)
        if not kept:
            self.write(UpdateEntry(first, (STARTED,)))

    def write(self, entry: UpdateEntry) -> None:
        """Append an entry; a mark in place of versions fills their room."""
        versions = entry.versions if len(entry.versions) == self._shards else entry.versions * self._shards
        self._do(lambda file: file.write(struct.pack(f"<q{self._shards}q", entry.ticket, *versions)))

    def sync(self) -> None:
        """Make all entries durable."""
        self._do(lambda file: file.flush(), os.fsync)

    def close(self) -> None:
        """Close the file."""
        self._do(lambda file: file.close())

    def _do(self, *actions: Callable[[IO[bytes]], Any]) -> None:
        try:
            for action in actions:
                if self._file is not None:
                    action(self._file)
        except OSError as error:
            self._file = None
            print(f"the update log ends here, and the run cannot be replayed: {error}", flush=True)


def cloned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy, None of None."""
    return None if tensor is None else tensor.clone()


def updates_in(entries: Sequence[UpdateEntry], softsync: int) -> int:
    """Return how many updates the entries of a log make."""
    updates = count = 0
    for entry in entries:
        count += entry.versions[0] >= 0
        if count == softsync or (entry.versions[0] == FLUSHED and count):
            updates, count = updates + 1, 0
    return updates


_Pushed = tuple[Versions, torch.Tensor | None, torch.Tensor | None]  # versions, gradient (None: left out), buffers


class WeightShard:
    """The weights of one shard and their updates; safe for threads. `lock` guards all state."""

    def __init__(
        self,
        settings: TrainingSettings,
        number: int,
        pieces: Sequence[nn.Parameter],
        ranks: int,
        first: int,
        max_steps: int,
        buffers: torch.Tensor | None = None,
        log: UpdateLog | None = None,
    ) -> None:
        """`pieces` are views of one vector, in order; `first` is the first ticket; `max_steps` is the schedule's end.

        `buffers` are the module's persistent buffers as bytes, on the first shard; `log` gets a UpdateEntry an update.
        """
        self.lock = threading.Lock()
        self.number = number
        self.pieces = list(pieces)
        self._ranks, self._softsync = ranks, settings.server.softsync
        self._is_capped, self._is_ordered = settings.server.staleness == "capped", settings.server.order == "tickets"
        self._is_adaptive = OPTIMIZERS[settings.optimizer.name].is_adaptive
        self.optimizer = optim.build(settings.optimizer, self.pieces, settings.global_batch_size, fused=True)
        # 3.9 in place of 5.7 ms for 10 M weights; other rounding
        if isinstance(self.optimizer, torch.optim.SGD) and ranks > 1:
            self.optimizer.param_groups[0].update(fused=True, foreach=False)
        self._base_lr = float(self.optimizer.param_groups[0]["lr"])
        start = optim.warmup_start(settings.optimizer, settings.schedule, settings.global_batch_size)
        self._factor = partial(optim.lr_factor, settings.schedule, max_steps=max_steps, start=start)
        # The vector of which the pieces are consecutive views.
        size = sum(piece.numel() for piece in self.pieces)
        self.weights = self.pieces[0].detach().as_strided((size,), (1,), self.pieces[0].storage_offset())
        self._sum = torch.zeros_like(self.weights)
        self._count = 0  # gradients in `_sum`
        self.buffers, self._next_buffers = buffers, buffers
        self.log = log
        # Updates so far, also those of earlier starts in the log: the versions in the log never begin again.
        self.version = 0 if log is None else updates_in(log.entries, self._softsync)
        self._first = first  # the first ticket since the last boundary
        self.applied = first  # tickets so far, in any order
        self._has: set[int] = set()  # tickets since the last boundary
        self._pending: dict[int, _Pushed] = {}  # in order: tickets that wait for an earlier one
        self._kept: dict[int, tuple[int, torch.Tensor, torch.Tensor | None]] = {}  # in order: weights by ticket
        self.staleness: Counter[int] = Counter()
        self.average: torch.Tensor | None = None  # of the weights, if the job keeps one
        self.after_step: Callable[[int], None] = lambda step: None

    def begin(self) -> None:
        """Begin at a boundary: all tickets handed out are applied. The next tickets read the present weights."""
        with self.lock:
            self._first = self.applied
            self._has.clear()
            self._kept.clear()
            if self._is_ordered:
                for ticket in range(self.applied, self.applied + self._ranks):
                    self._keep(ticket)

    def flush(self) -> None:
        """Apply an incomplete average, at a boundary, and make the log durable."""
        with self.lock:
            if self._count:
                self._note(self._count, (FLUSHED,))
                self._update()
            if self.log is not None:
                self.log.sync()

    def pull(self, ticket: int, room: torch.Tensor, buffers: torch.Tensor | None = None) -> int:
        """Copy the weights for the ticket to `room`, and the buffers; return their version."""
        with self.lock:
            for old in [key for key in self._kept if key <= ticket - self._ranks]:
                del self._kept[old]  # all shards have it: otherwise this ticket would not be handed out
            version, weights, kept = self._kept.get(ticket, (self.version, self.weights, self.buffers))
            room.copy_(weights)
            if buffers is not None and kept is not None:
                buffers.copy_(kept)
            return version

    def push(
        self, ticket: int, versions: Versions, gradient: torch.Tensor | None, buffers: torch.Tensor | None = None
    ) -> bool:
        """Apply the ticket's gradient, which is overwritten; return False if the shard has it already.

        `gradient` None: the ticket counts, without an update. `buffers`: of the step's first virtual rank.
        """
        with self.lock:
            if ticket in self._has or ticket < self._first:
                return False
            self._has.add(ticket)
            if not self._is_ordered:
                self._apply(ticket, versions, gradient, buffers)
                return True
            self._pending[ticket] = versions, cloned(gradient), cloned(buffers)
            while self.applied in self._pending:
                done = self.applied
                self._apply(done, *self._pending.pop(done))
                self._keep(done + self._ranks)
            return True

    def _keep(self, ticket: int) -> None:
        self._kept[ticket] = (self.version, self.weights.clone(), cloned(self.buffers))

    @torch.no_grad()
    def _apply(
        self, ticket: int, versions: Versions, gradient: torch.Tensor | None, buffers: torch.Tensor | None
    ) -> None:
        tau = self.version - versions[self.number]
        self._note(ticket, (LEFT_OUT,) if gradient is None else versions)
        self.applied += 1
        if gradient is not None:
            self.staleness[tau] += 1
            weight = min(1.0, self._ranks / (1 + tau)) if self._is_capped else 1.0
            self._sum.add_(gradient, alpha=weight) if self._count else torch.mul(gradient, weight, out=self._sum)
            self._count += 1
            if buffers is not None and self._next_buffers is not None:
                self._next_buffers = buffers.clone()
            if self._count == self._softsync:
                self._update()
        if self.applied % self._ranks == 0:
            self.after_step(self.applied // self._ranks)

    def _update(self) -> None:
        share = self._count / self._ranks
        share = math.sqrt(share) if self._is_adaptive else share
        if self._count > 1:
            self._sum /= self._count
        factor = self._factor((self.applied - 1) // self._ranks)
        optim.set_lr(self.optimizer.param_groups, [self._base_lr * share], factor)
        for piece, part in zip(self.pieces, torch.split(self._sum, [p.numel() for p in self.pieces]), strict=True):
            piece.grad = part.view(piece.shape)
        self.optimizer.step()
        self.buffers, self._count, self.version = self._next_buffers, 0, self.version + 1

    def _note(self, ticket: int, versions: Versions) -> None:
        if self.log is not None:
            self.log.write(UpdateEntry(ticket, versions))

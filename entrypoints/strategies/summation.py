"""Gradients summed in an order that no number of ranks changes, for the same bits on 1, 2, 4, ... ranks.

Adding floating-point numbers in another order gives another sum. So the order is fixed: the V = 2^n virtual ranks are
the leaves of a binary tree, where two nodes are siblings if their numbers differ in the lowest bit, their parents if
those differ in the next, and so on. a + b is b + a to the bit, so it does not matter who adds.

One rank walks the tree as a binary counter does (Counter). Across ranks, level k adds what rank r and rank r ^ 2^k
hold: two ranks at a time, so that no transfer has an order of its own. With strided ownership (v = r + W a) the ranks
are the lower levels, and each micro-batch is summed over the ranks at once, as fsdp must; with neighbours (v = r A + a)
they are the upper ones, and only the step's sum is sent, as ddp wants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Counter", "Ladder", "TreeGradients", "TreeReduceScatter", "ladder", "sum_transfers"]

_BUCKET_BYTES = 25 << 20  # ddp's: large enough for full speed, small enough to be sent during the backward pass
_FIRST_BUCKET_BYTES = 1 << 20
_DOUBLING_RANKS = (
    4  # up to here sending all at every level is quicker than halving: 1.1 times ddp's step, not 1.8 (gloo)
)

# New names in torch 2.13, which warns of the old ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Node = TypeVar("Node")


class Counter(Generic[Node]):
    """The sums of one rank that wait for their right siblings: at most one for each bit of the leaves' number.

    `add(into, other)` adds in place.
    """

    def __init__(self, add: Callable[[Node, Node], None]) -> None:
        self._add = add
        self._waiting: list[Node] = []
        self._leaves = 0

    def push(self, leaf: Node) -> list[Node]:
        """Take the next leaf and add to it the siblings it completes. Return those, which are free now."""
        freed = []
        level = self._leaves
        while level & 1:
            freed.append(self._waiting.pop())
            self._add(leaf, freed[-1])
            level >>= 1
        self._leaves += 1
        self._waiting.append(leaf)
        return freed

    def end(self) -> None:
        """Begin anew, after the last leaf."""
        self._leaves = 0
        self._waiting.clear()


@dataclass(frozen=True)
class Ladder:
    """This rank's partners: the group of two at each level, and how many ranks there are."""

    rank: int
    ranks: int
    pairs: list[dist.ProcessGroup | None]  # None stands for all ranks, which are two then


def ladder() -> Ladder:
    """Return the partners among all ranks, whose number is a power of two. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    levels = ranks.bit_length() - 1
    if ranks == 2:
        return Ladder(rank, ranks, [None])
    pairs = [sorted((rank, rank ^ 1 << level)) for level in range(levels)]
    return Ladder(rank, ranks, [dist.new_group(pair, use_local_synchronization=True) for pair in pairs])


def sum_transfers(flat: torch.Tensor, ranks: Ladder) -> Iterator[dist.Work]:
    """Sum the tensor over all ranks in place; yield each transfer once it is under way, and go on when asked.

    The number of elements is a multiple of the number of ranks. Among few ranks every level sends the whole tensor.
    Among many each level halves what a rank is responsible for, so that as much is sent as by a ring:
    2 (W - 1) / W times the tensor, not log2(W) times.
    """
    if ranks.ranks <= _DOUBLING_RANKS:
        for pair in ranks.pairs:
            yield _begun(dist.all_reduce(flat, group=pair, async_op=True))
        return
    rest = flat
    for level, pair in enumerate(ranks.pairs):
        rest, work = _halve(rest, ranks.ranks >> level, pair)
        yield work
    yield _begun(_all_gather(flat, rest, async_op=True))


class TreeReduceScatter:
    """fsdp's reduce-scatter over the tree. Has the methods that set_custom_reduce_scatter asks for.

    Under hsdp each copy of the model is `width` ranks. The sum over the copies is the tree's too; fsdp's own all-reduce
    over them follows, and finds the sum on the first copy and zeros on the others, so that its order is no matter.
    """

    def __init__(self, ranks: Ladder, width: int) -> None:
        self._ranks = ranks
        self._levels = width.bit_length() - 1
        self._is_first_copy = ranks.rank < width

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a transfer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum over all ranks to the output."""
        rest = input_tensor
        for level, pair in enumerate(self._ranks.pairs[: self._levels]):
            rest, work = _halve(rest, group.size() >> level, pair)
            work.wait()
        output_tensor.copy_(rest)
        for pair in self._ranks.pairs[self._levels :]:
            dist.all_reduce(output_tensor, group=pair)
        if not self._is_first_copy:
            output_tensor.zero_()


def _halve(rest: torch.Tensor, parts: int, pair: dist.ProcessGroup | None) -> tuple[torch.Tensor, dist.Work]:
    """Share the parts with this level's partner, the even ones and the odd ones; return the sum of one's own.

    After all levels a rank is left with the part of its own number: bit k of it was decided at level k.
    """
    evens_then_odds = rest.view(parts // 2, 2, -1).transpose(0, 1).contiguous().view(-1)
    own = torch.empty_like(evens_then_odds[: evens_then_odds.numel() // 2])
    return own, _begun(_reduce_scatter(own, evens_then_odds, group=pair, async_op=True))


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is a member of each group it uses
    return work


class TreeGradients:
    """ddp's gradients in flat buckets, summed over the tree; the first transfers begin during the backward pass.

    Sums are made element by element, so how the buckets are cut is no matter. A parameter that no micro-batch of the
    step used has the gradient zero, not None: to know that of all ranks would take a transfer of its own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], silent: bool) -> None:
        self._ranks = Ladder(0, 1, []) if silent else ladder()
        self._buckets = [_Bucket(part, self._ranks.ranks) for part in _cut(parameters)]
        self._is_last = False
        self._sent = 0  # buckets, in their order: all ranks must send them in the same
        self._under_way: list[tuple[Iterator[dist.Work], dist.Work]] = []
        device = parameters[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                arrived = functools.partial(self._arrived, bucket)
                parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def begin(self, is_last: bool) -> None:
        """Give every parameter the gradient zero, as a part of a bucket, before a micro-batch."""
        self._is_last, self._sent = is_last, 0
        for bucket in self._buckets:
            bucket.lend()

    def end(self) -> None:
        """Add the micro-batch's gradients to those before; the last one's go to the other ranks as well."""
        if self._is_last:
            self._send(every=True)
            return
        for bucket in self._buckets:
            bucket.push()

    def finish(self) -> None:
        """Wait until the sums over the ranks are in the gradients."""
        while self._under_way:
            going, self._under_way = self._under_way, []
            for transfers, work in going:
                work.wait()
                self._go_on(transfers)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for bucket in self._buckets:
            bucket.end()

    def _arrived(self, bucket: _Bucket, _parameter: torch.Tensor) -> None:
        if self._is_last:
            bucket.missing -= 1
            if not bucket.missing:
                self._send(every=False)

    def _send(self, every: bool) -> None:
        while self._sent < len(self._buckets) and (every or not self._buckets[self._sent].missing):
            flat = self._buckets[self._sent].push()
            self._sent += 1
            transfers = sum_transfers(flat, self._ranks)
            if self._stream is None:
                self._go_on(transfers)
                continue
            # On a GPU waiting is a matter of streams: all levels are queued beside the backward pass, not after it.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for work in transfers:
                    work.wait()

    def _go_on(self, transfers: Iterator[dist.Work]) -> None:
        work = next(transfers, None)
        if work is not None:
            self._under_way.append((transfers, work))


@dataclass(frozen=True)
class _Flat:
    """Memory for a bucket's gradients, and each of them in it."""

    values: torch.Tensor
    parts: list[torch.Tensor]

    def add(self, other: _Flat) -> None:
        self.values.add_(other.values)


class _Bucket:
    """Some of the parameters: the gradients of this micro-batch, and the sums of those before."""

    def __init__(self, parameters: list[nn.Parameter], multiple: int) -> None:
        self.parameters = parameters
        self.missing = 0  # gradients that this backward pass has not written yet
        self._multiple = multiple
        self._counter: Counter[_Flat] = Counter(_Flat.add)
        self._free: list[_Flat] = []
        self._flat = self._allocate()

    def lend(self) -> None:
        """Set every gradient to zero, in memory that no sum is kept in."""
        self._flat = self._free.pop() if self._free else self._allocate()
        self._flat.values.zero_()
        self.missing = len(self.parameters)
        for parameter, part in zip(self.parameters, self._flat.parts, strict=True):
            parameter.grad = part

    def push(self) -> torch.Tensor:
        """Add the gradients to the sums they complete; return them, flat."""
        self._free += self._counter.push(self._flat)
        return self._flat.values

    def end(self) -> None:
        """Begin anew: what is in the gradients now is the step's sum."""
        self._counter.end()
        self._free.append(self._flat)

    def _allocate(self) -> _Flat:
        sizes = [parameter.numel() for parameter in self.parameters]
        padded = -(-sum(sizes) // self._multiple) * self._multiple
        values = self.parameters[0].detach().new_empty(padded)
        parts = torch.split(values[: sum(sizes)], sizes)
        return _Flat(values, [_shaped(part, p) for part, p in zip(parts, self.parameters, strict=True)])


def _shaped(part: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return the part in the parameter's layout, which optimizers are quickest in."""
    if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.shape)


def _cut(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in buckets of one type, the last first: about the order in which gradients come."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        if not buckets or size > room or parameter.dtype != buckets[-1][0].dtype:
            room = _BUCKET_BYTES if buckets else _FIRST_BUCKET_BYTES
            buckets.append([])
        buckets[-1].append(parameter)
        room -= size
    return buckets

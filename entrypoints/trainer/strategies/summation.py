"""Gradients summed in an order that does not depend on the number of ranks: the same bits on 1, 2, 4, ... ranks.

Adding floating-point numbers in a different order gives a different sum. So the order is fixed: the V = 2^n virtual
ranks are the leaves of a binary tree. Two nodes are siblings if their numbers differ in the lowest bit, the parents are
siblings if their numbers differ in the next bit, and so on. a + b equals b + a to the bit, so any rank may add.
Within a rank the tree is walked like a binary counter (Counter). Across ranks, level k adds the values of rank r and
rank r ^ 2^k: two ranks at a time, so no transfer has an order of its own. With strided ownership (v = r + W a) ranks
are the lower levels, and each micro-batch is summed over the ranks at once, as fsdp must; with neighbours (v = r A + a)
ranks are the upper levels, and only the step's sum is sent, as ddp should.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...errors import TaskError
from .strategy import all_gather, buckets, layout

_FIRST_BUCKET_BYTES = 1 << 20  # as DistributedDataParallel's: sent early in the backward pass
# Up to so many ranks, sending all at every level is faster than halving: 1.1 times ddp's step, not 1.8 (gloo).
_DOUBLING_RANKS = 4

# New name in torch 2.13, which warns of the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Node = TypeVar("Node")
# This rank's partner at each level, as a group of two; None: all ranks, for a job of two ranks.
Ladder = list[dist.ProcessGroup | None]


class PartialSums(Generic[Node]):
    """The sums of one rank that wait for their right siblings: at most one for each bit of the number of leaves.

    `add(into, other)` adds in place.
    """

    def __init__(self, add: Callable[[Node, Node], Any]) -> None:
        self._add = add
        self._waiting: list[Node] = []
        self._leaves = 0

    def push(self, leaf: Node) -> list[Node]:
        """Add the waiting siblings of the next leaf to the leaf. Return the added siblings, which are free now."""
        freed, level = [], self._leaves
        while level & 1:
            freed.append(self._waiting.pop())
            self._add(leaf, freed[-1])
            level >>= 1
        self._leaves += 1
        self._waiting.append(leaf)
        return freed

    def end(self) -> None:
        """Start again, after the last leaf."""
        self._leaves = 0
        self._waiting.clear()


def ladder() -> Ladder:
    """Return the partners among all ranks; the number of ranks is a power of two. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 2:
        return [None]
    pairs = [sorted((rank, rank ^ 1 << level)) for level in range(ranks.bit_length() - 1)]
    return [dist.new_group(pair, use_local_synchronization=True) for pair in pairs]


def sum_transfers(flat: torch.Tensor, pairs: Ladder) -> Iterator[dist.Work]:
    """Sum the tensor over all ranks in place; yield each transfer once begun; the caller waits, then asks for the next.

    The number of elements is a multiple of the number of ranks. With few ranks every level sends the whole tensor. With
    many ranks each level halves a rank's part, so a rank sends as much as in a ring: 2 (W - 1) / W times the tensor,
    not log2(W) times.
    """
    ranks = 1 << len(pairs)
    if ranks <= _DOUBLING_RANKS:
        for pair in pairs:
            yield begun(dist.all_reduce(flat, group=pair, async_op=True))
        return
    rest = flat
    for level, pair in enumerate(pairs):
        rest, work = _halve(rest, ranks >> level, pair)
        yield work
    yield begun(all_gather(flat, rest, async_op=True))


class Allocated:
    """A transfer of fsdp's that takes its memory from the allocator."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a transfer."""
        return torch.empty(*size, dtype=dtype, device=device)


class TreeReduceScatter(Allocated):
    """fsdp's reduce-scatter over the tree. Has the methods that set_custom_reduce_scatter needs.

    Under hsdp each copy of the model is on `width` ranks. The tree also sums over the copies; fsdp's own all-reduce
    over the copies follows, and finds the sum on the first copy and zeros on all other copies, so its order does not
    matter.
    """

    def __init__(self, pairs: Ladder, width: int) -> None:
        levels = width.bit_length() - 1
        self._inside, self._over_copies = pairs[:levels], pairs[levels:]
        self._is_first_copy = dist.get_rank() < width

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *_: Any, **__: Any) -> None:
        """Write this rank's part of the sum over all ranks to the output."""
        rest = input_tensor
        for level, pair in enumerate(self._inside):
            rest, work = _halve(rest, group.size() >> level, pair)
            work.wait()
        output_tensor.copy_(rest)
        for pair in self._over_copies:
            dist.all_reduce(output_tensor, group=pair)
        if not self._is_first_copy:
            output_tensor.zero_()


def _halve(rest: torch.Tensor, parts: int, pair: dist.ProcessGroup | None) -> tuple[torch.Tensor, dist.Work]:
    """Exchange parts with this level's partner, even parts against odd parts; return the sum of this rank's half.

    After all levels a rank has the part of its own number: bit k of the number was decided at level k.
    """
    evens_then_odds = rest.view(parts // 2, 2, -1).transpose(0, 1).contiguous().view(-1)
    own = torch.empty_like(evens_then_odds[: evens_then_odds.numel() // 2])
    return own, begun(_reduce_scatter(own, evens_then_odds, group=pair, async_op=True))


def begun(work: dist.Work | None) -> dist.Work:
    """Return the transfer."""
    assert work is not None  # this rank is a member of each group it uses
    return work


class TreeGradients:
    """ddp's gradients in flat buckets, summed over the tree; the first transfers begin during the backward pass.

    Sums are made element by element, so the division into buckets does not matter. A parameter that no micro-batch of
    the step used has the gradient zero, not None: to learn of unused parameters on all ranks would need a further
    transfer.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], silent: bool) -> None:
        self._pairs = [] if silent else ladder()
        # The last first: about the order in which gradients arrive.
        cut = buckets(parameters[::-1], _FIRST_BUCKET_BYTES)
        self._buckets = [_Bucket(part, 1 << len(self._pairs)) for part in cut]
        self._is_last = False
        self._sent = 0  # number of buckets sent, in order: all ranks must send in the same order
        self._under_way: list[tuple[Iterator[dist.Work], dist.Work]] = []
        device = parameters[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        for bucket in self._buckets:
            arrived = functools.partial(self._arrived, bucket)
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def begin(self, is_last: bool) -> None:
        """Set every gradient to zero, as a part of a bucket, before a micro-batch."""
        self._is_last, self._sent = is_last, 0
        for bucket in self._buckets:
            bucket.lend()

    def end(self) -> None:
        """Add the micro-batch's gradients to the earlier sums; after the last micro-batch, send to other ranks too."""
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

    def _arrived(self, bucket: _Bucket, parameter: torch.Tensor) -> None:
        if self._is_last:
            if self._pairs and not bucket.missing:
                shape = "x".join(map(str, parameter.shape))
                raise TaskError(
                    f"a parameter of shape {shape} gets a second gradient in one backward pass, and the first is "
                    "with the other ranks: write use_reentrant=False in torch.utils.checkpoint, or use the layer once"
                )
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._send(every=False)

    def _send(self, every: bool) -> None:
        while self._sent < len(self._buckets) and (every or not self._buckets[self._sent].missing):
            flat = self._buckets[self._sent].push()
            self._sent += 1
            transfers = sum_transfers(flat, self._pairs)
            if self._stream is None:
                self._go_on(transfers)
                continue
            # On a GPU, streams wait: all levels are queued in parallel with the backward pass, not after it.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for work in transfers:
                    work.wait()

    def _go_on(self, transfers: Iterator[dist.Work]) -> None:
        if (work := next(transfers, None)) is not None:
            self._under_way.append((transfers, work))


class _Flat(NamedTuple):
    """Memory for a bucket's gradients, and a view of each gradient."""

    values: torch.Tensor
    parts: list[torch.Tensor]


class _Bucket:
    """Some of the parameters: the gradients of this micro-batch, and the sums of earlier micro-batches."""

    def __init__(self, parameters: list[nn.Parameter], multiple: int) -> None:
        self.parameters = parameters
        self.missing = set[torch.Tensor]()  # whose gradients this backward pass has not written yet
        self._multiple = multiple
        self._counter = PartialSums[_Flat](lambda into, other: into.values.add_(other.values))
        self._free: list[_Flat] = []
        self._flat = self._allocate()

    def lend(self) -> None:
        """Set every gradient to zero, in memory that holds no sum."""
        self._flat = self._free.pop() if self._free else self._allocate()
        self._flat.values.zero_()
        self.missing = set(self.parameters)
        for parameter, part in zip(self.parameters, self._flat.parts, strict=True):
            parameter.grad = part

    def push(self) -> torch.Tensor:
        """Add the gradients to the sums they complete; return the result, flat."""
        self._free += self._counter.push(self._flat)
        return self._flat.values

    def end(self) -> None:
        """Start again: the gradients now hold the step's sum."""
        self._counter.end()
        self._free.append(self._flat)

    def _allocate(self) -> _Flat:
        sizes = [parameter.numel() for parameter in self.parameters]
        padded = -(-sum(sizes) // self._multiple) * self._multiple
        values = self.parameters[0].detach().new_empty(padded)
        parts = torch.split(values[: sum(sizes)], sizes)
        return _Flat(values, [part.as_strided(*layout(p)) for part, p in zip(parts, self.parameters, strict=True)])

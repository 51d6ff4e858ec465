"""Pipeline parallelism: stages on different ranks compute the blocks of a model, one micro-batch after the other.

Every stage calls the task's own `loss` on its own copy of the batch, so neither model nor task need a change. The
blocks before the stage's own only pass on the activation that the previous stage has sent. Behind the stage's last
block an exception ends the pass. The parameters of other stages are removed; names stay those of the whole model.

The generator's state travels with the activation, and gradients add up in the order of the micro-batches: so the losses
are those of one process bit for bit, dropout included. The schedules are in schedules.py.

torch.distributed.pipelining has the same schedules and is not used: it wants the model as stages whose inputs and
outputs are given, with a loss function of its own, while here `loss(model, batch)` of the task stays unchanged; and it
passes no state of generators between stages, so dropout would differ from one process.

`async` starts the forward passes of later steps before this step's update, so that no stage waits at the end of a step
(PipeDream, Harlap et al. 2018). The backward pass of a micro-batch then uses the weights of its forward pass (`weights:
stash`), or the newest (`latest`). The number of updates between the two passes is the staleness, and is reported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from ...errors import TaskError
from ...rank.exchange import local_part
from ..optim import whole_norms
from ..settings import ParallelSettings
from .cut import Trace
from .links import Activation, Links
from .schedules import PassOrder
from .strategy import Feed, StageTimes, Strategy, scale_down

T = TypeVar("T")


class _PassEnds(BaseException):
    """Ends the pass of a stage inside the model; no `except Exception` of the user's code may catch it."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output


class _LossEnds(_PassEnds):
    """Ends the call of the task's function."""


@dataclass
class _Pass:
    """A micro-batch between its forward and its backward pass through a chunk; `version` counts weight updates."""

    received: Activation | None = None
    output: torch.Tensor | None = None
    version: int = 0


class _Weights:
    """The weights of the forward passes whose backward passes are still to come.

    Tensors that autograd saves for a backward pass refer to the parameters, which an update changes in place. Instead a
    pass saves the parameter's version; the values of a version are copied when an update replaces them.
    """

    def __init__(self, module: nn.Module, keeps: bool) -> None:
        """`keeps`: whether a backward pass uses the weights of its forward pass, or the newest. Raises TaskError."""
        self.version = 0
        self._keeps = keeps
        self._own = {local_part(p).untyped_storage()._cdata: local_part(p).detach() for p in module.parameters()}
        if len(self._own) < len(list(module.parameters())):
            raise TaskError("parallel.schedule: async needs parameters in memory of their own; set schedule: 1f1b")
        self._old: dict[int, dict[int, torch.Tensor]] = {}

    def saved(self) -> saved_tensors_hooks:
        """Return a context for a forward pass, which saves parameters by version."""
        version = self.version

        def pack(tensor: torch.Tensor) -> Any:
            address = tensor.untyped_storage()._cdata
            own = self._own.get(address)
            if own is None:
                return tensor
            return address, tensor.size(), tensor.stride(), tensor.storage_offset() - own.storage_offset()

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            address, size, stride, offset = packed
            values: torch.Tensor = self._old.get(version, self._own)[address]
            return values.as_strided(size, stride, values.storage_offset() + offset)

        return saved_tensors_hooks(pack, unpack)

    def update(self, in_flight: set[int]) -> None:
        """Prepare for an update: keep the values that passes in flight, by version, still need."""
        self._old = {version: values for version, values in self._old.items() if version in in_flight}
        if self._keeps and self.version in in_flight:
            self._old[self.version] = {address: own.clone() for address, own in self._own.items()}
        self.version += 1


@dataclass
class PipelineStage:
    """This rank's stage of a pipeline, in a module without the parameters of the other stages.

    `starts`: the first block of each piece of the model; a stage has one piece, or one for each chunk.
    """

    module: nn.Module
    starts: tuple[int, ...]
    found: Trace
    shared: tuple[str, ...]  # the names of parameters that the first and the last stage share
    links: Links
    settings: ParallelSettings
    device: torch.device
    expected: float  # the share of a step in which the stages wait
    _around: Callable[[int, bool], AbstractContextManager[Any]] = field(init=False)
    _weights: _Weights | None = None
    _piece: int = 0  # in progress
    _is_inside: bool = False  # the module's forward pass
    _has_ended: bool = False  # the pass, after the piece's last block
    _incoming: Activation | None = None
    _batches: dict[int, Any] = field(default_factory=dict)  # by micro-batch, until its last chunk
    _passes: dict[tuple[int, int], _Pass] = field(default_factory=dict)  # between forward and backward
    _begun: int = 0  # forward passes of this step
    _expected: int = 0  # forward passes of this step whose activations are being received
    _stale: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of this stage that have parameters."""
        pieces = range(self.links.number, len(self.starts), self.settings.pipeline)
        own = [block for piece in pieces for block in self.found.blocks[slice(*self._span(piece))]]
        return [block for block in own if any(True for _ in block.parameters())]

    def attach(self) -> None:
        """Make the module compute the blocks of the piece in progress only."""
        for number, block in enumerate(self.found.blocks):
            # Outside the block's hooks, with which fsdp would gather parameters that this pass does not need.
            block._call_impl = functools.partial(self._call, number, block._call_impl)  # type: ignore[method-assign]
        forward = self.module.forward

        @functools.wraps(forward)
        def until_the_end(*args: Any, **kwargs: Any) -> Any:
            self._is_inside = True
            try:
                return forward(*args, **kwargs)
            except _PassEnds as end:
                self._has_ended = True
                return end.output
            finally:
                self._is_inside = False

        self.module.forward = until_the_end

    def spread(self, strategy: Strategy) -> Strategy:
        """Return the strategy of this stage's module, with the passes of the pipeline. Raises TaskError."""
        self.module.register_forward_hook(self._end_loss)  # after the hooks of fsdp
        # With chunks or passes of later steps, no pass begins with the buffers of the step's begin.
        is_plain = self.settings.schedule in ("1f1b", "gpipe")
        self._around = strategy.micro_batch if is_plain else lambda _virtual, _last: nullcontext()
        if not is_plain and self.found.written:
            raise TaskError(
                f"parallel.schedule: {self.settings.schedule} cannot train a model that changes its buffer "
                f"{self.found.written[0]}; set schedule: 1f1b"
            )
        if self.settings.schedule == "async":
            self._weights = _Weights(self.module, self.settings.weights == "stash")
            if self.shared:
                raise TaskError(
                    f"parallel.schedule: async cannot train {self.shared[0]}, because two stages share it; set 1f1b"
                )
        own = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        ends = [own[name] for name in self.shared if name in own]
        elsewhere = frozenset(self.shared) if self.links.number == self.settings.pipeline - 1 else frozenset()

        @torch.no_grad()
        def finish() -> None:
            strategy.finish()
            for parameter in ends:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local_part(parameter.grad), group=self.links.ends)

        @torch.no_grad()
        def clip(max_norm: float) -> torch.Tensor:
            moved = {name: p for name, p in own.items() if p.grad is not None}
            gradients = [local_part(p.grad) for p in moved.values() if p.grad is not None]
            counted = dict(zip(moved, whole_norms(list(moved.values()), gradients)[0], strict=True))
            norms = [counted.get(name) if name not in elsewhere else None for name in self.found.parameters]
            table = torch.stack([torch.zeros((), device=self.device) if norm is None else norm for norm in norms])
            dist.all_reduce(table, group=self.links.forward)  # each norm is from one stage: the sum rounds nothing
            norm: torch.Tensor = torch.linalg.vector_norm(table)
            scale_down(gradients, norm, max_norm)
            return norm

        return replace(
            strategy,
            clip=clip,
            finish=finish,
            walk=self.walk,
            evaluate=self.evaluate,
            stage_times=self.times,
            saved_elsewhere=elsewhere,
        )

    def walk(self, feed: Feed) -> torch.Tensor:
        """Run the passes of a step; return the sum of the losses, a float64: 0 before the last stage.

        The gradients of this stage's parameters are summed over `feed.owned`.
        """
        parallel, count = self.settings, len(feed.owned)
        order = PassOrder(parallel.schedule, parallel.pipeline, parallel.chunks, self.links.number, count)
        most = order.passes * (1 + feed.steps_left if self._weights is not None else 1)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number in range(order.passes):
            while self._begun < min(number + order.ahead + 1, most):
                for coming in range(self._expected, min(self._begun + 2, most)):
                    self._expect(order.forward(coming)[0])
                self._expected = min(self._begun + 2, most)
                self._forward(feed, *order.forward(self._begun))
                self._begun += 1
            for coming in range(number + bool(number), min(number + 2, order.passes)):
                chunk, micro_batch = order.backward(coming)
                if self._piece_of(chunk) < len(self.starts) - 1:
                    output = self._passes[chunk, micro_batch].output
                    assert output is not None
                    self.links.expect_gradient(output)
            chunk, micro_batch = order.backward(number)
            made = self._passes.pop((chunk, micro_batch))
            if self._piece_of(chunk) == len(self.starts) - 1 and made.output is not None:
                total += made.output.detach().double()
            self._backward(feed, chunk, made, number == order.passes - 1)
        self._expected -= order.passes
        self._begun -= order.passes
        self._passes = {(chunk, number - count): made for (chunk, number), made in self._passes.items()}
        if self._weights is not None:
            self._weights.update({made.version for made in self._passes.values()})
        if self._weights is None or not feed.steps_left:
            self.links.flush()
        return total

    def evaluate(self, run: Callable[[nn.Module], T]) -> T | None:
        """Return the result of `run(model)` on the last stage, None on the others; without gradients."""
        result: T | None = None
        for chunk in range(self.settings.chunks):
            self._expect(chunk)
            self._begin(chunk)
            try:
                result = run(self.module)
            except _LossEnds as end:
                self._give(end.output)
        self.links.flush()
        return result

    def times(self) -> StageTimes:
        """Return the times since the last call. Collective."""
        waited = torch.zeros(self.settings.pipeline, dtype=torch.float64)
        waited[self.links.number] = self.links.waited_s()
        dist.all_reduce(waited, group=self.links.forward)
        stale = self._stale or [0]
        found = StageTimes(tuple(waited.tolist()), self.expected, sum(stale) / len(stale), max(stale))
        self._stale.clear()
        return found

    def _piece_of(self, chunk: int) -> int:
        return chunk * self.settings.pipeline + self.links.number

    def _span(self, piece: int) -> tuple[int, int]:
        """Return the first block of a piece, and the first block after the piece."""
        ends = (*self.starts[1:], len(self.found.blocks))
        return self.starts[piece], ends[piece]

    def _call(self, number: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand for the call of a block: compute the block, pass on its input, receive, or end the pass."""
        first, end = self._span(self._piece)
        if not self._is_inside:
            raise TaskError("parallel.pipeline: loss and evaluate must call the model itself, and not its parts")
        if number >= end:
            raise _PassEnds(args[0])
        if number >= first:
            return own(*args, **kwargs)
        if number < first - 1:
            return args[0]
        if self._incoming is None:  # a trace has checked the loss
            raise TaskError("parallel.pipeline: evaluate(model, batch) calls the model twice; call it once")
        incoming, self._incoming = self._incoming, None
        incoming.set_generators()
        return incoming.tensor.clone()  # the block may change its input in place

    def _end_loss(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if self._has_ended:
            self._has_ended = False
            raise _LossEnds(output)

    def _forward(self, feed: Feed, chunk: int, micro_batch: int) -> None:
        count = len(feed.owned)
        virtual, is_last = feed.owned[micro_batch % count], micro_batch % count == count - 1
        self._begin(chunk)
        if chunk == 0:
            self._batches[micro_batch] = feed.batch()
        keeps = chunk < self.settings.chunks - 1
        batch = self._batches[micro_batch] if keeps else self._batches.pop(micro_batch)
        feed.seed(virtual, micro_batch // count)
        version = self._weights.version if self._weights is not None else 0
        made = self._passes[chunk, micro_batch] = _Pass(self._incoming, version=version)
        with self._around(virtual, is_last), self._weights.saved() if self._weights is not None else nullcontext():
            try:
                made.output = feed.loss(self.module, batch)
            except _LossEnds as end:
                made.output = end.output
                self._give(end.output)
        feed.between()

    def _backward(self, feed: Feed, chunk: int, made: _Pass, last: bool) -> None:
        self._piece = self._piece_of(chunk)  # recomputation may call blocks
        output, made.output = made.output, None
        assert output is not None
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last)
        if self._weights is not None:
            self._stale.append(self._weights.version - made.version)
        if self._piece_of(chunk) == len(self.starts) - 1:
            feed.backward(output)
        else:
            torch.autograd.backward(output, self.links.take_gradient())
        if made.received is not None:
            self.links.give_gradient(made.received.tensor)
        feed.between()

    def _expect(self, chunk: int) -> None:
        """Begin to receive the output of the piece of the model before the chunk."""
        if piece := self._piece_of(chunk):
            self.links.expect(self.found.outputs[self.starts[piece] - 1])

    def _begin(self, chunk: int) -> None:
        """Begin a pass of a chunk, with the output of the previous piece of the model."""
        self._piece = self._piece_of(chunk)
        self._incoming = self.links.take() if self._piece else None

    def _give(self, output: torch.Tensor) -> None:
        """Send the output of the piece in progress."""
        _, end = self._span(self._piece)
        self.links.give(output, self.found.outputs[end - 1])

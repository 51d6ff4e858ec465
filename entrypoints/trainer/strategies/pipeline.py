"""Pipeline parallelism: stages on different ranks compute the blocks of a model, one micro-batch after the other.

Every stage calls the task's own `loss` on its own copy of the batch, so neither model nor task need a change. The
blocks before the stage's own only pass on the activation that the previous stage has sent. Behind the stage's last
block an exception ends the pass. The parameters of other stages are removed; names stay those of the whole model.

The generator's state travels with the activation, and gradients add up in the order of the micro-batches: so the losses
are those of one process bit for bit, dropout included. Schedules: gpipe (Huang et al. 2019), all forward passes first;
1f1b (Narayanan et al. 2019, PipeDream-Flush), which keeps at most a micro-batch for each later stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.rank.exchange import local_part
from cloudtrain.entrypoints.trainer.optim import whole_norms
from cloudtrain.entrypoints.trainer.settings import ParallelSettings, bubble
from cloudtrain.entrypoints.trainer.strategies.cut import Trace, cut, keep_stage, trace
from cloudtrain.entrypoints.trainer.strategies.strategy import Strategy, scale_down

__all__ = ["SCHEDULES", "Feed", "PipelineStage"]

SCHEDULES = ("1f1b", "gpipe")

T = TypeVar("T")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 8


class _PassEnds(BaseException):
    """Ends the pass of a stage inside the model; no `except Exception` of the user's code may catch it."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output


class _LossEnds(_PassEnds):
    """Ends the call of the task's function."""


@dataclass(frozen=True)
class Feed:
    """The micro-batches of a step on this rank: `owned` are their virtual ranks.

    `batch` returns the next batch; `seed` seeds the generators; `loss` returns the checked loss of (model, batch);
    `backward` runs the backward pass of a loss; `between` is called after each pass.
    """

    owned: range
    batch: Callable[[], Any]
    seed: Callable[[int], None]
    loss: Callable[[Any, Any], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    between: Callable[[], None]


@dataclass(frozen=True)
class Groups:
    """The ranks of one pipeline, by stage, and process groups between them: for each direction, for all, for the ends.

    `ends` has the first and the last stage.
    """

    ranks: tuple[int, ...]
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    ends: dist.ProcessGroup | None

    @classmethod
    def create(cls, stages: int) -> Groups:
        """Return the groups of this rank's pipeline. All ranks call it."""
        each, found = dist.get_world_size() // stages, None
        for first in range(each):
            line = list(range(first, dist.get_world_size(), each))
            forward, backward, ends = dist.new_group(line), dist.new_group(line), dist.new_group([line[0], line[-1]])
            if dist.get_rank() in line:
                is_end = dist.get_rank() in (line[0], line[-1])
                found = cls(tuple(line), forward, backward, ends if is_end else None)
        assert found is not None
        return found


@dataclass
class _Pass:
    """A micro-batch between its forward and its backward pass."""

    received: torch.Tensor | None = None
    output: torch.Tensor | None = None


@dataclass
class PipelineStage:
    """This rank's stage of a pipeline, in a module without the parameters of the other stages."""

    module: nn.Module
    number: int
    starts: tuple[int, ...]
    found: Trace
    shared: tuple[str, ...]
    groups: Groups
    schedule: str
    device: torch.device
    _around: Callable[[int, bool], AbstractContextManager[Any]] = field(init=False)
    _incoming: torch.Tensor | None = None
    _state: torch.Tensor | None = None
    _sends: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)
    _head_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Learn the size of the bytes before an activation."""
        self._head_bytes = _head(torch.empty(0), self.device).numel()

    @classmethod
    def cut_out(
        cls,
        settings: ParallelSettings,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        probe: Callable[[nn.Module], object],
        device: torch.device,
        micro_batches: int,
    ) -> PipelineStage:
        """Trace the model, and remove the other stages' parameters. Collective; prints the stages. Raises TaskError."""
        names = {part: name for name, part in module.named_modules()}
        found = trace(module, blocks, probe)
        starts = tuple(cut(settings, len(found.blocks)))
        groups = Groups.create(settings.pipeline)
        number = groups.ranks.index(dist.get_rank())
        if dist.get_rank() == 0:
            ends = [*starts[1:], len(found.blocks)]
            stages = [
                names[found.blocks[first]] + (f" to {names[found.blocks[end - 1]]}" if end - first > 1 else "")
                for first, end in zip(starts, ends, strict=True)
            ]
            share = 100 * bubble(settings.pipeline, micro_batches)
            print(
                f"pipeline {settings.pipeline}: {'; '.join(stages)}; with {settings.schedule} and {micro_batches} "
                f"micro-batches each stage waits {share:.0f} % of a step, if the stages take equal time",
                flush=True,
            )
        shared = keep_stage(module, found, starts, number, device)
        return cls(module, number, starts, found, shared, groups, settings.schedule, device)

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.number == len(self.starts) - 1

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks of this stage."""
        end = len(self.found.blocks) if self.is_last else self.starts[self.number + 1]
        return self.found.blocks[self.starts[self.number] : end]

    def attach(self) -> None:
        """Make the module compute this stage's blocks only."""
        first = self.starts[self.number]
        for block in self.found.blocks[: max(0, first - 1)]:
            block.forward = _pass_on
        if first:
            self.found.blocks[first - 1].forward = self._receive
        if self.is_last:
            return
        self.found.blocks[self.starts[self.number + 1]].forward = _end_pass
        forward = self.module.forward

        @functools.wraps(forward)
        def until_the_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except _PassEnds as end:
                return end.output

        self.module.forward = until_the_end

    def spread(self, strategy: Strategy) -> Strategy:
        """Return the strategy of this stage's module, with the passes of the pipeline."""
        if not self.is_last:
            self.module.register_forward_hook(_end_loss)  # after the hooks of fsdp
        self._around = strategy.micro_batch
        own = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        ends = [own[name] for name in self.shared if name in own]
        elsewhere = frozenset(self.shared) if self.is_last else frozenset()

        @torch.no_grad()
        def finish() -> None:
            strategy.finish()
            for parameter in ends:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local_part(parameter.grad), group=self.groups.ends)

        @torch.no_grad()
        def clip(max_norm: float) -> torch.Tensor:
            moved = {name: p for name, p in own.items() if p.grad is not None}
            gradients = [local_part(p.grad) for p in moved.values() if p.grad is not None]
            counted = dict(zip(moved, whole_norms(list(moved.values()), gradients)[0], strict=True))
            norms = [counted.get(name) if name not in elsewhere else None for name in self.found.parameters]
            table = torch.stack([torch.zeros((), device=self.device) if norm is None else norm for norm in norms])
            dist.all_reduce(table, group=self.groups.forward)  # each norm is from one stage: the sum rounds nothing
            norm: torch.Tensor = torch.linalg.vector_norm(table)
            scale_down(gradients, norm, max_norm)
            return norm

        return replace(
            strategy,
            clip=clip,
            finish=finish,
            walk=self.walk,
            evaluate=self.evaluate,
            saved_elsewhere=elsewhere,
        )

    def walk(self, feed: Feed) -> torch.Tensor:
        """Run the forward and backward passes of a step; return the sum of the losses, a float64.

        The sum is 0 before the last stage. The gradients of this stage's parameters are summed over `feed.owned`.
        """
        count, later = len(feed.owned), len(self.starts) - 1 - self.number
        ahead = count if self.schedule == "gpipe" else later
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        waiting: list[_Pass] = []
        done = 0
        for number, virtual in enumerate(feed.owned):
            waiting.append(self._forward(feed, virtual, number == count - 1))
            if self.is_last and (loss := waiting[-1].output) is not None:
                total += loss.detach().double()
            if number >= ahead:
                self._backward(feed, waiting.pop(0), done == count - 1)
                done += 1
        while waiting:
            self._backward(feed, waiting.pop(0), done == count - 1)
            done += 1
        self._flush()
        return total

    def evaluate(self, run: Callable[[nn.Module], T]) -> T | None:
        """Return the result of `run(model)` on the last stage, None on the others; without gradients."""
        self._take()
        try:
            result = run(self.module)
        except _LossEnds as end:
            self._send_on(end.output)
            self._flush()
            return None
        return result

    def _forward(self, feed: Feed, virtual: int, last: bool) -> _Pass:
        self._take()
        batch = feed.batch()
        feed.seed(virtual)
        made = _Pass(self._incoming)
        with self._around(virtual, last):
            try:
                made.output = feed.loss(self.module, batch)
            except _LossEnds as end:
                made.output = end.output
                self._send_on(end.output)
        feed.between()
        return made

    def _backward(self, feed: Feed, made: _Pass, last: bool) -> None:
        output, made.output = made.output, None
        assert output is not None
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last)
        if self.is_last:
            feed.backward(output)
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, self.groups.ranks[self.number + 1], self.groups.backward)
            torch.autograd.backward(output, gradient)
        if (received := made.received) is not None:
            back = torch.zeros_like(received) if received.grad is None else received.grad
            self._send(back.contiguous(), self.groups.ranks[self.number - 1], self.groups.backward)
        feed.between()

    def _take(self) -> None:
        """Receive the activation of the previous stage, with its shape and the generator's state."""
        if self.number == 0:
            return
        source, group = self.groups.ranks[self.number - 1], self.groups.forward
        head = torch.empty(self._head_bytes, dtype=torch.uint8)
        dist.recv(head, source, group)
        sizes = head[: 8 * (_MOST_DIMS + 2)].view(torch.int64).tolist()
        self._state = head[8 * (_MOST_DIMS + 2) :]
        dims, dtype = sizes[0], _DTYPES[sizes[1]]
        received = torch.empty(sizes[2 : 2 + dims], dtype=dtype, device=self.device)
        dist.recv(received, source, group)
        self._incoming = received.requires_grad_(torch.is_grad_enabled())

    def _receive(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Stand for the block before this stage's first: return the received activation."""
        received, state = self._incoming, self._state
        assert received is not None
        assert state is not None
        cpu = len(torch.get_rng_state())
        torch.set_rng_state(state[:cpu].clone())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state[cpu:].clone(), self.device)
        return received

    def _send_on(self, output: torch.Tensor) -> None:
        target, group = self.groups.ranks[self.number + 1], self.groups.forward
        self._send(_head(output, self.device), target, group)
        self._send(output.detach().contiguous(), target, group)

    def _send(self, tensor: torch.Tensor, target: int, group: dist.ProcessGroup) -> None:
        work = dist.isend(tensor, target, group)
        assert work is not None
        self._sends = [pair for pair in self._sends if not pair[0].is_completed()]
        self._sends.append((work, tensor))

    def _flush(self) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()


def _head(output: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the bytes that precede an activation: its dimensions, type and shape, and the generators' states."""
    if output.dim() > _MOST_DIMS or output.dtype not in _DTYPES:
        raise TaskError(f"parallel.pipeline: a block returns {output.dtype} of {output.dim()} dimensions")
    shape = [output.dim(), _DTYPES.index(output.dtype), *output.shape, *[0] * (_MOST_DIMS - output.dim())]
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat([torch.tensor(shape, dtype=torch.int64).view(torch.uint8), *states])


def _pass_on(*args: Any, **_kwargs: Any) -> Any:
    return args[0]


def _end_pass(*args: Any, **_kwargs: Any) -> Any:
    raise _PassEnds(args[0])


def _end_loss(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
    raise _LossEnds(output)

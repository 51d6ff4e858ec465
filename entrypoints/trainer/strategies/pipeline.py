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
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.rank.exchange import local_part
from cloudtrain.entrypoints.trainer.optim import whole_norms
from cloudtrain.entrypoints.trainer.settings import ParallelSettings

if TYPE_CHECKING:
    from cloudtrain.entrypoints.trainer.strategies.strategy import Strategy

__all__ = ["SCHEDULES", "Feed", "PipelineStage", "Trace", "bubble", "cut", "even_cut", "trace"]

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


# ------------------------------------------------------------------------------------------------- the cut of the model


@dataclass(frozen=True)
class Trace:
    """One forward pass: the blocks in the order of their calls, and where parameters and buffers were used.

    A phase is -1 before the first block, the number of a block, or the number of blocks behind the last block.
    """

    blocks: tuple[nn.Module, ...]
    phases: dict[str, frozenset[int]]
    parameters: tuple[str, ...]  # the names of the trainable parameters of the whole model, in order


class _Uses(TorchDispatchMode):
    """Notes the phase in which each known tensor is an operation's argument."""

    def __init__(self, names: dict[torch.Tensor, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = -1
        self.found: dict[str, set[int]] = {name: set() for name in names.values()}
        self._names = {id(tensor): name for tensor, name in names.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if (name := self._names.get(id(value))) is not None:
                self.found[name].add(self.phase)
        return func(*args, **(kwargs or {}))


def trace(module: nn.Module, blocks: Sequence[nn.Module], run: Callable[[nn.Module], object]) -> Trace:
    """Run the forward pass once on tensors without data, and return its trace. Raises TaskError.

    `run` calls the task's loss. The blocks must form a chain: each is called once, and gets the output of the previous.
    """
    names = {part: name for name, part in module.named_modules()}
    tensors: dict[torch.Tensor, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensors.setdefault(tensor, name)
    uses, called, last = _Uses(tensors), list[nn.Module](), list[Any]()
    forwards = {block: block.forward for block in blocks}

    def follow(block: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if block in called:
                raise TaskError(f"parallel.pipeline: {names[block]} is called twice in one forward pass")
            if last and not (args and args[0] is last[0]):
                raise TaskError(
                    f"parallel.pipeline: the first argument of {names[block]} is not the output of "
                    f"{names[called[-1]]}, so the model cannot be cut between them; write blocks(model) in the task"
                )
            uses.phase = len(called)
            called.append(block)
            output = forwards[block](*args, **kwargs)
            if not isinstance(output, torch.Tensor):
                raise TaskError(f"parallel.pipeline: {names[block]} returns a {type(output).__name__}, not a tensor")
            last[:] = [output]
            uses.phase = len(blocks) if len(called) == len(blocks) else -2
            return output

        return forward

    try:
        for block in blocks:
            block.forward = follow(block)
        with torch.random.fork_rng(), FakeTensorMode(allow_non_fake_inputs=True), uses:
            run(module)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"parallel.pipeline: the forward pass cannot be traced without data: {type(error).__name__}: {error}"
        ) from error
    finally:
        for block in blocks:
            del block.forward
    if len(called) < len(blocks):
        missing = next(names[block] for block in blocks if block not in called)
        raise TaskError(f"parallel.pipeline: the forward pass does not call {missing}; write blocks(model) in the task")
    between = next((name for name, phases in uses.found.items() if -2 in phases), None)
    if between is not None:
        raise TaskError(f"parallel.pipeline: {between} is used between two blocks; write blocks(model) in the task")
    phases = {name: frozenset(found) for name, found in uses.found.items()}
    return Trace(tuple(called), phases, tuple(name for name, p in module.named_parameters() if p.requires_grad))


def even_cut(blocks: int, stages: int) -> list[int]:
    """Return the first block of each stage, for stages of equal numbers of blocks; earlier stages get the rest."""
    each, rest = divmod(blocks, stages)
    return [stage * each + min(stage, rest) for stage in range(stages)]


def cut(settings: ParallelSettings, blocks: int) -> list[int]:
    """Return the first block of each stage. Raises TaskError."""
    stages = settings.pipeline
    if blocks < stages:
        raise TaskError(f"parallel.pipeline is {stages}, but the model has {blocks} blocks; set {blocks} or fewer")
    if settings.cut == "even":
        return even_cut(blocks, stages)
    starts = [0, *settings.cut]
    if len(starts) != stages or sorted(set(starts)) != starts or starts[-1] >= blocks:
        raise TaskError(
            f"parallel.cut {list(settings.cut)} must be {stages - 1} rising numbers from 1 to {blocks - 1}: the first "
            "block of each later stage"
        )
    return starts


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of a step in which a stage waits, for stages of equal time.

    Source: Huang et al. 2019 (GPipe), section 2.3: (p - 1) / (m + p - 1).
    """
    return (stages - 1) / (micro_batches + stages - 1)


def keep_stage(
    module: nn.Module, found: Trace, starts: Sequence[int], stage: int, device: torch.device
) -> tuple[str, ...]:
    """Remove the parameters and buffers of the other stages from the module.

    Return the names of the parameters that the first and the last stage share, such as a tied embedding. The removed
    tensors leave placeholders of the same shape without memory, because code before the blocks still runs. Raises
    TaskError if other stages would share a parameter.
    """
    blocks, last = len(found.blocks), len(starts) - 1
    stage_of = [sum(start <= number for start in starts) - 1 for number in range(blocks)]
    shared = []
    for part_name, part in list(module.named_modules()):
        for kind in (part._parameters, part._buffers):
            for name, tensor in list(kind.items()):
                if tensor is None:
                    continue
                full = f"{part_name}.{name}".lstrip(".")
                phases = found.phases.get(full) or frozenset({-1})
                stages = {0 if n < 0 else last if n >= blocks else stage_of[n] for n in phases}
                if len(stages) > 1 and kind is part._parameters:
                    if stages != {0, last}:
                        raise TaskError(
                            f"parallel.pipeline: {full} is used in stages {sorted(stages)}; only the first and the "
                            "last stage can share a parameter: change parallel.cut"
                        )
                    shared.append(full)
                if stage not in stages:
                    del kind[name]
                    part.__dict__[name] = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
    return tuple(shared)


# --------------------------------------------------------------------------------------------------------- the schedule


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
            torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # as in torch's own function
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
        head = torch.empty_like(_head(torch.empty(0), self.device))
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

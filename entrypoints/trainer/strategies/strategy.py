"""The record that every strategy returns: one model, spread over the ranks, with functions for the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...rank.exchange import local_part, whole
from .. import data
from ..optim import whole_norms
from ..settings import TrainingSettings
from .buffers import Buffers

Blocks = Callable[[Any], Iterable[Any]]
State = dict[str, torch.Tensor]
Tensor = TypeVar("Tensor", bound=torch.Tensor)
Result = TypeVar("Result")

_BUCKET_BYTES = 25 << 20  # as DistributedDataParallel's
# The type for computation by `training.precision`; the weights keep the type that `model(params)` gave them.
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
# New name in torch 2.13, which warns of the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class StageTimes:
    """Seconds in which each stage of a pipeline waited for other stages, and the staleness of this rank's stage.

    `expected`: the share of a step in which the stages wait, by the schedule and the measured times of the blocks.
    Staleness is the number of weight updates between a micro-batch's forward and backward pass.
    """

    waited_s: tuple[float, ...]
    expected: float
    mean_staleness: float
    most_staleness: int


@dataclass(frozen=True)
class Feed:
    """The micro-batches of a step on this rank: `owned` are their virtual ranks.

    `batch` returns the next batch; `seed(virtual, steps)` seeds the generators for a micro-batch so many steps later;
    `loss` returns the checked loss of (model, batch); `backward` runs the backward pass of a loss; `between` is called
    after each pass. The pipeline must be empty `steps_left` steps after this one.
    """

    owned: range
    batch: Callable[[], Any]
    seed: Callable[[int, int], None]
    loss: Callable[[Any, Any], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    between: Callable[[], None]
    steps_left: int = 0


@dataclass(frozen=True)
class Strategy:
    """One model, spread over the ranks, with functions that all ranks call or no rank calls.

    Only `autocast`, `undo_buffers`, `rank_state`, `load_rank_state`, `figures`, `is_alike` and `is_lone` are local. A
    step is: for each virtual rank that this rank owns, in order, the forward pass and the backward pass of
    loss / divisor inside `micro_batch`; then `finish`; then the gradients are those of the mean over the global batch,
    or with `exchange` this rank's own until `exchange`; then the optimizer's step and `share_update`; then
    `after_step`. Buffers follow virtual rank 0, see buffers.py.

    Under the strategy local ranks train apart between averages. Such a step is a lone step: its gradients are those of
    this rank's samples, and `clip` and `finite_gradients` see only them.
    """

    module: nn.Module  # the user's module: clean names, state_dict() that aliases the parameters, evaluation
    model: Callable[[Callable[[Any], Any]], Any]  # runs a function of `module` in one forward pass: the loss
    divisor: int  # divides each micro-batch's mean loss before the backward pass
    strided: bool  # a rank r of W owns the virtual ranks r, r + W, ...; else the neighbours r * A ... r * A + A - 1
    micro_batch: Callable[[int, bool], AbstractContextManager[Any]]  # (virtual rank, the step's last on this rank?)
    finish: Callable[[], None]  # waits for the work that the last backward pass has started
    evaluate: Callable[[Callable[[Any], Any]], Any]  # runs a function of `module`; None before a pipeline's last stage
    autocast: Callable[[], AbstractContextManager[Any]]
    clip: Callable[[float], torch.Tensor]  # scales the gradients down to the norm; the norm before, equal on all ranks
    scale: Callable[[float], None]  # multiplies the gradients of the step, after `finish`
    finite_gradients: Callable[[], bool]  # whether all gradients are free of nan and infinity, equal on all ranks
    sync_buffers: Callable[[], None]  # to every rank, rank 0's: before evaluation, and before other ranks save them
    undo_buffers: Callable[[], None]  # back to the values at the start of an unfinished step of several micro-batches
    rank_state: Callable[[], State] = dict  # this rank's own state, saved by rank
    load_rank_state: Callable[[State], None] = lambda state: None  # for the same number of ranks; {} begins without
    # Of a stage of a pipeline: the passes of a step, which return the sum of losses, in place of the loop's own; the
    # times of all stages since the last call; and the names of parameters that another stage saves.
    walk: Callable[[Feed], torch.Tensor] | None = None
    stage_times: Callable[[], StageTimes] | None = None
    saved_elsewhere: frozenset[str] = frozenset()
    # Inside, the module has the parameters that the optimizer changes: to create the optimizer, and to name its state.
    optimized: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    shard: int = 0  # of the optimizer's parameters: its part of a copy, which draws random numbers of its own
    share_update: Callable[[], None] = lambda: None  # after the optimizer's step
    # Of a method that sends after clipping: (step counted from 0) replaces this rank's gradients, unscaled and clipped,
    # by the mean over the ranks; before the optimizer's step, unless the step is left out.
    exchange: Callable[[int], None] | None = None
    adopt: Callable[[torch.optim.Optimizer], None] = lambda _: None  # changes a built-in optimizer for the method
    # Figures of the method for the step event, of this rank since the last call: bytes_sent is a step's mean.
    figures: Callable[[], dict[str, float]] = dict
    # Called once, with the optimizer and the scaler of the job.
    attach: Callable[[torch.optim.Optimizer, torch.amp.GradScaler], None] = lambda optimizer, scaler: None
    is_lone: Callable[[int], bool] = lambda step: False  # whether this step, counted from 0, is a lone step
    # After every step, also a left-out step, with the steps done and the run's last step: averages, if due. Returns the
    # steps since the ranks last had the same weights, 0 if the weights differ now.
    after_step: Callable[[int, int], int] = lambda step, last_step: 1
    is_alike: Callable[[], bool] = lambda: True  # whether all ranks have the same weights: else no save, no evaluation
    compare_passes: Callable[[], Any] = lambda: None  # raises TaskError if the ranks have gathered different blocks
    # For a save at any step. Inside, model and optimizer have the ranks' means; yields this rank's own values.
    merged: Callable[[], AbstractContextManager[State]] = lambda: contextlib.nullcontext({})
    # State of the method, equal on all ranks and saved once; loaded with the steps done, before `load_rank_state`.
    shared_state: Callable[[], State] = dict
    load_shared_state: Callable[[State, int], None] = lambda state, step: None

    def parameter_names(self) -> dict[torch.Tensor, str]:
        """Return the names of the module's parameters, and of those that the optimizer changes in their place."""
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        with self.optimized():
            return names | {parameter: name for name, parameter in self.module.named_parameters()}


@dataclass(frozen=True)
class Setup:
    """A model and the job that spreads the model: what a strategy is made from."""

    settings: TrainingSettings
    module: nn.Module
    device: torch.device
    split: data.Split
    blocks: Blocks | None = None
    """Returns the blocks of the model; None: the model's layers."""
    silent: bool = False
    """No gradient or weight is sent, and the numbers are wrong: to measure the cost of communication."""
    mesh: DeviceMesh | None = None
    """The mesh of all ranks, if a copy of the model is spread over several ranks."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that need gradients."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def buffers(self, first: int) -> Buffers:
        """Return the module's buffers, for a rank that begins with virtual rank `first`."""
        keeps, stages = self.settings.on_nan == "skip", self.settings.parallel.pipeline
        return Buffers(self.module, self.split, first, self.silent, keeps=keeps, stages=stages)

    def of_one_rank(self, buffers: Buffers, *, agree: bool = False) -> Strategy:
        """Return the strategy of the unchanged module on a single rank; `agree`: ranks have different gradients."""
        parameters = self.trained
        return Strategy(
            module=self.module,
            model=lambda run: run(self.module),
            evaluate=lambda run: run(self.module),
            divisor=self.split.accumulation,
            strided=False,
            micro_batch=buffers.micro_batch,
            finish=lambda: None,
            autocast=autocaster(self.settings.precision, self.device),
            clip=lambda max_norm: clip(parameters, max_norm),
            scale=lambda factor: scale_gradients([p.grad for p in parameters if p.grad is not None], factor),
            finite_gradients=lambda: finite_gradients(parameters, agree=agree),
            sync_buffers=buffers.sync,
            undo_buffers=buffers.undo,
        )


def sparse_layers(module: nn.Module) -> list[str]:
    """Return the names of the trained embeddings whose gradients are sparse: only the rows of a batch."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, kinds))
    return [name for name, part in parts if part.sparse and part.weight.requires_grad]


class OneForward(nn.Module):
    """A module around the task's module, whose forward pass runs a function of the task's module.

    The strategies spread this module. So `loss` sees the same module under every strategy, and may call the module's
    methods and parts, or the module twice: for DDP and FSDP2 all of that is one forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[nn.Module], Result]) -> Result:
        """Return the function's result."""
        return run(self.module)


def layout(parameter: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Return the shape and the strides of the parameter's gradient, as optimizers expect: without gaps."""
    return parameter.shape, torch.empty_like(parameter, device="meta").stride()


def buckets(tensors: Sequence[Tensor], first_bytes: int = _BUCKET_BYTES) -> list[list[Tensor]]:
    """Return the tensors in groups of one type and device, each sent at once: about _BUCKET_BYTES of this rank's.

    The first group has about `first_bytes`.
    """
    parts, limits = [local_part(tensor) for tensor in tensors], [first_bytes, _BUCKET_BYTES]
    groups = dist._compute_bucket_assignment_by_size(parts, limits)[0] if parts else []  # type: ignore[attr-defined]
    return [[tensors[number] for number in group] for group in groups]


def autocaster(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that opens an autocast to the precision; a null context for fp32."""
    low = LOW.get(precision)
    return contextlib.nullcontext if low is None else lambda: torch.autocast(device.type, low)


def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients down to the norm; return the norm before, over all shards."""
    return whole(nn.utils.clip_grad_norm_(parameters, max_norm))


@torch.no_grad()
def clip_split(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip like `clip`, for gradients that are split in several ways: one all-reduce for each way of splitting."""
    moved = [p for p in parameters if p.grad is not None]
    if not moved:
        return torch.zeros(())
    gradients = [local_part(p.grad) for p in moved if p.grad is not None]
    norm: torch.Tensor = torch.linalg.vector_norm(whole_norms(moved, gradients)[0])
    scale_down(gradients, norm, max_norm)
    return norm


@torch.no_grad()
def scale_gradients(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply the gradients, or this rank's parts."""
    if parts := [local_part(gradient) for gradient in gradients]:  # none if the loss is a constant
        torch._foreach_mul_(parts, factor)


def scale_down(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients, or this rank's parts, from the norm down to `max_norm`."""
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # as in torch's own function


@torch.no_grad()
def clip_whole(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip like `clip`, with a norm whose bits do not depend on how the gradients are sharded.

    Sums over shards would depend on it: each gradient is gathered, one at a time, for a norm of the whole gradient.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(whole(gradient)) for gradient in gradients]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    scale_down([local_part(gradient) for gradient in gradients], norm, max_norm)
    return norm


def finite_gradients(parameters: Sequence[nn.Parameter], agree: bool) -> bool:
    """Return whether no gradient has nan or infinity; `agree`: on all ranks, because ranks hold different shards."""
    parts = [local_part(p.grad) for p in parameters if p.grad is not None]
    parts = [part for part in parts if part.numel()]  # a shard may be empty, without a largest element
    # The largest magnitude is finite exactly if all elements are: a sum of squares may overflow earlier.
    flag = torch.zeros((), dtype=torch.int32, device=parameters[0].device)
    if parts:
        flag += ~torch.isfinite(nn.utils.get_total_norm(parts, float("inf")))
    if agree:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return not bool(flag.item())


@torch.no_grad()
def share_weights(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Copy rank 0's values to every rank, one tensor at a time: ranks may have drawn different values."""
    if dist.get_world_size() == 1:
        return
    for tensor in tensors:
        moved = tensor.detach().to(device).contiguous()
        dist.broadcast(moved, 0)
        if moved.data_ptr() != tensor.data_ptr():
            tensor.copy_(moved)

"""The record that every strategy returns: one model, spread over the ranks, and what the training loop does with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cloudtrain.entrypoints.sharding import local_part

__all__ = ["LOW", "Blocks", "State", "Strategy", "autocaster", "clip", "clip_whole", "finite", "finite_gradients"]
__all__ += ["no_state", "skip_state", "share_weights"]

Blocks = Callable[[Any], Iterable[Any]]
State = dict[str, torch.Tensor]

# What `training.precision` computes in; the weights that the optimizer moves are fp32 in any case.
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Strategy:
    """One model, spread. All ranks call each function, or none does; `autocast`, `undo_buffers` and the two for state
    are local.

    A step is: for each virtual rank that this rank owns, in order, the forward pass and the backward pass of
    loss / divisor inside `micro_batch`; then `finish`; then the gradients are those of the mean over the global batch.
    Buffers follow virtual rank 0, see buffers.py.
    """

    module: nn.Module  # the user's module: clean names, state_dict() that aliases the parameters, evaluation
    model: nn.Module  # what `loss` calls in training
    divisor: int  # each micro-batch's mean loss is divided by it before its backward pass
    strided: bool  # a rank r of W owns the virtual ranks r, r + W, ...; else the neighbours r * A ... r * A + A - 1
    micro_batch: Callable[[int, bool], AbstractContextManager[Any]]  # (virtual rank, the step's last on this rank?)
    finish: Callable[[], None]  # ends what the last backward pass left under way
    autocast: Callable[[], AbstractContextManager[Any]]
    clip: Callable[[float], torch.Tensor]  # scales the gradients down to the norm; the norm before, alike on all ranks
    finite_gradients: Callable[[], bool]  # whether all gradients are free of nan and infinity, alike on all ranks
    rank_state: Callable[[], State]  # what is this rank's own, to be saved by rank: {} for most
    load_rank_state: Callable[[State], None]  # the same, of the same number of ranks; {} begins afresh
    sync_buffers: Callable[[], None]  # every rank gets rank 0's: before evaluation, and before other ranks save them
    undo_buffers: Callable[[], None]  # back to what an unfinished step of several micro-batches began with


def autocaster(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return what opens an autocast to the precision; fp32 needs none."""
    low = LOW.get(precision)
    return contextlib.nullcontext if low is None else lambda: torch.autocast(device.type, low)


def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients down to the norm; return the norm they had, over all shards."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


@torch.no_grad()
def clip_whole(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Do as `clip`, with a norm whose bits do not depend on how the gradients are sharded.

    Sums over shards would: so each gradient is gathered, one at a time, and its norm taken as of a whole one.
    """
    gradients: list[Any] = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    whole = (g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in whole]))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as in torch's own
    for gradient in gradients:
        local_part(gradient).mul_(factor)
    return norm


def finite(module: nn.Module) -> bool:
    """Return whether this rank's part of every parameter is free of nan and infinity."""
    return all(bool(torch.isfinite(local_part(p)).all()) for p in module.parameters())


def finite_gradients(parameters: Sequence[nn.Parameter], agree: bool) -> bool:
    """Return whether every gradient is free of nan and infinity; `agree`: on all ranks, which hold different shards."""
    found = [local_part(p.grad) for p in parameters if p.grad is not None]
    found = [part for part in found if part.numel()]  # a shard may be empty, which has no largest element
    # The largest magnitude is finite just where all elements are: a sum of squares may overflow before.
    flag = torch.zeros((), dtype=torch.int32, device=parameters[0].device)
    if found:
        flag += ~torch.isfinite(nn.utils.get_total_norm(found, float("inf")))
    if agree:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return not bool(flag.item())


def no_state() -> State:
    """Return the state of a strategy that has none of a rank's own."""
    return {}


def skip_state(state: State) -> None:
    """Leave what is not this strategy's: it was saved under another setting."""


@torch.no_grad()
def share_weights(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give every rank rank 0's values, one tensor at a time on the device: ranks may have drawn different ones."""
    if dist.get_world_size() == 1:
        return
    for tensor in tensors:
        moved = tensor.detach().to(device).contiguous()
        dist.broadcast(moved, 0)
        if moved.data_ptr() != tensor.data_ptr():
            tensor.copy_(moved)

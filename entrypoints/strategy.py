"""How a model is spread over the ranks: ddp (a copy each) or fsdp (FSDP2, a shard each).

A strategy is a record of functions, made by one function a strategy; the training loop knows the record alone. Both
speak of full state in the same form (parameter name -> tensor, whole, on rank 0), so a checkpoint of one loads into the
other, on any number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from cloudtrain.entrypoints.settings import TaskError

__all__ = ["STRATEGIES", "Strategy", "clip", "default_blocks", "finite", "wrap"]

Blocks = Callable[[Any], Iterable[Any]]
State = dict[str, Any]


@dataclass(frozen=True)
class Strategy:
    """One model, spread. Every function but `accumulate` and `autocast` is collective: all ranks call it or none."""

    module: nn.Module  # the user's module: parameters, evaluation
    model: nn.Module  # what `loss` calls in training
    accumulate: Callable[[bool], AbstractContextManager[None]]  # around one micro-batch; True: the step's last
    autocast: Callable[[], AbstractContextManager[Any]]
    weights: Callable[[], State]  # the model's whole state dict on rank 0, {} elsewhere
    optimizer_state: Callable[[torch.optim.Optimizer], State]  # the same by parameter name; {} elsewhere
    load: Callable[[torch.optim.Optimizer, State | None, State | None], None]  # rank 0's (model, optimizer or None)

    def sync_buffers(self) -> None:
        """Give every rank rank 0's persistent buffers: those are saved, so those are evaluated too."""
        for buffer in _saved_buffers(self.module):
            dist.broadcast(buffer, 0)


def wrap(name: str, module: nn.Module, device: torch.device, precision: str, blocks: Blocks | None) -> Strategy:
    """Return the module spread by the named strategy. Raises TaskError at an unknown strategy or precision."""
    if name not in STRATEGIES:
        raise TaskError(f"strategy {name!r} is unknown; there are {', '.join(sorted(STRATEGIES))}")
    if precision not in ("fp32", "bf16"):
        raise TaskError(f"precision {precision!r} is unknown; there are bf16, fp32")
    if not any(p.requires_grad for p in module.parameters()):
        raise TaskError("model(params) returned a module without a parameter that needs gradients: nothing to train")
    return STRATEGIES[name](module.to(device), device, precision, blocks)


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients down to the norm; return the norm they had, over all shards."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def finite(module: nn.Module) -> bool:
    """Return whether this rank's part of every parameter is free of nan and infinity."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in module.parameters())
    return all(bool(torch.isfinite(part).all()) for part in parts)


def _ddp(module: nn.Module, device: torch.device, precision: str, _blocks: Blocks | None) -> Strategy:
    # Gradients as views of the buckets save a copy: 16 % of the step of a 10 M transformer (trainer.md item 11).
    model = DistributedDataParallel(
        module, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    rank = dist.get_rank()

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()

    def load(optimizer: torch.optim.Optimizer, weights: State | None, state: State | None) -> None:
        _check_weights(module, weights)
        shared = [weights, state]
        dist.broadcast_object_list(shared, 0, device=torch.device("cpu"))
        module.load_state_dict(shared[0] or {})
        if shared[1]:
            optimizer.load_state_dict(_by_position(module, optimizer, shared[1]))

    return Strategy(
        module=module,
        model=model,
        accumulate=lambda last: contextlib.nullcontext() if last else model.no_sync(),
        autocast=autocast,
        weights=lambda: module.state_dict() if rank == 0 else {},
        optimizer_state=lambda optimizer: _by_name(module, optimizer) if rank == 0 else {},
        load=load,
    )


def _fsdp(module: nn.Module, device: torch.device, precision: str, blocks: Blocks | None) -> Strategy:
    for tensor in (*module.parameters(), *_saved_buffers(module)):
        dist.broadcast(tensor.detach(), 0)  # as ddp does: ranks may have drawn different weights
    low = torch.bfloat16 if precision == "bf16" else None
    inner = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    # The root hands out fp32, so that the loss is computed in it, as under autocast.
    outer = MixedPrecisionPolicy(inner.param_dtype, inner.reduce_dtype, output_dtype=torch.float32 if low else None)
    if low:  # running statistics stay fp32, and batch norm takes no mixture of the two
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=low)
        for norm in [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.affine]:
            fully_shard(norm, mp_policy=exact)
    for block in (blocks or default_blocks)(module):
        if not isinstance(block, FSDPModule):
            fully_shard(block, mp_policy=inner)
    model = fully_shard(module, mp_policy=outer)
    buffers = _saved_buffers(module)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    @contextlib.contextmanager
    def accumulate(last: bool) -> Any:
        for buffer in buffers:  # as ddp does, so that a resumed run goes on with the same ones on every rank
            dist.broadcast(buffer, 0)
        model.set_requires_gradient_sync(last)
        yield

    def load(optimizer: torch.optim.Optimizer, weights: State | None, state: State | None) -> None:
        _check_weights(module, weights)
        set_model_state_dict(module, weights or {}, options=spread)
        has_state = [bool(state and state["state"])]  # plain sgd has none, which torch's function does not expect
        dist.broadcast_object_list(has_state, 0, device=torch.device("cpu"))
        if has_state[0]:
            set_optimizer_state_dict(module, optimizer, state or {}, options=spread)

    return Strategy(
        module=module,
        model=module,
        accumulate=accumulate,
        autocast=contextlib.nullcontext,
        weights=lambda: get_model_state_dict(module, options=whole),
        optimizer_state=lambda optimizer: get_optimizer_state_dict(module, optimizer, options=whole),
        load=load,
    )


STRATEGIES: dict[str, Callable[[nn.Module, torch.device, str, Blocks | None], Strategy]] = {"ddp": _ddp, "fsdp": _fsdp}


def default_blocks(model: nn.Module) -> list[nn.Module]:
    """Return what fsdp gathers and frees as one: the outermost children of a ModuleList or Sequential.

    A transformer's layers are that nearly always. Parameters outside them belong to the root.
    """
    found: list[nn.Module] = []
    for child in model.children():
        holder = isinstance(child, (nn.ModuleList, nn.ModuleDict))  # it has no forward, so it cannot be one itself
        if isinstance(model, (nn.ModuleList, nn.Sequential)) and not holder:
            found += [child] if any(True for _ in child.parameters()) else []
        else:
            found += default_blocks(child)
    return found


def _saved_buffers(module: nn.Module) -> list[torch.Tensor]:
    names = set(module.state_dict(keep_vars=True))
    return [buffer for name, buffer in module.named_buffers() if name in names]


def _check_weights(module: nn.Module, weights: State | None) -> None:
    """Raise the same TaskError on every rank where rank 0's saved weights are another model's."""
    fault = [_difference(module, weights or {}) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(fault, 0, device=torch.device("cpu"))
    if fault[0]:
        raise TaskError(
            f"the checkpoint is another model's: {fault[0]}; mend model(params), "
            "or start afresh with checkpoint.resume: never"
        )


def _difference(module: nn.Module, weights: State) -> str | None:
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items() if isinstance(t, torch.Tensor)}
    saved = {name: tuple(t.shape) for name, t in weights.items() if isinstance(t, torch.Tensor)}
    faults = {
        "it lacks": [name for name in shapes if name not in saved],
        "it has but this model lacks": [name for name in saved if name not in shapes],
        "the shape differs of": [
            f"{name} {saved[name]}, here {shape}" for name, shape in shapes.items() if saved.get(name, shape) != shape
        ],
    }
    return "; ".join(f"{what} {_first(names)}" for what, names in faults.items() if names) or None


def _first(names: list[str], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _by_name(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the optimizer's state under parameter names, the form that fsdp's functions read and write."""
    order, packed = _names(module, optimizer), optimizer.state_dict()
    groups = [{**group, "params": [order[i] for i in group["params"]]} for group in packed["param_groups"]]
    return {"state": {order[i]: value for i, value in packed["state"].items()}, "param_groups": groups}


def _by_position(module: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> State:
    """Return the inverse of `_by_name` for this optimizer, which may hold the parameters in another order."""
    position = {name: i for i, name in enumerate(_names(module, optimizer))}
    here = optimizer.state_dict()["param_groups"]
    if len(here) != len(state["param_groups"]):
        count = len(state["param_groups"])
        raise TaskError(f"the checkpoint's optimizer has {count} parameter groups, this one {len(here)}")
    # load_state_dict pairs parameters by their place in the groups' lists, so the lists must be this optimizer's own.
    groups = [{**then, "params": now["params"]} for then, now in zip(state["param_groups"], here, strict=True)]
    return {"state": {position[n]: v for n, v in state["state"].items() if n in position}, "param_groups": groups}

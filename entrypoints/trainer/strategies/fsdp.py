"""Strategies fsdp and hsdp (torch's FSDP2): every rank holds a shard of each parameter and gathers a block at a time.

hsdp shards over some ranks only, normally the ranks of one node, and keeps a copy of the model on every such group.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ...errors import TaskError
from ...format import first_of
from ..settings import TrainingSettings
from . import blocks as blocks_of
from .buffers import Buffers, checksum, refusal
from .gathers import GatherNotes
from .strategy import (
    LOW,
    OneForward,
    Setup,
    Strategy,
    all_gather,
    autocaster,
    clip,
    clip_split,
    clip_whole,
    share_weights,
)
from .summation import Allocated, PartialSums, TreeReduceScatter, ladder


def shard_width(settings: TrainingSettings, ranks: int) -> int:
    """Return how many ranks share one copy of the model under hsdp: by default the ranks of a node.

    Fewer ranks than that are one group: a job that lost machines continues as fsdp.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) // settings.parallel.tensor
    return min(settings.shard_size or local or ranks, ranks)


def data_mesh(settings: TrainingSettings, device: torch.device, ranks: int) -> DeviceMesh:
    """Return the mesh of all ranks: stages, then `ranks` data ranks by the strategy, then the ranks of a layer."""
    tensor, stages = settings.parallel.tensor, settings.parallel.pipeline
    width = {"ddp": 1, "fsdp": ranks}.get(settings.strategy) or shard_width(settings, ranks)
    sizes = {"pipeline": stages, "replicate": ranks // width, "shard": width, "tensor": tensor}
    always = "replicate" if settings.strategy == "ddp" else "shard"
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == always}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def sharded(setup: Setup) -> Strategy:
    """Return the module with a shard on each rank: over all ranks (fsdp), or over each group of ranks (hsdp).

    Raises TaskError.
    """
    settings, module, split, mesh = setup.settings, setup.module, setup.split, setup.mesh
    blocks = blocks_of.find(settings, module, setup.blocks)
    _check(module, blocks)
    if mesh is None:
        share_weights(module.parameters(), setup.device)
        mesh = data_mesh(settings, setup.device, split.ranks)
    data_rank = dist.get_rank() // settings.parallel.tensor % split.ranks
    names = tuple(name for name in mesh.mesh_dim_names or () if name in ("replicate", "shard"))
    if setup.silent:  # without the other dimension the copies are not summed
        names = ("shard",)
    blocks_of.prepare(settings, module, blocks, whole=False)
    stages = settings.parallel.pipeline
    root = OneForward(module) if stages == 1 else module  # a stage ends the passes inside its module
    _shard(settings, root, module, blocks, mesh[names])
    strict = settings.reproducible == "strict"
    first = data_rank * (1 if strict else split.accumulation)
    buffers = setup.buffers(first)
    buffers.sync()
    is_over_tree = strict and split.ranks > 1 and not setup.silent
    comm = TreeReduceScatter(ladder(), mesh["shard"].size()) if is_over_tree else None
    for part in _sharded_parts(root):
        if setup.silent:
            part.set_custom_all_gather(_LocalGather())  # type: ignore[arg-type]  # it has the methods
            part.set_custom_reduce_scatter(_LocalScatter())  # type: ignore[arg-type]
        elif comm is not None:
            part.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    parameters = setup.trained  # the shards: see _shard
    clips = clip_whole if strict else clip if settings.parallel.ranks == 1 else clip_split
    strictly = partial(_strict, parameters, PartialSums(_add), buffers)

    def around(virtual: int, last: bool) -> AbstractContextManager[Any]:
        if split.accumulation > 1:  # until the step's last micro-batch the gradients stay on their rank, unsharded
            cast(FSDPModule, root).set_requires_gradient_sync(last)
        return buffers.micro_batch(virtual, last)

    return replace(
        _watched(setup, setup.of_one_rank(buffers, agree=True), root, mesh["shard"]),
        model=root,
        evaluate=root,
        shard=mesh["shard"].get_local_rank(),
        divisor=split.virtual if strict else split.accumulation,
        strided=strict,
        micro_batch=buffers.micro_batch if stages > 1 else strictly if strict else around,
        # Inside the module's forward pass, or a stage's, the policy of _shard sets the precision.
        autocast=autocaster(settings.precision, setup.device) if stages == 1 else contextlib.nullcontext,
        clip=lambda max_norm: clips(parameters, max_norm),
    )


def _watched(setup: Setup, strategy: Strategy, root: nn.Module, mesh: DeviceMesh) -> Strategy:
    """Return the strategy, whose `finish` has nothing to do, with notes of the root's gathers."""
    is_alone = setup.split.ranks == 1 or setup.silent or dist.get_backend() == "fake"
    if is_alone or not isinstance(root, OneForward) or not hasattr(root, "set_custom_all_gather"):  # new in torch 2.9
        return strategy
    notes, groups = GatherNotes(), [like := mesh.get_group()]
    if mesh.device_type == "cpu":  # against gloo's abort at different sizes; in training it would cost 8 % of a step
        ranks, timeout = dist.get_process_group_ranks(like), like._get_backend(setup.device).options._timeout
        groups = [dist.new_group(ranks, timeout, use_local_synchronization=True) for _ in range(4)]
    parts: list[Any] = [found for found in root.named_modules() if isinstance(found[1], FSDPModule)]
    for number, (name, part) in enumerate(parts):
        what = f"calls block {name.removeprefix('module.')}" if name else "calls the model"
        part.set_custom_all_gather(_NotedGather(partial(notes.add, what), groups[number % len(groups)], root.module))
    root.register_forward_hook(lambda *_: notes.add("ends the batch"), always_call=True)
    return replace(strategy, finish=partial(notes.add, "ends the step"), compare_passes=notes.compare)


def _check(module: nn.Module, found: list[nn.Module]) -> None:
    """Raise TaskError where FSDP2 would raise an error about its internals."""
    names = {part: name for name, part in module.named_modules()}
    outer = sorted((names[block] for block in found), key=len, reverse=True)  # the innermost fitting block comes first
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = next((block for block in outer if name.startswith(f"{block}.")), "the root")
        other, theirs = owners.setdefault(parameter, (name, owner))
        if theirs != owner:
            raise TaskError(
                f"{other} and {name} are one parameter, but fsdp shards {theirs} and {owner} separately; write "
                "blocks(model) in the task so that both lie in the same block, or in none"
            )
        if not parameter.dim():
            raise TaskError(f"parameter {name} is a single number, which fsdp cannot shard; give it the shape (1,)")
        if not parameter.is_contiguous():
            raise TaskError(
                f"parameter {name} is not contiguous, as fsdp needs it; call .contiguous() in model(params)"
            )
    kinds: dict[str, set[str]] = {}
    for parameter, (_, owner) in owners.items():
        if parameter.requires_grad:
            kinds.setdefault(owner, set()).add(str(parameter.dtype))
    for block, own in kinds.items():
        if len(own) > 1:
            listed = ", ".join(sorted(own))
            raise TaskError(f"the parameters of {block} are {listed}; fsdp shards those of one type together: use one")


def _shard(
    settings: TrainingSettings, root: nn.Module, module: nn.Module, found: list[nn.Module], mesh: DeviceMesh
) -> None:
    low = LOW.get(settings.precision)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if settings.cpu_offload else OffloadPolicy()
    inner = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    # The root returns fp32, so that the loss is computed in fp32, as under autocast.
    # A stage of a pipeline gathers its parameters once a step, and not for each micro-batch.
    keeps_gathered = settings.shard == "gradients" or settings.parallel.pipeline > 1
    keep: dict[str, Any] = {"reshard_after_forward": False} if keeps_gathered else {}
    outer = MixedPrecisionPolicy(inner.param_dtype, inner.reduce_dtype, output_dtype=torch.float32 if low else None)
    if low:  # running statistics stay fp32, and batch norm takes no mixture of types
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=low)
        for norm in [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.affine]:
            fully_shard(norm, mesh=mesh, mp_policy=exact, offload_policy=offload, **keep)
    names = {part: name for name, part in module.named_modules()}
    for unit in (*found, root):
        _refuse_changes(unit, names.get(unit, ""))  # before the hooks of fsdp, which free the gathered parameters
    for block in found:
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=mesh, mp_policy=inner, offload_policy=offload, **keep)
    if low and root is not module:
        _compute_in(low, module, mesh.device_type)
    sharded_root = fully_shard(root, mesh=mesh, mp_policy=outer, offload_policy=offload, **keep)
    # Ranks with different unused parameters would send gradients of different sizes; now an unused gradient is zero.
    if hasattr(sharded_root, "set_reduce_scatter_unused_params"):  # new in torch 2.13
        sharded_root.set_reduce_scatter_unused_params(True)
    root.register_forward_hook(lambda root, *_: None if torch.is_grad_enabled() else reshard(root))


def _refuse_changes(unit: nn.Module, prefix: str) -> None:
    """Raise TaskError if the unit's first forward pass writes to parameters, whose gathered copies fsdp drops."""
    kept: dict[str, tuple[bool, Any]] = {}

    def gathered() -> dict[str, tuple[bool, Any]]:
        """Return, by name, whether a gathered parameter needs a gradient, and what shows a change."""
        found = {} if dist.get_backend() == "fake" else dict(unit.named_parameters(prefix))
        return {
            name.removeprefix("module."): (p.requires_grad, (id(p), p._version, p.untyped_storage(), checksum(p)))
            for name, p in found.items()
            if not isinstance(p, DTensor)
        }

    def after(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        now = gathered()
        names = [name for name, seen in kept.items() if now.get(name, seen)[1] != seen[1]]
        if frozen := [name for name in names if not kept[name][0]]:
            raise TaskError(refusal(frozen))
        if names:
            raise TaskError(
                f"loss or forward writes to {first_of(names, 4)}, of which fsdp and hsdp drop the gathered copy: "
                "change it in after_step(model, step), in place, or set strategy: ddp"
            )
        kept.clear()

    before = unit.register_forward_pre_hook(lambda *_: kept.update(gathered()))
    handles = [before, unit.register_forward_hook(after)]


def _compute_in(low: torch.dtype, module: nn.Module, device_type: str) -> None:
    """Cast the inputs of the module's forward pass to the type, and its outputs to fp32, as FSDP2 casts a root's.

    A method or part of the module that `loss` calls itself gets its types from autocast.
    """
    forward = module.forward

    def cast(dtype: torch.dtype, values: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda v: v.to(dtype) if v.is_floating_point() else v, values)

    @functools.wraps(forward)
    def in_low(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(low, (args, kwargs))
        with torch.autocast(device_type, enabled=False):
            return cast(torch.float32, forward(*args, **kwargs))

    module.forward = in_low


def reshard(module: nn.Module) -> None:
    """Reshard what stays gathered for a backward pass, which an evaluation lacks: the root; the blocks under ZeRO-2."""
    for part in _sharded_parts(module):
        part.reshard()


def _sharded_parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


@contextlib.contextmanager
def _strict(
    parameters: list[nn.Parameter],
    sums: PartialSums[dict[nn.Parameter, Any]],
    buffers: Buffers,
    virtual: int,
    last: bool,
) -> Iterator[None]:
    """Wrap a micro-batch that is summed over the ranks at once; the sharded sums are added in the tree's order."""
    with buffers.micro_batch(virtual, last):
        yield
        with torch.no_grad():
            gradients = {p: p.grad for p in parameters if p.grad is not None}
            sums.push(gradients)
            for parameter in parameters:
                parameter.grad = gradients.get(parameter) if last else None
            if last:
                sums.end()
                # Turns -0 into 0, as every sum over copies does: otherwise hsdp and fsdp would differ in -0.
                parts: list[Any] = list(gradients.values())
                torch._foreach_add_([part.to_local() for part in parts], 0.0)


def _add(into: dict[nn.Parameter, Any], other: dict[nn.Parameter, Any]) -> None:
    both = [parameter for parameter in other if parameter in into]
    if both:
        torch._foreach_add_([into[p].to_local() for p in both], [other[p].to_local() for p in both])
    into.update({parameter: gradient for parameter, gradient in other.items() if parameter not in into})


class _NotedGather(Allocated):
    def __init__(self, note: Callable[[], None], in_evaluation: dist.ProcessGroup, module: nn.Module) -> None:
        self._note, self._in_evaluation, self._module = note, in_evaluation, module

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self._note()
        group = group if self._module.training else self._in_evaluation
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _LocalGather(Allocated):
    """Uses this rank's shard for all ranks: nothing is sent, and the numbers are wrong."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *_: Any, **__: Any) -> None:
        for rank, part in enumerate(output_tensor.view(group.size(), -1)):
            if rank != group.rank():  # the input is already this rank's part of the output
                part.copy_(input_tensor)


class _LocalScatter(Allocated):
    """Uses this rank's gradients for the mean of all ranks: nothing is sent, and the numbers are wrong."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *_: Any, **__: Any) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

"""The blocks of a model: the units that fsdp shards, that are recomputed to save memory, and that are compiled.

To save memory too, `activation_offload` keeps the tensors for the backward pass in host memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ...errors import TaskError
from ...rank.exchange import local_part
from ..settings import TrainingSettings
from .strategy import Blocks

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find(settings: TrainingSettings, module: nn.Module, blocks: Blocks | None) -> list[nn.Module]:
    """Return the blocks, inner before outer: by `wrap_min_params`, else by the task, else the layers.

    Raises TaskError if the task returns no valid blocks.
    """
    if settings.wrap_min_params:
        return sized_blocks(module, settings.wrap_min_params)
    if blocks is None:
        return default_blocks(module)
    named = list(blocks(module))
    depth = {part: name.count(".") for name, part in module.named_modules()}
    for block in named:
        if not isinstance(block, nn.Module) or block not in depth:
            raise TaskError(f"blocks(model) returned {block!r:.80}; it must return submodules of the model")
        if isinstance(block, _WITHOUT_FORWARD):
            kind = type(block).__name__
            raise TaskError(f"blocks(model) returned a {kind}, which has no forward pass; return what is in it")
    return sorted((block for block in named if block is not module), key=lambda block: -depth[block])


def default_blocks(model: nn.Module, *, whole: bool = False) -> list[nn.Module]:
    """Return the outermost children of a ModuleList or Sequential that have parameters.

    A transformer's layers nearly always have this form. Parameters outside the blocks belong to the root. `whole`: also
    the children without parameters, such as activation functions, of a Sequential.
    """
    layers: list[nn.Module] = []
    for child in model.children():
        holder = isinstance(child, (nn.ModuleList, nn.ModuleDict))  # a holder has no forward pass: never a block
        if isinstance(model, (nn.ModuleList, nn.Sequential)) and not holder:
            is_needed = whole and isinstance(model, nn.Sequential)
            layers += [child] if is_needed or any(True for _ in child.parameters()) else []
        else:
            layers += default_blocks(child, whole=whole)
    return layers


def sized_blocks(model: nn.Module, min_params: int) -> list[nn.Module]:
    """Return every submodule with at least `min_params` parameters outside its inner blocks; inner first."""
    sized: list[nn.Module] = []
    for child in model.children():
        if not isinstance(child, nn.MultiheadAttention):  # the attention reads weights without calling its parts
            sized += sized_blocks(child, min_params)
        taken = {id(p) for block in sized for p in block.parameters()}
        rest = sum(p.numel() for p in child.parameters() if id(p) not in taken)
        if rest >= min_params and not isinstance(child, _WITHOUT_FORWARD):
            sized.append(child)
    return sized


def prepare(settings: TrainingSettings, module: nn.Module, blocks: list[nn.Module], whole: bool) -> None:
    """Compile the blocks, and recompute the blocks in the backward pass, if the settings ask for it.

    `whole`: compile the module as a unit. Names in the state dict do not change: a block's forward is replaced, not the
    block. Raises TaskError if no block can be recomputed.
    """
    if settings.activation_checkpointing and not blocks:
        raise TaskError(
            "activation_checkpointing found no block to compute again: the model has no ModuleList or Sequential; "
            "write blocks(model) in the task, which returns the layers, or set wrap_min_params"
        )
    # The recomputed function must be compiled inside: the compiler does not follow buffers that are restored.
    in_parts = settings.compile and bool(blocks) and (settings.activation_checkpointing or not whole)
    for block in blocks:
        forward: Callable[..., Any] = torch.compile(block.forward) if in_parts else block.forward
        if settings.activation_checkpointing:
            forward = _again(block, forward)
        if forward is not block.forward:
            block.forward = forward
    if settings.compile and not in_parts:
        module.compile()


def _again(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that keeps no activations; the recomputation begins with the same buffers."""
    has_buffers = any(True for _ in block.buffers())

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        named = block.named_buffers(remove_duplicate=False)
        before = {name: buffer.detach().clone() for name, buffer in named}
        # Copies of the old buffers: otherwise batch norm would count every batch twice.
        return contextlib.nullcontext(), _reparametrize_module(block, before, stack_weights=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(forward, **kwargs) if kwargs else forward
        if not torch.is_grad_enabled():
            return bound(*args)
        return checkpoint(bound, *args, use_reentrant=False, context_fn=contexts if has_buffers else noop_context_fn)

    return call


def saved_on_host(module: nn.Module, host_device: str = "cpu") -> AbstractContextManager[Any]:
    """Return a context for a forward pass, whose saved tensors go to host memory, and back in the backward pass.

    Parameters, and on a GPU tensors that are in host memory already, are left alone. The device meta keeps nothing.
    torch's own `save_on_cpu` also copies the parameters, which stay on the device in any case, and waits for each copy.
    With activation_checkpointing the saved tensors are the inputs of the blocks.
    """
    parameters = {_address(parameter) for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        owner = tensor if tensor._base is None else tensor._base
        # fsdp's gathered parameters are Parameters, but not the module's once their block is done.
        if isinstance(owner, nn.Parameter) or _address(tensor) in parameters or not tensor.numel():
            return tensor
        part = local_part(tensor)
        on_gpu = part.device.type == "cuda"
        host = torch.empty_like(part, device=host_device, pin_memory=on_gpu)
        host.copy_(part, non_blocking=on_gpu)  # the backward pass is later in the same stream
        spread = None
        if isinstance(tensor, DTensor):
            spread = tensor.device_mesh, tensor.placements, {"shape": tensor.shape, "stride": tensor.stride()}
        return tensor.device, host, spread

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host, spread = packed
        part = torch.empty_like(host, device=device).copy_(host, non_blocking=True)
        return part if spread is None else DTensor.from_local(part, *spread[:2], run_check=False, **spread[2])

    return saved_tensors_hooks(pack, unpack)


def _address(tensor: torch.Tensor) -> int:
    return int(local_part(tensor).untyped_storage()._cdata)

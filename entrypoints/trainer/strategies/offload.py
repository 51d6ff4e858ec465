"""`activation_offload`: tensors that are saved for the backward pass wait in host memory.

torch's own `save_on_cpu` also copies the parameters, which stay on the device in any case, and waits for each copy.
With activation_checkpointing the saved tensors are the inputs of the blocks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from ...rank.exchange import local_part


def saved_on_host(module: nn.Module, host_device: str = "cpu") -> AbstractContextManager[Any]:
    """Return a context for a forward pass, whose saved tensors go to host memory, and back in the backward pass.

    Parameters, and on a GPU tensors that are in host memory already, are left alone. The device meta
    keeps nothing.
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
        return tensor.device, host, _spread(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host, spread = packed
        part = torch.empty_like(host, device=device).copy_(host, non_blocking=True)
        return part if spread is None else DTensor.from_local(part, *spread[:2], run_check=False, **spread[2])

    return saved_tensors_hooks(pack, unpack)


def _address(tensor: torch.Tensor) -> int:
    return int(local_part(tensor).untyped_storage()._cdata)


def _spread(tensor: torch.Tensor) -> Any:
    """Return what makes a DTensor of this rank's part; None for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return None
    return tensor.device_mesh, tensor.placements, {"shape": tensor.shape, "stride": tensor.stride()}

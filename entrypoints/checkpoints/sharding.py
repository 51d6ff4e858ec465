"""A tensor's values on this rank: all of a plain tensor, a shard of an FSDP2 DTensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["local_part"]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's values of the tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""The values of ranks: a rank's part of a tensor, and small values passed between ranks.

Small values travel as JSON in tensors: torch's own object collectives need numpy and unpickle.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's values of the tensor, sharing its memory: all of a plain tensor, a shard of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor on each rank; the ranks of a DTensor call together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, by rank, on every rank. Values must be JSON values; all ranks call it."""
    own = json.dumps(value).encode()
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = max(int(size) for size in sizes)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(parts, _padded(own, longest), group=group)
    return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]


def share(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value on every rank; the values of other ranks are ignored. All ranks call it."""
    own = json.dumps(value).encode() if dist.get_rank(group) == 0 else b""
    size = torch.tensor([len(own)])
    dist.broadcast(size, 0, group=group)
    data = _padded(own, int(size))
    dist.broadcast(data, 0, group=group)
    return json.loads(bytes(data.tolist()))


def _padded(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)

"""Copies of the model that differ between the ranks: no loss shows the difference, and a checkpoint would mix them.

Each rank hashes its parameters and saved buffers, and the ranks compare the hashes of tensors on several ranks: all
under ddp, the tensors of the same shard under hsdp, and of a split layer the same part's and whole tensors.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import TaskError
from ..format import first_of
from ..rank import exchange
from ..rank.exchange import local_part
from .data import Stream
from .job import TrainingJob, TrainState
from .strategies.buffers import checksum


def compare(job: TrainingJob, progress: TrainState) -> None:
    """Compare the copies, whose buffers are in step, and the streams. Raises TaskError, on all ranks; all call it."""
    if job.place.ranks == 1 or progress.compared_step == progress.step:
        return
    job.strategy.compare_passes()
    if isinstance(job.train_data, Stream):
        marks = {f"{at}": mark for at, mark in enumerate(job.train_data.marks.tolist()) if mark}
        if _unequal(exchange.gather(marks)):
            raise TaskError(
                f"the ranks read different streams, as their items up to step {progress.step} show; return the same "
                "stream on all ranks, not a rank's share: the trainer gives each rank its micro-batches"
            )
    names = differing(job.strategy.module, job.place.holders)
    if names:
        equal = "" if progress.compared_step is None else f", and were equal at step {progress.compared_step}"
        plan = "a split layer that needs the kind `sequence` in the tensor plan, " if job.place.tensor > 1 else ""
        raise TaskError(
            f"the ranks' copies of the model differ at step {progress.step}{equal}, so a checkpoint would mix them: "
            f"{first_of(names, 4)}. The usual causes: {plan}an optimizer, a learning rate or other code that follows "
            "this rank's own loss, batch or random numbers, or machines of different kinds. Average such values over "
            "the ranks (torch.distributed.all_reduce), or seed them alike"
        )
    progress.compared_step = progress.step


@torch.no_grad()
def differing(module: nn.Module, holders: range) -> list[str]:
    """Return the names of the tensors whose copies differ among the ranks of a stage, `holders`. All ranks call it."""
    own: dict[str, int] = {}  # by piece and name
    pieces: dict[str, int] = {}
    for name, tensor in module.state_dict().items():
        piece = _piece(tensor, holders) if isinstance(tensor, torch.Tensor) else None
        if piece is not None:
            value = own[f"{piece}:{name}"] = checksum(local_part(tensor))
            pieces[piece] = zlib.crc32(value.to_bytes(4, "big"), pieces.get(piece, 0))
    if not _unequal(exchange.gather(pieces)):
        return []
    return list(dict.fromkeys(key.partition(":")[2] for key in _unequal(exchange.gather(own))))


def _unequal(listed: list[dict[str, int]]) -> list[str]:
    """Return the keys with several values."""
    values: dict[str, set[int]] = {}
    for key, value in (pair for one in listed for pair in one.items()):
        values.setdefault(key, set()).add(value)
    return [key for key, found in values.items() if len(found) > 1]


def _piece(tensor: torch.Tensor, holders: range) -> str | None:
    """Return the piece of the model that this rank's values are, None if no other rank holds the piece."""
    if not isinstance(tensor, DTensor):
        return f"{holders.start}"
    mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if math.prod(mesh.size(dim) for dim in split) == len(holders):
        return None
    return " ".join([f"{holders.start}", *(f"{dim}={at[dim]}" for dim in split)])

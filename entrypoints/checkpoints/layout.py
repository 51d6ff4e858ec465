"""Assigns boxes of tensors to ranks; together the ranks write every tensor exactly once.

Each rank writes the own part of a sharded tensor (a DTensor of FSDP2); a single rank writes a part of several ranks.
Whole tensors, present on every rank, are cut along the first dimension, with equal bytes per writer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..rank import exchange
from .shards import Box

Tensors = Mapping[str, torch.Tensor]
Piece = tuple[Box, torch.Tensor]  # a box, and this rank's values for the box


def pieces(tensors: Tensors, rank: int, writers: Sequence[int], holders: Sequence[int]) -> list[Piece]:
    """Return the pieces that this rank writes; empty if the rank is not a writer.

    `holders` are the ranks with tensors of these names, in order; all holders call. Collective if a holder does not
    write: then sharded tensors are gathered, one at a time.
    """
    everybody = set(holders) <= set(writers)
    writers = [writer for writer in writers if writer in holders]
    if not writers:  # see `foreign_pieces`
        return []
    whole: dict[str, torch.Tensor] = {}
    found: list[Piece] = []
    for number, (name, tensor) in enumerate(tensors.items()):
        if not isinstance(tensor, DTensor):
            whole[name] = tensor
        elif not everybody:
            gathered = tensor.full_tensor()
            if rank in writers:
                whole[name] = gathered.cpu()  # the device may lack room for all tensors
        elif _writes(tensor, number, rank, holders):
            found.append((local_box(name, tensor), tensor.to_local()))
    return found + (_share(whole, writers.index(rank), len(writers)) if rank in writers else [])


def foreign_pieces(tensors: Tensors, rank: int, writers: Sequence[int]) -> list[Piece]:
    """Return this rank's pieces of tensors without a writer: of stages of a pipeline on other machines.

    All ranks call; each tensor is sent to all ranks, one at a time.
    """
    device = next((exchange.local_part(tensor).device for tensor in tensors.values()), torch.device("cpu"))
    found = {name: whole.cpu() for name, whole in whole_tensors(tensors, device, writers) if rank in writers}
    return _share(found, writers.index(rank), len(writers)) if found else []


def whole_tensors(
    tensors: Tensors, device: torch.device, without: Sequence[int] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole tensors of all ranks by name, one at a time, sent by the first rank with each. All ranks call.

    The tensors of the ranks in `without` are left out.
    """
    about = {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()}
    listed = exchange.gather(about)
    known = {name for rank in without for name in listed[rank]}
    sources = {name: rank for rank in reversed(range(len(listed))) for name in listed[rank] if name not in known}
    for name, source in sources.items():
        shape, dtype = listed[source][name]
        own = torch.empty(shape, dtype=getattr(torch, dtype)) if name not in tensors else tensors[name]
        whole = exchange.whole(own).detach().to(device).contiguous()
        torch.distributed.broadcast(whole, source)
        yield name, whole


def local_box(name: str, tensor: torch.Tensor) -> Box:
    """Return the box of the whole tensor that is on this rank."""
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(name, tensor.dtype, whole, (0,) * len(whole), whole)
    chunks: list[Any] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if not chunks:  # fewer rows than ranks: this rank has no row
        return Box(name, tensor.dtype, whole, (0,) * len(whole), (0, *whole[1:]))
    return Box(name, tensor.dtype, whole, tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def _writes(tensor: DTensor, number: int, rank: int, holders: Sequence[int]) -> bool:
    """Return whether this rank writes a box that several ranks hold; the ranks take turns by the tensor's number."""
    if tensor.to_local().numel() == 0:
        return False
    mesh = tensor.device_mesh
    meshes = len(holders) // mesh.size()  # of neighbouring ranks, each mesh with a copy of the tensor
    if holders.index(rank) // mesh.size() != number % meshes:
        return False
    number //= meshes
    coordinate = list(mesh.get_coordinate() or ())
    copies = [i for i, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(coordinate[i] == number % mesh.size(i) for i in copies)


def _share(whole: dict[str, torch.Tensor], index: int, count: int) -> list[Piece]:
    """Return one writer's part of the tensors: of all bytes, those from index / count to (index + 1) / count."""
    total = sum(tensor.nbytes for tensor in whole.values())
    begin, end = total * index // count, total * (index + 1) // count
    found: list[Piece] = []
    at = 0
    for name, tensor in whole.items():
        rows = tensor.shape[0] if tensor.dim() else 1
        row_bytes = max(1, tensor.nbytes // max(rows, 1))
        # A row belongs to the writer whose range holds the row's start; a tensor without elements belongs to writer 0.
        first = min(max(-(-(begin - at) // row_bytes), 0), rows)
        last = min(max(-(-(end - at) // row_bytes), 0), rows)
        at += tensor.nbytes
        if index == count - 1:
            last = rows
        if first < last or (tensor.numel() == 0 and index == 0):
            found.append(_rows(name, tensor, first, last, rows))
    return found


def _rows(name: str, tensor: torch.Tensor, first: int, last: int, rows: int) -> Piece:
    shape = tuple(tensor.shape)
    if tensor.dim() == 0 or (first, last) == (0, rows) or tensor.numel() == 0:
        return Box(name, tensor.dtype, shape, (0,) * len(shape), shape), tensor
    box = Box(name, tensor.dtype, shape, (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    return box, tensor[first:last]

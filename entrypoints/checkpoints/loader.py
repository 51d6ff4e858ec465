"""Reads a checkpoint into live tensors; ranks and strategy may differ from those at the save.

Every rank maps the shards and copies the boxes that it needs. Ranks that do not see the folder get each tensor from
rank 0, one at a time.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..rank import exchange
from ..rank.exchange import local_part
from . import folder as folders
from . import layout, shards

ATTEMPTS = 3  # to read a checkpoint from an unreliable network share

Shape = tuple[int, ...]
PlacedBox = tuple[shards.Shard, shards.Box, int]  # a box, and where its bytes begin in the shard
Parts = Mapping[str, list[PlacedBox]]  # the boxes of each tensor, by its name


@dataclass(frozen=True)
class CheckpointReader:
    """An open checkpoint. `shapes`: every tensor's whole shape, equal on all ranks; `parts`: the boxes, if visible."""

    path: Path
    shapes: Mapping[str, Shape]
    parts: Parts
    dtypes: Mapping[str, torch.dtype]
    is_seen_by_all: bool
    plain: Any

    def fill_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the named values into this rank's parts of the tensors. All ranks call it; their names may differ."""
        names: Iterable[str] = tensors
        if not self.is_seen_by_all:
            names = dict.fromkeys(name for names in exchange.gather(list(tensors)) for name in names)
        for name in names:
            self._fill(name, tensors.get(name))

    def _fill(self, name: str, tensor: torch.Tensor | None) -> None:
        if self.is_seen_by_all and tensor is not None:
            self._copy(name, layout.local_box(name, tensor), local_part(tensor).detach())
            return
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        if self.parts:
            all_of_it = shards.Box(name, whole.dtype, tuple(whole.shape), (0,) * whole.dim(), tuple(whole.shape))
            self._copy(name, all_of_it, whole)
        dist.broadcast(whole, 0)
        if tensor is not None:
            box = layout.local_box(name, tensor)
            part = whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]
            local_part(tensor).detach().copy_(part)

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor, on the CPU."""
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        self._fill(name, whole)
        return whole

    def _copy(self, name: str, box: shards.Box, target: torch.Tensor) -> None:
        for shard, part, begin in self.parts[name]:
            shared = overlap(part, box)
            if shared is not None:
                source, here = shared
                target[here].copy_(shard.tensor(part, begin)[source])


def open_reader(found: folders.FoundCheckpoint, *, whole: bool = True) -> CheckpointReader:
    """Open the checkpoint; all ranks call. Raises CheckpointError, on all ranks, if the shards contradict each other.

    `whole`: this rank will read most of the bytes, so the pages are fetched at once.
    """
    sees = _seen_by(found.path)
    seen, everybody = sees[dist.get_rank()], all(sees)
    parts: dict[str, list[PlacedBox]] = {}
    plain, fault = b"", None
    if seen and (everybody or dist.get_rank() == 0):
        try:
            for name in found.files:
                if name.startswith("shard-"):
                    shard = shards.open_shard(found.path / name, whole=whole)
                    if shard.save != found.trainer.get("save", shard.save):
                        raise ValueError(f"{name} is of another save than {folders.TRAINER}")
                    for box, begin in shard.boxes:
                        parts.setdefault(box.name, []).append((shard, box, begin))
            plain = folders.read(found.path / folders.PLAIN)
            fault = _gap(parts)
        except (OSError, ValueError) as error:
            fault = str(error)
    if fault := next(filter(None, exchange.gather(fault)), None):
        raise folders.CheckpointError(fault)
    if not everybody:
        plain = bytes.fromhex(exchange.share(plain.hex()))
    try:
        loaded = torch.load(io.BytesIO(plain), map_location="cpu", weights_only=True)
    except Exception as error:  # any kind: torch documents no type
        raise folders.CheckpointError(f"{folders.PLAIN} is not readable: {type(error).__name__}") from error
    save = found.trainer.get("save")
    if isinstance(loaded, dict) and loaded.pop("save", save) != save:
        raise folders.CheckpointError(f"{folders.PLAIN} is of another save than {folders.TRAINER}")
    return _reader(found.path, parts, loaded, is_seen_by_all=everybody)


def open_files(files: list[Path]) -> CheckpointReader:
    """Open files of plain weights, safetensors or torch.save's, which only rank 0 reads; all ranks call.

    Raises CheckpointError, on all ranks, for a file that is no state dict of tensors.
    """
    parts: dict[str, list[PlacedBox]] = {}
    fault = None
    if dist.get_rank() == 0:
        try:
            for path in files:
                is_plain = path.suffix == ".safetensors"
                opened = [shards.open_shard(path, is_own=False)] if is_plain else _of_state_dict(path)
                for shard in opened:
                    for box, begin in shard.boxes:
                        parts.setdefault(box.name, []).append((shard, box, begin))
            fault = _gap(parts)
        except (OSError, ValueError) as error:
            fault = str(error)
    if fault := exchange.share(fault):
        raise folders.CheckpointError(fault)
    return _reader(files[0], parts, {}, is_seen_by_all=dist.get_world_size() == 1)


def _reader(path: Path, parts: Parts, plain: Any, *, is_seen_by_all: bool) -> CheckpointReader:
    """Return the reader; ranks that do not see the files get shapes and types from rank 0. Collective."""
    table: dict[str, Any] = {name: [found[0][1].whole, str(found[0][1].dtype)] for name, found in parts.items()}
    table = table if is_seen_by_all else exchange.share(table)
    shapes = {name: tuple(whole) for name, (whole, _) in table.items()}
    dtypes = {name: getattr(torch, dtype.removeprefix("torch.")) for name, (_, dtype) in table.items()}
    return CheckpointReader(path, shapes, parts, dtypes, is_seen_by_all, plain)


def _of_state_dict(path: Path) -> list[shards.Shard]:
    """Return a shard in memory for each tensor of a file of torch.save. Raises OSError, ValueError."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # any kind: torch documents no type
        raise ValueError(f"{path.name} is not readable as plain weights: {type(error).__name__}") from error
    for key in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    wrong = [] if isinstance(found, dict) else [type(found).__name__]
    wrong = wrong or [str(name) for name, value in found.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise ValueError(f"{path.name} is no state dict of tensors: {', '.join(wrong[:4])}")
    made = []
    for name, value in found.items():
        shape, data = tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8)
        made.append(shards.Shard(path, data, ((shards.Box(name, value.dtype, shape, (0,) * len(shape), shape), 0),)))
    return made


def check(path: Path, patience_s: float = 2.0) -> str | None:
    """Return the fault of the checkpoint, or None; the ranks that see the folder share the work. All ranks call.

    Raises CheckpointError, on all ranks, if the checkpoint cannot be read; the checkpoint may still be intact.
    """
    for attempt in range(ATTEMPTS):
        sees = _seen_by(path)
        readers = [rank for rank, seen in enumerate(sees) if seen] or [0]
        fault, trouble = None, None
        if dist.get_rank() in readers:
            try:
                fault = folders.verify(path, only=_share_of_files(path, readers))
            except (folders.Unreadable, OSError) as error:
                trouble = str(error)
        answers = exchange.gather([fault, trouble])
        if not any(trouble for _, trouble in answers):
            return next((found for found, _ in answers if found), None)
        if attempt < ATTEMPTS - 1:
            time.sleep(patience_s)
    raise folders.Unreadable(next(trouble for _, trouble in answers if trouble))


def _share_of_files(path: Path, readers: list[int]) -> list[str] | None:
    """Return the files whose bytes this rank reads; None (all files) if the manifest is unreadable."""
    try:
        names = sorted(folders.read_manifest(path))
    except (OSError, ValueError):
        return None
    return names[readers.index(dist.get_rank()) :: len(readers)]


def _seen_by(path: Path) -> list[bool]:
    """Return for each rank whether the rank sees rank 0's checkpoint, and not a local folder of the same name."""
    own = None
    with contextlib.suppress(OSError, ValueError):
        own = zlib.crc32(folders.read(path / folders.MANIFEST))
    found = exchange.gather(own)
    return [mark is not None and mark == found[0] for mark in found]


def overlap(part: shards.Box, wanted: shards.Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of two boxes of one tensor, as slices of the first and of the second; None without overlap."""
    source, target = [], []
    for begin, size, at, length in zip(part.offset, part.shape, wanted.offset, wanted.shape, strict=True):
        low, high = max(begin, at), min(begin + size, at + length)
        if low >= high:
            return None
        source.append(slice(low - begin, high - begin))
        target.append(slice(low - at, high - at))
    return tuple(source), tuple(target)


def _gap(parts: Parts) -> str | None:
    """Return the fault if a tensor's boxes do not fill the tensor, each place once, or differ in shape or type."""
    for name, found in parts.items():
        boxes = [box for _, box, _ in found]
        if len({(box.whole, box.dtype) for box in boxes}) > 1:
            return f"the shards contradict each other about {name}"
        whole = shards.Box(name, boxes[0].dtype, boxes[0].whole, (), boxes[0].whole).nbytes
        if sum(box.nbytes for box in boxes) != whole:
            return f"the shards lack a part of {name}"
        if _have_a_place_twice(boxes):
            return f"the shards have a part of {name} twice, and lack another"
    return None


def _have_a_place_twice(boxes: list[shards.Box]) -> bool:
    """Return whether two boxes overlap; in linear time for the usual boxes, slices of one dimension."""
    boxes = sorted((box for box in boxes if box.nbytes), key=lambda box: box.offset)
    cut = {i for box in boxes for i, side in enumerate(box.shape) if side != box.whole[i]}
    if len(cut) <= 1:
        at = next(iter(cut), 0)
        return any(b.offset[at] < a.offset[at] + a.shape[at] for a, b in itertools.pairwise(boxes)) if cut else False
    for at, box in enumerate(boxes):  # only boxes that begin within this one's first side can overlap it
        end = box.offset[0] + box.shape[0]
        near = itertools.takewhile(lambda other: other.offset[0] < end, itertools.islice(boxes, at + 1, None))  # noqa: B023
        if any(overlap(box, other) for other in near):
            return True
    return False

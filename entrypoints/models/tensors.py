"""Weights as safetensors files, written and read in pieces: memory for one piece, whatever the size of the model.

The tensors come from a checkpoint's shards, where each rank has boxes of a tensor, or from the files of a model folder.
No torch: importing it takes 220 MB. A file holds 5 GB at most, with an index in the form of Hugging Face's libraries.
The shapes of saved weights are read by manifest, index and headers alone, so a laptop can look at a checkpoint in a
bucket. Source: safetensors' README, version 0.4, and huggingface_hub's `split_torch_state_dict_into_shards`.
"""

from __future__ import annotations

import ctypes
import hashlib
import heapq
import itertools
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints import folder as checkpoints
from ..checkpoints import matching
from ..stores.store import Store, in_threads, open_store
from .folder import INDEX, WEIGHT_FILES, WEIGHTS

if TYPE_CHECKING:
    import torch

FILE_BYTES = 5_000_000_000  # as Hugging Face's libraries cut files
SIZES = {"F64": 8, "I64": 8, "C64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
SIZES |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1)
_PIECE_BYTES = 1 << 22
HEADER_BYTES = 100_000_000  # safetensors' own limit
THREADS = 16
FIRST_BYTES = 1 << 16  # holds the header of most files
_MANIFEST_OF_STEP = re.compile(r"step-\d{8,}/" + re.escape(checkpoints.MANIFEST))

Shape = tuple[int, ...]
_Run = tuple[int, Path, int, int]  # position in the tensor, file, position in the file, bytes


class NoShapesError(Exception):
    """The weights may be whole, but no header has their shapes: a file of torch.save."""


@dataclass(frozen=True)
class TensorBox:
    """A box of a tensor in a file; the values are in row-major order from byte `begin`."""

    file: Path
    begin: int
    offset: Shape
    shape: Shape


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files. `dtype`: safetensors' name of the type; `written`: the type in the exported file."""

    dtype: str
    shape: Shape
    parts: tuple[TensorBox, ...]
    written: str = ""

    @property
    def target(self) -> str:
        """The type in the exported file."""
        return self.written or self.dtype

    @property
    def nbytes(self) -> int:
        """The size in the exported file."""
        return SIZES[self.target] * math.prod(self.shape)

    def runs(self) -> Iterator[_Run]:
        """Yield the bytes in the order of the tensor. Raises ValueError if the parts do not add up to the tensor."""
        at = 0
        size = SIZES[self.dtype]
        for run in heapq.merge(*(_runs(part, self.shape, size) for part in self.parts)):
            if run[0] != at:
                raise ValueError(f"the shards {'lack a part' if run[0] > at else 'have a part twice'}")
            at += run[3]
            yield run
        if at != size * math.prod(self.shape):
            raise ValueError("the shards lack a part")


def find(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors in safetensors files or a checkpoint's shards, by name. Raises OSError, ValueError."""
    return _joined(pair for file in files for pair in _header(file))


def at(place: str, *, averaged: bool = True) -> dict[str, Shape]:
    """Return the shapes at a path or uri, of a folder or a file. Raises as `shapes`."""
    if "://" in place:
        is_file, (folder, _, name) = place.endswith((".safetensors", ".pt")), place.rpartition("/")
    else:
        is_file, folder, name = Path(place).is_file(), str(Path(place).parent), Path(place).name
    return _of_files(open_store(folder), [name]) if is_file else shapes(open_store(place), averaged=averaged)


def shapes(store: Store, *, averaged: bool = True) -> dict[str, Shape]:
    """Return the shapes of the weights by the model's names; of several checkpoints, of the newest.

    All checkpoints of a job have the same shapes. `averaged`: of the average, if kept. Raises the errors of the store,
    FileNotFoundError without weights, ValueError for damaged files, CheckpointError for another version's manifest,
    NoShapesError.
    """
    above = ""
    if (manifest := store.read(checkpoints.MANIFEST)[0]) is None:
        steps = [name for name in store.names("step-") if _MANIFEST_OF_STEP.fullmatch(name)]
        if steps:
            manifest, above = store.read(max(steps))[0], max(steps).partition("/")[0] + "/"
    if manifest is not None:
        files = checkpoints.parse_manifest(manifest, "the checkpoint")
        found = _of_files(store, [above + name for name in files if name.startswith("shard-")])
        return {name: found[full] for name, full in matching.saved_names(found, averaged=averaged).items()}
    if (index := store.read(INDEX)[0]) is not None:
        return _of_files(store, listed(index))
    try:
        return _of_files(store, [WEIGHTS])
    except FileNotFoundError:
        other = WEIGHT_FILES[-1]  # of torch.save
    try:
        store.head(other, 1)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is neither a checkpoint nor {', '.join(WEIGHT_FILES)}") from None
    return _of_files(store, [other])


def write(folder: Path, tensors: Mapping[str, StoredTensor], file_bytes: int = FILE_BYTES) -> dict[str, str]:
    """Write the tensors durably, with an index if there are several files; return the files' sha256 by name.

    Raises OSError, ValueError if a tensor is not complete.
    """
    groups = _groups(tensors, file_bytes)
    count = len(groups)
    names = [WEIGHTS] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    sums = {name: _write_file(folder / name, group) for name, group in zip(names, groups, strict=True)}
    if count > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        placed = {name: file for file, group in zip(names, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return sums


def files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder."""
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def load(tensor: StoredTensor) -> torch.Tensor:
    """Return the values, in the type of the exported file. Raises OSError, ValueError."""
    import torch

    from ..checkpoints.shards import DTYPES

    buffer, at = bytearray(tensor.nbytes), 0
    for piece in _pieces(tensor):
        buffer[at : at + len(piece)] = piece
        at += len(piece)
    if not buffer:
        return torch.empty(tensor.shape, dtype=DTYPES[tensor.target])
    return torch.frombuffer(buffer, dtype=DTYPES[tensor.target]).view(tensor.shape)


def listed(index: bytes) -> set[str]:
    """Return the files that an index names. Raises ValueError."""
    try:
        files = set(json.loads(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{INDEX} is damaged: it is no list of files by weights") from error
    if wrong := [name for name in files if not isinstance(name, str) or "/" in name or "\0" in name]:
        raise ValueError(f"{INDEX} names {wrong[0]!r:.80}, which is no file of this folder")
    if not files:
        raise ValueError(f"{INDEX} names no file")
    return files


def _joined(pairs: Iterable[tuple[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Return the tensors by name, with the parts of all files. Raises ValueError."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in pairs:
        known = found.get(name)
        if known and (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
            raise ValueError(f"the files contradict each other about {name}")
        found[name] = replace(tensor, parts=(*known.parts, *tensor.parts)) if known else tensor
    return found


def _header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the name of each tensor in a file, and the file's part of the tensor. Raises OSError, ValueError."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= min(size - 8, HEADER_BYTES):
            raise ValueError(f"{file.name} has no header")
        text = opened.read(length)
    yield from _boxes(text, file, size - 8 - length)


def _boxes(text: bytes, file: Path, room: float = math.inf) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a header as `_header` does; `room`: the bytes of the file after the header."""
    try:
        header: dict[str, Any] = json.loads(text)
        boxes = json.loads((header.pop("__metadata__", None) or {}).get("boxes", "{}"))
        for key, entry in header.items():
            shape, (begin, end) = tuple(map(int, entry["shape"])), entry["data_offsets"]
            box = boxes.get(key) or {"name": key, "whole": shape, "offset": (0,) * len(shape)}
            if not isinstance(box["name"], str):
                raise ValueError(f"the name of {key} is no text")
            whole, offset = tuple(map(int, box["whole"])), tuple(map(int, box["offset"]))
            sides = list(zip(offset, shape, whole, strict=True))
            is_inside = 0 <= begin <= end <= room and all(0 <= o <= o + s <= w for o, s, w in sides)
            if not is_inside or end - begin != SIZES[entry["dtype"]] * math.prod(shape):
                raise ValueError(f"{key} does not fit")
            yield (
                box["name"],
                StoredTensor(entry["dtype"], whole, (TensorBox(file, 8 + len(text) + begin, offset, shape),)),
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{file.name} has a header that contradicts itself: {error}") from error


def _runs(part: TensorBox, whole: Shape, size: int) -> Iterator[_Run]:
    """Yield the part's neighbouring bytes, in the order of the tensor."""
    if 0 in part.shape:
        return
    cut = max((i for i, side in enumerate(part.shape) if side != whole[i]), default=0)
    strides = [size * math.prod(whole[i + 1 :]) for i in range(len(whole))]
    length = size * math.prod(part.shape[cut:])
    begin = sum(offset * stride for offset, stride in zip(part.offset, strides, strict=True))
    for number, place in enumerate(itertools.product(*map(range, part.shape[:cut]))):
        at = begin + sum(i * stride for i, stride in zip(place, strides, strict=False))
        yield at, part.file, part.begin + number * length, length


def _pieces(tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield the tensor's bytes in pieces; a piece is valid until the next but one. Raises OSError, ValueError."""
    length = min(_PIECE_BYTES, SIZES[tensor.dtype] * math.prod(tensor.shape))
    buffer, spare, fill = memoryview(bytearray(length)), memoryview(bytearray(length)), 0
    with ExitStack() as stack:
        opened = {part.file: stack.enter_context(part.file.open("rb")).fileno() for part in tensor.parts}
        for _, file, at, length in tensor.runs():
            while length:
                count = os.preadv(opened[file], [buffer[fill : fill + length]], at)
                if not count:
                    raise ValueError(f"{file.name} ends early")
                fill, at, length = fill + count, at + count, length - count
                if fill == len(buffer):
                    yield _written(buffer, tensor)
                    buffer, spare, fill = spare, buffer, 0
        if fill:
            yield _written(buffer[:fill], tensor)


def _written(piece: memoryview, tensor: StoredTensor) -> memoryview:
    """Return the values in the type of the exported file, rounded as torch does."""
    if tensor.target == tensor.dtype:
        return piece
    import torch

    from ..checkpoints.shards import DTYPES

    changed = torch.frombuffer(piece, dtype=DTYPES[tensor.dtype]).to(DTYPES[tensor.target])
    return memoryview(ctypes.string_at(changed.data_ptr(), changed.nbytes))


def _groups(tensors: Mapping[str, StoredTensor], file_bytes: int) -> list[dict[str, StoredTensor]]:
    """Return the tensors of each file; a tensor above the limit has a file to itself."""
    groups: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > file_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups


def _write_file(path: Path, tensors: Mapping[str, StoredTensor]) -> str:
    order = sorted(tensors, key=lambda name: -SIZES[tensors[name].target])  # so that every tensor is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        end = begin + tensor.nbytes
        header[name] = {"dtype": tensor.target, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 64) * 64)
    digest, first = hashlib.sha256(), memoryview(len(text).to_bytes(8, "little") + text)
    pieces = itertools.chain([first], *(_named_pieces(name, tensors[name]) for name in order))
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        before: Future[None] | None = None
        for piece in pieces:
            hashed = pool.submit(digest.update, piece)  # beside reads and writes: all release the interpreter's lock
            rest = piece
            while rest:
                rest = rest[file.write(rest) or 0 :]
            if before is not None:
                before.result()
            before = hashed
        pool.shutdown()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _named_pieces(name: str, tensor: StoredTensor) -> Iterator[memoryview]:
    try:
        yield from _pieces(tensor)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _of_files(store: Store, files: Collection[str]) -> dict[str, Shape]:
    if other := [name for name in files if not name.endswith(".safetensors")]:
        raise NoShapesError(f"{other[0]} has no header with shapes")
    headers: dict[str, bytes] = {}

    def fetch(name: str) -> None:
        data = store.head(name, FIRST_BYTES)
        length = int.from_bytes(data[:8], "little")
        if not 0 < length <= HEADER_BYTES:
            raise ValueError(f"{name} has no header")
        headers[name] = (data if len(data) >= 8 + length else store.head(name, 8 + length))[8 : 8 + length]

    in_threads(fetch, files, THREADS)
    pairs = (pair for name, text in headers.items() for pair in _boxes(text, Path(name)))
    return {name: tensor.shape for name, tensor in _joined(pairs).items()}

"""One rank's file: the rank's boxes of tensors in the safetensors format, readable by other programs.

8 bytes of header length, a JSON header (name -> dtype, shape, byte range; `__metadata__` holds each box's place in its
tensor), then the bytes. Source: the format's description in the safetensors repository's README, version 0.4.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import foreign

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK_BYTES = 1 << 22  # small, so that a stop or a full disk is noticed soon


@dataclass(frozen=True)
class Box:
    """A block of a tensor: its start and size in each dimension, and the shape of the whole tensor."""

    name: str
    dtype: torch.dtype
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return self.shape == self.whole

    @property
    def nbytes(self) -> int:
        """The box's size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Shard:
    """An open file: `data` is the whole file (uint8, mapped), and `boxes` has the start of each box in `data`.

    `save` is the name of the save that wrote it.
    """

    path: Path
    data: torch.Tensor
    boxes: tuple[tuple[Box, int], ...]
    save: str | None = None

    def tensor(self, box: Box, begin: int) -> torch.Tensor:
        """Return the box's values; the first access reads them from disk."""
        data = self.data[begin : begin + box.nbytes]
        if begin % box.dtype.itemsize:  # of another program
            data = data.clone()
        return data.view(box.dtype).view(box.shape)


def place(boxes: Sequence[Box]) -> tuple[bytes, list[int], int]:
    """Return the file's head, each box's position after the head, and the bytes after the head. Raises TypeError.

    Boxes with the widest elements come first, so that every box is aligned to its element size.
    """
    order = sorted(range(len(boxes)), key=lambda i: -boxes[i].dtype.itemsize)
    header: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    positions = [0] * len(boxes)
    end = 0
    for i in order:
        box = boxes[i]
        if box.dtype not in _CODES:
            raise TypeError(f"a checkpoint cannot hold {box.name}: its dtype is {box.dtype}")
        positions[i], end = end, end + box.nbytes
        key = box.name if box.is_whole else f"{box.name}@{','.join(map(str, box.offset))}"
        header[key] = {"dtype": _CODES[box.dtype], "shape": list(box.shape), "data_offsets": [positions[i], end]}
        if not box.is_whole:
            parts[key] = {"name": box.name, "whole": list(box.whole), "offset": list(box.offset)}
    text = json.dumps({"__metadata__": {"boxes": json.dumps(parts)}, **header}, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 64) * 64)  # aligns the data after the header
    return (len(text)).to_bytes(8, "little") + text, positions, end


def marked(head: bytes, save: str) -> bytes:
    """Return the head with the name of its save, the first text of the header."""
    begin = b'{"__metadata__":{'
    text = begin + b'"save":%s,' % json.dumps(save).encode() + head[8:].strip().removeprefix(begin)
    text = text.ljust(-(-len(text) // 64) * 64)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, head: bytes, data: torch.Tensor) -> dict[str, Any]:
    """Write head and data (uint8, on the CPU) durably; return size and crc32 for the manifest. Raises OSError."""
    with path.open("wb", buffering=0) as file:
        checksum = zlib.crc32(head)
        _write_all(file.fileno(), memoryview(head))
        if data.nbytes:
            view = memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")
            for begin in range(0, data.nbytes, _CHUNK_BYTES):
                chunk = view[begin : begin + _CHUNK_BYTES]
                _write_all(file.fileno(), chunk)
                checksum = zlib.crc32(chunk, checksum)
        os.fsync(file.fileno())
    return {"size": len(head) + data.nbytes, "crc32": f"{checksum:08x}"}


def open_shard(path: Path, *, whole: bool = True, is_own: bool = True) -> Shard:
    """Map the file and read its header. Raises OSError, ValueError if the file is no shard.

    `whole`: the whole file will be read, so its pages are fetched in one call and not by page faults. `is_own` False: a
    file of another program, which has no table of boxes and holds whole tensors.
    """
    data = _mapped(path, whole)
    length = int.from_bytes(bytes(data[:8].tolist()), "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError(f"{path.name} has no header")
    boxes = []
    try:
        header = json.loads(bytes(data[8 : 8 + length].tolist()))
        about = header.pop("__metadata__", None) if not is_own else header.pop("__metadata__")
        parts = json.loads(about["boxes"] if is_own else (about or {}).get("boxes", "{}"))
        for key, entry in header.items():
            shape = tuple(entry["shape"])
            part = parts.get(key) or {"name": key, "whole": shape, "offset": (0,) * len(shape)}
            box = Box(part["name"], DTYPES[entry["dtype"]], tuple(part["whole"]), tuple(part["offset"]), shape)
            begin, end = entry["data_offsets"]
            is_aligned = not is_own or (length + begin) % box.dtype.itemsize == 0
            is_inside = 0 <= begin <= end <= len(data) - 8 - length
            if not _fits(box) or end - begin != box.nbytes or not (is_aligned and is_inside):
                raise ValueError(f"{key} does not fit")
            boxes.append((box, 8 + length + begin))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} has a header that contradicts itself: {error}") from error
    return Shard(path, data, tuple(boxes), (about or {}).get("save"))


def _fits(box: Box) -> bool:
    """Return whether the box lies inside its tensor. Raises ValueError."""
    sides = list(zip(box.offset, box.shape, box.whole, strict=True))
    if any(type(side) is not int for each in sides for side in each):
        raise ValueError(f"a side of {box.name} is no whole number")
    return all(offset >= 0 and size >= 0 and offset + size <= whole for offset, size, whole in sides)


def _mapped(path: Path, whole: bool) -> torch.Tensor:
    with foreign.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 9:
            raise ValueError(f"{path.name} has {size} bytes")
        flags = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_POPULATE", 0) if whole else 0)
        # A writable mapping would copy each page for torch's warning, so the warning is suppressed.
        view = mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(view, dtype=torch.uint8)


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]

"""The file format of cached lines: compressed blocks, and an index so that most blocks need not be read.

The file `lines` holds blocks of some thousand lines, each compressed separately; `index` has a record of fixed size for
each block: offset, sizes, line count, times, ranks and checksum. A block is stored in columns: the writers, the times,
and the texts, separated by newlines. Both files only grow, so a writer may die at any time: readers ignore bytes beyond
the length in the registry, and the next writer cuts them off.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..backend import LogLine

BLOCK_BYTES = 1 << 18  # approximate text size of a block, the unit of reading
_LEVEL = 1  # of zlib: nearly the compression of level 6 at a third of the time
_RECORD = struct.Struct("<QIIIddQI")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECK.size
_HEAD = struct.Struct("<II")
_NO_RANK = -1  # lines of the node itself
_make = partial(tuple.__new__, LogLine)


class DamagedError(Exception):
    """A block, or its record in the index, differs from the written bytes."""


class BlockEntry(NamedTuple):
    """An index record: a block's `offset` and `size`, its `line_count`, times (`first_s` to `last_s`) and ranks.

    `ranks` has a bit for each rank modulo 63, and bit 63 for the nodes' own lines; a bit of 0 means that the rank is
    absent.
    """

    offset: int
    size: int
    text_size: int
    line_count: int
    first_s: float
    last_s: float
    ranks: int
    checksum: int


class Block(NamedTuple):
    """A block in columns: `text` (lines joined by newlines), `whose` (index into `streams`: node, rank), `times`."""

    text: str
    streams: list[tuple[int, int | None]]
    whose: array[int]
    times: array[float]

    def lines(self) -> list[LogLine]:
        """Return the lines."""
        nodes = [node for node, _ in self.streams]
        ranks = [rank for _, rank in self.streams]
        rows = zip(
            self.text.split("\n"),
            map(nodes.__getitem__, self.whose),
            map(ranks.__getitem__, self.whose),
            self.times,
            strict=True,
        )
        return list(map(_make, rows))


def rank_bit(rank: int | None) -> int:
    """Return the rank's bit in an index record."""
    return 1 << 63 if rank is None else 1 << (rank % 63)


def encoded(lines: Sequence[LogLine], offset: int) -> tuple[bytes, BlockEntry]:
    """Return the lines as a block at the offset, and its record. The texts must not contain newlines."""
    streams: dict[tuple[int, int | None], int] = {}
    whose = array("H", (streams.setdefault((line[1], line[2]), len(streams)) for line in lines))
    times = array("d", (line[3] for line in lines))
    table = array("i")
    ranks = 0
    for node, rank in streams:
        table.extend((node, _NO_RANK if rank is None else rank))
        ranks |= rank_bit(rank)
    text = "\n".join([line[0] for line in lines]).encode("utf-8", "surrogatepass")
    head = _HEAD.pack(len(lines), len(streams))
    data = zlib.compress(b"".join((head, table.tobytes(), whose.tobytes(), times.tobytes(), text)), _LEVEL)
    entry = BlockEntry(offset, len(data), len(text), len(lines), min(times), max(times), ranks, zlib.crc32(data))
    return data, entry


def decoded(data: bytes, entry: BlockEntry) -> Block:
    """Return the block. Raises DamagedError."""
    if len(data) != entry.size or zlib.crc32(data) != entry.checksum:
        raise DamagedError
    raw = memoryview(zlib.decompress(data))
    count, stream_count = _HEAD.unpack_from(raw)
    table, whose, times = array("i"), array("H"), array("d")
    at = _HEAD.size
    for column, length in ((table, 2 * stream_count), (whose, count), (times, count)):
        size = length * column.itemsize
        column.frombytes(raw[at : at + size])
        at += size
    streams = [(node, None if rank == _NO_RANK else rank) for node, rank in zip(table[::2], table[1::2], strict=True)]
    return Block(str(raw[at:], "utf-8", "surrogatepass"), streams, whose, times)


def packed(entry: BlockEntry) -> bytes:
    """Return the record's bytes."""
    record = _RECORD.pack(*entry)
    return record + _CHECK.pack(zlib.crc32(record))


def entries(index: Path, end: int) -> Iterator[BlockEntry]:
    """Yield the records of the blocks before `end` in the file. Raises DamagedError."""
    offset = 0
    try:
        with index.open("rb") as file:
            while offset < end:
                record = file.read(RECORD_BYTES)
                body = record[: _RECORD.size]
                if len(record) != RECORD_BYTES or _CHECK.unpack_from(record, _RECORD.size)[0] != zlib.crc32(body):
                    raise DamagedError
                entry = BlockEntry(*_RECORD.unpack(body))
                if entry.offset != offset:
                    raise DamagedError
                offset += entry.size
                yield entry
    except OSError as error:
        raise DamagedError from error


def read(file: int, entry: BlockEntry) -> Block:
    """Return the record's block, read from the open file. Raises DamagedError."""
    try:
        return decoded(os.pread(file, entry.size, entry.offset), entry)
    except OSError as error:
        raise DamagedError from error

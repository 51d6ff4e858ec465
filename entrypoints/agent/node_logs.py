"""Reads lines from an agent's log files by byte offset: a resumed stream repeats no line and loses no line.

A page of a long log is a piece of each file, and all pieces end at about the same time: a rank with many lines does
not fall behind the remaining ranks, and the sequence of pages is in order.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

from .. import atomic_json, processes
from ..contract import EXIT, STATE, AgentState
from . import log_times

PAGE_BYTES, FILE_BYTES = 4 << 20, 1 << 16  # at most for all files together, at least for each file
LINE_BYTES = 1 << 20  # a longer line is split
BOOT = "boot.log"
BLOCK = 1 << 16


@dataclass(frozen=True)
class Chunk:
    """A file's next whole lines. `times` are the notes on the lines' times (logtimes.between).

    The last line has no newline if the file has ended or the line is very long; the last line may end with a carriage
    return, if a progress bar continues. `has_more`: the page has no room for the following lines, so lines of all
    files that are younger than the last line of this piece must wait for the next page.
    """

    name: str
    offset: int
    data: bytes
    times: tuple[tuple[int, float], ...] = ()
    has_more: bool = False

    def dump(self) -> dict[str, Any]:
        """Return the chunk's description for a channel, which carries the bytes apart."""
        told = {"name": self.name, "offset": self.offset, "size": len(self.data)}
        return {**told, "times": self.times, "has_more": self.has_more}

    @property
    def rank(self) -> int | None:
        """The rank of the lines, None for the node's own lines."""
        return _rank(self.name)

    @property
    def until_s(self) -> float | None:
        """When the last line was written, None if unknown."""
        last = self.offset + len(self.data) - 1
        return max(map(itemgetter(1), self.times)) if _is_noted(self.times, last) else None


def read(
    root: Path,
    offsets: Mapping[str, int],
    ranks: Collection[int] | None = None,
    page_bytes: int = PAGE_BYTES,
    *,
    has_ended: bool | None = None,
) -> list[Chunk]:
    """Return the bytes after the offsets in the node's log files, at most a page in total; empty without new lines.

    With `ranks`, only the ranks' files. A last line without newline waits for the end of the node or of its agent.
    `has_ended`: whether the node has ended, if the agent's process cannot be seen from this machine.
    """
    if has_ended is None:
        has_ended = _has_ended(root)
    sizes = {path: _size(path) for path in _files(root / "log", ranks)}
    news = {path: size for path, size in sizes.items() if size > offsets.get(path.name, 0)}
    limit = max(FILE_BYTES, page_bytes // max(1, len(news)))
    pieces = [_chunk(path, offsets.get(path.name, 0), size, limit, has_ended=has_ended) for path, size in news.items()]
    chunks = [chunk for chunk in pieces if chunk.data]
    until_s = min((chunk.until_s for chunk in chunks if chunk.has_more and chunk.until_s is not None), default=None)
    if until_s is None:
        return chunks
    return [piece for chunk in chunks if (piece := _cut(chunk, until_s)).data]


def near_end(
    root: Path, ranks: Collection[int] | None = None, *, lines: int | None = None, since_s: float | None = None
) -> dict[str, int]:
    """Return each file's offset of its last `lines` lines, or of the lines written since `since_s`."""
    found = {}
    for path in _files(root / "log", ranks):
        size = path.stat().st_size
        at = 0 if since_s is None else _back(path, log_times.before(path, since_s), 1)
        # A line more than requested: the last line may not be whole yet.
        found[path.name] = at if lines is None else max(at, _last_lines(path, size, lines + 1))
    return found


def _has_ended(root: Path) -> bool:
    found = atomic_json.read_json(root / STATE)
    state = found and AgentState.load(found)
    return (root / EXIT).exists() or (state is not None and not processes.alive(state.pid, state.stamp))


def _size(path: Path) -> int:
    """Return the file's size; a network file system asks its server again when the file is opened."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def _files(folder: Path, ranks: Collection[int] | None) -> Iterator[Path]:
    if ranks is None and (folder / BOOT).exists():
        yield folder / BOOT
    found = ((_rank(path.name), path) for path in folder.glob("rank-*.log"))
    yield from (
        path for rank, path in sorted((r, p) for r, p in found if r is not None) if ranks is None or rank in ranks
    )


def _rank(name: str) -> int | None:
    match = re.fullmatch(r"rank-(\d+)\.log", name)
    return int(match[1]) if match else None


def _chunk(path: Path, offset: int, size: int, limit: int, *, has_ended: bool) -> Chunk:
    data = _piece(path, offset, limit)
    if len(data) == limit < LINE_BYTES and b"\n" not in data:
        data = _piece(path, offset, LINE_BYTES)
    has_more = size > offset + len(data)
    end = data.rfind(b"\n") + 1
    if has_ended and not has_more:
        end = len(data)
    elif b"\r" in data[end:]:  # a running progress bar: its last state may not be whole yet
        end = data.rfind(b"\r") + 1
    elif not end and len(data) >= LINE_BYTES:
        end = len(data)
    times = log_times.between(path, offset, offset + end) if end else []
    return Chunk(path.name, offset, data[:end], tuple(times), has_more)


def _piece(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _cut(chunk: Chunk, until_s: float) -> Chunk:
    """Return the piece of the chunk written until `until_s`; the chunk that defines `until_s` stays whole."""
    count = bisect_right(list(accumulate(map(itemgetter(1), chunk.times), max)), until_s)
    if count == len(chunk.times) and _is_noted(chunk.times, chunk.offset + len(chunk.data) - 1):
        return chunk
    end = chunk.times[count - 1][0] if count else chunk.offset
    end = chunk.data.rfind(b"\n", 0, max(0, end - chunk.offset)) + 1
    return Chunk(chunk.name, chunk.offset, chunk.data[:end], chunk.times[:count], has_more=True)


def _is_noted(times: tuple[tuple[int, float], ...], last: int) -> bool:
    return bool(times) and times[-1][0] > last


def _last_lines(path: Path, size: int, count: int) -> int:
    """Return the offset of the last `count` lines; a last line without a newline counts."""
    if size == 0:
        return 0
    with path.open("rb") as file:
        file.seek(size - 1)
        is_whole = file.read(1) == b"\n"
    return _back(path, size - is_whole, count)


def _back(path: Path, offset: int, count: int) -> int:
    """Return the start of the line that is `count` newlines before the offset."""
    with path.open("rb") as file:
        while offset > 0:
            begin = max(0, offset - BLOCK)
            file.seek(begin)
            data = file.read(offset - begin)
            found = data.count(b"\n")
            if found < count:
                count, offset = count - found, begin
                continue
            at = len(data)
            for _ in range(count):
                at = data.rfind(b"\n", 0, at)
            return begin + at + 1
    return 0

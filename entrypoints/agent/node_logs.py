"""Reads lines from an agent's log files by byte offset: a resumed stream repeats no line and loses no line.

A page of a long log is a piece of each file, and all pieces end at about the same time: a rank with many lines does
not fall behind the remaining ranks, and the sequence of pages is in order.

When each line was written is noted in a second file instead of in the log itself. Ranks write their logs directly into
files: no relay can stall or lose lines. The agent polls the sizes ten times a second and notes `size time` for a file
that has grown: the bytes before `size` existed at `time` (unix seconds).

A third file has the events of rank 0's log, block by block: a job's state then needs no search of a long log. The log
decides: a reader searches the log itself behind the last block, and wherever a block is missing or damaged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from .. import atomic_json, events, processes
from ..contract import EXIT, STATE, AgentState

PAGE_BYTES, FILE_BYTES = 4 << 20, 1 << 16  # at most for all files together, at least for each file
LINE_BYTES = 1 << 20  # a longer line is split
BOOT = "boot.log"
BLOCK, INDEX_BLOCK = 1 << 16, 1 << 12
MOST_LAST, LINE_CHARACTERS = 10, 200  # of the lines before a rank's end, which often name the cause
_END_BYTES = 32_768  # a progress bar rewrites one line hundreds of times
_PLAIN = bytes([*b"\t\r\n", *range(0x20, 0x7F)])
SUFFIX, EVENTS = ".times", ".events"  # of the files with the times of a log's lines, and with the events
RANK_0 = "rank-0.log"  # has all events that the launcher reads
_MOST_STRETCHES = 2000  # shared by a log's pages: the later pages of a long log leave fewer steps, as curves need


@dataclass(frozen=True)
class Chunk:
    """A file's next whole lines. `times` are the notes on the lines' times (`between`).

    The last line has no newline if the file has ended or the line is very long; the last line may end with a carriage
    return, if a progress bar continues. `has_more`: the page has no room for the following lines, so lines of all
    files that are younger than the last line of this piece must wait for the next page.
    """

    name: str
    offset: int
    data: bytes
    times: tuple[tuple[int, float], ...] = ()
    has_more: bool = False
    ends: tuple[int, ...] = ()
    """Of a searched piece: the offset in the file behind each line, and behind the whole piece."""
    left_out: int = 0
    """The lines of a searched piece that do not match."""
    counts: tuple[int, ...] = ()
    """Of a piece searched for events.MARK: how many events each line stands for (events.weights)."""

    @classmethod
    def load(cls, told: Mapping[str, Any], data: bytes) -> Chunk:
        """Return the chunk from its description (`dump`) and its bytes."""
        times = tuple((size, time_s) for size, time_s in told["times"])
        ends, counts = (tuple(told.get(name) or ()) for name in ("ends", "counts"))
        return cls(told["name"], told["offset"], data, times, told["has_more"], ends, told.get("left_out") or 0, counts)

    def dump(self) -> dict[str, Any]:
        """Return the chunk's description for a channel, which carries the bytes apart."""
        told = {"name": self.name, "offset": self.offset, "size": len(self.data)}
        more = {"ends": self.ends, "left_out": self.left_out, "counts": self.counts} if self.ends else {}
        return {**told, "times": self.times, "has_more": self.has_more, **more}

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
    pattern: str = "",
) -> list[Chunk]:
    """Return the bytes after the offsets in the node's log files, at most a page in total; empty without new lines.

    With `ranks`, only the ranks' files. A last line without newline waits for the end of the node or of its agent.
    `has_ended`: whether the node has ended, if the agent's process cannot be seen from this machine. `pattern`: lines
    without a match of this regular expression, in ASCII, may be left out; a line with other characters stays. For
    events.MARK only events stay, and steps may be left out (`Chunk.counts`).
    """
    if has_ended is None:
        found = atomic_json.read_json(root / STATE)
        state = found and AgentState.load(found)
        has_ended = (root / EXIT).exists() or bool(state and not processes.alive(state.pid, state.stamp))
    sizes = {path: _size(path) for path in _files(root / "log", ranks)}
    news = {path: size for path, size in sizes.items() if size > offsets.get(path.name, 0)}
    limit = max(FILE_BYTES, page_bytes // max(1, len(news)))
    if pattern == events.MARK and len(news) == 1:
        [(path, size)] = news.items()
        piece, limit = _in_blocks(path, offsets.get(path.name, 0), size, limit)
        if piece is not None:
            return [piece]
    pieces = [_chunk(path, offsets.get(path.name, 0), size, limit, has_ended=has_ended) for path, size in news.items()]
    chunks = [chunk for chunk in pieces if chunk.data]
    until_s = min((chunk.until_s for chunk in chunks if chunk.has_more and chunk.until_s is not None), default=None)
    if until_s is not None:
        chunks = [piece for chunk in chunks if (piece := _cut(chunk, until_s)).data]
    return [_matching(chunk, pattern) for chunk in chunks] if pattern else chunks


def near_end(
    root: Path, ranks: Collection[int] | None = None, *, lines: int | None = None, since_s: float | None = None
) -> dict[str, int]:
    """Return each file's offset of its last `lines` lines, or of the lines written since `since_s`."""
    found = {}
    for path in _files(root / "log", ranks):
        size = path.stat().st_size
        at = 0 if since_s is None else _back(path, before(path, since_s), 1)
        # A line more than requested: the last line may not be whole yet.
        found[path.name] = at if lines is None else max(at, _offset_of_last(path, size, lines + 1))
    return found


def last_lines(rank: int) -> list[str]:
    """Return the last lines of the rank's log on this node, as text for users; empty without a log."""
    folder = os.environ.get("CLOUDTRAIN_LOG_DIR")
    if not folder:
        return []
    try:
        with (Path(folder) / f"rank-{rank}.log").open("rb") as log:
            begin = max(0, log.seek(0, os.SEEK_END) - _END_BYTES)
            log.seek(begin)
            text = log.read(_END_BYTES).decode(errors="replace")
    except OSError:
        return []
    return last_lines_of(text.partition("\n")[2] if begin and "\n" in text else text)


def last_lines_of(text: str) -> list[str]:
    """Return the last lines, without event tails and empty lines, long lines cut, progress bars in the last state."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in reversed(text.split("\n")))
    found = list(islice(filter(None, (events.parse(line)[0].rstrip() for line in lines)), MOST_LAST))
    return [line if len(line) <= LINE_CHARACTERS else f"{line[: LINE_CHARACTERS - 1]}…" for line in found[::-1]]


class TimeIndex:
    """The writer: one file `NAME.times` beside each `NAME.log` of a folder, and the file with the events of rank 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[Path, int] = {}
        self._events = _EventsFile(folder / RANK_0)

    def note(self, now_s: float) -> None:
        """Note the growth of every log in the folder."""
        for log in self.folder.glob("*.log"):
            # If the job has just removed the log, or the disk is full, a time is lost, and the supervisor continues.
            with contextlib.suppress(OSError):
                size = log.stat().st_size
                if size != self._sizes.get(log, 0):
                    self._sizes[log] = size
                    with log.with_suffix(SUFFIX).open("a") as index:
                        index.write(f"{size} {now_s:.3f}\n")
                if log.name == RANK_0:
                    self._events.grow(size)


class _EventsFile:
    """The writer of a log's blocks: a line for each, `BEGIN END JSON`, with the block's offsets in the log.

    A killed writer leaves at most a part of the last line, which the next writer cuts off.
    """

    def __init__(self, log: Path) -> None:
        self._log, self._path = log, log.with_suffix(EVENTS)
        self._size = -1  # of the whole lines in the file; -1 before the first look at the file
        self._end = 0  # of the last block, in the log

    def grow(self, size: int) -> None:
        """Write the next block of the log of `size` bytes, if it is complete. Raises OSError."""
        if self._size < 0 and size >= PAGE_BYTES:  # of a node's earlier agent
            blocks = list(_blocks(self._log, 0, size))
            self._size, self._end = sum(len(line) for *_, line in blocks), blocks[-1][1] if blocks else 0
        if size < self._end:  # another log of this name
            self._path.unlink(missing_ok=True)
            self._size = self._end = 0
        if size - self._end <= PAGE_BYTES:
            return
        chunk = _matching(_chunk(self._log, self._end, size, PAGE_BYTES, has_ended=False), events.MARK)
        if chunk.ends[-1] == self._end:  # no whole line
            return
        told = {**chunk.dump(), "data": chunk.data.decode(errors="surrogateescape")}
        line = f"{chunk.offset} {chunk.ends[-1]} {json.dumps(told)}\n".encode()
        with os.fdopen(os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
            file.truncate(self._size)
            file.seek(self._size)
            file.write(line)
        self._size, self._end = self._size + len(line), chunk.ends[-1]


def between(log: Path, begin: int, end: int) -> list[tuple[int, float]]:
    """Return the notes on the log's bytes from `begin` to `end`: (size, unix seconds), both rising.

    A byte was first seen at the time of the first note with a larger size; the newest bytes may have no note yet. The
    function reads only the relevant part of the index, by bisection: a day's index has some 20 MB.
    """
    try:
        with log.with_suffix(SUFFIX).open("rb") as index:
            return list(_notes(index, begin, end))
    except OSError:
        return []


def before(log: Path, since_s: float) -> int:
    """Return how many of the log's bytes existed before `since_s` according to the notes; never too many."""
    try:
        with log.with_suffix(SUFFIX).open("rb") as index:
            size = 0
            _seek(index, lambda _, time_s: time_s < since_s)
            for line in index:
                note = _note(line)
                if note is None or note[1] >= since_s:
                    return size
                size = note[0]
            return size
    except OSError:
        return 0


def _size(path: Path) -> int:
    """Return the file's size; a network file system asks its server again when the file is opened."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def _files(folder: Path, ranks: Collection[int] | None) -> Iterator[Path]:
    if ranks is None and (folder / BOOT).exists():
        yield folder / BOOT
    found = ((_rank(path.name), path) for path in folder.glob("rank-*.log"))
    ordered = sorted((rank, path) for rank, path in found if rank is not None)
    yield from (path for rank, path in ordered if ranks is None or rank in ranks)


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
    times = between(path, offset, offset + end) if end else []
    return Chunk(path.name, offset, data[:end], tuple(times), has_more)


def _blocks(log: Path, offset: int, size: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the begin, the end and the line of the blocks of events behind `offset`, in a log of `size` bytes."""
    with contextlib.suppress(OSError, ValueError), log.with_suffix(EVENTS).open("rb") as file:
        last = 0
        for line in file:
            begin, end = map(int, line.split(b" ", 2)[:2])
            if not last == begin < end <= size or not line.endswith(b"\n"):
                return
            last = end
            if end > offset:
                yield begin, end, line


def _in_blocks(log: Path, offset: int, size: int, limit: int) -> tuple[Chunk | None, int]:
    """Return the blocks of events behind `offset` as a searched piece, or None and the bytes to search in the log."""
    data, times, ends, counts, left_out, end = b"", list[tuple[int, float]](), list[int](), list[int](), 0, offset
    for begin, behind, line in _blocks(log, offset, size) if size - offset > limit else ():
        if begin != end:  # search the log until the next block begins
            return None, min(limit, behind - offset)
        block = _block(line)
        if block is None or len(data) > limit:
            break
        base = offset + len(data) - block.offset
        times += [(base + place, time_s) for place, time_s in block.times]
        data, end, left_out = data + block.data, behind, left_out + block.left_out
        ends += block.ends[:-1]
        counts += block.counts
    if end == offset:
        return None, limit
    return Chunk(log.name, offset, data, tuple(times), size > end, (*ends, end), left_out, tuple(counts)), limit


def _block(line: bytes) -> Chunk | None:
    """Return the searched piece in a line of the file of events, None for an unsound line."""
    begin, end, told = line.split(b" ", 2)
    with contextlib.suppress(AttributeError, LookupError, RecursionError, TypeError, ValueError):
        fields = json.loads(told)
        block = Chunk.load(fields, fields["data"].encode(errors="surrogateescape"))
        places = [place for place, _ in block.times]
        numbers = {type(each) for each in (block.left_out, *block.ends, *block.counts, *places)}
        is_whole = len(block.ends) - 1 == len(block.counts) == block.data.count(b"\n")
        is_timed = all(isinstance(time_s, float | int) for _, time_s in block.times)
        if is_whole and is_timed and numbers == {int} and (block.offset, block.ends[-1]) == (int(begin), int(end)):
            return block
    return None


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


def _matching(chunk: Chunk, pattern: str) -> Chunk:
    """Return the lines of the chunk that may match, with a note of each line's time, and a note of the chunk's end."""
    data, begin, lines, ends, counts = chunk.data, 0, list[bytes](), list[int](), tuple[int, ...]()
    is_plain = pattern == events.MARK or not data.translate(None, _PLAIN)  # colours could split a word
    find = re.compile((pattern if is_plain else f"{pattern}|[^\\t\\r\\n -~]").encode())
    while begin < len(data) and (found := find.search(data, begin)) is not None:
        start = max(begin, data.rfind(b"\n", begin, found.start()) + 1)
        begin = data.find(b"\n", found.start()) + 1 or len(data)
        lines.append(data[start:begin])
        ends.append(chunk.offset + begin)
    if pattern == events.MARK:
        most = min(events.MOST_STRETCHES, max(1, _MOST_STRETCHES * PAGE_BYTES // (chunk.offset + len(data) or 1)))
        weights = events.weights([line.decode(errors="replace") for line in lines], most)
        kept = [n for n, weight in enumerate(weights) if weight is not None]
        lines, ends, counts = [lines[n] for n in kept], [ends[n] for n in kept], tuple(weights[n] or 0 for n in kept)
    sizes, latest = [size for size, _ in chunk.times], list(accumulate(map(itemgetter(1), chunk.times), max))
    places = accumulate(map(len, lines), initial=chunk.offset)
    next(places)
    noted = [(place, bisect_left(sizes, end)) for place, end in zip(places, ends, strict=True)]
    times = [(place, latest[note]) for place, note in noted if note < len(latest)]
    if _is_noted(chunk.times, chunk.offset + len(data) - 1):
        times.append((chunk.offset + sum(map(len, lines)) + 1, latest[-1]))
    left_out = max(int(not lines), data.count(b"\n") - len(lines))
    ends.append(chunk.offset + len(data))
    return replace(chunk, data=b"".join(lines), times=tuple(times), ends=tuple(ends), left_out=left_out, counts=counts)


def _is_noted(times: tuple[tuple[int, float], ...], last: int) -> bool:
    return bool(times) and times[-1][0] > last


def _offset_of_last(path: Path, size: int, count: int) -> int:
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


def _seek(index: BinaryIO, is_before: Callable[[int, float], bool]) -> None:
    """Go to the beginning of a note, at most INDEX_BLOCK bytes before the first note that `is_before` does not take."""
    low, high = 0, index.seek(0, os.SEEK_END)
    while high - low > INDEX_BLOCK:
        middle = (low + high) // 2
        index.seek(middle)
        index.readline()
        note = _note(index.readline())
        low, high = (middle, high) if note and is_before(*note) else (low, middle)
    index.seek(low)
    if low:
        index.readline()


def _notes(index: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, float]]:
    _seek(index, lambda size, _: size <= begin)
    rest = b""
    while block := index.read(BLOCK):
        whole, newline, rest = (rest + block).rpartition(b"\n")
        if not newline:
            continue
        words = whole.split()
        sizes, times = list(map(int, words[::2])), list(map(float, words[1::2]))
        first, last = bisect_right(sizes, begin), bisect_left(sizes, end) + 1
        yield from zip(sizes[first:last], times[first:last], strict=True)
        if last <= len(sizes):
            return


def _note(line: bytes) -> tuple[int, float] | None:
    """Return the size and the time in a line, None for an incomplete line."""
    if not line.endswith(b"\n"):
        return None
    size, _, time_s = line.partition(b" ")
    return int(size), float(time_s)

"""When each line of a log file was written, noted in a second file instead of in the log itself.

Ranks write their logs directly into files: no relay can stall or lose lines. The agent polls the sizes ten times a
second and notes `size time` for a file that has grown: the bytes before `size` existed at `time` (unix seconds).
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".times"
BLOCK, PIECE = 1 << 12, 1 << 16


class TimeIndex:
    """The writer: one file `NAME.times` beside each `NAME.log` of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[Path, int] = {}

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


def _seek(index: BinaryIO, is_before: Callable[[int, float], bool]) -> None:
    """Go to the beginning of a note, at most BLOCK bytes before the first note that is not before the wanted part."""
    low, high = 0, index.seek(0, os.SEEK_END)
    while high - low > BLOCK:
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
    while block := index.read(PIECE):
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

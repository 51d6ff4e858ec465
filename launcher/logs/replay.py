"""Read cached lines from the front or from the back, and skip blocks without possible matches."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ..backend import LogLine
from . import blocks
from .cache import CachePosition
from .view import View

# A pattern of only these parts matches within a joined text of many lines whenever it matches within a line.
_LOCAL_PATTERN = re.compile(r"(?:[\w %:/=,;'\"@#&<>~!`-]|\\[dwbs.\[\]()/-]|\.|\[[\w -]+\]|\|)+")


class Replay:
    """The committed blocks of a cached log, each read once. Every wanted line matches the view.

    The constructor raises blocks.DamagedError.
    """

    def __init__(self, folder: Path, place: CachePosition, view: View) -> None:
        self._ranks, self._since_s = view.ranks, view.since_s
        self._find = view.grep if view.grep is not None and is_of_blocks(view.grep) else None
        self._bits = None if view.ranks is None else sum({blocks.rank_bit(rank) for rank in view.ranks})
        self._next = 0
        self._entries = list(blocks.entries(folder / f"index-{place.round}", place.size))
        try:
            self._file = os.open(folder / f"lines-{place.round}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise blocks.DamagedError from error

    def next(self) -> list[LogLine] | None:
        """Return the next block's lines, None after the last; a call after blocks.DamagedError skips the block."""
        while self._next < len(self._entries):
            self._next += 1
            if lines := self._lines(self._entries[self._next - 1]):
                return lines
        return None

    def last(self, count: int, wants: Callable[[LogLine], bool] | None, *, patient: bool = False) -> list[LogLine]:
        """Return the last wanted lines. Raises blocks.DamagedError, or skips damaged blocks if `patient`."""
        found: list[list[LogLine]] = []
        for entry in reversed(self._entries):
            if count <= 0:
                break
            try:
                lines = self._lines(entry)
            except blocks.DamagedError:
                if not patient:
                    raise
                continue
            lines = [line for line in lines if line.text[-1:] != "\r" and (wants is None or wants(line))]
            found.append(lines[-count:])
            count -= len(found[-1])
        return [line for lines in reversed(found) for line in lines]

    def before(self) -> Counter[tuple[int, int | None]]:
        """Return the number of lines of each node and rank, among the requested ranks, before the block read last.

        A skipped block that is damaged counts zero: a repeated line is better than a lost line.
        """
        counts: Counter[tuple[int, int | None]] = Counter()
        for entry in self._entries[: max(0, self._next - 1)]:
            with contextlib.suppress(blocks.DamagedError):
                block = blocks.read(self._file, entry)
                for stream, lines in Counter(block.whose).items():
                    who = block.streams[stream]
                    if self._ranks is None or who[1] in self._ranks:
                        counts[who] += lines
        return counts

    @property
    def lost(self) -> int:
        """The number of lines in the block read last."""
        return self._entries[self._next - 1].line_count

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _lines(self, entry: blocks.BlockEntry) -> list[LogLine]:
        if self._bits is not None and not entry.ranks & self._bits:
            return []
        if self._since_s is not None and entry.last_s < self._since_s:
            return []
        block = blocks.read(self._file, entry)
        is_absent = self._find is not None and self._find.search(block.text) is None
        # Hidden characters, such as colours, could split a word.
        if is_absent and block.text.replace("\n", "").replace("\t", "").replace("\r", "").isprintable():
            return []
        if self._ranks is None:
            return block.lines()
        return [line for line in block.lines() if line.rank in self._ranks]


def is_of_blocks(pattern: re.Pattern[str]) -> bool:
    """Return whether a block's text matches whenever a line matches; False for patterns with line anchors."""
    return _LOCAL_PATTERN.fullmatch(pattern.pattern) is not None

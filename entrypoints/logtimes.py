"""When each line of a log file was written, told beside the file instead of inside it.

Ranks write their logs straight into files: no pump to stall or to lose lines. The agent looks at the sizes ten times
a second and notes `size time` where one has grown: the bytes before `size` were there at `time` (unix seconds).
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from pathlib import Path

__all__ = ["Clock", "TimeIndex"]

SUFFIX = ".times"


class TimeIndex:
    """The writer: one file `NAME.times` beside each `NAME.log` of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[Path, int] = {}

    def note(self, now_s: float) -> None:
        """Note the growth of every log in the folder."""
        for log in self.folder.glob("*.log"):
            size = log.stat().st_size
            if size != self._sizes.get(log, 0):
                self._sizes[log] = size
                # On a full disk a time is lost, which the next look brings; the supervisor must not be.
                with contextlib.suppress(OSError), log.with_suffix(SUFFIX).open("a") as index:
                    index.write(f"{size} {now_s:.3f}\n")


class Clock:
    """The reader: the time of a line, by the offset at which it begins."""

    def __init__(self, log: Path) -> None:
        self._ends: list[int] = []
        self._times: list[float] = []
        self._read = 0
        self._path = log.with_suffix(SUFFIX)

    def at(self, offset: int) -> float | None:
        """Return when the byte at `offset` was first seen, None where it has not been noted yet."""
        if not self._ends or offset >= self._ends[-1]:
            self._load()
        place = bisect_right(self._ends, offset)
        return self._times[place] if place < len(self._times) else None

    def _load(self) -> None:
        try:
            with self._path.open("rb") as index:
                index.seek(self._read)
                data = index.read()
        except OSError:
            return
        whole = data.rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            end, _, time_s = line.partition(b" ")
            self._ends.append(int(end))
            self._times.append(float(time_s))

"""Print a job's lines: a whole page in a single write, each progress bar as a single line."""

from __future__ import annotations

import os
import re
import sys
import time

from ..backend import LogLine
from ..text import tables
from ..text.terminal import aside, print_lines, write
from ..text.visible import folded
from .view import View

_COLOUR = re.compile("\x1b\\[[0-9;:]*m")
REDRAW_S = 0.25  # seconds between two redraws of a running bar


class Printer:
    """Standard output for a view of a job, until `finish`.

    A running progress bar is redrawn below the other lines if the reader follows the job (`is_live`) on a capable
    terminal; elsewhere a bar is printed when it has ended.
    """

    def __init__(self, view: View, *, is_live: bool) -> None:
        self.view = view
        self._bars: dict[tuple[int, int | None], LogLine] = {}
        self._can_redraw = is_live and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._is_drawn = False
        self._drawn_s = 0.0

    def print(self, lines: list[LogLine]) -> None:
        """Print the lines that the view shows."""
        if self.view.raw and not self.view.as_json:
            if chosen := self.view.chosen(lines):
                ends = ["" if line.text.endswith("\r") else "\n" for line in chosen]
                write("".join([text + end for text, end in zip(self.view.shown(chosen), ends, strict=True)]))
            return
        if self._bars or "\r" in "\n".join([line.text for line in lines]):
            lines = self.ended(lines)
        texts = self.view.shown(self.view.chosen(lines))
        if texts:
            self.clear()
            print_lines(texts)
        if self._can_redraw:
            self._redraw()

    def clear(self) -> None:
        """Erase the running bar before other output."""
        if self._is_drawn:
            write("\r\x1b[K")
            self._is_drawn, self._drawn_s = False, 0.0

    def say(self, message: str) -> None:
        """Print a message of our own between the lines."""
        self.clear()
        aside(message)

    def finish(self) -> None:
        """Print bars that never ended."""
        self.clear()
        print_lines(self.view.shown(self.view.chosen(self.bars())))

    def bars(self) -> list[LogLine]:
        """Return the last state of each bar that never ended, and forget the bars."""
        bars, self._bars = sorted(self._bars.values(), key=lambda line: line.time_s), {}
        return [bar for bar in map(_ended, bars) if bar.text]

    def ended(self, lines: list[LogLine]) -> list[LogLine]:
        """Return the lines without running bars; the newest state of a bar is stored until the bar ends."""
        found = []
        for line in lines:
            stream = line.node, line.rank
            if line.text.endswith("\r"):
                self._bars[stream] = line
                continue
            before = self._bars.pop(stream, None)
            if before is not None and not line.text:  # only the end of the bar's line
                line = before._replace(time_s=line.time_s)
            if "\r" in line.text:
                line = _ended(line)
                if not line.text:
                    continue
            found.append(line)
        return found

    def _redraw(self) -> None:
        if not self._bars or time.monotonic() - self._drawn_s < REDRAW_S:
            return
        newest = max(self._bars.values(), key=lambda line: line.time_s)
        texts = self.view.shown(self.view.chosen([_ended(newest)]))
        if not texts:
            return
        room = (tables.width() or 80) - 1
        write(f"\r\x1b[K{_COLOUR.sub('', texts[0])[:room]}")
        self._is_drawn, self._drawn_s = True, time.monotonic()


def _ended(bar: LogLine) -> LogLine:
    """Return a bar's line with only its last state."""
    return bar._replace(text=folded(bar.text))

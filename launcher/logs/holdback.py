"""Hold lines back for earlier lines: a platform may ingest different nodes' lines with different delays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import itemgetter

from cloudtrain.launcher.backend import LogLine

__all__ = ["HoldBack"]

# Limits of lines and characters; above them the oldest lines are released, so that memory is bounded.
MOST_HELD, MOST_CHARACTERS = 20_000, 1 << 22


class HoldBack:
    """Lines that wait `seconds` for earlier lines and are then released in time order.

    Each (node, rank) keeps its own order: if its clock goes back, a line counts with the time of the line before.
    """

    def __init__(self, seconds: float, held: Sequence[LogLine] = ()) -> None:
        self._seconds = seconds
        self._latest: dict[tuple[int, int | None], float] = {}
        # (effective time, arrival time, line), sorted by effective time; equal times keep the order of arrival.
        self._held: list[tuple[float, float, LogLine]] = []
        self._put(held, time.time())

    @property
    def held(self) -> list[LogLine]:
        """The waiting lines, in order."""
        return [line for _, _, line in self._held]

    def pass_on(self, lines: list[LogLine], *, all_of_them: bool = False) -> list[LogLine]:
        """Take lines in; return the lines that need not wait any longer, or all lines with `all_of_them`."""
        if not self._seconds and not self._held:
            return lines
        now_s = time.time()
        self._put(lines, now_s)
        ready = len(self._held) if all_of_them else max(self._too_many(), self._ready(now_s))
        found = [line for _, _, line in self._held[:ready]]
        del self._held[:ready]
        return found

    def _put(self, lines: Sequence[LogLine], now_s: float) -> None:
        for line in lines:
            stream = line.node, line.rank
            counts_s = self._latest[stream] = max(line.time_s, self._latest.get(stream, 0.0))
            self._held.append((counts_s, now_s, line))
        self._held.sort(key=itemgetter(0))

    def _too_many(self) -> int:
        """Return the number of lines above the limits."""
        too_many = max(0, len(self._held) - MOST_HELD)
        characters = sum([len(line[0]) for _, _, line in self._held[too_many:]])
        while characters > MOST_CHARACTERS:
            characters -= len(self._held[too_many][2][0])
            too_many += 1
        return too_many

    def _ready(self, now_s: float) -> int:
        """Return the number of lines that have waited long enough, by their own time or since their arrival."""
        ready = 0
        for place, (counts_s, came_s, _) in enumerate(self._held, 1):
            if counts_s <= now_s - self._seconds or not 0 <= now_s - came_s < self._seconds:
                ready = place
        return ready

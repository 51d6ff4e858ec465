"""Holding lines back for earlier ones, where a platform takes in one node's lines later than another's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import itemgetter

from cloudtrain.launcher.backend import LogLine

__all__ = ["HoldBack"]

# Lines, and characters in them; with more the oldest go on: memory is bounded, whatever a job prints.
MOST_HELD, MOST_CHARACTERS = 20_000, 1 << 22


class HoldBack:
    """Lines that wait `seconds` for earlier ones, then go on in the order of their times.

    Each stream keeps its own order: where its clock goes back, its lines count as no younger than the one before.
    """

    def __init__(self, seconds: float, held: Sequence[LogLine] = ()) -> None:
        self._seconds = seconds
        self._latest: dict[tuple[int, int | None], float] = {}
        # (time it counts by, when it came, line), by the first; of equal ones as they came.
        self._held: list[tuple[float, float, LogLine]] = []
        self._put(held, time.time())

    @property
    def held(self) -> list[LogLine]:
        """The lines that wait, in order."""
        return [line for _, _, line in self._held]

    def pass_on(self, lines: list[LogLine], *, all_of_them: bool = False) -> list[LogLine]:
        """Take lines in; return those whose turn it is, or with `all_of_them` whatever is here."""
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
        """Return how many there are above what may be held."""
        too_many = max(0, len(self._held) - MOST_HELD)
        characters = sum([len(line[0]) for _, _, line in self._held[too_many:]])
        while characters > MOST_CHARACTERS:
            characters -= len(self._held[too_many][2][0])
            too_many += 1
        return too_many

    def _ready(self, now_s: float) -> int:
        """Return how many need wait no longer: by their own time, or since they came, where clocks differ."""
        ready = 0
        for place, (counts_s, came_s, _) in enumerate(self._held, 1):
            if counts_s <= now_s - self._seconds or not 0 <= now_s - came_s < self._seconds:
                ready = place
        return ready

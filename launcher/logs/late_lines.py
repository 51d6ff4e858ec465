"""Late lines: platforms ingest lines after a job's reported end, and different nodes' lines with different delays."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from ..backend import LogLine, LogPage, Pace
from ..job import State

CLEAN_PAGES = 2  # after the silence: all is read again between two pages. Seconds alone would count a back-off
LONG_OVER_S = 60.0  # after the end; by then the platform has ingested all lines
PATIENCE_S = 90.0  # with a log that cannot be read

# Limits of lines and characters; above them the oldest lines are released, so that memory is bounded.
MOST_HELD, MOST_CHARACTERS = 20_000, 1 << 22


@dataclass
class EndDetector:
    """Detects the end of the log for a reader that knows the job's end (`state`).

    A log that cannot be read for PATIENCE_S counts as ended: the report of the job's end must not wait forever.
    """

    pace: Pace
    state: State
    pages: int = 0
    quiet_since_s: float = field(default_factory=time.monotonic)

    def is_last(self, page: LogPage) -> bool:
        """Take a further page; return whether the page was the last."""
        if page.lines or page.left_out:
            self.pages, self.quiet_since_s = 0, time.monotonic()
            return False
        if not page.is_clean:
            return self.is_out_of_patience()
        # No silence is needed if the job never ran, or ended long ago.
        is_old = self.state.ended_s is not None and time.time() - self.state.ended_s > LONG_OVER_S
        late_s = 0.0 if is_old or self.state.started_s is None else self.pace.late_s
        if time.monotonic() - self.quiet_since_s >= late_s:
            self.pages += 1
        return page.is_complete or self.pages >= CLEAN_PAGES

    def is_out_of_patience(self) -> bool:
        """Return whether the log has brought no line for longer than PATIENCE_S."""
        return time.monotonic() - self.quiet_since_s > PATIENCE_S


class HoldBack:
    """Lines that wait `seconds` for earlier lines and are then released in time order.

    A line waits for less if all nodes have been read to their ends at a later request: no earlier line can come then.
    Each (node, rank) keeps its own order: if its clock goes back, a line counts with the time of the line before.
    """

    def __init__(self, seconds: float, held: Sequence[LogLine] = ()) -> None:
        self._seconds = seconds
        self._latest: dict[tuple[int, int | None], float] = {}
        # (effective time, arrival time, line), sorted by effective time; equal times keep the order of arrival.
        self._held: list[tuple[float, float, LogLine]] = []
        self._whole_s = -math.inf  # when the last whole page came
        self._put(held, time.time())

    @property
    def held(self) -> list[LogLine]:
        """The waiting lines, in order."""
        return [line for _, _, line in self._held]

    def pass_on(self, lines: list[LogLine], *, all_of_them: bool = False, is_whole: bool = False) -> list[LogLine]:
        """Take a page's lines in; return the lines that need not wait any longer, or all lines with `all_of_them`."""
        if not self._seconds and not self._held:
            return lines
        now_s = time.time()
        self._put(lines, now_s)
        # No request from before the last whole page is open, so this page was requested after that page had come.
        until_s = self._whole_s if is_whole else -math.inf
        ready = len(self._held) if all_of_them else max(self._too_many(), self._ready(now_s, until_s))
        self._whole_s = now_s if is_whole else self._whole_s
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
        too_many = max(0, len(self._held) - MOST_HELD)
        characters = sum([len(line[0]) for _, _, line in self._held[too_many:]])
        while characters > MOST_CHARACTERS:
            characters -= len(self._held[too_many][2][0])
            too_many += 1
        return too_many

    def _ready(self, now_s: float, until_s: float) -> int:
        """Return the number of lines that have waited long enough, by their own time or since their arrival.

        A line that came at `until_s` or before need not wait.
        """
        ready = 0
        for place, (counts_s, came_s, _) in enumerate(self._held, 1):
            has_waited = counts_s <= now_s - self._seconds or not 0 <= now_s - came_s < self._seconds
            if has_waited or came_s <= until_s:
                ready = place
        return ready

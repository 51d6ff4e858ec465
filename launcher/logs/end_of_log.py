"""Decides when a finished job's log is complete: platforms ingest lines after they report the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cloudtrain.launcher.backend import LogPage, Pace
from cloudtrain.launcher.job import State

__all__ = ["CLEAN_PAGES", "EndDetector"]

CLEAN_PAGES = 2  # after the silence: all is read again between two pages. Seconds alone would count a back-off
LONG_OVER_S = 60.0  # after the end; by then the platform has ingested all lines
PATIENCE_S = 90.0  # with a log that cannot be read


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
        if time.monotonic() - self.quiet_since_s >= self._late_s():
            self.pages += 1
        return page.is_complete or self.pages >= CLEAN_PAGES

    def is_out_of_patience(self) -> bool:
        """Return whether the log has brought no line for longer than PATIENCE_S."""
        return time.monotonic() - self.quiet_since_s > PATIENCE_S

    def _late_s(self) -> float:
        """Return the necessary seconds of silence: 0 if the job never ran, or ended long ago."""
        is_old = self.state.ended_s is not None and time.time() - self.state.ended_s > LONG_OVER_S
        return 0.0 if is_old or self.state.started_s is None else self.pace.late_s

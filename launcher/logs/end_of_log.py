"""When a job that is over has said everything: platforms take lines in later than they tell of the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cloudtrain.launcher.backend import LogPage, Pace
from cloudtrain.launcher.job import State

__all__ = ["CLEAN_PAGES", "EndDetector"]

CLEAN_PAGES = 2  # after the silence: between them everything was read anew. Seconds alone would count a back-off
LONG_OVER_S = 60.0  # since its end: then nothing is on its way any more
PATIENCE_S = 90.0  # with a log that can be read no further


@dataclass
class EndDetector:
    """One reader's patience, from the moment when it knows of the end (`state`).

    It ends, too, where nothing could be read for PATIENCE_S: how the job ended must not wait for its log for ever.
    """

    pace: Pace
    state: State
    pages: int = 0
    quiet_since_s: float = field(default_factory=time.monotonic)

    def has_come(self, page: LogPage) -> bool:
        """Take in one more page; return whether it was the last."""
        if page.lines or page.left_out:
            self.pages, self.quiet_since_s = 0, time.monotonic()
            return False
        if not page.is_clean:
            return self.is_out_of_patience()
        if time.monotonic() - self.quiet_since_s >= self._late_s():
            self.pages += 1
        return page.is_complete or self.pages >= CLEAN_PAGES

    def is_out_of_patience(self) -> bool:
        """Return whether the log could be read no further for too long."""
        return time.monotonic() - self.quiet_since_s > PATIENCE_S

    def _late_s(self) -> float:
        """Return for how long there must be silence: not at all where nothing ran, or all is long over."""
        is_old = self.state.ended_s is not None and time.time() - self.state.ended_s > LONG_OVER_S
        return 0.0 if is_old or self.state.started_s is None else self.pace.late_s

"""When a job that is over has said everything: platforms take lines in later than they tell of the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cloudtrain.launcher.backend import LogPage, Pace

__all__ = ["LastWord"]

CLEAN_PAGES = 2  # after the silence: between them everything was read anew. Seconds alone would count a back-off
LONG_OVER_S = 60.0  # since its end: then nothing is on its way any more
PATIENCE_S = 90.0  # with a log that can be read no further


@dataclass
class LastWord:
    """One reader's patience, from the moment when it knows of the end (`ended_s`, unix seconds, where it is known).

    It ends, too, where nothing could be read for PATIENCE_S: how the job ended must not wait for its log for ever.
    """

    pace: Pace
    ended_s: float | None
    pages: int = 0
    quiet_since_s: float = field(default_factory=time.monotonic)

    def has_come(self, page: LogPage) -> bool:
        """Take in one more page; return whether it was the last."""
        if page.lines or page.left_out:
            self.pages, self.quiet_since_s = 0, time.monotonic()
            return False
        if not page.is_clean:
            return time.monotonic() - self.quiet_since_s > PATIENCE_S
        is_old = self.ended_s is not None and time.time() - self.ended_s > LONG_OVER_S
        if is_old or time.monotonic() - self.quiet_since_s >= self.pace.late_s:
            self.pages += 1
        return page.is_complete or self.pages >= CLEAN_PAGES

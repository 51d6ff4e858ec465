"""When a job that is over has said everything: platforms take lines in later than they tell of the end."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cloudtrain.launcher.backend import LogPage, Pace

__all__ = ["LastWord"]

CLEAN_ROUNDS = 2  # seconds alone would take a back-off for silence
LONG_OVER_S = 60.0  # since its end: then nothing is on its way any more


@dataclass
class LastWord:
    """One reader's patience, from the moment when it knows of the end (`ended_s`, unix seconds, where it is known)."""

    pace: Pace
    ended_s: float | None
    rounds: int = 0
    quiet_since_s: float | None = None

    def has_come(self, page: LogPage) -> bool:
        """Take in one more page; return whether it was the last."""
        now_s = time.monotonic()
        if page.lines or not page.is_clean:
            self.rounds, self.quiet_since_s = 0, None
            return False
        if page.is_complete:
            return True
        self.rounds += 1
        self.quiet_since_s = now_s if self.quiet_since_s is None else self.quiet_since_s
        is_old = self.ended_s is not None and time.time() - self.ended_s > LONG_OVER_S
        return self.rounds >= CLEAN_ROUNDS and now_s - self.quiet_since_s >= (0.0 if is_old else self.pace.late_s)

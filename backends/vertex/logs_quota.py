"""The rate limit for Cloud Logging: a project may send 60 list calls a minute, and cloudtrain uses only a part.

All processes of a home folder share one count, in a small file under a lock: more followers mean fewer calls for each.
"""

from __future__ import annotations

import fcntl
import json
import re
import time
from pathlib import Path

MINUTE_S = 60.0
FOLLOWING, PASSING = 30, 50  # calls a minute: for a follower, and for a command that reads the present lines and exits
BUSY_S, LONGEST_BUSY_S = 5.0, 60.0  # the pause after the first refusal, and the longest pause after repeated refusals


class LogQuota:
    """The share of a project's calls: the count of all processes of the home folder, and this process's pause."""

    def __init__(self, home: Path, project: str) -> None:
        self._path = home / f"vertex-log-calls-{re.sub(r'[^a-z0-9-]', '_', project)}.json"
        self._not_before_s = self._pause_s = 0.0

    def refused(self) -> None:
        """Note that Cloud Logging has refused a call: this process pauses, twice as long after each refusal."""
        self._pause_s = min(2 * self._pause_s, LONGEST_BUSY_S) or BUSY_S
        self._not_before_s = time.monotonic() + self._pause_s

    def answered(self) -> None:
        """Note that Cloud Logging has answered."""
        self._not_before_s = self._pause_s = 0.0

    def may_ask(self, most: int = FOLLOWING) -> bool:
        """Count one more call and return True; return False after `most` calls in a minute, or during a pause.

        After half of a follower's share, calls are spaced evenly: several followers take turns.
        """
        if time.monotonic() < self._not_before_s:
            return False
        try:
            with self._path.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                now_s = time.time()
                made = [when for when in _read(file.read()) if 0 <= now_s - when < MINUTE_S]
                is_soon = len(made) >= FOLLOWING / 2 and now_s - made[-1] < MINUTE_S / FOLLOWING
                if len(made) >= most or (most == FOLLOWING and is_soon):
                    return False
                file.seek(0)
                file.truncate()
                json.dump([*made, now_s], file)
        except OSError:  # a full disk: reading the log matters more than the count
            pass
        return True


def _read(text: str) -> list[float]:
    try:
        return [float(when) for when in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []

"""How often Cloud Logging may be asked: 60 lists a minute for a whole project, of which we take a part.

All processes of this home count together, in a small file under a lock: several that follow jobs ask less often each.
"""

from __future__ import annotations

import fcntl
import json
import re
import time
from pathlib import Path

__all__ = ["FOLLOWING", "PASSING", "answered", "forget", "may_ask", "refused"]

MINUTE_S = 60.0
FOLLOWING, PASSING = 30, 50  # calls a minute: by who stays, and by who reads what is there and goes
BUSY_S, LONGEST_BUSY_S = 5.0, 60.0  # after a refusal, and after many

_pauses: dict[str, tuple[float, float]] = {}  # project -> until when nothing is asked (monotonic), and for how long


def refused(project: str) -> None:
    """Note that Cloud Logging wants to be left alone: this process does, for longer and longer."""
    pause_s = min(2 * _pauses[project][1], LONGEST_BUSY_S) if project in _pauses else BUSY_S
    _pauses[project] = (time.monotonic() + pause_s, pause_s)


def answered(project: str) -> None:
    """Note that it answers."""
    _pauses.pop(project, None)


def forget() -> None:
    """Forget all refusals."""
    _pauses.clear()


def may_ask(home: Path, project: str, most: int = FOLLOWING) -> bool:
    """Count one more call; return False, and count none, after `most` in a minute, or shortly after a refusal."""
    if time.monotonic() < _pauses.get(project, (0.0, 0.0))[0]:
        return False
    path = home / f"vertex-log-calls-{re.sub(r'[^a-z0-9-]', '_', project)}.json"
    try:
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            now_s = time.time()
            made = [when for when in _read(file.read()) if 0 <= now_s - when < MINUTE_S]
            if len(made) >= most:
                return False
            file.seek(0)
            file.truncate()
            json.dump([*made, now_s], file)
    except OSError:  # a full disk: a log that can be read is worth more than the count
        pass
    return True


def _read(text: str) -> list[float]:
    try:
        return [float(when) for when in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []

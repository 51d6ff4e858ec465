"""Which lines of a job are shown, and how: prefixed by rank, event tails hidden, or as one JSON object each."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field

from cloudtrain.entrypoints import events
from cloudtrain.launcher.backend import LogLine
from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.progress import finite
from cloudtrain.launcher.terminal import coloured

__all__ = ["View", "parse_ranks"]

MAX_RANKS = 100_000  # more than any job has; a slip of the keyboard must not count to it in memory


@dataclass(frozen=True)
class View:
    """What the user asked to see. `prefix`: put the rank before each line."""

    ranks: frozenset[int] | None = None
    node: int | None = None
    grep: re.Pattern[str] | None = None
    since_s: float | None = None
    timestamps: bool = False
    raw: bool = False
    as_json: bool = False
    prefix: bool = True
    attempt: int = field(default=1)

    def wants(self, line: LogLine) -> bool:
        """Return whether the line is to be shown."""
        if self.node is not None and line.node != self.node:
            return False
        if self.since_s is not None and line.time_s < self.since_s:
            return False
        return self.grep is None or bool(self.grep.search(line.text))

    def show(self, line: LogLine) -> str:
        """Return the line as it is printed."""
        if self.as_json:
            return self._json(line)
        text = line.text if self.raw else events.parse(line.text)[0]
        if self.prefix and not self.raw:
            who = f"r{line.rank}" if line.rank is not None else f"node{line.node}"
            text = f"{coloured(f'[{who}]', line.rank if line.rank is not None else line.node)} {text}"
        if self.timestamps:
            text = f"{_clock(line.time_s)} {text}"
        return text

    def _json(self, line: LogLine) -> str:
        text, event = events.parse(line.text)
        fields = {
            "time_s": round(line.time_s, 3),
            "attempt": self.attempt,
            "node": line.node,
            "rank": line.rank,
            "text": line.text if self.raw else text,
            "event": finite(event),
        }
        return json.dumps(fields, ensure_ascii=False)


def parse_ranks(text: str) -> frozenset[int]:
    """Return the ranks in `0,3-5`. Raises UsageError."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or not int(match[1]) <= int(match[2] or match[1]) < MAX_RANKS:
            raise UsageError(f"`{text}` names no ranks", hint="write them as 0 or 0,3-5")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


def _clock(time_s: float) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time_s))
    return f"{stamp}.{int(time_s * 1000) % 1000:03d}"

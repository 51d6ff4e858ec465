"""The selection and format of a job's lines: prefixed by rank, for people, or as JSON objects."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cloudtrain.entrypoints import events

from ..backend import Chosen, LogLine
from ..errors import UsageError
from ..store.progress import finite
from ..text import visible
from ..text.terminal import coloured, json_line

MAX_RANKS = 100_000  # more than any job has; a typing mistake must not fill the memory

# torch's note on its own connections, from each rank at each start on hosts without a name server; nothing to mend.
_NOISE = "] [c10d] The hostname of the client socket cannot be retrieved."


@dataclass(frozen=True)
class View:
    """The user's options."""

    ranks: Chosen = None
    node: int | None = None
    grep: re.Pattern[str] | None = None
    since_s: float | None = None
    timestamps: bool = False
    raw: bool = False
    as_json: bool = False
    prefix: bool = True
    """The rank before each line."""
    attempt: int = 1
    hold_back_s: float | None = None
    """None for the backend's default."""

    def wants(self, line: LogLine) -> bool:
        """Return whether the line is shown."""
        return bool(self.chosen([line]))

    def chosen(self, lines: list[LogLine]) -> list[LogLine]:
        """Return the lines to show, `_NOISE` only if raw; `grep` is matched against the visible text of a line."""
        if not (self.raw or self.as_json):
            lines = [line for line in lines if _NOISE not in line.text]
        if self.node is not None:
            lines = [line for line in lines if line.node == self.node]
        if self.since_s is not None:
            lines = [line for line in lines if line.time_s >= self.since_s]
        if self.grep is None:
            return lines
        search = self.grep.search
        if self.raw or self.as_json or visible.are_plain([line.text for line in lines]):
            return [line for line in lines if search(line.text)]
        return [line for line in lines if search(visible.shown(line.text, colour=False))]

    def shown(self, lines: Sequence[LogLine]) -> list[str]:
        """Return the lines as printed."""
        if self.as_json:
            return [self._json(line) for line in lines]
        texts = [line.text for line in lines]
        if self.raw:
            texts = [visible.tame(text) for text in texts] if sys.stdout.isatty() else texts
        elif not visible.are_plain(texts):
            colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            texts = [visible.shown(text, colour=colour) for text in texts]
        if self.prefix and not self.raw:
            before = {
                (node, rank): coloured(f"[node{node}]", node) if rank is None else coloured(f"[r{rank}]", rank)
                for node, rank in {line[1:3] for line in lines}
            }
            texts = [f"{before[line[1:3]]} {text}" for line, text in zip(lines, texts, strict=True)]
        if self.timestamps:
            times = [divmod(int(line.time_s * 1000), 1000) for line in lines]  # most lines share their second
            clock = {second: time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second)) for second in dict(times)}
            texts = [f"{clock[second]}.{milli:03d} {text}" for (second, milli), text in zip(times, texts, strict=True)]
        return texts

    def _json(self, line: LogLine) -> str:
        text, event = events.parse(line.text)
        fields = {
            "time_s": round(line.time_s, 3),
            "attempt": self.attempt,
            "node": line.node,
            "rank": line.rank,
            "text": line.text if self.raw else visible.folded(text),
            "event": finite(event),
        }
        return json_line(fields)


def parse_ranks(text: str) -> frozenset[int]:
    """Return the ranks in `0,3-5`. Raises UsageError."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or not int(match[1]) <= int(match[2] or match[1]) < MAX_RANKS:
            raise UsageError(f"`{text}` names no ranks", hint="write them as 0 or 0,3-5")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)

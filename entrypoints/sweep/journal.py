"""The journal of a packed sweep: one JSON object a line, each durable before the next decision.

The state of a sweep is the state after the last whole line. A crash may tear the last line, which is ignored and cut.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import atomic_json
from .search import Segment

NAME = "sweep.jsonl"


@dataclass
class SweepState:
    """What a packed sweep knows of its segments."""

    results: dict[tuple[int, int], float | None] = field(default_factory=dict)  # by (trial, rung)
    open: dict[tuple[int, int], Segment] = field(default_factory=dict)  # begun, without a result
    starts_s: list[float] = field(default_factory=list)  # of each result, from the launch to the first step
    paces_s: list[float] = field(default_factory=list)  # of each result, seconds a step
    homes: dict[int, int] = field(default_factory=dict)  # the node with a trial's checkpoint
    sources: set[int] = field(default_factory=set)  # the trials that others were copied from

    def apply(self, line: dict[str, Any]) -> None:
        """Apply a line: the start of a segment, or its end with a result."""
        if line["e"] == "start":
            segment = Segment(**line["segment"])
            self.open[segment.key] = segment
            self.homes[segment.trial] = line["node"]
            self.sources |= set() if segment.source is None else {segment.source}
            return
        key = line["trial"], line["rung"]
        self.open.pop(key, None)
        self.results[key] = line["value"]
        if line["start_s"] is not None and line["step_s"] is not None:
            self.starts_s.append(line["start_s"])
            self.paces_s.append(line["step_s"])


class Journal:
    """The journal in a folder, open for further lines; `state` includes all lines."""

    def __init__(self, folder: Path) -> None:
        self.path, self.state = folder / NAME, SweepState()
        is_new = not self.path.exists()
        self._file = self.path.open("ab+")
        if is_new:
            atomic_json.sync(folder)
        self._file.seek(0)
        whole = self._file.read().rpartition(b"\n")
        for line in whole[0].splitlines():
            self.state.apply(json.loads(line))
        self._file.truncate(len(whole[0] + whole[1]))

    def add(self, event: str, **fields: Any) -> None:
        """Append a line, make the line durable, and apply it. Raises OSError."""
        line = {"e": event, **fields}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.state.apply(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

"""The journal of a sweep: what its driver knows, one checked line for each start and each end of a segment."""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import atomic_json
from .search import Segment

NAME = "sweep.jsonl"


@dataclass
class SweepState:
    """What a sweep knows of its segments: the state after the last whole line of the journal."""

    results: dict[tuple[int, int], float | None] = field(default_factory=dict)  # by (trial, rung)
    open: dict[tuple[int, int], Segment] = field(default_factory=dict)  # begun, without a result
    paces: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """Of each result the seconds from the launch to the first step, and seconds a step; by the trial's place."""
    own: dict[int, tuple[float, float]] = field(default_factory=dict)  # the newest pace of a trial
    places: dict[int, str] = field(default_factory=dict)  # the folder with a trial's checkpoint (segments.place_of)
    sources: set[int] = field(default_factory=set)  # the trials that others were copied from

    def apply(self, line: Mapping[str, Any]) -> None:
        """Apply a line: the start of a segment, or its end with a result. Raises KeyError, TypeError, ValueError."""
        if line["e"] == "start":
            segment = Segment(**line["segment"])
            _require_numbers(*segment.key, segment.from_step, segment.until_step)
            self.open[segment.key] = segment
            self.results.pop(segment.key, None)  # a failure before a resume
            self.places[segment.trial] = line["place"]
            self.sources |= set() if segment.source is None else {segment.source}
            return
        key = line["trial"], line["rung"]
        _require_numbers(*key)
        fields = line["value"], line["start_s"], line["step_s"]
        value, start_s, step_s = (each if each is None else float(each) for each in fields)
        self.results[key] = value
        self.open.pop(key, None)
        if start_s is not None and step_s is not None:
            self.own[key[0]] = pace = start_s, step_s
            self.paces[self.places.get(key[0], "")].append(pace)

    def forget_later(self) -> None:
        """Forget what a trial has done after a segment whose end is lost, which trains again from the beginning.

        The trial's checkpoint is of a later step.
        """
        for trial, rung in sorted(self.open):
            later = [key for key in (*self.results, *self.open) if key[0] == trial and key[1] > rung]
            for key in later:
                self.results.pop(key, None)
                self.open.pop(key, None)
            if later and (trial, rung) in self.open:
                self.open[trial, rung] = replace(self.open[trial, rung], is_new=True)


class Journal:
    """The journal in a folder, open for further lines; `state` includes all lines.

    A line is the CRC-32 of its JSON, as eight hexadecimal digits, a blank, and the JSON; each line is durable before
    the next decision. A crash may tear the last line, which is ignored and cut. A damaged line in the middle drops
    itself: its segment trains again.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.state = folder / NAME, SweepState()
        is_new = not self.path.exists()
        self._file = self.path.open("ab+")
        if is_new:
            atomic_json.sync(folder)
        self._file.seek(0)
        whole = self._file.read().rpartition(b"\n")
        for number, line in enumerate(whole[0].split(b"\n") if whole[1] else (), 1):
            if not self._take(line):
                print(f"{NAME} line {number} is damaged, and left out: its segment trains again", flush=True)
        self.state.forget_later()
        self._file.truncate(len(whole[0] + whole[1]))

    def add(self, event: str, **fields: Any) -> None:
        """Append a line, make the line durable, and apply it. Raises OSError."""
        line = {"e": event, **fields}
        text = json.dumps(line).encode()
        self._file.write(b"%08x %b\n" % (zlib.crc32(text), text))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.state.apply(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _take(self, line: bytes) -> bool:
        """Apply a line of the file; return False for a damaged line."""
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            return False
        try:
            self.state.apply(json.loads(text))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):  # written by another version
            return False
        return True


def _require_numbers(*values: Any) -> None:
    if any(type(value) is not int for value in values):
        raise TypeError(f"not whole numbers: {values}")

"""A reader's memory of the lines already returned: each line once, and each container's lines in order.

Containers number their lines (entrypoints/container/log_relay.py). The number identifies a copy even if Cloud Logging
gives the copy another id, and shows that a line is missing. At its end a container reports its last number, which shows
that all lines have arrived. For each container the memory keeps only the next number and the earlier gaps. Lines
without a number are identified by their keys, for as long as a copy may arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from cloudtrain.launcher.backend import LogLine

from .logs_entries import LogEntry

HOLD_S = 1.5  # how old a line becomes, at most, while it waits for earlier lines; later ones are returned on arrival
KEPT_S = 180.0  # how long the key of a line without a number is kept
MOST_HELD = 2000  # lines of one container; above this, the first held lines are released
GIVE_UP_S, MOST_GAPS = 600.0, 500  # a gap is given up at this age, or if the container has more than MOST_GAPS gaps
BEFORE_S = 90.0  # before a container's first known line, where the time of the preceding line is unknown


@dataclass(frozen=True)
class Gap:
    """Missing line numbers, from first to last, between the stamps of the lines around them."""

    first: int
    last: int
    before_s: float
    after_s: float
    since_s: float  # when the reader stopped waiting for the lines


@dataclass
class _ContainerRun:
    """The line count of one container."""

    node: int
    first_s: float  # the stamp of the first entry received from the container
    next: int = 1
    stamp_s: float = 0.0
    time_s: float = 0.0  # of the last line; never decreases, even if the container's clock steps back
    gaps: list[Gap] = field(default_factory=list)
    count: int | None = None  # of all lines, once the container has reported the end of its log
    end_s: float = 0.0  # the stamp of the end of the log
    is_final: bool = False
    held: dict[int, tuple[LogEntry, float]] = field(default_factory=dict)

    @classmethod
    def load(cls, data: dict[str, Any]) -> _ContainerRun:
        """Return the count from the output of `dump`."""
        held = {entry["number"]: (LogEntry(**entry), seen_s) for entry, seen_s in data["held"]}
        return cls(**{**data, "gaps": [Gap(*gap) for gap in data["gaps"]], "held": held})

    def dump(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        held = [[vars(entry), seen_s] for entry, seen_s in self.held.values()]
        return {**vars(self), "gaps": [list(astuple(gap)) for gap in self.gaps], "held": held}

    def has_received(self, number: int) -> bool:
        if number in self.held:
            return True
        return number < self.next and not any(gap.first <= number <= gap.last for gap in self.gaps)

    def is_whole(self) -> bool:
        return not self.gaps and not self.held and (self.count is None or self.next > self.count)


class Order:
    """The reader's memory. `dump` returns the content for the cursor."""

    def __init__(self, data: dict[str, Any] | None = None, *, is_over: bool = False) -> None:
        """`is_over`: the job has ended, so no container follows one whose end report was not final."""
        self._is_over = is_over
        self._runs: dict[str, _ContainerRun] = {}
        self._seen: dict[str, float] = {}
        self.high_s = 0.0
        self.lost = 0  # lines given up in this poll
        if data is None:
            return
        self.high_s, self._seen = data["high_s"], dict(data["seen"])
        for name, stored in data["lives"].items():
            self._runs[name] = _ContainerRun.load(stored)

    def dump(self) -> dict[str, Any]:
        """Return the memory as JSON."""
        runs = {name: run.dump() for name, run in self._runs.items()}
        return {"lives": runs, "seen": self._seen, "high_s": self.high_s}

    def take(self, entries: Iterable[LogEntry], now_s: float) -> list[LogLine]:
        """Take in the entries; return the lines that are due."""
        lines = []
        for entry in entries:
            self.high_s = max(self.high_s, entry.stamp_s)
            if entry.life is not None:
                run = self._runs.setdefault(entry.life, _ContainerRun(entry.node, entry.stamp_s))
                if not run.has_received(entry.number):
                    run.held[entry.number] = (entry, now_s)
            elif entry.key not in self._seen:
                self._seen[entry.key] = entry.stamp_s
                if entry.own is None:
                    lines.append(_line(entry))
                elif entry.own["e"] == "end":
                    run = self._runs.setdefault(str(entry.own.get("life")), _ContainerRun(entry.node, entry.stamp_s))
                    run.end_s = entry.stamp_s
                    run.count, run.is_final = int(entry.own.get("lines", 0)), bool(entry.own.get("final", True))
        for run in self._runs.values():
            lines += self._release(run, now_s)
            self.lost += _give_up(run, now_s)
        self._seen = {key: stamp_s for key, stamp_s in self._seen.items() if stamp_s > self.high_s - KEPT_S}
        return lines

    def gaps(self, nodes: frozenset[int]) -> list[Gap]:
        """Return the missing lines, also lines after the last received one if the container has reported its count."""
        found = [gap for run in self._runs.values() if run.node in nodes for gap in run.gaps]
        for run in self._runs.values():
            if run.node in nodes and run.count is not None and run.next <= run.count:
                found.append(Gap(run.next, run.count, run.stamp_s, run.end_s, 0.0))
        return [gap if gap.before_s else replace(gap, before_s=gap.after_s - BEFORE_S) for gap in found]

    @property
    def is_holding(self) -> bool:
        """Whether lines wait for earlier lines."""
        return any(run.held for run in self._runs.values())

    def is_complete(self, nodes: frozenset[int]) -> bool:
        """Return whether the nodes have reported the end of their logs and no line is missing."""
        ours = sorted((run for run in self._runs.values() if run.node in nodes), key=lambda run: run.first_s)
        newest = {run.node: run for run in ours}
        have_ended = {node for node, run in newest.items() if run.is_final or (self._is_over and run.count is not None)}
        return have_ended >= nodes and all(map(_ContainerRun.is_whole, ours))

    @staticmethod
    def _release(run: _ContainerRun, now_s: float) -> list[LogLine]:
        found = []
        for number in sorted(run.held):
            entry, seen_s = run.held[number]
            if number > run.next:
                if now_s - min(seen_s, entry.stamp_s) < HOLD_S and len(run.held) <= MOST_HELD:
                    break
                run.gaps.append(Gap(run.next, number - 1, run.stamp_s, entry.stamp_s, now_s))
            del run.held[number]
            if number < run.next:
                _fill(run.gaps, number)
                found.append(_line(entry))
                continue
            run.next, run.stamp_s = number + 1, max(run.stamp_s, entry.stamp_s)
            run.time_s = max(run.time_s, entry.time_s)
            found.append(_line(entry)._replace(time_s=run.time_s))
        return found


def _fill(gaps: list[Gap], number: int) -> None:
    """Take the number out of the gap that contains the number."""
    for at, gap in enumerate(gaps):
        if gap.first <= number <= gap.last:
            left, right = replace(gap, last=number - 1), replace(gap, first=number + 1)
            gaps[at : at + 1] = [part for part in (left, right) if part.first <= part.last]
            return


def _give_up(run: _ContainerRun, now_s: float) -> int:
    """Drop gaps that are too old or too many; return the number of lost lines."""
    kept = [gap for gap in run.gaps if now_s - gap.since_s < GIVE_UP_S][-MOST_GAPS:]
    lost = sum(gap.last - gap.first + 1 for gap in run.gaps if gap not in kept)
    run.gaps = kept
    return lost


def _line(entry: LogEntry) -> LogLine:
    return LogLine(entry.text, entry.node, entry.rank, entry.time_s)

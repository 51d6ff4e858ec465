"""A reader's memory of the lines already returned: each line once, and each container's lines in order.

Containers number their lines (entrypoints/container/log_relay.py). The number identifies a copy even if Cloud Logging
gives the copy another id, and shows that a line is missing. At its end a container reports its last number, which shows
that all lines have arrived. For each container the memory keeps only the next number and the earlier gaps. Lines
without a number are identified by their keys, for as long as a copy may arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
            life = _ContainerRun(**{**stored, "gaps": [Gap(*gap) for gap in stored["gaps"]], "held": {}})
            life.held = {fields["number"]: (LogEntry(**fields), seen_s) for fields, seen_s in stored["held"]}
            self._runs[name] = life

    def dump(self) -> dict[str, Any]:
        """Return the memory as JSON."""
        runs = {}
        for name, life in self._runs.items():
            stored = {key: value for key, value in life.__dict__.items() if key not in ("gaps", "held")}
            stored["gaps"] = [list(gap.__dict__.values()) for gap in life.gaps]
            stored["held"] = [[entry.__dict__, seen_s] for entry, seen_s in life.held.values()]
            runs[name] = stored
        return {"lives": runs, "seen": self._seen, "high_s": self.high_s}

    def take(self, entries: Iterable[LogEntry], now_s: float) -> list[LogLine]:
        """Take in the entries; return the lines that are due."""
        lines = []
        for entry in entries:
            self.high_s = max(self.high_s, entry.stamp_s)
            if entry.life is not None:
                life = self._runs.setdefault(entry.life, _ContainerRun(entry.node, entry.stamp_s))
                if not life.has_received(entry.number):
                    life.held[entry.number] = (entry, now_s)
            elif entry.key not in self._seen:
                self._seen[entry.key] = entry.stamp_s
                if entry.own is None:
                    lines.append(_line(entry))
                elif entry.own["e"] == "end":
                    life = self._runs.setdefault(str(entry.own.get("life")), _ContainerRun(entry.node, entry.stamp_s))
                    life.end_s = entry.stamp_s
                    life.count, life.is_final = int(entry.own.get("lines", 0)), bool(entry.own.get("final", True))
        for life in self._runs.values():
            lines += self._release(life, now_s)
            self.lost += _give_up(life, now_s)
        self._seen = {key: stamp_s for key, stamp_s in self._seen.items() if stamp_s > self.high_s - KEPT_S}
        return lines

    def gaps(self, nodes: frozenset[int]) -> list[Gap]:
        """Return the missing lines, also lines after the last received one if the container has reported its count."""
        found = [gap for life in self._runs.values() if life.node in nodes for gap in life.gaps]
        for life in self._runs.values():
            if life.node in nodes and life.count is not None and life.next <= life.count:
                found.append(Gap(life.next, life.count, life.stamp_s, life.end_s, 0.0))
        return [gap if gap.before_s else replace(gap, before_s=gap.after_s - BEFORE_S) for gap in found]

    @property
    def is_holding(self) -> bool:
        """Whether lines wait for earlier lines."""
        return any(life.held for life in self._runs.values())

    def is_complete(self, nodes: frozenset[int]) -> bool:
        """Return whether the nodes have reported the end of their logs and no line is missing."""
        ours = sorted((life for life in self._runs.values() if life.node in nodes), key=lambda life: life.first_s)
        newest = {life.node: life for life in ours}
        have_ended = {
            node for node, life in newest.items() if life.is_final or (self._is_over and life.count is not None)
        }
        return have_ended >= nodes and all(map(_ContainerRun.is_whole, ours))

    @staticmethod
    def _release(life: _ContainerRun, now_s: float) -> list[LogLine]:
        found = []
        for number in sorted(life.held):
            entry, seen_s = life.held[number]
            if number > life.next:
                if now_s - min(seen_s, entry.stamp_s) < HOLD_S and len(life.held) <= MOST_HELD:
                    break
                life.gaps.append(Gap(life.next, number - 1, life.stamp_s, entry.stamp_s, now_s))
            del life.held[number]
            if number < life.next:
                _fill(life.gaps, number)
                found.append(_line(entry))
                continue
            life.next, life.stamp_s = number + 1, max(life.stamp_s, entry.stamp_s)
            life.time_s = max(life.time_s, entry.time_s)
            found.append(_line(entry)._replace(time_s=life.time_s))
        return found


def _fill(gaps: list[Gap], number: int) -> None:
    """Take the number out of the gap that contains the number."""
    for at, gap in enumerate(gaps):
        if gap.first <= number <= gap.last:
            left, right = replace(gap, last=number - 1), replace(gap, first=number + 1)
            gaps[at : at + 1] = [part for part in (left, right) if part.first <= part.last]
            return


def _give_up(life: _ContainerRun, now_s: float) -> int:
    """Drop gaps that are too old or too many; return the number of lost lines."""
    kept = [gap for gap in life.gaps if now_s - gap.since_s < GIVE_UP_S][-MOST_GAPS:]
    lost = sum(gap.last - gap.first + 1 for gap in life.gaps if gap not in kept)
    life.gaps = kept
    return lost


def _line(entry: LogEntry) -> LogLine:
    return LogLine(entry.text, entry.node, entry.rank, entry.time_s)

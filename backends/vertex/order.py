"""A reader's memory: which lines it has given out, so that each comes once and every container's in its own order.

Containers number their lines (entrypoints/pump.py). So a copy is known as one whatever Cloud Logging calls it, a line
that is missing is known to be, and the last number, which a container tells at its end, tells when all are there. Of
each container no more is kept than the next number and the gaps before it. Lines without a number are told apart by
their keys, for as long as they may come again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.backends.vertex.entries import Entry
from cloudtrain.launcher.backend import LogLine

__all__ = ["HOLD_S", "Gap", "Order"]

HOLD_S = 1.5  # how long a line waits for those before it; later ones come when they come
KEPT_S = 180.0  # how long a line without a number is known
MOST_HELD = 2000  # of one container; with more the first ones are given out


@dataclass
class Gap:
    """Numbers that have not come, the first to the last; `before_s` is the stamp of the line before them."""

    first: int
    last: int
    before_s: float
    since_s: float  # when it was given up to wait for them


@dataclass
class _Life:
    """One container's count."""

    node: int
    next: int = 1
    stamp_s: float = 0.0
    gaps: list[Gap] = field(default_factory=list)
    count: int | None = None  # of all its lines, once it has said its last word
    is_final: bool = False
    held: dict[int, tuple[Entry, float]] = field(default_factory=dict)

    def knows(self, number: int) -> bool:
        if number in self.held:
            return True
        return number < self.next and not any(gap.first <= number <= gap.last for gap in self.gaps)

    def is_whole(self) -> bool:
        return not self.gaps and not self.held and (self.count is None or self.next > self.count)


class Order:
    """What a cursor holds of it is `dump`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self._lives: dict[str, _Life] = {}
        self._seen: dict[str, float] = {}
        self.high_s = 0.0
        if data is None:
            return
        self.high_s, self._seen = data["high_s"], dict(data["seen"])
        for name, told in data["lives"].items():
            life = _Life(**{**told, "gaps": [Gap(*gap) for gap in told["gaps"]], "held": {}})
            life.held = {fields["number"]: (Entry(**fields), seen_s) for fields, seen_s in told["held"]}
            self._lives[name] = life

    def dump(self) -> dict[str, Any]:
        """Return it as JSON."""
        lives = {}
        for name, life in self._lives.items():
            told = {key: value for key, value in life.__dict__.items() if key not in ("gaps", "held")}
            told["gaps"] = [[gap.first, gap.last, gap.before_s, gap.since_s] for gap in life.gaps]
            told["held"] = [[entry.__dict__, seen_s] for entry, seen_s in life.held.values()]
            lives[name] = told
        return {"lives": lives, "seen": self._seen, "high_s": self.high_s}

    def take(self, entries: Iterable[Entry], now_s: float) -> list[LogLine]:
        """Take the entries in; return the lines whose turn it is."""
        lines = []
        for entry in entries:
            self.high_s = max(self.high_s, entry.stamp_s)
            if entry.life is not None:
                life = self._lives.setdefault(entry.life, _Life(entry.node))
                if not life.knows(entry.number):
                    life.held[entry.number] = (entry, now_s)
            elif entry.key not in self._seen:
                self._seen[entry.key] = entry.stamp_s
                if entry.own is None:
                    lines.append(_line(entry))
                elif entry.own["e"] == "end":
                    life = self._lives.setdefault(str(entry.own.get("life")), _Life(entry.node))
                    life.count, life.is_final = int(entry.own.get("lines", 0)), bool(entry.own.get("final", True))
        for life in self._lives.values():
            lines += map(_line, self._release(life, now_s))
        self._seen = {key: stamp_s for key, stamp_s in self._seen.items() if stamp_s > self.high_s - KEPT_S}
        return lines

    def gaps(self, nodes: frozenset[int]) -> list[Gap]:
        """Return what is missing, also behind the last line of a container that has told how many it had."""
        found = [gap for life in self._lives.values() if life.node in nodes for gap in life.gaps]
        for life in self._lives.values():
            if life.node in nodes and life.count is not None and life.next <= life.count:
                found.append(Gap(life.next, life.count, life.stamp_s, 0.0))
        return found

    @property
    def is_holding(self) -> bool:
        """Whether lines wait for others."""
        return any(life.held for life in self._lives.values())

    def is_complete(self, nodes: frozenset[int]) -> bool:
        """Return whether the nodes have said their last word and nothing of what they said is missing."""
        ours = [life for life in self._lives.values() if life.node in nodes]
        return {life.node for life in ours if life.is_final} >= nodes and all(life.is_whole() for life in ours)

    @staticmethod
    def _release(life: _Life, now_s: float) -> list[Entry]:
        found = []
        for number in sorted(life.held):
            entry, seen_s = life.held[number]
            if number > life.next:
                if now_s - seen_s < HOLD_S and len(life.held) <= MOST_HELD:
                    break
                life.gaps.append(Gap(life.next, number - 1, life.stamp_s, now_s))
            elif number < life.next:
                _fill(life.gaps, number)
            del life.held[number]
            life.next = max(life.next, number + 1)
            life.stamp_s = max(life.stamp_s, entry.stamp_s) if number + 1 == life.next else life.stamp_s
            found.append(entry)
        return found


def _fill(gaps: list[Gap], number: int) -> None:
    """Take the number out of the gap that it is in."""
    for at, gap in enumerate(gaps):
        if gap.first <= number <= gap.last:
            left = Gap(gap.first, number - 1, gap.before_s, gap.since_s)
            right = Gap(number + 1, gap.last, gap.before_s, gap.since_s)
            gaps[at : at + 1] = [part for part in (left, right) if part.first <= part.last]
            return


def _line(entry: Entry) -> LogLine:
    return LogLine(entry.text, entry.node, entry.rank, entry.time_s)

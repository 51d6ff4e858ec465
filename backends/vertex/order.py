"""A reader's memory: which lines it has given out, so that each comes once and every container's in its own order.

Containers number their lines (entrypoints/pump.py). So a copy is known as one whatever Cloud Logging calls it, a line
that is missing is known to be, and the last number, which a container tells at its end, tells when all are there. Of
each container no more is kept than the next number and the gaps before it. Lines without a number are told apart by
their keys, for as long as they may come again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from cloudtrain.backends.vertex.entries import Entry
from cloudtrain.launcher.backend import LogLine

__all__ = ["HOLD_S", "Gap", "Order"]

HOLD_S = 1.5  # how long a line waits for those before it; later ones come when they come
KEPT_S = 180.0  # how long a line without a number is known
MOST_HELD = 2000  # of one container; with more the first ones are given out
GIVE_UP_S, MOST_GAPS = 600.0, 500  # after so long, or of so many of one container, what is missing will not come
BEFORE_S = 90.0  # before a container's first line that is known, where even the line before it is missing


@dataclass(frozen=True)
class Gap:
    """Numbers that have not come, the first to the last, between the stamps of the lines around them."""

    first: int
    last: int
    before_s: float
    after_s: float
    since_s: float  # when it was given up to wait for them


@dataclass
class _Life:
    """One container's count."""

    node: int
    first_s: float  # the stamp of what was known of it first
    next: int = 1
    stamp_s: float = 0.0
    time_s: float = 0.0  # of its last line; it never goes back, whatever the container's clock does
    gaps: list[Gap] = field(default_factory=list)
    count: int | None = None  # of all its lines, once it has said its last word
    end_s: float = 0.0  # the last word's stamp
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

    def __init__(self, data: dict[str, Any] | None = None, *, is_over: bool = False) -> None:
        """`is_over`: the job has ended, and no container takes over from one that has said that another might."""
        self._is_over = is_over
        self._lives: dict[str, _Life] = {}
        self._seen: dict[str, float] = {}
        self.high_s = 0.0
        self.lost = 0  # lines that were given up in this round
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
            told["gaps"] = [list(gap.__dict__.values()) for gap in life.gaps]
            told["held"] = [[entry.__dict__, seen_s] for entry, seen_s in life.held.values()]
            lives[name] = told
        return {"lives": lives, "seen": self._seen, "high_s": self.high_s}

    def take(self, entries: Iterable[Entry], now_s: float) -> list[LogLine]:
        """Take the entries in; return the lines whose turn it is."""
        lines = []
        for entry in entries:
            self.high_s = max(self.high_s, entry.stamp_s)
            if entry.life is not None:
                life = self._lives.setdefault(entry.life, _Life(entry.node, entry.stamp_s))
                if not life.knows(entry.number):
                    life.held[entry.number] = (entry, now_s)
            elif entry.key not in self._seen:
                self._seen[entry.key] = entry.stamp_s
                if entry.own is None:
                    lines.append(_line(entry))
                elif entry.own["e"] == "end":
                    life = self._lives.setdefault(str(entry.own.get("life")), _Life(entry.node, entry.stamp_s))
                    life.end_s = entry.stamp_s
                    life.count, life.is_final = int(entry.own.get("lines", 0)), bool(entry.own.get("final", True))
        for life in self._lives.values():
            lines += self._release(life, now_s)
            self.lost += _give_up(life, now_s)
        self._seen = {key: stamp_s for key, stamp_s in self._seen.items() if stamp_s > self.high_s - KEPT_S}
        return lines

    def gaps(self, nodes: frozenset[int]) -> list[Gap]:
        """Return what is missing, also behind the last line of a container that has told how many it had."""
        found = [gap for life in self._lives.values() if life.node in nodes for gap in life.gaps]
        for life in self._lives.values():
            if life.node in nodes and life.count is not None and life.next <= life.count:
                found.append(Gap(life.next, life.count, life.stamp_s, life.end_s, 0.0))
        return [gap if gap.before_s else replace(gap, before_s=gap.after_s - BEFORE_S) for gap in found]

    @property
    def is_holding(self) -> bool:
        """Whether lines wait for others."""
        return any(life.held for life in self._lives.values())

    def is_complete(self, nodes: frozenset[int]) -> bool:
        """Return whether the nodes have said their last word and nothing of what they said is missing."""
        ours = sorted((life for life in self._lives.values() if life.node in nodes), key=lambda life: life.first_s)
        newest = {life.node: life for life in ours}
        have_ended = {
            node for node, life in newest.items() if life.is_final or (self._is_over and life.count is not None)
        }
        return have_ended >= nodes and all(map(_Life.is_whole, ours))

    @staticmethod
    def _release(life: _Life, now_s: float) -> list[LogLine]:
        found = []
        for number in sorted(life.held):
            entry, seen_s = life.held[number]
            if number > life.next:
                if now_s - seen_s < HOLD_S and len(life.held) <= MOST_HELD:
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
    """Take the number out of the gap that it is in."""
    for at, gap in enumerate(gaps):
        if gap.first <= number <= gap.last:
            left, right = replace(gap, last=number - 1), replace(gap, first=number + 1)
            gaps[at : at + 1] = [part for part in (left, right) if part.first <= part.last]
            return


def _give_up(life: _Life, now_s: float) -> int:
    """Forget what has been missing for too long; return how many lines that are."""
    kept = [gap for gap in life.gaps if now_s - gap.since_s < GIVE_UP_S][-MOST_GAPS:]
    lost = sum(gap.last - gap.first + 1 for gap in life.gaps if gap not in kept)
    life.gaps = kept
    return lost


def _line(entry: Entry) -> LogLine:
    return LogLine(entry.text, entry.node, entry.rank, entry.time_s)

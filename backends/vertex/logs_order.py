"""Cloud Logging's entries as log lines, and a reader's memory: each line once, each container's lines in order.

entrypoints/container/log_relay.py prints each line as a JSON object. Cloud Logging turns the object into the entry's
payload: `message`, `severity`, and under `ct` the container's mark, the line's number in the container, and the line's
time. If the platform keeps the object as text, this module parses the text.

Containers number their lines. The number identifies a copy even if Cloud Logging gives the copy another id, and shows
that a line is missing. At its end a container reports its last number, which shows that all lines have arrived. For
each container the memory keeps only the next number and the earlier gaps. Lines without a number are identified by
their keys, for as long as a copy may arrive.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from cloudtrain.launcher.backend import LogLine, container_output
from cloudtrain.launcher.text.times import seconds

HOLD_S = 1.5  # how old a line becomes, at most, while it waits for earlier lines; later ones are returned on arrival
KEPT_S = 180.0  # how long the key of a line without a number is kept
MOST_HELD = 2000  # lines of one container; above this, the first held lines are released
GIVE_UP_S, MOST_GAPS = 600.0, 500  # a gap is given up at this age, or if the container has more than MOST_GAPS gaps
BEFORE_S = 90.0  # before a container's first known line, where the time of the preceding line is unknown

_TASK = re.compile(r"workerpool(\d+)-(\d+)")


@dataclass(frozen=True)
class LogEntry:
    """One line. `life` and `number` are the container's mark and line count; `life` is None if a line has no number.

    `stamp_s` is Cloud Logging's time, used in queries; `time_s` is the time at which the container's log relay saw the
    line. `own` is the event by which a container reports its end. `key` identifies the entry.
    """

    key: str
    node: int
    stamp_s: float
    time_s: float
    text: str
    rank: int | None = None
    life: str | None = None
    number: int = 0
    own: dict[str, Any] | None = None


def node_of(task: str) -> int:
    """Return the node's index for a replica's name: pool 0 is node 0, pool 1 the later nodes, any other name node 0."""
    found = _TASK.match(task)
    return int(found[2]) + 1 if found and found[1] == "1" else 0


def task_of(node: int) -> str:
    """Return the replica's name for a node's index."""
    return f"workerpool1-{node - 1}" if node else "workerpool0-0"


def of_json(raw: dict[str, Any]) -> LogEntry:
    """Return the line of an entry in REST form."""
    stamp = str(raw.get("timestamp") or raw.get("receiveTimestamp") or "")
    payload = raw.get("jsonPayload")
    node = node_of(str(((raw.get("resource") or {}).get("labels") or {}).get("task_name", "")))
    key, stamp_s = f"{stamp} {raw.get('insertId', '')}", seconds(stamp) or 0.0
    message = raw.get("textPayload") if payload is None else payload.get("message")
    if payload is not None and not isinstance(message, str):  # structured output of the user's program
        message = json.dumps(payload, ensure_ascii=False, sort_keys=True)
    message, mark = (message or "").rstrip("\n"), (payload or {}).get("ct")
    if mark is None and message.startswith("{") and '"ct"' in message:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the platform may keep a line as plain text
            found = json.loads(message)
            message, mark = str(found["message"]), found["ct"]
    line = container_output.parse(message, stamped=False)
    if not isinstance(mark, dict) or "n" not in mark:
        return LogEntry(key, node, stamp_s, stamp_s, line.text, line.rank, own=line.own)
    time_s = float(mark.get("t", stamp_s * 1000)) / 1000
    return LogEntry(key, node, stamp_s, time_s, line.text, line.rank, str(mark.get("l")), int(mark["n"]))


def joined(raw: Iterable[dict[str, Any]], parts: dict[str, dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the entries, with split entries of Cloud Logging joined; `parts` keeps incomplete entries between calls."""
    for each in raw:
        split = each.get("split")
        if not split or int(split.get("totalSplits", 1)) < 2:
            yield each
            continue
        there = parts.setdefault(str(split.get("uid")), {})
        there[str(split.get("index", 0))] = str((each.get("jsonPayload") or {}).get("message", each.get("textPayload")))
        if len(there) == int(split["totalSplits"]):
            del parts[str(split.get("uid"))]
            text = "".join(there[index] for index in sorted(there, key=int))
            whole = {key: value for key, value in each.items() if key not in ("split", "textPayload")}
            # Every part repeats the fields beside the message.
            payload = {**(each.get("jsonPayload") or {}), "message": text}
            yield {**whole, "insertId": split.get("uid"), "jsonPayload": payload}


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
        data = data or {"lives": {}, "seen": {}, "high_s": 0.0}
        self._runs = {name: _ContainerRun.load(stored) for name, stored in data["lives"].items()}
        self._seen: dict[str, float] = dict(data["seen"])
        self.high_s: float = data["high_s"]
        self.lost = 0  # lines given up in this poll

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

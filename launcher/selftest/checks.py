"""The verdict on what a selftest has seen: pure functions of lines, states and requests.

An expected value is a value, or a mapping: `least` and `most` are bounds; `order` are states that may come, in this
order, of which the last must come.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from ..backend import LogLine

Facts = dict[str, Any]
_LINE = re.compile(r"selftest rank=(\d+) life=(\S+) step=(\d+) at=([\d.]+) loss=(\S+)")


class TaskLine(NamedTuple):
    """A line of the selftest's task. `life`: the rank's process; `late_s`: from its print to its arrival here."""

    attempt: int
    rank: int
    life: str
    step: int
    loss: str
    late_s: float


def line_of(attempt: int, line: LogLine, now_s: float) -> TaskLine | None:
    """Return the line of the task, None for another line."""
    found = _LINE.fullmatch(line.text)
    if found is None:
        return None
    rank, life, step, at_s, loss = found.groups()
    return TaskLine(attempt, int(rank), life, int(step), loss, max(0.0, now_s - float(at_s)))


def differing(expected: Mapping[str, Any], came: Mapping[str, Any]) -> list[str]:
    """Return the names whose value is not the expected one."""
    return [name for name, value in expected.items() if not _is_met(value, came.get(name))]


def _is_met(expected: Any, value: Any) -> bool:
    if not isinstance(expected, dict):
        return bool(expected == value)
    if "order" in expected:
        rest = iter(expected["order"])
        return bool(value) and value[-1] == expected["order"][-1] and all(each in rest for each in value)
    return value is not None and expected.get("least", value) <= value <= expected.get("most", value)


def of_lines(lines: Sequence[TaskLine], last_step: int, late_s: float) -> tuple[Facts, Facts]:
    """Return what is expected of the lines of both ranks, and what came."""
    lives: dict[tuple[int, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        lives[line.attempt, line.rank][line.life].append(line.step)
    steps = [each for of_rank in lives.values() for each in of_rank.values()]
    pairs = [pair for each in steps for pair in pairwise(each)]
    attempts = sorted({attempt for attempt, _ in lives})
    lost = sum(len(set(range(min(each), max(each) + 1)) - set(each)) for each in steps)
    for attempt in attempts:
        starts = list(zip_longest(*(lives[attempt, rank].values() for rank in (0, 1)), fillvalue=[]))
        for number, (first, second) in enumerate(starts, 1):
            apart = abs(max(first, default=0) - max(second, default=0))
            lost += max(0, apart - (number < len(starts)))  # at a kill one rank may be a step behind
    came: Facts = {
        "ranks": len({rank for _, rank in lives}),
        "lost": lost,
        "twice": sum(before == after for before, after in pairs),
        "disordered": sum(before > after for before, after in pairs),
        "last_step": max((line.step for line in lines), default=None),
        "late_s": round(max((line.late_s for line in lines), default=0.0), 1),
    }
    return {
        "ranks": 2,
        "lost": 0,
        "twice": 0,
        "disordered": 0,
        "last_step": last_step,
        "late_s": {"most": late_s},
    }, came


def of_losses(lines: Sequence[TaskLine], others: Sequence[TaskLine]) -> tuple[Facts, Facts]:
    """Compare the losses of a step that ran again, after a kill or in an undisturbed job, to the bit."""
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for line in (*lines, *others):
        found[line.rank, line.step].append(line.loss)
    again = [set(each) for each in found.values() if len(each) > 1]
    came = {"compared": len(again), "unlike": sum(len(each) > 1 for each in again)}
    return {"compared": {"least": 10}, "unlike": 0}, came


def of_requests(sent: Any, accepted: Any) -> tuple[Facts, Facts]:
    """Compare a request with the platform's record of it; keys that the platform adds are listed."""
    ours, theirs = dict(_leaves(sent)), dict(_leaves(accepted))
    came = {
        "changed": sorted(key for key in ours if key in theirs and theirs[key] != ours[key]),
        "left_out": sorted(ours.keys() - theirs.keys()),
        "added": sorted(theirs.keys() - ours.keys()),
        "keys": len(ours),
    }
    return {"changed": [], "left_out": []}, came


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for number, each in enumerate(value):
            yield from _leaves(each, f"{path}.{number}")
    else:
        yield path, value

"""The verdict on what a selftest has seen: pure functions of lines and facts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from ..job import State

Facts = dict[str, Any]


class TaskLine(NamedTuple):
    """A line of the selftest's task. `life`: the rank's process, which is `of` that rank by its own word."""

    attempt: int
    rank: int | None
    of: int
    life: str
    step: int
    loss: float
    late_s: float
    """From its print, by the clock of its host, to its arrival here."""
    stamp_off_s: float = 0.0
    """From its print to the time that it has at the platform."""


def differing(expected: Mapping[str, Any], came: Mapping[str, Any]) -> list[str]:
    """Return the names whose value is not the expected one; templates/selftest/steps.yaml says how to expect."""
    return [name for name, value in expected.items() if not _is_met(value, came.get(name))]


def _is_met(expected: Any, value: Any) -> bool:
    if not isinstance(expected, dict):
        return bool(expected == value)
    if order := expected.get("order"):
        rest = iter(order)
        return bool(value) and value[-1] == order[-1] and order[1] in value and all(each in rest for each in value)
    return value is not None and expected.get("least", value) <= value <= expected.get("most", value)


def of_lines(lines: Sequence[TaskLine], max_steps: int, held_back_s: float) -> Facts:
    """Return the faults of the lines of both ranks, over all starts of an attempt and over all attempts."""
    lives: dict[tuple[int, int | None], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        lives[line.attempt, line.rank][line.life].append(line.step)
    runs = [run for of_rank in lives.values() for run in of_rank.values()]
    pairs = [pair for run in runs for pair in pairwise(run)]
    lost = sum(max(run) - min(run) + 1 - len(set(run)) for run in runs)
    for attempt in {attempt for attempt, _ in lives}:
        starts = [*zip_longest(*(lives[attempt, rank].values() for rank in (0, 1)), fillvalue=[])]
        for number, both in enumerate(starts, 1):
            last = sorted(max(run, default=-1) for run in both)
            lost += max(0, last[1] - last[0] - (number < len(starts)))  # at a kill a rank may be a step behind
    late_s = [line.late_s for line in lines] or [0.0]
    return {
        "ranks": len({line.rank for line in lines}),
        "lines": len(lines),
        "misplaced": sum(line.rank != line.of for line in lines),
        "lost": lost,
        "missing": max_steps - 1 - max((line.step for line in lines), default=-1),
        "twice": sum(step == after for step, after in pairs),
        "disordered": sum(step > after for step, after in pairs),
        "late_s": round(max(0.0, max(late_s) - held_back_s), 1),
        "ahead_s": round(max(0.0, -min(late_s)), 1),
        "stamp_off_s": round(max([line.stamp_off_s for line in lines] or [0.0], key=abs), 1),
    }


def of_times(times: Sequence[tuple[float, State, float]]) -> Facts:
    """Return how far the platform's times are before the send or after the seen end, and its bill outside of them."""
    clock, billed = [0.0], [0.0]
    for sent_s, state, over_s in times:
        both = state.started_s or sent_s, state.ended_s or over_s
        clock += [min(*both, sent_s) - sent_s, max(*both, over_s) - over_s]
        if state.billed_s is not None:
            billed += [min(0.0, state.billed_s - both[1] + both[0]), max(0.0, state.billed_s - over_s + sent_s)]
    clock_off_s, billed_off_s = (max(each, key=abs) for each in (clock, billed))
    return {"clock_off_s": round(clock_off_s, 1), "billed_off_s": round(billed_off_s, 1)}


def of_losses(lines: Sequence[TaskLine]) -> Facts:
    """Compare the losses of each step that ran again, after a kill or in an undisturbed job, to the bit."""
    losses: dict[tuple[int | None, int], list[float]] = defaultdict(list)
    for line in lines:
        losses[line.rank, line.step].append(line.loss)
    again = [each for each in losses.values() if len(each) > 1]
    return {"compared": len(again), "unlike": sum(len(set(each)) > 1 for each in again)}

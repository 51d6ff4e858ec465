"""The facts of what a selftest has seen, their verdicts, and the report, fit to be attached to an issue.

A report has numbers and words of a fixed list.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.entrypoints import atomic_json, processes

from ..errors import ConfigError
from ..job import State
from ..planning.prepared import Prepared, region_of
from ..text.terminal import say_each

Facts = dict[str, Any]
LEAST_INSIDE = 4  # characters of a value that is searched for inside a longer word
MOST_SMALL = 99_999  # a larger number of a block may be an account or a project
BLOCKING = {"state", "starts"}  # facts without which later steps make no sense
FACTOR, APART_S = 2.0, 5.0  # times of two reports differ beyond both


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


def is_met(expected: Any, value: Any) -> bool:
    """Return whether the value is the expected one; templates/selftest/steps.yaml says how to expect."""
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
    pairs, lost = [pair for of_rank in lives.values() for run in of_rank.values() for pair in pairwise(run)], 0
    for attempt in {attempt for attempt, _ in lives}:
        starts = [*zip_longest(*(lives[attempt, rank].values() for rank in (0, 1)), fillvalue=[])]
        for number, both in enumerate(starts, 1):
            steps, is_last = [step for run in both for step in run], number == len(starts)
            whole = {*range(min(steps), max(steps) + is_last)}  # at a kill a rank may be a step behind
            lost += sum(len(whole.difference(run)) for run in both)
    return {
        "ranks": len({line.rank for line in lines}),
        "lines": len(lines),
        "misplaced": sum(line.rank != line.of for line in lines),
        "lost": lost,
        "missing": max_steps - 1 - max((line.step for line in lines), default=-1),
        "twice": sum(step == after for step, after in pairs),
        "disordered": sum(step > after for step, after in pairs),
        "late_s": max([0.0, *(round(line.late_s - held_back_s, 1) for line in lines)]),
        "ahead_s": max([0.0, *(round(-line.late_s, 1) for line in lines)]),
        "stamp_off_s": max([0.0, *(round(line.stamp_off_s, 1) for line in lines)], key=abs),
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


class ProofReport:
    """The report, written and shown after each step. `table`: steps.yaml; `private`: what it must not hold."""

    def __init__(self, path: Path, head: Mapping[str, str], table: Mapping[str, Any], private: re.Pattern[str]) -> None:
        self.path, self.table, self._private = path, table, private
        self.data: dict[str, Any] = {"selftest": 1, "head": head, "steps": []}

    def add(self, step: str, seconds: float, came: Facts, words: Sequence[str] = ()) -> bool:
        """Add a step, show `words` if it differs, and return whether later steps make sense. Raises ConfigError.

        `came` has `why` for a step that was not checked (the step that it needs, or words of the table), `error` for a
        step that failed.
        """
        expected, noted = (self.table["steps"][step][key] for key in ("expected", "noted"))
        why, failure = came.get("why"), came.get("error")
        unlike = [] if why or failure else [name for name in expected if not is_met(expected[name], came.get(name))]
        verdict = "not checked" if why else "differs" if unlike or failure else "ok"
        known = {name: came[name] for name in (*expected, *noted, "error", "code", "why") if came.get(name) is not None}
        row = {"step": step, "verdict": verdict, "seconds": round(seconds, 1), "expected": expected, "came": known}
        self.data["steps"].append(row)
        lines = [f"{name}: expected {_shown(expected[name])}, came {_shown(came.get(name))}" for name in unlike]
        lines += [f"it needs the step: {why}" if why in self.table["steps"] else why] if why else []
        lines += filter(None, words) if verdict == "differs" else []
        say_each([f"{verdict:<12} {step:<18} {seconds:7.1f} s", *(f"    {line}" for line in lines)])
        if word := next(filter(self._private.search, {*_texts(self.data)} - {*_texts(self.table)}), None):
            message = f"the report is not written: at the step `{step}` it would hold a value of yours: {word}"
            raise ConfigError(message, where=self.path, hint="please report this as a fault, without the value")
        try:
            atomic_json.write_json(self.path, self.data)
        except OSError as error:
            raise ConfigError(f"the report cannot be written: {error.strerror}", where=self.path) from error
        return not (why or failure or BLOCKING.intersection(unlike))


def _shown(value: Any) -> str:
    return "nothing" if value is None else re.sub(r"[\[\]{}'\"]", "", str(value)) or "none"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list | tuple):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(each)
    elif isinstance(value, str) or (isinstance(value, int) and value > MOST_SMALL):
        yield str(value)


def private_texts(block: Mapping[str, Any], head: Mapping[str, str]) -> re.Pattern[str]:
    """Return a pattern of the block's values, home, user and host; a region or machine of the report is public.

    A short value is found only as the whole word, for `a` is in many words; `cloudtrain` is in our own names.
    """
    values = (text for each in block.values() for text in _texts([*each.values()] if isinstance(each, dict) else each))
    host = socket.gethostname()
    found = {*values, str(Path.home()), processes.user_name(os.getuid()), host, host.partition(".")[0]}
    forms = {True: r"(?<![A-Za-z0-9])%s(?![A-Za-z0-9])", False: r"\A%s\Z"}
    hidden = found - {head.get("region"), head["machine"], "cloudtrain", ""}
    return re.compile("|".join(forms[len(each) >= LEAST_INSIDE] % re.escape(each) for each in hidden), re.IGNORECASE)


def head_of(prepared: Prepared) -> dict[str, str]:
    """Return the versions, the backend, the region and the machine type."""
    backend, python = prepared.config.backend, platform.python_version()
    head = {"cloudtrain": version("cloudtrain"), "python": python, "backend": backend, "machine": prepared.plan.machine}
    needed = [re.split("[^A-Za-z0-9._-]", each)[0] for each in requires("cloudtrain") or () if f'"{backend}"' in each]
    with contextlib.suppress(PackageNotFoundError, IndexError):
        head["sdk"] = f"{needed[0]} {version(needed[0])}"
    return head | ({"region": region} if (region := region_of(prepared)) else {})


def read(path: Path) -> dict[str, Any]:
    """Return the data of a report. Raises ConfigError."""
    with contextlib.suppress(ValueError, LookupError, TypeError, OSError, RecursionError):
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = [(row["step"], row["verdict"], {**row["came"]}) for row in data["steps"]]
        if data["selftest"] == 1 and all(isinstance(each, str) for row in rows for each in row[:2]):
            return dict(data)
    raise ConfigError("this is no report of a selftest", where=path, hint="cloudtrain selftest -o FILE writes one")


def compared(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Return a line for each verdict, state, code or time of the new report that differs from the old one's."""
    ours, theirs = ({row["step"]: row | row["came"] for row in each["steps"]} for each in (new, old))
    found = []
    for step in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(step, {}), theirs.get(step, {})
        verdicts, names = {one.get("verdict"), other.get("verdict")}, one.keys() | other.keys()
        names = {"verdict", "why"} if verdicts & {"not checked", None} else names - {"step", "expected", "came"}
        for name in sorted(names):
            may_be_missed = verdicts == {"ok"} and name.startswith("states_")  # a poll may miss a short state
            if not may_be_missed and _is_unlike(name, one.get(name), other.get(name)):
                found.append(f"{step}, {name}: {_shown(one.get(name))}, before {_shown(other.get(name))}")
    return found


def _is_unlike(name: str, new: Any, old: Any) -> bool:
    if not all(isinstance(each, int | float) for each in (new, old)) or name.startswith("exit_"):
        return bool(new != old)
    low, high = sorted((abs(new), abs(old)))
    return name.endswith(("_s", "seconds")) and high - low > APART_S and high > FACTOR * low  # counts differ by nature

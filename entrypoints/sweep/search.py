"""The decision of a search: which segments to start next. A pure function of the results, the running segments, money.

A trial is trained in segments. Segment k ends at the step of rung k, where the trial is evaluated, saved and paused; a
promoted trial goes on from there. Because the decision has no state, any number of processes may decide at once, and a
process may die at any time: a segment is identified by (trial, rung), and its sender sends a segment once.

Algorithms: `grid` and `random` train each trial to the end. `asha` (Li et al. 2018, arXiv 1810.05934, algorithm 2)
promotes a trial as soon as the trial is among the best 1/factor of its rung; `halving` (Jamieson and Talwalkar 2016)
waits for all trials of a rung. `pbt` (Jaderberg et al. 2017, arXiv 1711.09846): after each generation, the lowest
quarter of the population continues from copies of the highest quarter, with perturbed values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .space import Dimension, dimensions, drawn, grid, perturbed, unit

ALGORITHMS = ("grid", "random", "halving", "asha", "pbt")
IN_WORDS = (  # the help of `sweep.algorithm`
    "grid and random train each trial to the end. asha pauses trials at rungs, and lets the best 1/factor of a rung go "
    "on; halving first waits for all trials of a rung, so its result does not depend on the order of ends. pbt: after "
    "each generation the lowest quarter continues from copies of the highest quarter, with changed values."
)
PAUSING = ("asha", "halving", "pbt")  # the algorithms whose trials pause at rungs; grid and random run each to its end
COPYING = ("pbt",)  # the algorithms whose trials continue from copies of others
FIXED = ("grid", "pbt")  # the algorithms whose number of trials cannot grow
BATCH = "training.global_batch_size"  # if this key varies, rungs are counted in samples, which all trials share
HOPELESS = 3  # failures without any result before them: the task itself is at fault
MOST_TRIES = 3  # of a segment that a fault has ended
_QUARTER = 4  # pbt: the population's size divided by the number of replaced trials

Results = Mapping[tuple[int, int], float | None]
"""The metric by (trial, rung); None or nan for a trial that failed on the rung."""


@dataclass(frozen=True)
class Search:
    """The settings of a search. `rungs`: the step at the end of each segment; the last is the end of the training.

    If the training is given in epochs, rungs and the segments' steps are numbers of epochs. Else, if the space has
    BATCH, they are numbers of samples; `steps_of` converts these. The only rung of a script whose steps are unknown
    is 1: the whole script.
    """

    algorithm: str
    space: tuple[Dimension, ...]
    trials: int
    parallel: int
    rungs: tuple[int, ...]
    factor: int = 3
    mode: str = "min"
    seed: int = 0

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Search:
        """Return the search from its JSON form."""
        return cls(**{**data, "space": dimensions(data["space"]), "rungs": tuple(data["rungs"])})


@dataclass(frozen=True)
class Segment:
    """A part of a trial's training, from one step to the next. `source`: copy this trial's checkpoint first (pbt).

    `is_new`: train from the beginning, without the trial's checkpoint.
    """

    trial: int
    rung: int
    from_step: int
    until_step: int
    values: Mapping[str, Any]
    source: int | None = None
    is_new: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """The segment's identity in a search."""
        return self.trial, self.rung


@dataclass(frozen=True)
class Allowance:
    """The seconds to the deadline, `left`, and a segment's highest expected seconds: `start` + steps x `step`.

    `own`: start and step of the trials whose pace is known.
    """

    left: float = math.inf
    start: float = 0.0
    step: float = 0.0
    own: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def cost(self, trial: int, from_step: int, until_step: int) -> float:
        """Return the highest expected seconds of a segment of the trial."""
        start, step = self.own.get(trial, (self.start, self.step))
        return start + (until_step - from_step) * step


def steps_of(rung: int, values: Mapping[str, Any]) -> int:
    """Return the trial's step at a rung: the rung itself, or the samples divided by the trial's batch size."""
    return -(-rung // int(values[BATCH])) if BATCH in values else rung


def script_args(words: Iterable[str], values: Mapping[str, Any]) -> list[str]:
    """Return a script's arguments with a trial's values: `args.lr` replaces the word after `--lr`, or adds both."""
    found = list(words)
    for key, value in values.items():
        if key.startswith("args."):
            option = f"--{key.removeprefix('args.')}"
            at = found.index(option) if option in found else len(found)
            found[at : at + 2] = [option, str(value)]
    return found


def rungs(first: int, factor: int, last: int) -> tuple[int, ...]:
    """Return first x factor^k below `last`, and `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= factor
    return (*found, last)


def decide(
    search: Search, results: Results, running: Collection[tuple[int, int]], allowance: Allowance | None = None
) -> list[Segment]:
    """Return the segments to start now, in order; an empty list if segments must end first, or the search is over.

    The time to the deadline is paid, so it goes to trials that can finish: first to the algorithm's next segment whose
    trial can. If time alone refuses the algorithm's segments, then to the furthest trials that can finish, and to
    segments that can end. As long as no trial has finished, a slot is free in time for the furthest one: if need be
    the trial goes on without its promotion.
    """
    standing, allowance = _Standing(search, results, running), allowance or Allowance()
    found = list[Segment]()
    while len(standing.running) < search.parallel and (key := standing.next(allowance)) is not None:
        (trial, rung), steps = key, (0, *search.rungs)
        values, source = values_of(search, results, trial, rung), origin(search, results, trial, rung)
        found.append(Segment(trial, rung, steps[rung], steps[rung + 1], values, source))
        standing.start(key)
    return found


def ranked(search: Search, results: Results) -> dict[int, int]:
    """Return the trials with a result, each with its highest rung: the highest rung first, on a rung the best trial."""
    found = dict[int, int]()
    for rung in reversed(range(len(search.rungs))):
        for trial in _ranked(search, {trial: value for (trial, at), value in results.items() if at == rung}):
            found.setdefault(trial, rung)
    return found


def best(search: Search, results: Results) -> tuple[int, int] | None:
    """Return the (trial, rung) of the best result on the highest rung that has a result; None without a result."""
    return next(iter(ranked(search, results).items()), None)


def values_of(search: Search, results: Results, trial: int, rung: int) -> dict[str, Any]:
    """Return the trial's values on the rung. Only pbt changes a trial's values, by the results of lower rungs."""
    if search.algorithm == "grid":
        return _grid(search.space)[trial]
    if search.algorithm != "pbt" or rung == 0:
        return drawn(search.space, search.seed, trial)
    source = origin(search, results, trial, rung)
    if source is None:
        return values_of(search, results, trial, rung - 1)
    return perturbed(search.space, values_of(search, results, source, rung - 1), search.seed, trial, rung)


def origin(search: Search, results: Results, trial: int, rung: int) -> int | None:
    """Return the trial whose checkpoint of the last generation the trial continues; None for its own (pbt)."""
    if search.algorithm != "pbt" or rung == 0:
        return None
    last = {number: value for (number, at), value in results.items() if at == rung - 1}
    ranked, count = _ranked(search, last), len(last) // _QUARTER
    failed = sorted(last.keys() - set(ranked))
    losers = {*failed, *ranked[max(count, len(last) - count) :]}
    if trial not in losers or not ranked:
        return None
    highest = [each for each in ranked[: max(1, count)] if each not in losers] or ranked[:1]
    return highest[int(unit(search.seed, "source", trial, rung) * len(highest))]


_grid = functools.lru_cache(maxsize=4)(grid)


def _ranked(search: Search, values: Mapping[int, float | None]) -> list[int]:
    """Return the trials with a finite value or infinity, the best first; equal values by number. nan has no rank."""
    sign = -1.0 if search.mode == "max" else 1.0
    found = [(sign * value, trial) for trial, value in values.items() if value is not None and not math.isnan(value)]
    return [trial for _, trial in sorted(found)]


class _Standing:
    """The results and running segments by rung, updated as segments are chosen."""

    def __init__(self, search: Search, results: Results, running: Collection[tuple[int, int]]) -> None:
        self.search = search
        self.running = {key for key in running if key not in results}
        self.begun = {*results, *self.running}
        by_rung: list[dict[int, float | None]] = [{} for _ in search.rungs]
        for (trial, rung), value in results.items():
            by_rung[rung][trial] = value
        self.counts = [len(values) for values in by_rung]
        self.ranked = [_ranked(search, values) for values in by_rung]
        self.is_finished = bool(self.ranked[-1])
        self.top = self._top(by_rung)  # the trial without a failure on the highest rung, and this rung; -1 without one
        self.new = max((trial for trial, rung in self.begun if rung == 0), default=-1) + 1

    def start(self, key: tuple[int, int]) -> None:
        """Count the segment as running."""
        self.running.add(key)
        self.begun.add(key)
        self.top = key if key[1] > self.top[1] else self.top
        if key[1] == 0:
            self.new = key[0] + 1

    def due(self) -> Iterator[tuple[int, int]]:
        """Yield the segments that the algorithm may start, in its order."""
        for rung in reversed(range(len(self.search.rungs) - 1)):
            for trial in self._promotable(rung):
                if (trial, rung + 1) not in self.begun:
                    yield trial, rung + 1
        if self.new < self.search.trials:
            yield self.new, 0

    def _promotable(self, rung: int) -> list[int]:
        """Return the trials of the rung that go on, the best first."""
        count, ranked = self.counts[rung], self.ranked[rung]
        if self.search.algorithm == "asha":
            return ranked[: count // self.search.factor]
        if self.search.algorithm == "pbt":  # a failed trial goes on as a copy
            return list(range(count)) if count == self.search.trials and ranked else []
        return ranked[: max(1, count // self.search.factor)] if self._is_complete(rung) else []

    def _is_complete(self, rung: int) -> bool:
        """Return whether all trials that halving sends to the rung have a result there."""
        if rung == 0:
            return self.counts[0] >= self.search.trials
        due = self._promotable(rung - 1)
        return bool(due) and all((trial, rung) in self.begun and (trial, rung) not in self.running for trial in due)

    def next(self, allowance: Allowance) -> tuple[int, int] | None:
        """Return the segment to start on a free slot."""
        key = next((each for each in self.due() if self._whole(each, allowance) <= allowance.left), None)
        if key is None and any(self.due()):
            ready = (each for each in self._ready() if self._whole(each, allowance) <= allowance.left)
            short = (each for each in self.due() if self._cost(each, allowance) <= allowance.left)
            key = next(ready, None) or next(short, None)
        return key if self.is_finished else self._kept(key, allowance)

    def _kept(self, key: tuple[int, int] | None, allowance: Allowance) -> tuple[int, int] | None:
        """Return the segment, or the furthest trial's if this trial could not finish after the segment."""
        furthest = next(self._ready(), None)
        if furthest is None or self.top in self.running or self._whole(furthest, allowance) > allowance.left:
            return key
        if key is None and not self.running:
            return furthest
        is_last = len(self.running) + 1 >= self.search.parallel  # of the free slots
        waits = [self._cost(each, allowance) for each in (self.running if key is None else {key} if is_last else ())]
        return key if self._whole(furthest, allowance) + max(waits, default=0.0) <= allowance.left else furthest

    def _ready(self) -> Iterator[tuple[int, int]]:
        """Yield the next segments of all paused trials, on the highest rung first, the best first.

        A population goes on after a whole generation.
        """
        fewest = self.search.trials if self.search.algorithm in COPYING else 1
        for rung in reversed(range(len(self.search.rungs) - 1)):
            for trial in self.ranked[rung] if self.counts[rung] >= fewest else ():
                if (trial, rung + 1) not in self.begun:
                    yield trial, rung + 1

    def _cost(self, key: tuple[int, int], allowance: Allowance) -> float:
        """Return the segment's highest expected seconds."""
        trial, rung = key
        return allowance.cost(trial, self.search.rungs[rung - 1] if rung else 0, self.search.rungs[rung])

    def _whole(self, key: tuple[int, int], allowance: Allowance) -> float:
        """Return the highest expected seconds of the segment and of all later segments of the trial."""
        trial, rung = key
        return sum(self._cost((trial, at), allowance) for at in range(rung, len(self.search.rungs)))

    def _top(self, by_rung: list[dict[int, float | None]]) -> tuple[int, int]:
        reached: dict[int, int] = {}
        for trial, rung in self.begun:
            reached[trial] = max(rung, reached.get(trial, 0))
        ranked = [set(trials) for trials in self.ranked]
        live = ((-at, trial) for trial, at in reached.items() if trial not in by_rung[at] or trial in ranked[at])
        at, trial = min(live, default=(1, -1))
        return trial, -at

"""The decision of a search: no segment twice, none too late, a finished trial, one answer for the same inputs."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.entrypoints.sweep import space
from cloudtrain.entrypoints.sweep.search import Allowance, Search, best, decide, rungs, values_of

SPACE = space.dimensions(
    {"lr": {"log": [1e-5, 1e-1]}, "width": {"int": [16, 256], "log": True}, "name": ["adamw", "lamb"]}
)


def search(algorithm: str, trials: int = 27, parallel: int = 4, last: int = 81, **more: Any) -> Search:
    """Return a search over SPACE, with rungs at 1, 3, 9, 27 and 81 if the algorithm pauses trials."""
    steps = (last,) if algorithm in ("grid", "random") else rungs(1, 3, last)
    return Search(algorithm, SPACE, trials, parallel, steps, **more)


class History:
    """A random history of a search on a clock: segments fail, repeat, and take at most their expected time.

    Results come late: an ended segment may count as running for some decisions more. Results repeat: a known result
    may change, and a segment with a result may still count as running.
    """

    def __init__(self, what: Search, seed: int, *, failures: float, limit: float, start: float = 0.3) -> None:
        self.search, self.draw = what, random.Random(seed)
        self.failures, self.limit, self.start = failures, limit, start
        self.results: dict[tuple[int, int], float | None] = {}
        self.running: dict[tuple[int, int], float] = {}  # with their ends
        self.late: dict[tuple[int, int], float | None] = {}
        self.sent: list[tuple[int, int]] = []
        self.now = 0.0

    def run(self, *, added: int = 0) -> None:
        """Decide and end segments until the search is over; check each decision. Add trials once, at a random time."""
        adds_at = self.draw.randrange(2 * self.search.trials) if added else -1
        for decision in itertools.count():
            if decision == adds_at:
                self.search = replace(self.search, trials=self.search.trials + added)
            self._send()
            if not self.running and not self.late:
                return
            if not self.late:
                key = min(self.running, key=self.running.__getitem__)
                self.now = self.running.pop(key)
                self.late[key] = self._value()
            if self.draw.random() < 0.7:
                key = self.draw.choice(sorted(self.late))
                self.results[key] = self.late.pop(key)
            if self.results and self.search.algorithm == "asha" and self.draw.random() < 0.05:
                self.results[self.draw.choice(sorted(self.results))] = self._value()

    def _value(self) -> float | None:
        if self.draw.random() < self.failures:
            return self.draw.choice([None, math.nan])
        return round(self.draw.random(), 2)  # ties

    def _send(self) -> None:
        allowance = Allowance(self.limit - self.now, self.start, 1.0)
        items = list(self.results.items())
        repeated = self.draw.sample(items, min(len(items), self.draw.choice([0, 0, 2])))
        running = [*self.running, *self.late, *(key for key, _ in repeated)]
        self.draw.shuffle(items)
        found = decide(self.search, self.results, [*self.running, *self.late], allowance)
        assert found == decide(self.search, dict(items), self.draw.sample(running, len(running)), allowance)
        for segment in found:
            assert segment.key not in self.sent
            assert not any(trial == segment.trial for trial, _ in (*self.running, *self.late))
            cost = allowance.cost(segment.trial, segment.from_step, segment.until_step)
            assert self.now + cost <= self.limit + 1e-9
            self.sent.append(segment.key)
            self.running[segment.key] = self.now + cost * self.draw.uniform(0.1, 1.0)
        assert len(self.running) + len(self.late) <= self.search.parallel


@pytest.mark.parametrize("count", [60, pytest.param(2500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("algorithm", ["random", "halving", "asha", "pbt"])
def test_random_histories_end_in_time(algorithm: str, count: int) -> None:
    """No segment is sent twice or expected to end too late, and a trial finishes if none fails."""
    ladder = 5 * 0.3 + 81
    for seed in range(count):
        draw = random.Random(seed)
        failures = draw.choice([0.0, 0.05, 0.3])
        what = search(algorithm, trials=draw.randint(4, 40), parallel=draw.randint(1, 9))
        added = 0 if algorithm == "pbt" else draw.choice([0, 0, 9])  # a population has a fixed size
        many = what.trials if algorithm == "pbt" else 1  # a generation needs its whole population
        history = History(what, seed, failures=failures, limit=ladder * many * draw.uniform(1.0, 12.0))
        history.run(added=added)
        if failures == 0.0:
            assert any(rung == len(what.rungs) - 1 for _, rung in history.results), (seed, algorithm)


def test_asha_promotes_the_best_third_from_the_top_down() -> None:
    """With three results of a rung the best goes on first; nan and failures are worst, and are never promoted."""
    what = search("asha", trials=9, parallel=1)
    results: dict[tuple[int, int], float | None] = {(0, 0): 0.5, (1, 0): 0.2, (2, 0): math.nan}
    (segment,) = decide(what, results, ())
    assert (segment.key, segment.from_step, segment.until_step) == ((1, 1), 1, 3)
    assert decide(what, {(0, 0): None, (1, 0): math.nan, (2, 0): None}, ())[0].key == (3, 0)
    assert decide(what, {(0, 0): 0.5, (1, 0): 0.2}, ())[0].key == (2, 0)


def test_mode_max_promotes_the_highest() -> None:
    """The direction of the metric counts for promotions and for the best trial."""
    what = search("asha", parallel=1, mode="max")
    results = {(0, 0): 0.5, (1, 0): 0.2, (2, 0): 0.3}
    assert decide(what, results, ())[0].key == (0, 1)
    assert best(what, results) == (0, 0)


def test_halving_waits_for_its_rung_and_ignores_failures() -> None:
    """A rung's trials go on when all have a result; a failed trial blocks no other trial."""
    what = search("halving", trials=9, parallel=9)
    eight: dict[tuple[int, int], float | None] = {(trial, 0): trial / 10 for trial in range(8)}
    assert decide(what, eight, {(8, 0)}) == []
    assert [each.key for each in decide(what, {**eight, (8, 0): None}, ())] == [(0, 1), (1, 1), (2, 1)]
    assert decide(what, {**eight, (8, 0): None, (0, 1): None, (1, 1): 0.3}, {(2, 1)}) == []
    assert decide(what, {**eight, (8, 0): None, (0, 1): None, (1, 1): 0.3, (2, 1): 0.2}, ())[0].key == (2, 2)


def test_pbt_copies_the_highest_quarter_to_the_lowest() -> None:
    """The two lowest of eight go on from one of the two highest, with perturbed values; the rest keep their own."""
    what = search("pbt", trials=8, parallel=8)
    results = {(trial, 0): float(trial) for trial in range(8)}
    found = {each.trial: each for each in decide(what, results, ())}
    assert {trial for trial, each in found.items() if each.source is not None} == {6, 7}
    assert {found[6].source, found[7].source} <= {0, 1}
    assert found[3].values == values_of(what, results, 3, 0)
    assert found[6].values != values_of(what, results, found[6].source or 0, 0)


def test_short_time_still_finishes_a_trial() -> None:
    """The time for one whole training is kept: new trials stop before, and the best one goes on to the end."""
    what = search("asha", trials=81, parallel=4)
    history = History(what, 1, failures=0.0, limit=1.4 * (81 + 5 * 0.3))
    history.run()
    assert any(rung == 4 for _, rung in history.results)
    assert len({trial for trial, _ in history.results}) > 3


def test_deadline_leaves_a_slot_for_the_furthest_trial() -> None:
    """A segment that would take the last slot is not started if the furthest trial could not finish afterwards."""
    what = search("asha", trials=9, parallel=1)
    results = {(0, 0): 0.1, (1, 0): 0.2}
    assert decide(what, results, (), Allowance(81.0, step=1.0))[0].key == (2, 0)
    assert decide(what, results, (), Allowance(80.5, step=1.0))[0].key == (0, 1)
    assert decide(what, results, (), Allowance(0.5, step=1.0)) == []
    what = search("asha", trials=2, parallel=2)  # nothing is due: a wait for the running segment costs its seconds
    assert decide(what, {(0, 0): 0.1}, [(1, 0)], Allowance(81.0, step=1.0)) == []
    assert decide(what, {(0, 0): 0.1}, [(1, 0)], Allowance(80.5, step=1.0))[0].key == (0, 1)


def test_cheaper_segments_are_tried_before_the_search_ends() -> None:
    """If a promotion does not fit the rest of the time, a lower promotion or a new trial is begun in its place."""
    what = search("asha", trials=9, parallel=2)
    results = {(n, 0): 0.1 * n for n in range(3)} | {(0, rung): 0.1 for rung in range(1, 5)}
    results |= {(n, rung): 0.5 for n in (3, 4) for rung in (0, 1)} | {(3, 2): 0.4}
    assert decide(what, results, (), Allowance(1.5, step=1.0))[0].key == (5, 0)
    slow = Allowance(1.5, step=1.0, own={5: (0.0, 2.0)})
    assert (5, 0) not in [each.key for each in decide(what, results, (), slow)]


def test_values_are_a_pure_function_of_seed_and_number() -> None:
    """The same trial has the same values in any process; the values fill the ranges evenly."""
    found = [space.drawn(SPACE, 0, number) for number in range(200)]
    assert found[17] == space.drawn(SPACE, 0, 17) != space.drawn(SPACE, 1, 17)
    logs = sorted(math.log10(each["lr"]) for each in found)
    assert max(high - low for low, high in itertools.pairwise(logs)) < 0.1  # 4 / 200, and five times that
    assert {each["name"] for each in found} == {"adamw", "lamb"}
    assert all(isinstance(each["width"], int) and 16 <= each["width"] <= 256 for each in found)


def test_grid_lists_all_combinations_and_needs_points() -> None:
    """The last key varies fastest; a range without points is refused with the way out."""
    parts = space.dimensions({"a": {"log": [1e-3, 1e-1], "points": 3}, "b": [1, 2]})
    assert [tuple(each.values()) for each in space.grid(parts)] == [
        *((0.001, 1), (0.001, 2), (0.01, 1), (0.01, 2), (0.1, 1), (0.1, 2))
    ]
    with pytest.raises(space.SpaceError, match="number of points"):
        space.grid(space.dimensions({"a": {"log": [1e-3, 1e-1]}}))


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"uniform": [1, 1]}, "not below"),
        ({"log": [0, 1]}, "cannot begin at 0"),
        ({"int": [1.5, 3]}, "whole numbers"),
        ({"uniform": [0, 1], "log": True}, "unknown key `log`"),
        ({"uniform": [0, math.nan]}, "two numbers"),
        ([], "empty"),
        (["a", "a"], "twice"),
        (3, "a range or a list"),
        ({"choice": [1], "points": 3, "x": 1}, "unknown key `x`"),
    ],
)
def test_faulty_space_is_refused(written: Any, words: str) -> None:
    """Each fault names the key and the reason."""
    with pytest.raises(space.SpaceError, match=words) as caught:
        space.dimensions({"lr": written})
    assert caught.value.key == "lr"

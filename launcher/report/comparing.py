"""Compare jobs: differences of their configs, results, and the cost of the lowest loss that all jobs reached."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isclose
from typing import Any

from cloudtrain.entrypoints.format import amount, dollars, span

from ..job import Job
from ..jobs import shown_config
from ..jobs.view import outcome, view_of
from ..store import series as serieses
from ..store.registry import Registry
from . import facts
from .data import chart_data

_WINDOW = 1 / 60  # of a job's steps, on either side: single losses are noisy, so their mean counts
_MOST_DRAWN = 6000  # points of all jobs together
_FEW = 24  # with fewer rows each row is shown unsmoothed
_GRID = 200  # number of places at which two curves are compared
_EQUAL = 1e-3  # two losses with a smaller relative gap have no rank


@dataclass(frozen=True)
class Reached:
    """The point at which a job's loss had fallen to a value: the step, the seconds of run time, and the money."""

    step: int | None
    seconds: float | None
    usd: float | None


@dataclass(frozen=True)
class Comparison:
    """Jobs and their data, in the order in which the user named them."""

    jobs: tuple[Job, ...]
    datas: tuple[dict[str, Any], ...]
    drawn: tuple[dict[str, Any], ...]
    """The `datas`, reduced to as many points as a page can show."""
    results: tuple[dict[str, Any], ...]
    config: dict[str, list[Any]]
    """The keys that differ, with the value of each job."""
    target: float | None
    """The loss for `reached`: the lowest that all jobs reached, or the loss that the user asked for."""
    reached: tuple[Reached | None, ...]


def compared(registry: Registry, jobs: Sequence[Job], now_s: float, target: float | None = None) -> Comparison:
    """Return the comparison of the jobs, as known at `now_s`."""
    views = [view_of(job, registry.attempts(job), now_s) for job in jobs]
    runs = [(view, serieses.read(registry.database, view.job.id)) for view in views]
    datas = [chart_data(view, series) for view, series in runs]
    results = [facts.results(view, series) for view, series in runs]
    share = _MOST_DRAWN // len(runs)
    target = common_loss(datas) if target is None else target
    has_script = not all(job.config.get("task") for job in jobs)
    return Comparison(
        jobs=tuple(jobs),
        datas=tuple(datas),
        drawn=tuple(chart_data(view, serieses.drawable(series, share)) for view, series in runs),
        results=tuple(results),
        config=shown_config.differing([shown_config.shown(job, set_only=has_script) for job in jobs]),
        target=target,
        reached=tuple(None if target is None else reached(data, target, now_s) for data in datas),
    )


def smoothed(data: dict[str, Any]) -> list[tuple[int, float]]:
    """Return the index of each row of steps with a loss, and the mean loss of the steps around the row.

    As in the charts: equally many steps on both sides, fewer near the start; near the end fewer later steps. Steps that
    were lost and repeated count with the later values.
    """
    losses = data["steps"].get("loss", ())
    weights = data["steps"].get("weight") or [1] * len(losses)
    numbers = [(i, loss) for i, loss in enumerate(losses) if isinstance(loss, float | int) and weights[i]]
    rows = _not_repeated(numbers, data["steps"].get("step", ()))
    places = list(accumulate((weights[i] for i, _ in rows), initial=0))
    sums = list(accumulate((loss * weights[i] for i, loss in rows), initial=0.0))
    most = 0.5 + (0 if len(rows) < _FEW else max(2, round(_WINDOW * places[-1])))

    def until(place: float) -> float:
        """Return the sum over all steps before a place."""
        at = min(max(bisect_right(places, place) - 1, 0), len(rows) - 1)
        return float(sums[at] + rows[at][1] * (place - places[at]))

    found = []
    for row, (i, _) in enumerate(rows):
        middle = (places[row] + places[row + 1]) / 2
        left = min(most, middle)
        right = min(left, places[-1] - middle)
        found.append((i, (until(middle + right) - until(middle - left)) / (left + right)))
    return found


def common_loss(datas: Sequence[dict[str, Any]]) -> float | None:
    """Return the lowest loss that all jobs reached; None if a job reports no loss."""
    lowest = [min((loss for _, loss in smoothed(data)), default=None) for data in datas]
    return None if None in lowest else max(loss for loss in lowest if loss is not None)


def reached(data: dict[str, Any], target: float, now_s: float) -> Reached | None:
    """Return the point at which the job's loss first reached the target; None if never."""
    steps, curve = data["steps"], smoothed(data)
    at = next((at for at, (_, loss) in enumerate(curve) if loss <= target), None)
    if at is None:
        return None
    (left, before), (right, after) = curve[max(0, at - 1)], curve[at]
    # A row of many steps has the place of their middle: the loss fell between the row before and this row.
    is_between = before > target and "weight" in steps and steps["weight"][right] > 1
    share = (before - target) / (before - after) if is_between else 1.0

    def there(name: str) -> float | None:
        begin, end = steps[name][left], steps[name][right]
        if share == 1.0 or begin is None or end is None:
            return None if end is None else float(end)
        return float(begin + share * (end - begin))

    step, time_s = there("step"), there("time_s") or 0.0
    usd = there("usd") or None  # a machine without a price does not necessarily cost zero
    return Reached(None if step is None else round(step), ran_s(data, time_s, now_s), usd)


def ran_s(data: dict[str, Any], time_s: float, now_s: float) -> float | None:
    """Return the seconds that the job's attempts had run by a time, without the pauses between them."""
    spans = [(each["began_s"], each["ended_s"] or now_s) for each in data["attempts"] if each["began_s"] is not None]
    return sum(max(0.0, min(end_s, time_s) - begin_s) for begin_s, end_s in spans) if spans else None


def crossing(one: dict[str, Any], other: dict[str, Any], axis: str) -> tuple[float, int] | None:
    """Return the place along `usd` or `step` from which a job has the lower loss, and the job's index: 0 or 1.

    None if the same job is lower all the way, if the losses are equal at the end, or if the curves have no common
    stretch.
    """
    curves = [_curve(each, axis) for each in (one, other)]
    if not all(len(curve) > 1 for curve in curves):
        return None
    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if high <= low:
        return None
    places = [low + (high - low) * i / _GRID for i in range(_GRID + 1)]
    pairs = [(x, _value(curves[0], x), _value(curves[1], x)) for x in places]
    gaps = [(x, a > b) for x, a, b in pairs if not isclose(a, b, rel_tol=_EQUAL)]
    if not gaps or gaps[-1][0] != places[-1]:
        return None
    lower = int(gaps[-1][1])
    turn = next((i for i in range(len(gaps) - 1, 0, -1) if gaps[i][1] != gaps[i - 1][1]), None)
    return None if turn is None else (gaps[turn][0], lower)


def rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return the results of each job: a name, and the figures of the jobs as text."""
    names = [*_RESULTS, *dict.fromkeys(name for shown in comparison.results for name in shown if name not in _RESULTS)]
    table = [("state", [outcome(job) for job in comparison.jobs])]
    for name in names:
        values = [result.get(name) for result in comparison.results]
        if any(value is not None for value in values):
            of_metric = name.replace(".loss", ".evaluated loss").replace("metrics.", "").replace(".", " ")
            words = _RESULTS.get(name) or of_metric
            table.append((words, ["-" if value is None else _text(name, value) for value in values]))
    for words, field, name in _REACHED:
        values = [None if each is None else getattr(each, field) for each in comparison.reached]
        if any(value is not None for value in values):
            at = f"{words} smoothed loss {facts.figure(comparison.target)}{', USD' if field == 'usd' else ''}"
            words_of = ["-" if value is None else _text(name, value) for value in values]
            reached = zip(words_of, comparison.reached, strict=True)
            table.append((at, [text if point else "never" for text, point in reached]))
    return table


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison with stable names, with the jobs in the user's order."""
    return {
        "jobs": [
            {"job": data["job"], "results": result, "reached": None if each is None else vars(each)}
            for data, result, each in zip(comparison.datas, comparison.results, comparison.reached, strict=True)
        ],
        "config": comparison.config,
        "target_loss": comparison.target,
        "crossing": _crossing_json(comparison),
    }


def crossing_words(comparison: Comparison) -> str:
    """Return text: the place from which a job has the lower loss; "" without such a place."""
    place = _crossing_json(comparison)
    if place is None:
        return ""
    names = [job.id for job in comparison.jobs]
    after = names.index(place["lower_after"])
    where = dollars(place["at"] * 1e6) if place["axis"] == "usd" else f"step {round(place['at']):,}"
    return f"from {where} on the loss of {names[after]} is lower, before that of {names[1 - after]}"


def value_text(value: Any) -> str:
    """Return a config's value on one line, `-` if not set."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_RESULTS = {
    "steps": "steps",
    "loss": "loss",
    "lowest_loss": "lowest loss",
    "samples_per_s": "samples/s",
    "bytes_sent": "bytes a step",
    "running_s": "time",
    "spend_usd": "cost, USD",
}
_REACHED = (("step at", "step", "steps"), ("time to", "seconds", "running_s"), ("cost to", "usd", "spend_usd"))


def _crossing_json(comparison: Comparison) -> dict[str, Any] | None:
    if len(comparison.jobs) != 2:
        return None
    axis = "usd" if all(data["spend"] and data["spend"][-1][1] for data in comparison.datas) else "step"
    place = crossing(comparison.datas[0], comparison.datas[1], axis)
    return None if place is None else {"axis": axis, "at": place[0], "lower_after": comparison.jobs[place[1]].id}


def _text(name: str, value: Any) -> str:
    if name == "running_s":
        return span(value)
    if name == "spend_usd":
        return amount(value * 1e6)
    return facts.figure(value)


def _curve(data: dict[str, Any], axis: str) -> list[tuple[float, float]]:
    """Return the smoothed loss over an increasing axis."""
    found: list[tuple[float, float]] = []
    for i, loss in smoothed(data):
        x = data["steps"][axis][i]
        if x is None:
            continue
        while found and found[-1][0] >= x:
            found.pop()
        found.append((x, loss))
    return found


def _not_repeated(rows: Sequence[tuple[int, float]], steps: Sequence[int | None]) -> list[tuple[int, float]]:
    """Return the rows (index, loss) without those whose step a later row repeats or precedes."""
    kept, least = [], inf
    for i, loss in reversed(rows):
        step = steps[i]
        if step is None or step < least:
            kept.append((i, loss))
            least = least if step is None else step
    return kept[::-1]


def _value(curve: Sequence[tuple[float, float]], x: float) -> float:
    at = bisect_left(curve, (x,))
    if at == 0:
        return curve[0][1]
    if at == len(curve):
        return curve[-1][1]
    (left, before), (right, after) = curve[at - 1], curve[at]
    return before + (after - before) * (x - left) / (right - left)

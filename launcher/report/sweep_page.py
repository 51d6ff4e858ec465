"""The report of a sweep's job as a single HTML file: rungs, the best result over money, all trials.

The charts are places in a drawing: parallel coordinates of all trials, and the best result over money. The template
writes the SVG and escapes all texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cloudtrain.entrypoints.format import cell, dollars, most
from cloudtrain.entrypoints.sweep.search import Results, Search, ranked, values_of
from cloudtrain.entrypoints.sweep.space import Dimension

from ..job import Job
from ..jobs.view import outcome, view_of
from ..planning import search_spec
from ..store import sweeps
from ..store.progress import finite
from ..store.registry import Registry
from ..store.sweeps import SegmentRecord
from ..sweeps import costs, overview
from ..sweeps.costs import SweepCost
from ..text.units import moment, percent
from . import page
from .facts import figure

WIDTH, HEIGHT = 1120, 300
TOP, BOTTOM, LEFT, RIGHT = 34, 26, 70, 90
CLASSES = 5  # of colour, by rank
TICKS = 4
_MOST_CHOICES = 12  # names beside an axis


@dataclass(frozen=True)
class TrialEnd:
    """A trial at its last result."""

    trial: int
    values: dict[str, Any]
    value: float | None
    """The metric; None without a result, like `step`, which was trained."""
    step: int | None
    state: str
    micro: int | None
    """The trial's cost in micro-dollars; None if a price is unknown."""


@dataclass(frozen=True)
class Axis:
    """An axis at a place, with a name, and with ticks as (place, text)."""

    at: float
    name: str
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class BestCurve:
    """The best result so far as steps, all results as dots (x, y, text), and the ticks of both axes."""

    points: str
    dots: tuple[tuple[float, float, str], ...]
    x: Axis
    y: Axis


def sweep_html(registry: Registry, job: Job, now_s: float) -> str:
    """Return the report of a sweep's job, as known at `now_s`."""
    search, found = search_spec.search_of(job.config), overview.as_json(registry.database, job)
    cost = costs.costs_of(registry.database, view_of(job, registry.attempts(job), now_s))
    ends = ends_of(search, sweeps.segments(registry.database, job.id), cost)
    axes, lines = parallel(search.space, ends, found["metric"])
    return page.rendered(
        "sweep.html",
        (),
        title=f"{job.id}: {outcome(job)}",
        as_of=f"{moment(now_s)} UTC",
        job=job,
        outcome=outcome(job),
        sweep=found,
        plan=overview.plan_lines(job.config, job.attempt.plan),
        not_begun=job.attempt.progress.get("not_begun"),
        cards=list(_cards(found, cost)),
        width=WIDTH,
        height=HEIGHT,
        curve=best_curve(_results(cost, found["metric"]), search.mode),
        axes=axes,
        lines=lines,
        keys=[each.key for each in search.space],
        trials=[_row(each) for each in ends],
        figure=overview.figure,
        place_of=overview.place_of,
    )


def sweep_json(registry: Registry, job: Job, now_s: float) -> dict[str, Any]:
    """Return the data of the report with stable names: the trials, the cost, and all trials in the order of rank."""
    search, view = search_spec.search_of(job.config), view_of(job, registry.attempts(job), now_s)
    cost = costs.costs_of(registry.database, view)
    ends = ends_of(search, sweeps.segments(registry.database, job.id), cost)
    trials = [
        {name: value for name, value in vars(each).items() if name != "micro"}
        | {"value": finite(each.value), "usd": None if each.micro is None else each.micro / 1e6}
        for each in ends
    ]
    about = {"job": job.id, "state": job.attempt.state.state}
    return {**about, **overview.as_json(registry.database, job), "cost": costs.as_json(cost), "ends": trials}


def ends_of(search: Search, segments: list[SegmentRecord], cost: SweepCost) -> list[TrialEnd]:
    """Return the trials at their last results: the best first, trials without a result last."""
    results = overview.results_of(segments)
    rank = {trial: place for place, trial in enumerate(ranked(search, results))}
    last: dict[int, SegmentRecord] = {}
    for each in segments:
        if each.trial not in last or each.state in sweeps.ENDED:
            last[each.trial] = each
    trials = sorted(last, key=lambda trial: (rank.get(trial, len(last)), trial))
    return [_end(search, results, last[trial], trial in rank, cost) for trial in trials]


def _end(search: Search, results: Results, last: SegmentRecord, is_ranked: bool, cost: SweepCost) -> TrialEnd:
    own = [each.segment for each in cost.trials[last.trial] if each.segment.value is not None]
    found = own[-1] if is_ranked and own else None
    value, step = (None, None) if found is None else (found.value, found.step)
    if found is not None and step is None:
        step = search.rungs[found.rung]
    values, state = values_of(search, results, last.trial, last.rung), costs.state_of(cost, last.trial)
    return TrialEnd(last.trial, values, value, step, state, costs.total(cost.trials[last.trial]))


def _results(cost: SweepCost, metric: str) -> Iterator[tuple[int, float, str]]:
    """Yield each result with the money spent until its end; an unknown price counts as 0."""
    spent = 0
    for each in sorted(cost.segments, key=lambda each: each.segment.ended_s or float("inf")):
        spent += each.micro or 0
        row = each.segment
        if row.state == "done" and row.value is not None:
            at = overview.place_of({"unit": cost.unit}, {"step": cost.rungs[row.rung]})
            text = f"trial {row.trial}, {at}: {metric} {row.value:.6g}, {most(spent)} spent"
            yield spent, row.value, text


def _cards(found: dict[str, Any], cost: SweepCost) -> Iterator[tuple[str, str, str]]:
    first = found["best"][0] if found["best"] else None
    spent, limit_micro = cost.money.spent_micro, cost.money.limit_micro
    limit = "no budget" if limit_micro is None else f"of {dollars(limit_micro)}"
    if first is not None:
        at = f"trial {first['trial']} at {overview.ended_at(found, first)}"
        yield f"Best {found['metric']}", overview.figure(first["value"]), at
    yield "Trials", str(found["trials"]), f"of {found['planned']} planned"
    yield "Spent", most(spent), limit
    if spent:
        yield "Idle", percent(cost.idle_micro / spent), "the job's start, and free slots"
    if cost.paused and cost.saved_micro is not None:
        steps = f"an estimate: {cost.saved_steps:,} untrained {cost.unit}"
        yield "Saved by pauses", dollars(cost.saved_micro), steps


def _row(each: TrialEnd) -> list[str]:
    values = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in each.values.values()]
    result = "-" if each.value is None else overview.figure(each.value)
    step, cost = "-" if each.step is None else str(each.step), cell(each.micro)
    return [str(each.trial), result, step, each.state, cost, *values]


def parallel(
    space: Sequence[Dimension], ends: Sequence[TrialEnd], metric: str
) -> tuple[list[Axis], list[tuple[str, str, str]]]:
    """Return the axes and the lines, the best trial last and therefore on top; `ends` are in rank order.

    A line has points in the form of SVG, the class of the style, and the text for the pointer. Trials without a result
    end before the metric's axis. Of 20 results or more, the worst tenth counts as equal, so that a diverged trial does
    not press all other results together.
    """
    known = sorted(each.value for each in ends if each.value is not None and math.isfinite(each.value))
    names = [each.key for each in space]
    gap = (WIDTH - LEFT - RIGHT) / max(1, len(names))
    axes = [Axis(LEFT + i * gap, each.key.rpartition(".")[2], _dimension_ticks(each)) for i, each in enumerate(space)]
    is_max = bool(known) and ends[0].value is not None and ends[0].value > known[len(known) // 2]
    low, high = _span_of(known, is_max=is_max) if known else (0.0, 1.0)
    axes.append(Axis(LEFT + len(names) * gap, metric, _number_ticks(low, high) if known else ()))
    ranked = [each for each in ends if each.value is not None]
    lines = list[tuple[str, str, str]]()
    for rank, each in enumerate(ends):
        shares = [_share(dimension, each.values[dimension.key]) for dimension in space]
        style = "sw-none"
        if each.value is not None:
            shares.append(_part(each.value, low, high))
            style = "sw-best" if rank == 0 else f"sw-q{min(CLASSES - 1, rank * CLASSES // len(ranked))}"
        points = " ".join(f"{axes[i].at:.1f},{_y(share):.1f}" for i, share in enumerate(shares))
        lines.append((points, style, _title(each, metric)))
    return axes, lines[::-1]


def best_curve(results: Iterable[tuple[int, float, str]], mode: str) -> BestCurve | None:
    """Return the best result over the money, of results (spent micro-dollars, value, text); None without a result."""
    found = [each for each in results if math.isfinite(each[1])]
    if not found:
        return None
    values = sorted(value for _, value, _ in found)
    low, high = _span_of(values, is_max=mode == "max")
    most = max(spent for spent, _, _ in found) / 1e6 or 1.0
    choose = max if mode == "max" else min

    def x(spent: float) -> float:
        return LEFT + spent / 1e6 / most * (WIDTH - LEFT - RIGHT)

    corners, best = list[tuple[float, float]](), found[0][1]
    for spent, value, _ in found:
        corners += [(x(spent), _y(_part(best, low, high)))] if corners else []
        best = choose(best, value)
        corners.append((x(spent), _y(_part(best, low, high))))
    dots = tuple((round(x(spent), 1), round(_y(_part(value, low, high)), 1), text) for spent, value, text in found)
    across = tuple((round(x(at * 1e6), 1), f"{figure(at)} USD") for at in _round_numbers(0.0, most))
    points = " ".join(f"{left:.1f},{top:.1f}" for left, top in corners)
    return BestCurve(points, dots, Axis(HEIGHT - BOTTOM, "", across), Axis(LEFT, "", _number_ticks(low, high)))


def _span_of(known: Sequence[float], *, is_max: bool) -> tuple[float, float]:
    """Return the least and the greatest value of the metric's axis, of values in order."""
    cut = len(known) // 10 if len(known) >= 20 else 0
    return (known[cut], known[-1]) if is_max else (known[0], known[-1 - cut])


def _title(each: TrialEnd, metric: str) -> str:
    result = f"{metric} {figure(each.value)} at step {each.step}" if each.value is not None else each.state
    return f"trial {each.trial}: {result}; {overview.values_text(each.values)}"


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _part(value: float, low: float, high: float) -> float:
    """Return the place of a value between both ends, 0 to 1; 0.5 on an axis with a single value."""
    return 0.5 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))


def _share(dimension: Dimension, value: Any) -> float:
    if dimension.kind == "choice":
        return _part(dimension.choices.index(value), 0, len(dimension.choices) - 1)
    if dimension.is_log:
        return _part(math.log(value), math.log(dimension.low), math.log(dimension.high))
    return _part(value, dimension.low, dimension.high)


def _dimension_ticks(dimension: Dimension) -> tuple[tuple[float, str], ...]:
    if dimension.kind == "choice":
        shown = dimension.choices[:: -(-len(dimension.choices) // _MOST_CHOICES)]
        return tuple((_y(_share(dimension, each)), overview.value_text(each)) for each in shown)
    if not dimension.is_log:
        return _number_ticks(dimension.low, dimension.high)
    low, high = math.log10(dimension.low), math.log10(dimension.high)
    step = max(1, math.ceil((high - low) / TICKS))
    powers = range(math.ceil(low), math.floor(high) + 1, step)
    places = [10.0**power for power in powers] if len(powers) > 1 else [dimension.low, dimension.high]
    return tuple((_y(_share(dimension, each)), figure(each)) for each in places)


def _number_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    return tuple((round(_y(_part(each, low, high)), 1), figure(each)) for each in _round_numbers(low, high))


def _round_numbers(low: float, high: float) -> list[float]:
    """Return about TICKS round numbers from low to high: multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]

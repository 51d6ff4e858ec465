"""The charts of a sweep as places in a drawing: parallel coordinates of all trials, and the best result over money.

Pure functions; the template writes the SVG and escapes all texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloudtrain.entrypoints.sweep.space import Dimension

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
    job: str
    values: dict[str, Any]
    value: float | None
    """The metric; None without a result, like `step`."""
    step: int | None
    state: str
    micro: int | None
    """The trial's cost in micro-dollars; None if a price is unknown."""


@dataclass(frozen=True)
class Drawn:
    """A line: points in the form of SVG, the class of the style, and the text for the pointer."""

    points: str
    style: str
    title: str


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


def parallel(space: Sequence[Dimension], ends: Sequence[TrialEnd], metric: str) -> tuple[list[Axis], list[Drawn]]:
    """Return the axes and the lines, the best trial last and therefore on top; `ends` are in rank order.

    Trials without a result end before the metric's axis. Of 20 results or more, the worst tenth counts as equal, so
    that a diverged trial does not press all other results together.
    """
    known = sorted(each.value for each in ends if each.value is not None and math.isfinite(each.value))
    names = [each.key for each in space]
    gap = (WIDTH - LEFT - RIGHT) / max(1, len(names))
    axes = [Axis(LEFT + i * gap, each.key.rpartition(".")[2], _dimension_ticks(each)) for i, each in enumerate(space)]
    is_max = bool(known) and ends[0].value is not None and ends[0].value > known[len(known) // 2]
    low, high = _span_of(known, is_max=is_max) if known else (0.0, 1.0)
    axes.append(Axis(LEFT + len(names) * gap, metric, _number_ticks(low, high) if known else ()))
    ranked = [each for each in ends if each.value is not None]
    lines = []
    for rank, each in enumerate(ends):
        shares = [_share(dimension, each.values[dimension.key]) for dimension in space]
        style = "sw-none"
        if each.value is not None:
            shares.append(_part(each.value, low, high))
            style = "sw-best" if rank == 0 else f"sw-q{min(CLASSES - 1, rank * CLASSES // len(ranked))}"
        points = " ".join(f"{axes[i].at:.1f},{_y(share):.1f}" for i, share in enumerate(shares))
        lines.append(Drawn(points, style, _title(each, metric)))
    return axes, lines[::-1]


def best_curve(results: Sequence[tuple[int, float, str]], mode: str) -> BestCurve | None:
    """Return the best result so far over the spent micro-dollars; results (spent, value, text) in order of their ends.

    None without a finite result.
    """
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
    values = ", ".join(f"{key.rpartition('.')[2]} {_text(value)}" for key, value in each.values.items())
    result = f"{metric} {figure(each.value)} at step {each.step}" if each.value is not None else each.state
    return f"trial {each.trial}: {result}; {values}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


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
        return tuple((_y(_share(dimension, each)), _text(each)) for each in shown)
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

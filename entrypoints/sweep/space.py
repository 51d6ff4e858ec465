"""The search space of a sweep: the written form of each key, and the values of a trial.

The values are a pure function of (seed, trial number), so a search has no state besides the trials' results. Numbers
follow the quasi-random sequence R_d: x_k(n) = frac(shift_k + n phi_d^-(k+1)), where phi_d is the positive root of
x^(d+1) = x + 1. Source: Roberts 2018, "The unreasonable effectiveness of quasirandom sequences".
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

KINDS = ("uniform", "log", "int", "choice")
FORMS = "as in `{log: [1e-5, 1e-1]}`, `{uniform: [0, 0.3]}`, `{int: [16, 256], log: true}` or a list of choices"
MOST_TRIALS = 100_000  # of a grid
_FACTORS = (0.8, 1.2)  # of a perturbed number; source: Jaderberg et al. 2017, section 4.1
_ANEW = 0.25  # the share of values that a perturbation draws anew; same source


class SpaceError(ValueError):
    """A part of the space has no meaning; `key` is the key of the space, and `hint` describes the fix."""

    def __init__(self, key: str, message: str, hint: str = FORMS) -> None:
        super().__init__(message)
        self.key, self.message, self.hint = key, message, hint


@dataclass(frozen=True)
class Dimension:
    """The possible values of a key: a range from `low` to `high`, both included, or `choices`.

    `points` is the number of values of a range in a grid; None for a choice, and for all whole numbers of a range.
    """

    key: str
    kind: Literal["uniform", "log", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    choices: tuple[Any, ...] = ()
    points: int | None = None

    def at(self, share: float) -> Any:
        """Return the value at a share of the range, 0 <= share < 1, by equal steps of the value or of its logarithm."""
        if self.kind == "choice":
            return self.choices[int(share * len(self.choices))]
        if self.kind == "int":
            low, high = (self.low - 0.5, self.high + 0.5) if not self.is_log else (self.low, self.high + 1)
            value = math.floor(_between(low, high, share, self.is_log) + (0.0 if self.is_log else 0.5))
            return int(min(max(value, self.low), self.high))
        return _short(_between(self.low, self.high, share, self.is_log))

    def most(self) -> int:
        """Return the most values that `listed` may have. Raises SpaceError for a range without `points`."""
        if self.points is None and self.kind not in ("int", "choice"):
            raise SpaceError(self.key, "a grid needs the number of points of a range", "add `points: 5`")
        return len(self.choices) or self.points or int(self.high - self.low) + 1

    def listed(self) -> list[Any]:
        """Return all values for a grid."""
        if self.kind == "choice":
            return list(self.choices)
        if self.points is None:
            return list(range(int(self.low), int(self.high) + 1))
        shares = [index / max(1, self.points - 1) for index in range(self.points)]
        found = [_between(self.low, self.high, share, self.is_log) for share in shares]
        return list(dict.fromkeys(round(each) if self.kind == "int" else _short(each) for each in found))

    def near(self, value: Any, draw: float) -> Any:
        """Return a perturbed value: a number times 0.8 or 1.2 within the range, or a neighbouring choice."""
        step = -1 if draw < 0.5 else 1
        if self.kind == "choice":
            place = self.choices.index(value) + step
            return self.choices[min(max(place, 0), len(self.choices) - 1)]
        moved = min(max(value * _FACTORS[step > 0], self.low), self.high)
        if self.kind == "int":  # a small number moves by 1
            return int(min(max(round(moved) if round(moved) != value else value + step, self.low), self.high))
        return _short(moved)


def dimensions(space: Mapping[str, Any]) -> tuple[Dimension, ...]:
    """Return the dimensions of a written space, in its order. Raises SpaceError for the first faulty key."""
    return tuple(_dimension(key, written) for key, written in space.items())


def unit(*words: object) -> float:
    """Return a number in [0, 1) that depends on the words alone (SHA-256)."""
    found = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(found[:7], "big") / (1 << 56)


def drawn(space: Sequence[Dimension], seed: int, number: int) -> dict[str, Any]:
    """Return the values of trial `number`: a point of the quasi-random sequence, shifted by the seed."""
    root = _root(len(space))
    shares = ((unit(seed, each.key) + number * root ** -(index + 1)) % 1.0 for index, each in enumerate(space))
    return {each.key: each.at(share) for each, share in zip(space, shares, strict=True)}


def grid(space: Sequence[Dimension]) -> list[dict[str, Any]]:
    """Return all combinations; the last key varies fastest.

    Raises SpaceError for a range without `points`, and for more than MOST_TRIALS combinations.
    """
    keys = [each.key for each in space]
    if (count := math.prod(each.most() for each in space)) > MOST_TRIALS:
        largest = max(space, key=Dimension.most).key
        message = f"the grid has {count:,} trials, more than {MOST_TRIALS:,}"
        raise SpaceError(largest, message, "fewer `points` or choices, or `algorithm: random`")
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(each.listed() for each in space))]


def perturbed(space: Sequence[Dimension], values: Mapping[str, Any], *words: object) -> dict[str, Any]:
    """Return the values, each perturbed or, with probability 1/4, drawn anew; the words determine the draws."""
    found = {}
    for each in space:
        draw = unit(*words, each.key, "value")
        is_new = unit(*words, each.key) < _ANEW
        found[each.key] = each.at(draw) if is_new else each.near(values[each.key], draw)
    return found


def _dimension(key: str, written: Any) -> Dimension:
    if _is_list(written):
        written = {"choice": list(written)}
    if not isinstance(written, Mapping):
        raise SpaceError(key, "a range or a list of choices is expected")
    kinds = [kind for kind in KINDS if _is_list(written.get(kind))]
    if len(kinds) != 1:
        raise SpaceError(key, f"one of {', '.join(KINDS)} with a list is expected")
    (kind,) = kinds
    if unknown := [str(each) for each in written if each not in (kind, "log" if kind == "int" else kind, "points")]:
        raise SpaceError(key, f"unknown key `{unknown[0]}` beside `{kind}`")
    items = tuple(written[kind])
    if kind == "choice":
        if not items:
            raise SpaceError(key, "the list of choices is empty")
        if len({json.dumps(each) for each in items}) < len(items):
            raise SpaceError(key, "a choice is listed twice", "once is enough")
        return Dimension(key, "choice", choices=items)
    return _range(key, kind, items, written)


def _range(key: str, kind: Any, bounds: tuple[Any, ...], written: Mapping[str, Any]) -> Dimension:
    if len(bounds) != 2 or not all(_is_number(each) for each in bounds):
        raise SpaceError(key, f"`{kind}` needs two numbers, the lowest and the highest value")
    low, high = bounds
    if not low < high:
        raise SpaceError(key, f"the lowest value {low} is not below the highest value {high}", "exchange the two")
    if kind == "int" and not all(isinstance(each, int) for each in bounds):
        raise SpaceError(key, "`int` needs two whole numbers")
    is_log = kind == "log" or bool(written.get("log"))
    if is_log and low <= 0:
        raise SpaceError(key, f"a logarithmic range cannot begin at {low}", "begin above 0, or use `uniform`")
    points = written.get("points")
    if points is not None and (not isinstance(points, int) or isinstance(points, bool) or points < 1):
        raise SpaceError(key, "`points` is a whole number above 0")
    return Dimension(key, kind, float(low), float(high), is_log, points=points)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: Any) -> bool:
    """Return whether the value is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _between(low: float, high: float, share: float, is_log: bool) -> float:
    return low * (high / low) ** share if is_log else low + (high - low) * share


def _short(value: float) -> float:
    """Return the value with six significant digits, which a person can read and copy."""
    return float(f"{value:.6g}")


def _root(count: int) -> float:
    """Return the positive root of x^(count + 1) = x + 1, by fixed-point iteration."""
    x = 2.0
    for _ in range(64):
        x = (1.0 + x) ** (1.0 / (count + 1))
    return x

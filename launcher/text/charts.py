"""Figures as rows of characters: sparklines, charts of a few rows, bars; of blocks, or ASCII without UTF-8."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Signs:
    """`levels` go from low to high, without a blank; `parts` can be distinguished without colour."""

    levels: str
    full: str
    empty: str
    parts: str
    rule: str
    cut: str
    pointer: str
    encoding: str


UNICODE = Signs("▁▂▃▄▅▆▇█", "█", "░", "█▓▒░", "─", "…", "▶", "utf-8")
ASCII = Signs("_.-:=+*#", "#", ".", "#=:.", "-", "~", ">", "ascii")


def signs_of(environ: Mapping[str, str] = os.environ) -> Signs:
    """Return the characters that the locale can show.

    LC_CTYPE=C.UTF-8 alone proves no UTF-8: Python itself sets the variable at its start if the locale is C (PEP 538).
    """
    asked = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or "C"
    if not environ.get("LC_ALL") and environ.get("LC_CTYPE") == "C.UTF-8":
        asked = environ.get("LANG") or "C"
    return UNICODE if "utf" in asked.lower() else ASCII


def chart(values: Sequence[float | None], width: int, height: int, signs: Signs) -> list[str]:
    """Return `height` rows of `width` characters, the top row first: blank if unknown, half as high if all equal."""
    bins = [None if value is None or not math.isfinite(value) else value for value in _joined(values, max(1, width))]
    known = [value for value in bins if value is not None]
    if not known or width < 1:
        return [""] * height
    low, high = min(known), max(known)
    is_flat = not 0 < high - low < math.inf
    steps = len(signs.levels) * height
    rows = [[" "] * len(bins) for _ in range(height)]
    for place, value in enumerate(bins):
        if value is None:
            continue
        share = 0.5 if is_flat else (value - low) / (high - low)
        level = min(steps, 1 + int(share * steps))  # from 1, so that the least value is visible
        for row in range(height):
            here = level - row * len(signs.levels)
            if here > 0:
                rows[height - 1 - row][place] = signs.levels[min(here, len(signs.levels)) - 1]
    return ["".join(row) for row in rows]


def _joined(values: Sequence[float | None], count: int) -> list[float | None]:
    """Return at most `count` values, each the mean of the known values in its section; fewer values stay unchanged."""
    if len(values) <= count:
        return list(values)
    ends = [place * len(values) // count for place in range(count + 1)]
    parts = [[each for each in values[begin:end] if each is not None] for begin, end in pairwise(ends)]
    return [sum(part) / len(part) if part else None for part in parts]


def bar(share: float, width: int, signs: Signs) -> str:
    """Return a bar filled to the share, 0 to 1: completely only at 1, and empty only below 1 %, shown as `<1 %`."""
    if width < 1:
        return ""
    full = min(width, max(math.floor(max(0.0, share) * width), int(share >= 0.01)))
    return signs.full * full + signs.empty * (width - full)


def stacked(shares: Sequence[float], width: int, signs: Signs) -> list[str]:
    """Return a run of signs for each share of the whole, `width` together; the largest remainders round up."""
    total = sum(shares)
    if total <= 0 or width < 1:
        return [""] * len(shares)
    exact = [share / total * width for share in shares]
    cells = [math.floor(each) for each in exact]
    order = sorted(range(len(shares)), key=lambda place: cells[place] - exact[place])
    for place in order[: width - sum(cells)]:
        cells[place] += 1
    return [signs.parts[place % len(signs.parts)] * count for place, count in enumerate(cells)]

"""The report's section about tests: figures by class, the confusion matrix, and the calibration, as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..jobs.evaluations import Tested, headline, quantiles
from .facts import figure

CELL, SIDE, EDGE = 34, 260, 46  # of a cell of the matrix, of the calibration's square, of the axes
_MOST_CLASSES = 30  # in a matrix that a reader can read
_FAINTEST = 0.12
_WHICH, _COMPARED = ("checkpoint", "step", "weights"), ("accuracy", "loss", "macro_f1", "mae", "rmse", "r2")


def section(tests: Sequence[Tested]) -> list[dict[str, Any]]:
    """Return the newest test of each split; an odd value of a job's event is left out."""
    newest = {str(each.figures.get("split")): each for each in tests}
    words = dict(zip(newest, headline(tests), strict=True))
    return [_picture(each.figures, words[split]) for split, each in newest.items()]


def _picture(figures: Mapping[str, Any], words: str) -> dict[str, Any]:
    """Return a test for the template.

    `cells`: x, y, opacity, count, whether the text is light, and the title. `bars`: x, y, height and title of the
    calibration's bins, whose width is a tenth of SIDE; `dots`: x and y.
    """
    compared = [each for each in figures.get("compared") or () if isinstance(each, dict)]
    names = [name for name in _COMPARED if any(name in each for each in compared)]
    which = [[str(each.get(key) or "-") for key in _WHICH] for each in compared]
    rows = [(*row, *(_text(each.get(name)) for name in names)) for row, each in zip(which, compared, strict=True)]
    table = _rows(figures.get("confusion"))
    is_shown = 0 < len(table) <= _MOST_CLASSES and all(len(row) == len(table) for row in table)
    worst = [each for each in figures.get("worst") or () if isinstance(each, dict)]
    keys = tuple(worst[0]) if worst else ()
    bins = _rows(figures.get("calibration"), 3)
    same = "This split is the eval split, which chose the best checkpoint: the figures are too good."
    return {
        "words": words,
        "warning": same if figures.get("same_as_eval") is True else "",
        "compared": tuple(rows) if len(rows) > 1 else (),
        "head": tuple(name.replace("_f1", " F1").capitalize().replace("f1", "F1") for name in (*_WHICH, *names)),
        "classes": tuple((str(n), *map(_text, row)) for n, row in enumerate(_rows(figures.get("classes")))),
        "count": len(table) if is_shown else 0,
        "cells": tuple(_cells(table)) if is_shown else (),
        "bars": tuple(_bar(place, *row) for place, row in enumerate(bins) if row[0]),
        "dots": tuple((_x(row[2]), _y(row[1])) for row in bins if row[0]),
        "pairs": tuple(f"{a:.0f} as {b:.0f}: {n:.0f}" for n, a, b in _rows(figures.get("pairs"), 3)),
        "residuals": quantiles(figures),
        "worst": tuple(tuple(_text(each.get(key)) for key in keys) for each in worst),
        "worst_head": tuple(key.capitalize() for key in keys),
    }


def _cells(table: Sequence[Sequence[float]]) -> list[tuple[float, float, float, str, bool, str]]:
    """Return the matrix's cells; the opacity is the share of the target's samples."""
    found: list[tuple[float, float, float, str, bool, str]] = []
    for target, row in enumerate(table):
        whole = sum(row)
        for chosen, count in enumerate(row):
            share = count / whole if whole else 0.0
            opacity = round(_FAINTEST + (1 - _FAINTEST) * share, 3) if count else 0.0
            title = f"target {target}, predicted {chosen}: {count:.0f} of {whole:.0f}"
            text = f"{count:.0f}" if count else ""
            found.append((EDGE + CELL * chosen, EDGE + CELL * target, opacity, text, opacity > 0.55, title))
    return found


def _bar(place: int, count: float, right: float, sure: float) -> tuple[float, float, float, str]:
    title = f"{count:.0f} samples, {100 * right:.1f} % right, at a probability of {100 * sure:.1f} % on average"
    return EDGE + place * SIDE / 10, _y(right), round(SIDE * right, 1), title


def _x(share: float) -> float:
    return round(EDGE + SIDE * min(1.0, max(0.0, share)), 1)


def _y(share: float) -> float:
    return round(10 + SIDE * (1 - min(1.0, max(0.0, share))), 1)


def _rows(value: Any, length: int | None = None) -> list[list[float]]:
    """Return the rows of numbers in the value; other rows, from a job's own event, are left out."""
    rows = [row for row in value if isinstance(row, list)] if isinstance(value, list) else []
    rows = [row for row in rows if all(type(each) in (int, float) for each in row)]
    return [row for row in rows if length is None or len(row) == length]


def _text(value: Any) -> str:
    return "-" if value is None else figure(value)

"""Tables for spreadsheets: CSV in which no cell is taken for a formula."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["csv_text"]

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets take a cell for that begins so, whoever named it


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the lines, the head first; a text that a spreadsheet would run gets an apostrophe in front."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([head, *([_safe(cell) for cell in row] for row in rows)])
    return out.getvalue().rstrip("\n")


def _safe(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell

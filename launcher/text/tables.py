"""Tables and long lines, fitted to the width of a terminal and uncut in files and pipes; tables as CSV."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

INDENT, LABEL = "  ", 12  # columns of a label with the blanks after the label
LEAST = 8  # characters that stay of a cut cell
_GLUE = "\0"  # in place of a blank that stays
TINY = 20  # columns; a narrower terminal is a mistake
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell with a first character of these as a formula
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_LABEL = re.compile(r" *\S+(?: \S+)* {2,}(?=\S)")


def width(stream: TextIO | None = None) -> int | None:
    """Return COLUMNS, else the terminal's columns; None if the stream (default: standard output) is no terminal."""
    out = stream or sys.stdout
    columns = _measured(out, "COLUMNS", 0) if out.isatty() else None
    return None if columns is None else max(TINY, columns)


def size() -> tuple[int | None, int | None]:
    """Return the terminal's columns (as `width` does) and rows, or LINES; None and None without a terminal."""
    columns = width()
    return columns, None if columns is None else _measured(sys.stdout, "LINES", 1) or None


def _measured(out: TextIO, variable: str, side: int) -> int | None:
    """Return the number in the variable, else the terminal's columns (side 0) or rows; None if unknown."""
    asked = os.environ.get(variable, "")
    if asked.isascii() and asked.isdecimal() and int(asked) > 0:
        return int(asked)
    try:
        return os.get_terminal_size(out.fileno())[side]
    except (OSError, ValueError):
        return None


def labelled(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each label and its text; a row without a label continues the row above."""
    return [f"{INDENT}{label:<{LABEL}}{text}" for label, text in rows]


def wrapped(lines: Iterable[str], columns: int | None) -> list[str]:
    """Return the lines broken at words, below the start of their text; never in a command, which users copy."""
    found: list[str] = []
    for line in (part for each in lines for part in each.split("\n")):
        found += [line] if columns is None or len(_COLOUR.sub("", line)) <= columns else _wrapped(line, columns)
    return found


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    drop: Sequence[str] = (),
    shorten: Mapping[str, int] | None = None,
    below: str = "",
    columns: int | None = None,
) -> list[str]:
    """Return aligned lines, the head first; uncut if `columns` is None.

    If the table is too wide, the column `below` goes under each row; then the columns in `drop` go, in the given order,
    until the rest fits with the columns in `shorten` cut, to the given widths at least; at last all but the first are
    cut.
    """
    if columns is None or _total(_widths(head, rows)) <= columns:
        return _aligned(head, rows, _widths(head, rows))
    under = head.index(below) if below in head else None
    notes = ["" if under is None else row[under] for row in rows]
    kept = [i for i in range(len(head)) if i != under]
    least = shorten or {}
    for name in [None, *drop]:
        kept = [i for i in kept if head[i] != name]
        named = {place: least[head[i]] for place, i in enumerate(kept) if head[i] in least}
        widths = _cut([_widths(head, rows)[i] for i in kept], named, columns)
        if _total(widths) <= columns:
            break
    else:
        widths = _cut(widths, dict.fromkeys(range(1, len(kept)), LEAST), columns)
    lines = _aligned([head[i] for i in kept], [[row[i] for i in kept] for row in rows], widths)
    found = lines[:1]
    for line, note in zip(lines[1:], notes, strict=True):
        found += [line, *(wrapped([f"    {note}"], columns) if note else [])]
    return found


def hidden(head: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Return a line with the columns of the head that are missing in a table on a narrow terminal, if any."""
    names = ", ".join(name for name in head if name not in lines[0])
    return [f"not shown for lack of room: {names}; --json shows all"] if names else []


def _wrapped(line: str, columns: int) -> list[str]:
    import textwrap  # few commands print a line longer than the terminal

    label = _LABEL.match(line)
    begin = len(line) - len(line.lstrip())
    hang = min(begin + 2, columns // 2)
    if label and label.end() <= columns // 2:
        begin = hang = label.end()
    text = " ".join(chunk.replace(" ", _GLUE) for chunk in _chunks(line[begin:]))
    wrapper = textwrap.TextWrapper(columns, line[:begin], " " * hang, break_long_words=False, break_on_hyphens=False)
    return [each.replace(_GLUE, " ") for each in wrapper.wrap(text)] or [line[:begin]]


def _chunks(text: str) -> list[str]:
    """Return the words of the text; the words of a command stay together."""
    found: list[str] = []
    is_command = False
    for word in text.split():
        if is_command and not word.startswith("("):
            found[-1] += f" {word}"
        else:
            found.append(word)
            is_command = word.lstrip("`(") == "cloudtrain"
        is_command = is_command and word[-1] not in ",;:.`)"
    return found


def _widths(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(head, *rows, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _cut(widths: list[int], least: Mapping[int, int], columns: int) -> list[int]:
    """Return the widths, with the widest columns in `least` cut until all columns fit or none can shrink further."""
    found = list(widths)
    for _ in range(_total(found) - columns):
        places = [place for place, most in least.items() if found[place] > most]
        if not places:
            break
        widest = max(places, key=lambda place: found[place])
        found[widest] -= 1
    return found


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    form = "  ".join(f"{{:<{each}}}" for each in widths).format  # fast, because a table may have ten thousand rows
    if any(most > each for most, each in zip(_widths(head, rows), widths, strict=True)):
        head, *rows = [
            [cell if len(cell) <= each else f"{cell[: each - 1]}…" for cell, each in zip(row, widths, strict=True)]
            for row in [head, *rows]
        ]
    return [form(*row).rstrip() for row in [head, *rows]]


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the table as CSV, the head first; a cell that a spreadsheet would run gets an apostrophe in front."""
    import csv  # few commands write CSV
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in row])
    return out.getvalue().rstrip("\n")

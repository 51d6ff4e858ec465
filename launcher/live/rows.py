"""Rows of a screen: rich text of one row, no wider than allowed. A job's text is never interpreted as markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from cloudtrain.launcher.text.charts import Signs

__all__ = [
    "LABEL",
    "GOOD",
    "BAD",
    "QUIET",
    "STATE_STYLES",
    "WARNS",
    "Part",
    "filled",
    "fitted",
    "in_job",
    "labelled",
    "row",
    "sides",
]

Part = str | tuple[str, str]  # text, or text and its style

LABEL = 11  # columns of the label before a value
QUIET, GOOD, WARNS, BAD = "bright_black", "green", "yellow", "bold red"
STATE_STYLES = {
    "pending": "bold yellow",
    "running": "bold cyan",
    "stopping": "bold yellow",
    "succeeded": "bold green",
    "failed": BAD,
    "stopped": "bold magenta",
}
# The folder of a node of a local or ssh job, in tracebacks; `code/train.py` remains.
_JOB_FOLDER = re.compile(r"/[^\s\"']*/attempt-\d+/node-\d+/")


def in_job(text: str) -> str:
    """Return the text with paths relative to the job's folder."""
    return _JOB_FOLDER.sub("", text)


def row(width: int, signs: Signs, *parts: Part) -> Text:
    """Return the parts joined, cut at the width with a sign for the cut."""
    return fitted(Text.assemble(*parts, no_wrap=True, end=""), width, signs)


def fitted(text: Text, width: int, signs: Signs) -> Text:
    """Return the text cut to the width."""
    if text.cell_len <= width:
        return text
    text.truncate(max(0, width - 1), overflow="crop")
    text.append(signs.cut, QUIET)
    return text


def sides(width: int, signs: Signs, left: Sequence[Part], right: Sequence[Part]) -> Text:
    """Return a row with a part at each end; the right part is dropped if both do not fit."""
    text = Text.assemble(*left, no_wrap=True, end="")
    other = Text.assemble(*right, no_wrap=True, end="")
    gap = width - text.cell_len - other.cell_len
    if gap < 2 and other.cell_len:
        return fitted(text, width, signs)
    text.append(" " * gap)
    text.append_text(other)
    return text


def labelled(width: int, signs: Signs, label: str, *parts: Part) -> Text:
    """Return a value after its label; all labels have the same width."""
    return row(width, signs, (f"{label:<{LABEL}}", QUIET), *parts)


def filled(text: str, width: int) -> str:
    """Return the text padded with blanks to the width, in terminal columns."""
    return text + " " * max(0, width - cell_len(text))

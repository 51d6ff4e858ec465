"""Rows of a screen: rich text of one row, no wider than allowed; the last row has the keys, or a question.

A job's text is never interpreted as markup.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text

from ..text.charts import Signs
from .model import WatchedJob
from .view_state import ViewState

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

_HELP = (
    ("up/down, j/k", "scroll the log; choose a job in the table"),
    ("PgUp/PgDn", "scroll by a page"),
    ("Home/End", "the first lines; the newest lines"),
    ("p, Space", "pause the log, and continue"),
    ("w", "wrap long lines of the log, and cut them"),
    ("l", "a larger log, and the figures again"),
    ("r", "choose ranks of the log: 0 or 0,3-5; nothing for all"),
    ("s", "stop the job, after a question"),
    ("Enter", "open the chosen job"),
    ("q, Esc", "back to the table; q in the table: quit"),
    ("Ctrl-L", "draw the screen again"),
)


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


def help_rows(width: int, height: int, signs: Signs) -> list[Text]:
    """Return the keys and their effects, at most `height` rows; the last row tells how to close the help."""
    rows = [row(width, signs, (f"  {key:<14}", "bold"), words) for key, words in _HELP]
    return [*rows[: height - 1], row(width, signs, ("any key closes this help", QUIET))][:height]


def job_keys(choice: ViewState, watched: WatchedJob, width: int, signs: Signs) -> Text:
    """Return the keys of a job's view."""
    keys = [
        ("q", "quit" if choice.is_single else "back"),
        ("l", "figures" if choice.is_large else "larger log"),
        ("r", "ranks"),
        ("p", "go on" if choice.held is not None else "pause"),
        ("w", "cut" if choice.wraps else "wrap"),
        *([("s", "stop")] if watched.job.active else []),
        ("?", "help"),
        ("up/down", "scroll"),
    ]
    return _keys(choice, keys, width, signs)


def table_keys(choice: ViewState, width: int, signs: Signs) -> Text:
    """Return the keys of the table."""
    keys = [("up/down", "choose"), ("Enter", "open"), ("s", "stop a job"), ("q", "quit"), ("?", "help")]
    return _keys(choice, keys, width, signs)


def _keys(choice: ViewState, keys: list[tuple[str, str]], width: int, signs: Signs) -> Text:
    """Return the question or the answer to the last key, if any; else as many keys as fit completely."""
    if choice.asks is not None:
        return row(width, signs, (f"Stop {choice.asks} and let it save? [y/N] ", f"bold {WARNS}"))
    if choice.typing is not None:
        fault = f"   {choice.word}" if choice.word else "   as 0 or 0,3-5; nothing for all"
        return row(width, signs, ("ranks: ", "bold"), f"{choice.typing}_", (fault, WARNS if choice.word else QUIET))
    if choice.word:
        return row(width, signs, (choice.word, "bold"))
    parts: list[Part] = []
    used = 0
    for key, what in keys:
        words = f" {what}"
        gap = "  " if parts else ""
        used += len(gap) + len(key) + len(words)
        if used > width:
            break
        parts += [gap, (key, "bold"), (words, QUIET)]
    return row(width, signs, *parts)

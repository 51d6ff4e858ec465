"""The last row: the keys and their effects, or a question that waits for an answer. Pure functions."""

from __future__ import annotations

from rich.text import Text

from cloudtrain.launcher.live.model import WatchedJob
from cloudtrain.launcher.live.rows import QUIET, WARNS, Part, row
from cloudtrain.launcher.live.view_state import ViewState
from cloudtrain.launcher.text.charts import Signs

__all__ = ["help_rows", "of_job", "of_table"]

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


def help_rows(width: int, height: int, signs: Signs) -> list[Text]:
    """Return the keys and their effects, at most `height` rows; the last row tells how to close the help."""
    rows = [row(width, signs, (f"  {key:<14}", "bold"), words) for key, words in _HELP]
    return [*rows[: height - 1], row(width, signs, ("any key closes this help", QUIET))][:height]


def of_job(choice: ViewState, watched: WatchedJob, width: int, signs: Signs) -> Text:
    """Return the keys of a job's view."""
    if (asked := _asked(choice, width, signs)) is not None:
        return asked
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
    return _keys(keys, width, signs)


def of_table(choice: ViewState, width: int, signs: Signs) -> Text:
    """Return the keys of the table."""
    if (asked := _asked(choice, width, signs)) is not None:
        return asked
    return _keys(
        [("up/down", "choose"), ("Enter", "open"), ("s", "stop a job"), ("q", "quit"), ("?", "help")], width, signs
    )


def _asked(choice: ViewState, width: int, signs: Signs) -> Text | None:
    if choice.asks is not None:
        return row(width, signs, (f"Stop {choice.asks} and let it save? [y/N] ", f"bold {WARNS}"))
    if choice.typing is not None:
        fault = f"   {choice.word}" if choice.word else "   as 0 or 0,3-5; nothing for all"
        return row(width, signs, ("ranks: ", "bold"), f"{choice.typing}_", (fault, WARNS if choice.word else QUIET))
    return row(width, signs, (choice.word, "bold")) if choice.word else None


def _keys(keys: list[tuple[str, str]], width: int, signs: Signs) -> Text:
    """Return as many keys as fit completely."""
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

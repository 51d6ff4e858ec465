"""The state of the view (selection, scroll position, questions), and the effect of a key. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..backend import LogLine
from ..errors import UsageError
from ..logs.view import parse_ranks

_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1}
_SCROLLS = {"up": 1, "k": 1, "down": -1, "j": -1}
_LONGEST = 40  # characters typed for ranks
Size = tuple[int, int]  # columns and rows of the screen


@dataclass(frozen=True)
class ViewState:
    """What the user has chosen on the screen."""

    chosen: str = ""
    """The selected row of the table."""
    opened: str | None = None
    """The job in view; None for the table."""
    is_single: bool = False
    """A single job is watched, without a table."""
    is_large: bool = False
    """The log has most of the screen."""
    ranks: str = ""
    """The ranks of the log, as typed; empty for all."""
    typing: str | None = None
    """The text typed for `ranks` so far."""
    asks: str | None = None
    """The job in the question of whether to stop."""
    held: tuple[LogLine, ...] | None = None
    """The log when paused."""
    back: int = 0
    """The number of the held lines below the view."""
    wraps: bool = False
    """Long log lines take several rows."""
    helps: bool = False
    """The keys are shown."""
    word: str = ""
    """An answer to the last key."""


@dataclass(frozen=True)
class Action:
    """The action to take: `quit`, `redraw`, `stop` the job, or `open` the job in view with the chosen ranks."""

    kind: str
    job: str = ""


def steer(
    choice: ViewState, key: str, jobs: Sequence[str], lines: Sequence[LogLine] = (), page: int = 10, ranks: int = 0
) -> tuple[ViewState, Action | None]:
    """Return the state after the key, and the action to take.

    `jobs` are the table's rows from the top, `lines` the log's lines, of which `page` are visible; `ranks` is the
    number of ranks of the job in view, 0 if unknown.
    """
    if key == "redraw":
        return choice, Action("redraw")
    choice = replace(choice, word="")
    if choice.helps:
        return replace(choice, helps=False), None
    if choice.asks is not None:
        asked = choice.asks
        return replace(choice, asks=None), Action("stop", asked) if key in ("y", "Y") else None
    if choice.typing is not None:
        return _typed(choice, key, ranks)
    if key == "?":
        return replace(choice, helps=True), None
    if choice.opened is None:
        return _in_table(choice, key, jobs)
    return _in_job(choice, key, lines, page)


def _typed(choice: ViewState, key: str, ranks: int) -> tuple[ViewState, Action | None]:
    text = choice.typing or ""
    if key == "enter":
        try:
            asked = parse_ranks(text) if text.strip() else frozenset[int]()
        except UsageError as error:
            return replace(choice, word=f"{error.message}; {error.hint}"), None
        if ranks and asked and max(asked) >= ranks:
            return replace(choice, word=f"no such rank; its ranks are 0 to {ranks - 1}"), None
        chosen = replace(choice, typing=None, ranks=text.strip(), held=None, back=0)
        return chosen, Action("open", choice.opened or "")
    if key == "escape":
        return replace(choice, typing=None), None
    if key == "back":
        return replace(choice, typing=text[:-1]), None
    if len(key) == 1 and key in "0123456789,- " and len(text) < _LONGEST:
        return replace(choice, typing=text + key), None
    return choice, None


def _in_table(choice: ViewState, key: str, jobs: Sequence[str]) -> tuple[ViewState, Action | None]:
    if key == "q":
        return choice, Action("quit")
    if not jobs:
        return choice, None
    place = jobs.index(choice.chosen) if choice.chosen in jobs else 0
    steps = {"home": -len(jobs), "end": len(jobs), "page up": -10, "page down": 10} | _MOVES
    if key in steps:
        return replace(choice, chosen=jobs[min(max(place + steps[key], 0), len(jobs) - 1)]), None
    if key == "enter":
        opened = replace(choice, chosen=jobs[place], opened=jobs[place], ranks="", held=None, back=0)
        return opened, Action("open", jobs[place])
    if key == "s":
        return replace(choice, chosen=jobs[place], asks=jobs[place]), None
    return choice, None


def _in_job(choice: ViewState, key: str, lines: Sequence[LogLine], page: int) -> tuple[ViewState, Action | None]:
    if key == "q" and choice.is_single:
        return choice, Action("quit")
    if key in ("q", "escape") and not choice.is_single:
        return replace(choice, opened=None, held=None, back=0), Action("open", "")
    if key == "l":
        return replace(choice, is_large=not choice.is_large), None
    if key == "w":
        return replace(choice, wraps=not choice.wraps), None
    if key == "r":
        return replace(choice, typing=choice.ranks), None
    if key == "s":
        return replace(choice, asks=choice.opened), None
    if key == "end" or (key in ("p", " ") and choice.held is not None):
        return replace(choice, held=None, back=0), None
    held = tuple(lines) if choice.held is None else choice.held  # scrolling back pauses: the lines do not move
    if key in ("p", " "):
        return replace(choice, held=held, back=0), None
    steps = {"page up": page, "page down": -page, "home": len(lines)} | _SCROLLS
    if key not in steps or (choice.held is None and steps[key] < 0):
        return choice, None
    return replace(choice, held=held, back=min(max(choice.back + steps[key], 0), max(0, len(held) - page))), None

"""What a job and its machines tell of themselves, held to what it is said to be before anybody stores or shows it.

A script may print any event line, and may write its own account: a figure that is none, brackets a thousand deep, text
that a terminal obeys. Here it comes in, and here it is made what the rest of the code relies upon.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from cloudtrain.launcher.job import JobState
from cloudtrain.launcher.text.visible import shown

if TYPE_CHECKING:
    from cloudtrain.launcher.job import State

__all__ = ["count", "numbers", "seconds", "state_of", "text", "tree", "value"]

LARGEST = 2**53  # no step, clock or count is more; beyond it JSON's readers disagree
LONGEST_S = 10 * 365 * 86_400.0  # that anything is foretold
_LATEST_S = 1e11  # in unix seconds, some thousand years on: what no clock can show is no time
_MOST_TEXT, _MOST_LINES, _MOST_LINE = 20_000, 200, 4000  # characters of a text, its lines, characters of each
_MOST_ENTRIES, _MOST_NAME, _MOST_VALUE, _DEPTH = 50, 80, 1000, 6  # of a list or an object
_NOT_FINITE = ("nan", "inf", "-inf")
_STATES: tuple[str, ...] = get_args(JobState)
_TIMES = ("started_s", "ended_s", "told_s")
_AMOUNTS = ("billed_s", "idle_s", "hourly_usd")


def count(told: Any) -> int | None:
    """Return a whole number that is not negative: a step, a rank; None for anything else."""
    if isinstance(told, float) and told.is_integer():
        told = int(told)
    is_count = isinstance(told, int) and not isinstance(told, bool) and 0 <= told <= LARGEST
    return told if is_count else None


def value(told: Any) -> float | int | str | None:
    """Return a number, as text where JSON has none for it (`nan`, `inf`, `-inf`); None for anything else."""
    if isinstance(told, bool):
        return None
    if isinstance(told, int):
        return told if abs(told) <= LARGEST else None
    if isinstance(told, float):
        return told if math.isfinite(told) else str(told)
    return told if told in _NOT_FINITE else None


def seconds(told: Any) -> float | int | None:
    """Return a time that something takes, from now to ten years; None for anything else."""
    found = value(told)
    return found if isinstance(found, float | int) and 0 <= found <= LONGEST_S else None


def text(told: Any, most: int = _MOST_VALUE) -> str | None:
    """Return one line of text which no terminal obeys; None for what is no text."""
    return shown(told.partition("\n")[0], colour=False)[:most] if isinstance(told, str) else None


def numbers(told: Any) -> dict[str, Any]:
    """Return the figures of an object by their names, a word among them as such; the first fifty."""
    found: dict[str, Any] = {}
    for key, each in told.items() if isinstance(told, dict) else ():
        name, known = text(key, _MOST_NAME), value(each)
        known = text(each) if known is None else known
        if name and known is not None:
            found[name] = known
        if len(found) == _MOST_ENTRIES:
            break
    return found


def tree(told: Any, depth: int = _DEPTH) -> Any:
    """Return text, figures, lists and objects as JSON can hold them; None for anything else, and too deep inside."""
    if isinstance(told, str):
        return _lines(told)
    if told is None or isinstance(told, bool):
        return told
    if isinstance(told, dict) and depth:
        items = list(told.items())[:_MOST_ENTRIES]
        return {text(key, _MOST_NAME) or "": tree(each, depth - 1) for key, each in items}
    if isinstance(told, list) and depth:
        return [tree(each, depth - 1) for each in told[:_MOST_ENTRIES]]
    return value(told)


def state_of(told: State) -> State:
    """Return the state with everything that a job may have written itself as its fields promise it."""
    clean: dict[str, Any] = {name: _within(getattr(told, name), _LATEST_S) for name in _TIMES}
    clean |= {name: _within(getattr(told, name), LONGEST_S) for name in _AMOUNTS}
    gone_s = told.gone_s if isinstance(told.gone_s, dict) else {}
    return replace(
        told,
        state=told.state if told.state in _STATES else "failed",
        reason=text(told.reason, _MOST_NAME) or None,
        resumable=bool(told.resumable),
        error=_error(told.error),
        restarts=count(told.restarts) or 0,
        detail=_lines(told.detail) if isinstance(told.detail, str) else None,
        url=text(told.url, _MOST_LINE),
        billed_by=text(told.billed_by),
        gone_s={node: taken for node, taken in gone_s.items() if _within(taken, LONGEST_S) is not None} or None,
        **clean,
    )


def _error(told: Any) -> dict[str, Any] | None:
    """Return the account of a failure: `message` is there and is text, `rank` a number, `lines` are lines."""
    if not isinstance(told, dict):
        return None
    found: dict[str, Any] = tree(told)
    if "rank" in told:
        found["rank"] = count(told["rank"])
    for name in ("kind", "type", "traceback", "signal"):
        if not isinstance(found.get(name, ""), str):
            found[name] = None
    if isinstance(told.get("traceback"), str):  # its end says where
        found["traceback"] = _lines(told["traceback"][-_MOST_TEXT:])
    if "lines" in told:
        lines = told["lines"] if isinstance(told["lines"], list) else []
        found["lines"] = [line for line in map(text, lines[-_MOST_ENTRIES:]) if line is not None]
    if not isinstance(found.get("message"), str):
        found["message"] = "" if found.get("message") is None else str(found["message"])
    return found


def _within(told: Any, most: float) -> Any:
    """Return the number as it is, None where it is none or lies beyond anything that may be meant."""
    is_sound = isinstance(told, float | int) and not isinstance(told, bool) and 0 <= told <= most
    return told if is_sound else None


def _lines(told: str) -> str:
    """Return text of several lines, of which no terminal obeys any; the first of them where there are many."""
    lines = told[:_MOST_TEXT].split("\n")[:_MOST_LINES]
    return "\n".join(shown(line, colour=False)[:_MOST_LINE] for line in lines)

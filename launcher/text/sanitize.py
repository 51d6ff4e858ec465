"""Validates untrusted input: values that a job and its machines report, before they are stored or shown.

A script may print any event line and write its own exit report: figures of a wrong type, a thousand nested brackets,
text with terminal control codes. The functions return values on which the rest of the code can rely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from ..job import JobState, State
from .visible import shown

LARGEST = 2**53  # most of a step, clock or count; JSON readers disagree on larger numbers
LONGEST_S = 10 * 365 * 86_400.0  # most of a duration or a forecast: ten years
LATEST_S = 1e11  # in unix seconds, about 3,000 years ahead; no clock can show a later time
_MOST_TEXT, _MOST_LINES, _MOST_LINE = 20_000, 200, 4000  # characters of a text, lines of a text, characters of a line
_MOST_ENTRIES, _MOST_NAME, _MOST_VALUE, _DEPTH = 50, 80, 1000, 6  # of a list or an object
_NOT_FINITE = ("nan", "inf", "-inf")
_STATES: tuple[str, ...] = get_args(JobState)


def count(data: Any) -> int | None:
    """Return a whole number that is not negative (a step, a rank); None for invalid values."""
    found = within(data, LARGEST)
    return int(found) if found is not None and found == int(found) else None


def value(data: Any) -> float | int | str | None:
    """Return a number, or the text `nan`, `inf` or `-inf`, which JSON has no number for; None for invalid values."""
    if isinstance(data, bool):
        return None
    if isinstance(data, int):
        return data if abs(data) <= LARGEST else None
    if isinstance(data, float):
        return data if math.isfinite(data) else str(data)
    return data if data in _NOT_FINITE else None


def seconds(data: Any) -> float | None:
    """Return a duration from 0 to ten years; None for invalid values."""
    return within(data, LONGEST_S)


def text(data: Any, most: int = _MOST_VALUE) -> str | None:
    """Return the first line of a text, without terminal control codes; None for invalid values."""
    return shown(data.partition("\n")[0], colour=False)[:most] if isinstance(data, str) else None


def numbers(data: Any) -> dict[str, Any]:
    """Return an object's numbers and texts by name, the first fifty."""
    found: dict[str, Any] = {}
    for key, each in data.items() if isinstance(data, dict) else ():
        name, known = text(key, _MOST_NAME), value(each)
        known = text(each) if known is None else known
        if name and known is not None:
            found[name] = known
        if len(found) == _MOST_ENTRIES:
            break
    return found


def tree(data: Any, depth: int = _DEPTH) -> Any:
    """Return text, numbers, lists and objects in JSON's types; None for invalid values, or below `depth` levels."""
    if isinstance(data, str):
        return _lines(data)
    if data is None or isinstance(data, bool):
        return data
    if isinstance(data, dict) and depth:
        items = list(data.items())[:_MOST_ENTRIES]
        return {text(key, _MOST_NAME) or "": tree(each, depth - 1) for key, each in items}
    if isinstance(data, list) and depth:
        return [tree(each, depth - 1) for each in data[:_MOST_ENTRIES]]
    return value(data)


def state_of(state: State) -> State:
    """Return the state with valid fields: a job may have written any of them."""
    changes = {
        name: clean
        for name, data in vars(state).items()
        if (data is not None or name in _NEVER_NONE) and (clean := _FIELDS[name](data)) is not data
    }
    return replace(state, **changes) if changes else state  # of ten thousand states few have a change


def _error(data: Any) -> dict[str, Any] | None:
    """Return a failure report with valid fields: `message` is text, `rank` a number or None, `lines` a list."""
    if not isinstance(data, dict):
        return None
    found: dict[str, Any] = tree(data)
    if "rank" in data:
        found["rank"] = count(data["rank"])
    for name in ("kind", "type", "traceback", "signal"):
        if not isinstance(found.get(name, ""), str):
            found[name] = None
    if isinstance(data.get("traceback"), str):  # the end of a traceback names the failing line
        found["traceback"] = _lines(data["traceback"][-_MOST_TEXT:])
    if "lines" in data:
        lines = data["lines"] if isinstance(data["lines"], list) else []
        found["lines"] = [line for line in map(text, lines[-_MOST_ENTRIES:]) if line is not None]
    if not isinstance(found.get("message"), str):
        found["message"] = "" if found.get("message") is None else str(found["message"])
    return found


def within(data: Any, most: float) -> float | None:
    """Return a number from 0 to `most` unchanged; None for invalid values."""
    is_sound = isinstance(data, float | int) and not isinstance(data, bool) and 0 <= data <= most
    return data if is_sound else None


def _lines(content: str) -> str:
    """Return a text of several lines, cut to the first 200, without terminal control codes."""
    lines = content[:_MOST_TEXT].split("\n")[:_MOST_LINES]
    return "\n".join(shown(line, colour=False)[:_MOST_LINE] for line in lines)


def _gone_s(data: Any) -> dict[str, float] | None:
    """Return the seconds by node, without invalid seconds."""
    items = data.items() if isinstance(data, dict) else ()
    return {node: taken for node, taken in items if seconds(taken) is not None} or None


_NEVER_NONE = frozenset({"state", "resumable", "restarts"})
_FIELDS: dict[str, Callable[[Any], Any]] = {  # of State; None is valid for all others
    "state": lambda data: data if data in _STATES else "failed",
    "reason": lambda data: text(data, _MOST_NAME) or None,
    "resumable": bool,
    "error": _error,
    "restarts": lambda data: count(data) or 0,
    "detail": lambda data: _lines(data) if isinstance(data, str) else None,
    "url": lambda data: text(data, _MOST_LINE),
    "billed_by": text,
    "gone_s": _gone_s,
    "joined_s": _gone_s,
    "queue": lambda data: data,
    **dict.fromkeys(("started_s", "ended_s", "told_s"), partial(within, most=LATEST_S)),
    **dict.fromkeys(("billed_s", "idle_s", "hourly_usd"), seconds),
}

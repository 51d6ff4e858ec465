"""Validates untrusted input: values that a job and its machines report, before they are stored or shown.

A script may print any event line and write its own exit report: figures of a wrong type, a thousand nested brackets,
text with terminal control codes. The functions return values on which the rest of the code can rely.
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

LARGEST = 2**53  # most of a step, clock or count; JSON readers disagree on larger numbers
LONGEST_S = 10 * 365 * 86_400.0  # most of a duration or a forecast: ten years
_LATEST_S = 1e11  # in unix seconds, about 3,000 years ahead; no clock can show a later time
_MOST_TEXT, _MOST_LINES, _MOST_LINE = 20_000, 200, 4000  # characters of a text, lines of a text, characters of a line
_MOST_ENTRIES, _MOST_NAME, _MOST_VALUE, _DEPTH = 50, 80, 1000, 6  # of a list or an object
_NOT_FINITE = ("nan", "inf", "-inf")
_STATES: tuple[str, ...] = get_args(JobState)
_TIMES = ("started_s", "ended_s", "told_s")
_AMOUNTS = ("billed_s", "idle_s", "hourly_usd")


def count(told: Any) -> int | None:
    """Return a whole number that is not negative (a step, a rank); None for invalid values."""
    if isinstance(told, float) and told.is_integer():
        told = int(told)
    is_count = isinstance(told, int) and not isinstance(told, bool) and 0 <= told <= LARGEST
    return told if is_count else None


def value(told: Any) -> float | int | str | None:
    """Return a number, or the text `nan`, `inf` or `-inf`, which JSON has no number for; None for invalid values."""
    if isinstance(told, bool):
        return None
    if isinstance(told, int):
        return told if abs(told) <= LARGEST else None
    if isinstance(told, float):
        return told if math.isfinite(told) else str(told)
    return told if told in _NOT_FINITE else None


def seconds(told: Any) -> float | int | None:
    """Return a duration from 0 to ten years; None for invalid values."""
    found = value(told)
    return found if isinstance(found, float | int) and 0 <= found <= LONGEST_S else None


def text(told: Any, most: int = _MOST_VALUE) -> str | None:
    """Return the first line of a text, without terminal control codes; None for invalid values."""
    return shown(told.partition("\n")[0], colour=False)[:most] if isinstance(told, str) else None


def numbers(told: Any) -> dict[str, Any]:
    """Return an object's numbers and texts by name, the first fifty."""
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
    """Return text, numbers, lists and objects in JSON's types; None for invalid values, or below `depth` levels."""
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
    """Return the state with valid fields: a job may have written any of them."""
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
    """Return a failure report with valid fields: `message` is text, `rank` a number or None, `lines` a list."""
    if not isinstance(told, dict):
        return None
    found: dict[str, Any] = tree(told)
    if "rank" in told:
        found["rank"] = count(told["rank"])
    for name in ("kind", "type", "traceback", "signal"):
        if not isinstance(found.get(name, ""), str):
            found[name] = None
    if isinstance(told.get("traceback"), str):  # the end of a traceback names the failing line
        found["traceback"] = _lines(told["traceback"][-_MOST_TEXT:])
    if "lines" in told:
        lines = told["lines"] if isinstance(told["lines"], list) else []
        found["lines"] = [line for line in map(text, lines[-_MOST_ENTRIES:]) if line is not None]
    if not isinstance(found.get("message"), str):
        found["message"] = "" if found.get("message") is None else str(found["message"])
    return found


def _within(told: Any, most: float) -> Any:
    """Return a number from 0 to `most` unchanged; None for invalid values."""
    is_sound = isinstance(told, float | int) and not isinstance(told, bool) and 0 <= told <= most
    return told if is_sound else None


def _lines(told: str) -> str:
    """Return a text of several lines, cut to the first 200, without terminal control codes."""
    lines = told[:_MOST_TEXT].split("\n")[:_MOST_LINES]
    return "\n".join(shown(line, colour=False)[:_MOST_LINE] for line in lines)

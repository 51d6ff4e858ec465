"""The filter of jobs.list: comparisons joined by AND, each with an optional NOT."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from fnmatch import fnmatchcase

from doubles.google.errors import invalid
from doubles.google.jobs import Job

__all__ = ["parse"]

_TERM = re.compile(
    r"""\s*(?P<not>NOT\s+|-)?(?P<field>[A-Za-z_][\w.\-]*)\s*(?P<op>!=|<=|>=|=|<|>|:)\s*
    (?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s"()]+))\s*(?:(?P<and>AND)\s+|$)""",
    re.VERBOSE,
)
_ORDER: dict[str, Callable[[float, float], bool]] = {
    "<": lambda ours, theirs: ours < theirs,
    "<=": lambda ours, theirs: ours <= theirs,
    ">": lambda ours, theirs: ours > theirs,
    ">=": lambda ours, theirs: ours >= theirs,
    "=": lambda ours, theirs: ours == theirs,
    "!=": lambda ours, theirs: ours != theirs,
}


def parse(text: str) -> Callable[[Job], bool]:
    """Return the filter as a function of a job. Raises GoogleError for an unknown filter."""
    terms: list[Callable[[Job], bool]] = []
    at, is_open = 0, bool(text.strip())
    while is_open:
        found = _TERM.match(text, at)
        if found is None:
            raise invalid(f'Invalid filter "{text}": cannot parse from character {at}.')
        value = found["bare"] if found["quoted"] is None else re.sub(r"\\(.)", r"\1", found["quoted"])
        terms.append(_term(text, found["field"], found["op"], value, bool(found["not"])))
        at, is_open = found.end(), found["and"] is not None
    return lambda job: all(term(job) for term in terms)


def _term(text: str, field: str, op: str, value: str, is_negated: bool) -> Callable[[Job], bool]:
    if field.startswith("labels."):
        key = field.removeprefix("labels.")
        holds = _text(text, op, value, lambda job: dict(job.asked.labels).get(key))
    elif field in ("display_name", "displayName"):
        holds = _text(text, op, value, lambda job: str(job.asked.display_name))
    elif field == "state" and op in ("=", "!="):
        holds = _text(text, op, value, lambda job: job.status)
    elif field in ("create_time", "createTime") and op in _ORDER:
        moment, compare = _moment(text, value), _ORDER[op]

        def holds(job: Job) -> bool:
            return compare(job.created, moment)
    else:
        raise invalid(f'Invalid filter "{text}": unsupported field or operator "{field}{op}".')
    return (lambda job: not holds(job)) if is_negated else holds


def _text(text: str, op: str, value: str, read: Callable[[Job], str | None]) -> Callable[[Job], bool]:
    if op == "=":
        return lambda job: read(job) == value
    if op == "!=":
        return lambda job: read(job) != value
    if op == ":":
        return lambda job: (found := read(job)) is not None and fnmatchcase(found, value)
    raise invalid(f'Invalid filter "{text}": unsupported operator "{op}".')


def _moment(text: str, value: str) -> float:
    try:
        return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    except ValueError:
        raise invalid(f'Invalid filter "{text}": "{value}" is no time.') from None

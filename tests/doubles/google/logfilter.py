"""The part of the Logging query language that followers use; different syntax is refused, never ignored."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from doubles.google.errors import GoogleError, invalid

MAX_CHARACTERS = 20_000  # ListLogEntriesRequest.filter, discovery document

Entry = Mapping[str, Any]  # in REST's form
Test = Callable[[Entry], bool]
Comparison = tuple[str, str, list[str]]  # field, operator, alternative values

_TOKENS = re.compile(r'\s+|"[^"\\]*"|>=|<=|[=:()]|[\w.*]+')
_FIELDS = re.compile(r"resource\.type|resource\.labels\.(job_id|task_name)|timestamp|jsonPayload(\.\w+)+")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)(?:[Tt ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|z|[+-]\d\d:\d\d)?)?")
_ORDERED = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Filter:
    """A filter, and its limits for an index: `test` holds for no entry outside the limits."""

    test: Test
    jobs: frozenset[str] | None = None  # None: any
    since_ns: int = 0


@lru_cache(maxsize=4096)
def ns_of(text: str) -> int:
    """Return an RFC 3339 time in nanoseconds since 1970. Raises ValueError."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(text)
    zone = "+00:00" if (found[4] or "Z") in "Zz" else found[4]
    moment = datetime.fromisoformat(f"{found[1]}T{found[2] or '00:00:00'}{zone}").astimezone(timezone.utc)
    return int(moment.timestamp()) * 1_000_000_000 + int((found[3] or "").ljust(9, "0"))


def parse(text: str) -> Filter:
    """Return the filter. Raises GoogleError INVALID_ARGUMENT."""
    if len(text) > MAX_CHARACTERS:
        raise invalid(f"The filter exceeds {MAX_CHARACTERS} characters.")
    if not text.strip():
        return Filter(lambda entry: True)
    return _Parser(text).filter()


class _Parser:
    """Precedence as documented: NOT binds closest, then OR, then AND."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._tokens: list[tuple[str, int]] = []
        place = 0
        while place < len(text):
            found = _TOKENS.match(text, place)
            if found is None:
                raise self._error(text[place], place)
            if not found[0].isspace():
                self._tokens.append((found[0], place))
            place = found.end()

    def filter(self) -> Filter:
        """Return the filter of the whole text."""
        tests, needed = self._all_of()
        if self._at < len(self._tokens):
            raise self._error(*self._next())
        jobs: frozenset[str] | None = None
        since_ns = 0
        for field, compared, values in needed:
            if field == "resource.labels.job_id":
                jobs = frozenset(values) if jobs is None else jobs & frozenset(values)
            elif field == "timestamp" and compared == ">=":
                since_ns = max(since_ns, ns_of(values[0]))
        return Filter(lambda entry: all(test(entry) for test in tests), jobs, since_ns)

    def _all_of(self) -> tuple[list[Test], list[Comparison]]:
        """Return the tests that must all hold, and the plain comparisons among the tests."""
        tests, needed = [], []
        while True:
            test, plain = self._any_of()
            tests.append(test)
            needed += plain
            if not self._takes("AND"):
                return tests, needed

    def _any_of(self) -> tuple[Test, list[Comparison]]:
        test, plain = self._one()
        tests = [test]
        while self._takes("OR"):
            tests.append(self._one()[0])
        if len(tests) == 1:
            return test, plain
        return lambda entry: any(one(entry) for one in tests), []

    def _one(self) -> tuple[Test, list[Comparison]]:
        if self._takes("NOT"):
            inner = self._one()[0]
            return lambda entry: not inner(entry), []
        if self._takes("("):
            tests, needed = self._all_of()
            self._expect(")")
            return lambda entry: all(test(entry) for test in tests), needed
        field, place = self._next()
        if _FIELDS.fullmatch(field) is None:
            raise self._error(field, place)
        compared, at = self._next()
        values = self._values()
        try:
            return _test(field, compared, values), [(field, compared, values)]
        except ValueError:
            raise self._error(compared, at) from None

    def _values(self) -> list[str]:
        if not self._takes("("):
            text, place = self._next()
            if text in ("AND", "OR", "NOT") or text[0] in "()=:<>":
                raise self._error(text, place)
            return [text.strip('"')]
        values = self._values()
        while self._takes("OR"):
            values += self._values()
        self._expect(")")
        return values

    def _takes(self, text: str) -> bool:
        """Pass over the next token if it is `text`; return whether it is."""
        is_next = self._at < len(self._tokens) and self._tokens[self._at][0] == text
        self._at += is_next
        return is_next

    def _next(self) -> tuple[str, int]:
        if self._at >= len(self._tokens):
            raise self._error("end of input", len(self._text))
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise self._error(*self._next())

    def _error(self, token: str, place: int) -> GoogleError:
        line = self._text.count("\n", 0, place) + 1
        column = place - (self._text.rfind("\n", 0, place) + 1) + 1
        return invalid(f"Unparseable filter: syntax error at line {line}, column {column}, token '{token}'")


def _test(field: str, compared: str, values: list[str]) -> Test:
    """Return the comparison as a function; the test of text is case-insensitive. Raises ValueError if unknown."""
    path = field.split(".")
    if path[0] == "resource" and compared == "=":
        folded = {value.casefold() for value in values}
        return lambda entry: str(_value(entry, path)).casefold() in folded
    if path[0] == "jsonPayload" and compared == ":" and values == ["*"]:
        return lambda entry: _value(entry, path) is not None
    if compared not in _ORDERED or path[0] == "resource" or len(values) != 1:
        raise ValueError(compared)
    holds = _ORDERED[compared]
    if field == "timestamp":
        moment = ns_of(values[0])
        return lambda entry: holds(ns_of(entry["timestamp"]), moment)
    limit = float(values[0])
    return lambda entry: isinstance(found := _value(entry, path), int | float) and holds(found, limit)


def _value(entry: Entry, path: list[str]) -> Any:
    found: Any = entry
    for part in path:
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found

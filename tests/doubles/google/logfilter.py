"""The part of the Logging query language that followers use; unknown syntax is refused, never ignored."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from doubles.google.errors import GoogleError, invalid

SEVERITIES = {"DEFAULT": 0, "DEBUG": 100, "INFO": 200, "NOTICE": 300, "WARNING": 400, "ERROR": 500}
SEVERITIES |= {"CRITICAL": 600, "ALERT": 700, "EMERGENCY": 800}
MAX_CHARACTERS = 20_000  # ListLogEntriesRequest.filter, discovery document

Entry = Mapping[str, Any]  # in REST's form
Test = Callable[[Entry], bool]

_STRING = r'"(?:\\.|[^"\\])*"'
_TOKENS = re.compile(
    rf"(?P<space>\s+|--[^\n]*)|(?P<string>{_STRING})|(?P<operator>>=|<=|!=|=~|!~|[=<>:()])"
    rf"|(?P<word>[^\s\"()=<>!:~]+(?:{_STRING}[^\s\"()=<>!:~]*)*)"
)
_PARTS = re.compile(rf"({_STRING}|[^.\"]+)(?:\.|$)")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)(?:[Tt ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|z|[+-]\d\d:\d\d)?)?")
_NAMES = {"log_name": "logName", "insert_id": "insertId", "receive_timestamp": "receiveTimestamp"}
_NAMES |= {"text_payload": "textPayload", "json_payload": "jsonPayload"}
_LEAVES = ("logName", "insertId", "timestamp", "receiveTimestamp", "textPayload", "severity")
_FOLDERS = ("resource", "labels", "jsonPayload", "split")
_ORDERED = (">", ">=", "<", "<=")


@dataclass(frozen=True)
class Filter:
    """A filter, and its limits for an index: `test` holds for no entry outside the limits."""

    test: Test
    jobs: frozenset[str] | None = None  # None: any
    since_ns: int = 0
    until_ns: int = 1 << 63  # both limits are inclusive


@dataclass(frozen=True)
class _Comparison:
    path: tuple[str, ...]
    operator: str
    values: tuple[str, ...]  # alternatives


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
    """Precedence as documented: NOT binds closest, then OR, then AND, which may be left out."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._tokens: list[tuple[str, str, int]] = []
        place = 0
        while place < len(text):
            found = _TOKENS.match(text, place)
            if found is None:
                raise self._error(text[place], place)
            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found[0], place))
            place = found.end()

    def filter(self) -> Filter:
        """Return the filter of the whole text."""
        tests, needed = self._all_of()
        if self._at < len(self._tokens):
            raise self._unexpected()
        jobs: frozenset[str] | None = None
        since_ns, until_ns = 0, 1 << 63
        for one in needed:
            if one.path == ("resource", "labels", "job_id") and one.operator == "=":
                jobs = frozenset(one.values) if jobs is None else jobs & frozenset(one.values)
            elif one.path == ("timestamp",) and len(one.values) == 1:
                stamp = ns_of(one.values[0])
                if one.operator in (">", ">=", "="):
                    since_ns = max(since_ns, stamp)
                if one.operator in ("<", "<=", "="):
                    until_ns = min(until_ns, stamp)
        return Filter(lambda entry: all(test(entry) for test in tests), jobs, since_ns, until_ns)

    def _all_of(self) -> tuple[list[Test], list[_Comparison]]:
        """Return the tests that must all hold, and the plain comparisons among the tests."""
        tests, needed = [], []
        while True:
            test, plain = self._any_of()
            tests.append(test)
            needed += plain
            if self._peek() == "AND":
                self._at += 1
            elif self._peek() in ("", ")"):
                return tests, needed

    def _any_of(self) -> tuple[Test, list[_Comparison]]:
        test, plain = self._one()
        tests = [test]
        while self._peek() == "OR":
            self._at += 1
            tests.append(self._one()[0])
        if len(tests) == 1:
            return test, plain
        return lambda entry: any(one(entry) for one in tests), []

    def _one(self) -> tuple[Test, list[_Comparison]]:
        kind, text, place = self._next()
        if text == "NOT" and kind == "word":
            inner = self._one()[0]
            return lambda entry: not inner(entry), []
        if text == "(":
            tests, needed = self._all_of()
            self._expect(")")
            return lambda entry: all(test(entry) for test in tests), needed
        if kind != "word" or text in ("AND", "OR"):
            raise self._error(text, place)
        if text.startswith("-"):
            inner = _test(self._comparison(text[1:], place), self._error, place)
            return lambda entry: not inner(entry), []
        found = self._comparison(text, place)
        return _test(found, self._error, place), [found]

    def _comparison(self, field: str, place: int) -> _Comparison:
        path = tuple(part[1:-1] if part.startswith('"') else part for part in _PARTS.findall(field))
        path = (_NAMES.get(path[0], path[0]), *path[1:]) if path else path
        is_leaf = len(path) == 1 and path[0] in _LEAVES
        if not is_leaf and not (len(path) > 1 and path[0] in _FOLDERS):
            raise self._error(field, place)
        if path[0] == "resource" and path[1:] != ("type",) and (path[1] != "labels" or len(path) != 3):
            raise self._error(field, place)
        kind, operator, at = self._next()
        if kind != "operator" or operator in ("(", ")", "=~", "!~"):
            raise self._error(operator, at)
        return _Comparison(path, operator, self._values())

    def _values(self) -> tuple[str, ...]:
        kind, text, place = self._next()
        if text == "(" and kind == "operator":
            values = list(self._values())
            while self._peek() == "OR":
                self._at += 1
                values += self._values()
            self._expect(")")
            return tuple(values)
        if kind == "operator":
            raise self._error(text, place)
        return (re.sub(r"\\(.)", r"\1", text[1:-1]) if kind == "string" else text,)

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _next(self) -> tuple[str, str, int]:
        if self._at >= len(self._tokens):
            raise self._error("end of input", len(self._text))
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, text: str) -> None:
        if self._peek() != text:
            raise self._unexpected()
        self._at += 1

    def _unexpected(self) -> GoogleError:
        _, text, place = self._next()
        return self._error(text, place)

    def _error(self, token: str, place: int) -> GoogleError:
        line = self._text.count("\n", 0, place) + 1
        column = place - (self._text.rfind("\n", 0, place) + 1) + 1
        return invalid(f"Unparseable filter: syntax error at line {line}, column {column}, token '{token}'")


def _test(asked: _Comparison, error: Callable[[str, int], GoogleError], place: int) -> Test:
    """Return the comparison as a function. Raises GoogleError if field, operator and value do not match."""
    path, operator, values = asked.path, asked.operator, asked.values
    if path[0] == "severity":
        unknown = [value for value in values if value.upper() not in SEVERITIES]
        if unknown or operator == ":":
            raise error(unknown[0] if unknown else operator, place)
        ranks = [SEVERITIES[value.upper()] for value in values]
        return _ordered(lambda entry: SEVERITIES[entry.get("severity", "DEFAULT")], operator, ranks)
    if path[0] in ("timestamp", "receiveTimestamp"):
        try:
            moments = [ns_of(value) for value in values]
        except ValueError as wrong:
            raise error(str(wrong), place) from None
        if operator == ":":
            raise error(operator, place)
        return _ordered(lambda entry: ns_of(entry[path[0]]), operator, moments)
    if path[0] == "insertId" and operator in _ORDERED:
        return _ordered(lambda entry: entry["insertId"], operator, list(values))
    if operator in _ORDERED:
        numbers = [_number(value) for value in values]
        if path[0] not in ("jsonPayload", "split") or None in numbers:
            raise error(operator, place)
        return _ordered(lambda entry: _number(_value(entry, path)), operator, numbers)
    return _worded(path, operator, values)


def _ordered(value: Callable[[Entry], Any], operator: str, others: list[Any]) -> Test:
    """Return a test that compares the value with alternatives; the test fails for a missing value."""
    compare: Callable[[Any, Any], bool] = {
        "=": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
    }[operator]

    def test(entry: Entry) -> bool:
        found = value(entry)
        return found is not None and any(compare(found, other) for other in others)

    return test


def _worded(path: tuple[str, ...], operator: str, values: tuple[str, ...]) -> Test:
    """Return a case-insensitive test of text; the test fails for a missing field, even with !=."""
    folded = tuple(value.casefold() for value in values)

    def test(entry: Entry) -> bool:
        found = _value(entry, path)
        if found is None:
            return False
        text = _text(found).casefold()
        if operator == ":":
            return any(value in ("*", "") or value in text for value in folded)
        return any((text == value) == (operator == "=") for value in folded)

    return test


def _value(entry: Entry, path: tuple[str, ...]) -> Any:
    found: Any = entry
    for part in path:
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None

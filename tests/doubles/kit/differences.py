"""Seeded differences: a platform that does not do what its documentation says.

A `Change` alters a document: the request that the platform accepts, or an answer. The settings `Differs` alter what the
platform does. Nothing here stands in any documentation; tests use the differences to prove that `selftest` finds them.
"""

import copy
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
REQUEST, ANSWER = "request", "answer"
_STEP = re.compile(r"(.*/)step-(\d+)/.*")


@dataclass(frozen=True)
class Differs:
    """The settings of what a platform does in another way."""

    log_lost: str = ""
    """A regular expression: matching lines of containers never arrive."""
    log_doubled: str = ""
    """The same: matching lines arrive twice, in the form in which the relay of a container wrote them."""
    kill_at: str = ""
    """The same: the platform kills a container that writes a matching line, once for each job."""
    stop_ends: str = ""
    """`failed`: a job that was stopped is told as failed. `completed`: as if it had come to its own end."""
    limit_factor: float = 1.0
    """The time limit comes early (below 1) or late."""
    grace_s: float | None = None
    """From SIGTERM to SIGKILL after a stop and at a time limit, in place of the platform's own figure."""
    list_lag_s: float = 0.0
    """How long the store's list has no fresh object, and still has a removed object."""
    artifact_damage: str = ""
    """A pattern of names: a byte of these output files changes before the platform stores them."""
    restores_older: bool = False
    """Whether a job starts without the newest checkpoint that the store had."""


@dataclass
class Change:
    """A change of the values at `path`, in the requests or in the answers of the operations.

    A path has names and `*`, separated by `/`; a list has the numbers of its elements. `how` is a name of HOWS.
    """

    operations: list[str]
    path: str
    how: str
    value: Any = None
    at: str = ANSWER
    count: int | None = None
    after: int = 0
    seen: int = field(default=0, init=False)

    def fires(self, names: Iterable[str], at: str) -> bool:
        """Return whether the change concerns the call, and count the call."""
        if at != self.at or not any(fnmatchcase(name, one) for name in names for one in self.operations):
            return False
        self.seen += 1
        return self.after < self.seen <= self.after + (math.inf if self.count is None else self.count)


class Changes:
    """The changes of a stand-in, in the order of their setting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: list[Change] = []

    def add(self, asked: dict[str, Any]) -> None:
        """Add a change. Raises ValueError for an unknown field, kind or place."""
        names = {each.name for each in fields(Change) if each.init}
        if not set(asked) <= names or asked.get("how") not in HOWS or asked.get("at", ANSWER) not in (REQUEST, ANSWER):
            raise ValueError(f"a change has {sorted(names)}, and `how` is one of {sorted(HOWS)}")
        with self._lock:
            self._changes.append(Change(**asked))

    def clear(self) -> None:
        """Forget all changes."""
        with self._lock:
            self._changes.clear()

    def applied(self, names: Iterable[str], at: str, document: Any) -> Any:
        """Return the document with the changes; without a change that fires, the document itself."""
        known = tuple(names)
        with self._lock:
            firing = [change for change in self._changes if change.fires(known, at)]
        for change in firing:
            document = copy.deepcopy(document)
            _change(document, change.path.split("/"), HOWS[change.how], change.value)
        return document


def _change(holder: Any, path: list[str], how: Callable[[Any, Any], Any], value: Any) -> None:
    """Change the values at the path below `holder`; a missing value changes only by `set`."""
    name, *rest = path
    if isinstance(holder, list):
        keys: list[Any] = list(range(len(holder))) if name == "*" else [int(name)][: len(holder) > int(name)]
    else:
        keys = list(holder) if name == "*" else [name]
    for key in reversed(keys):
        if rest:
            if isinstance(holder, list) or isinstance(holder.get(key), dict | list):
                _change(holder[key], rest, how, value)
        elif how is _drop:
            holder.pop(key) if isinstance(holder, list) else holder.pop(key, None)
        elif how is _set or isinstance(holder, list) or holder.get(key) is not None:
            holder[key] = how(holder[key] if isinstance(holder, list) else holder.get(key), value)


def _drop(old: Any, value: Any) -> Any:
    raise AssertionError("the caller removes the value")


def _set(old: Any, value: Any) -> Any:
    return value


def _number(old: Any, change: Callable[[float], float]) -> Any:
    """Return the changed number, in the form of the old one: a number, or a text with a unit such as `90s`."""
    if isinstance(old, str):
        found = re.fullmatch(r"(-?[\d.]+)(\D*)", old)
        return old if found is None else f"{change(float(found[1])):g}{found[2]}"
    return type(old)(change(old))


def _shifted(old: Any, seconds: float) -> Any:
    """Return the time, later by the seconds: a number, or a text of ISO 8601."""
    if not isinstance(old, str):
        return old + seconds
    moment = datetime.fromisoformat(old.replace("Z", "+00:00")) + timedelta(seconds=seconds)
    return moment.isoformat().replace("+00:00", "Z")


HOWS: dict[str, Callable[[Any, Any], Any]] = {
    "drop": _drop,
    "set": _set,
    "add": lambda old, value: _number(old, lambda number: number + value),
    "scale": lambda old, value: _number(old, lambda number: number * value),
    "up": lambda old, value: _number(old, lambda number: math.ceil(number / value) * value),
    "down": lambda old, value: _number(old, lambda number: number // value * value),
    "cut": lambda old, value: str(old)[:value],
    "word": lambda old, value: value.get(old, old),
    "shift": _shifted,
}


class Heard:
    """The lines of one container, as the platform hears them."""

    def __init__(self, settings: Callable[[], Differs], killed: set[str], job: str, kill: Callable[[], None]) -> None:
        self._settings, self._killed, self._job, self._kill = settings, killed, job, kill
        self._rest = b""

    def read(self, data: bytes) -> bytes:
        """Return what arrives of the output; of a platform that stores bytes, not lines. No bytes: the end."""
        settings = self._settings()
        if not (settings.log_lost or settings.log_doubled or settings.kill_at or self._rest):
            return data
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data:
            return b"".join(self.told([self._rest]))
        return b"".join(line + b"\n" for line in self.told(lines))

    def told(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the lines that arrive; kill the container at the line of `kill_at`."""
        settings = self._settings()
        for line in lines:
            text = line.decode(errors="replace")
            if settings.log_lost and re.search(settings.log_lost, text):
                continue
            yield line
            if settings.log_doubled and re.search(settings.log_doubled, text):
                yield line
            if settings.kill_at and self._job not in self._killed and re.search(settings.kill_at, text):
                self._killed.add(self._job)
                self._kill()


class Listing:
    """The list of a store that is consistent only later: by `list_lag_s`."""

    def __init__(self, lag_s: Callable[[], float]) -> None:
        self._lag_s, self._lock = lag_s, threading.Lock()
        self._seen: dict[tuple[str, str], tuple[float, Any]] = {}

    def told(self, place: str, entries: Iterable[tuple[str, T, float]], prefix: str) -> list[tuple[str, T]]:
        """Return what the list of the place has; entries are name, content and time of change, in order."""
        now, lag_s = time.time(), self._lag_s()
        there = [(name, content) for name, content, changed in entries if changed <= now - lag_s or not lag_s]
        if not lag_s:
            return there
        with self._lock:
            self._seen |= {(place, name): (now, content) for name, content in there}
            names = {name for name, _ in there}
            removed = [
                (name, content)
                for (at, name), (seen, content) in self._seen.items()
                if at == place and name not in names and name.startswith(prefix) and seen > now - lag_s
            ]
        return sorted([*there, *removed], key=lambda entry: entry[0])


def newest(names: Iterable[str]) -> list[str]:
    """Return the names of the files of the newest `step-N` folder in each place."""
    found = [(match[1], int(match[2]), name) for name in names if (match := _STEP.fullmatch(name))]
    last: dict[str, int] = {}
    for place, step, _ in found:
        last[place] = max(step, last.get(place, 0))
    return [name for place, step, name in found if step == last[place]]


def damage(folder: Path, pattern: str) -> None:
    """Change the last byte of the folder's files that match the pattern."""
    for path in folder.rglob("*"):
        if pattern and path.is_file() and fnmatchcase(path.name, pattern) and (data := path.read_bytes()):
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

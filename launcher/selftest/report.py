"""The report of a selftest: words and numbers of a fixed list, fit to be attached to an issue; two of them compared."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, get_args

from cloudtrain.entrypoints import atomic_json

from ..errors import CloudtrainError, ConfigError
from ..job import JobState
from ..planning.prepared import Prepared, region_of
from .checks import Facts, differing

OK, DIFFERS, NOT_CHECKED = "ok", "differs", "not checked"
HEAD = ("cloudtrain", "python", "sdk", "backend", "region", "machine")  # what may be a word from outside
REASONS = ("user", "budget", "time_limit", "paused", "preempted", "no_machines", "superseded", "node_failure", "error")
FACTS = """failed warned keys changed left_out added states_1 states_2 states_3 ranks lost twice disordered last_step late_s
    state instances step starts attempt attempts restarts resumed_step reason resumable saved_step files compared unlike
    took_s apart_s micro stop resume time_limit running left error code"""
KNOWN = frozenset(FACTS.split())
OURS = KNOWN | {"least", "most", "order", OK, DIFFERS, NOT_CHECKED, *HEAD, *get_args(JobState), *REASONS}
LEAST_INSIDE = 4  # characters of a value that is searched for inside a longer word
FACTOR, APART_S = 2.0, 5.0  # times of two reports differ beyond both
_WORD = re.compile(r"[A-Za-z0-9_.+:,\[\] -]{1,100}")


@dataclass(frozen=True)
class Row:
    """A step with its verdict. `words` are for the screen only: they may name the user's own places."""

    step: str
    verdict: str
    seconds: float = 0.0
    expected: Facts = field(default_factory=dict)
    came: Facts = field(default_factory=dict)
    words: tuple[str, ...] = ()
    why: str = ""

    @classmethod
    def judged(cls, step: str, seconds: float, expected: Facts, came: Facts, words: tuple[str, ...]) -> Row:
        """Return the row with its verdict."""
        unlike = differing(expected, came)
        said = tuple(f"{name}: expected {_shown(expected[name])}, came {_shown(came.get(name))}" for name in unlike)
        return cls(step, DIFFERS if unlike else OK, seconds, expected, came, (*said, *words) if unlike else ())

    def lines(self) -> list[str]:
        """Return the lines for the screen."""
        return [f"{self.verdict:<12} {self.step:<18} {self.seconds:7.1f} s", *(f"    {each}" for each in self.words)]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return (
        ", ".join(map(str, value)) or "none" if isinstance(value, list) else "nothing" if value is None else str(value)
    )


class Report:
    """The report in a file, written anew after each row, without the values in `private`."""

    def __init__(self, path: Path, head: Mapping[str, str], private: frozenset[str], steps: tuple[str, ...]) -> None:
        self.path, self._private, self._steps = path, private, steps
        self.head = {name: head[name] for name in HEAD if name in head}
        self.rows: list[Row] = []

    @property
    def is_ok(self) -> bool:
        """Whether the selftest came to its end, and no step differs; a step needs a step that differs, or no record."""
        return len(self.rows) == len(self._steps) and all(row.verdict != DIFFERS for row in self.rows)

    def add(self, row: Row) -> None:
        """Add the row, and write the file. Raises ConfigError if the file cannot be written, or would tell too much."""
        self.rows.append(row)
        data = self.dump()
        for word in _words(data, {*OURS, *self._steps}):
            if not _WORD.fullmatch(word) or any(_is_inside(value, word) for value in self._private):
                message = f"the report is not written: in the step `{row.step}` it would hold a value of yours: {word}"
                raise ConfigError(
                    message, where=self.path, hint="report this as a fault of cloudtrain, without the value"
                )
        try:
            atomic_json.write_json(self.path, data)
        except OSError as error:
            raise ConfigError(f"the report cannot be written: {error.strerror}", where=self.path) from error

    def dump(self) -> dict[str, Any]:
        """Return the data of the file."""
        rows = [
            {"step": row.step, "verdict": row.verdict, "seconds": round(row.seconds, 1)}
            | ({"why": row.why} if row.why else {"expected": _facts(row.expected), "came": _facts(row.came)})
            for row in self.rows
        ]
        return {"selftest": 1, "head": self.head, "steps": rows}


def _facts(facts: Mapping[str, Any]) -> Facts:
    return {name: facts[name] for name in facts if name in KNOWN}


def _words(value: Any, known: set[str]) -> Iterator[str]:
    """Yield the texts of the values that are no words of ours."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key != "why":  # a sentence of ours
                yield from _words(each, known)
    elif isinstance(value, list):
        for each in value:
            yield from _words(each, known)
    elif isinstance(value, str) and value not in known:
        yield value


def _is_inside(value: str, word: str) -> bool:
    """Return whether the word tells the value: a short value only as the whole word, for `a` is in many words."""
    if len(value) < LEAST_INSIDE:
        return value == word
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])", word) is not None


def head_of(prepared: Prepared) -> dict[str, str]:
    """Return the versions, the backend, the region and the machine type."""
    backend, python = prepared.config.backend, ".".join(map(str, sys.version_info[:3]))
    found = {
        "cloudtrain": version("cloudtrain"),
        "python": python,
        "backend": backend,
        "machine": prepared.plan.machine,
    }
    for needed in requires("cloudtrain") or ():
        name = re.split("[^A-Za-z0-9._-]", needed)[0]
        if f'extra == "{backend}"' in needed and "sdk" not in found:
            with contextlib.suppress(PackageNotFoundError):
                found["sdk"] = f"{name} {version(name)}"
    return found | ({"region": region} if (region := region_of(prepared)) else {})


def private_values(block: Any, public: frozenset[str]) -> frozenset[str]:
    """Return the texts that no report may hold: those of the config's block, the home, the user and the host."""
    own = {str(Path.home()), getpass.getuser(), socket.gethostname(), socket.gethostname().partition(".")[0]}
    return frozenset({*_words(block, set()), *own} - public - {""})


def read(path: Path) -> dict[str, Any]:
    """Return the data of a report. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["selftest"] == 1 and all(
            isinstance(row["came"] if "why" not in row else {}, dict) for row in data["steps"]
        ):
            return dict(data)
    except OSError as error:
        raise ConfigError(f"the report cannot be read: {error.strerror}", where=path) from error
    except (ValueError, LookupError, TypeError):
        pass
    raise ConfigError("this is no report of a selftest", where=path, hint="cloudtrain selftest -o FILE writes one")


def compared(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Return a line for each verdict, state, code or time of the new report that differs from the old one's."""
    found, known = [], {row["step"]: row for row in old["steps"]}
    for row in new["steps"]:
        before = known.get(row["step"], {"verdict": "absent"})
        ours, theirs = ({"verdict": each["verdict"], **each.get("came", {})} for each in (row, before))
        ours["seconds"], theirs["seconds"] = row["seconds"], before.get("seconds", row["seconds"])
        for name in sorted(ours.keys() | theirs.keys()):
            if _is_unlike(name, ours.get(name), theirs.get(name)):
                found.append(f"{row['step']}, {name}: {_shown(ours.get(name))}, before {_shown(theirs.get(name))}")
    return found


def _is_unlike(name: str, new: Any, old: Any) -> bool:
    if name.endswith("_s") or name == "seconds":
        low, high = sorted((float(new or 0), float(old or 0)))
        return high - low > APART_S and high > FACTOR * low
    if isinstance(new, int | float) and isinstance(old, int | float) and name not in ("stop", "resume", "time_limit"):
        return False  # a count, which no two runs share
    return bool(new != old)


def code_of(error: CloudtrainError) -> str:
    """Return the platform's code of the error, such as AccessDeniedException; else the name of our own error."""
    cause: Any = error.__cause__
    response = getattr(cause, "response", None)
    codes = [response.get("Error", {}).get("Code") if isinstance(response, dict) else None]
    codes += [getattr(cause, name, None) for name in ("code", "status_code", "reason")]
    return next((str(each) for each in codes if each and re.fullmatch(r"\w{1,60}", str(each))), type(error).__name__)

"""The errors of cloudtrain, reported in three lines: the problem, the place, the fix.

    CloudtrainError            1
    ├── UsageError             2   the command line is invalid
    ├── ConfigError            3   the config file, the code folder or a named file is wrong; carries all faults
    ├── CredentialError        4   no credentials, or no permission
    ├── CapacityError          5   no quota, no capacity
    ├── BudgetError            6   the budget refuses the job, or was reached
    ├── UnreachableError       7   the backend does not answer; the state of the job is unknown
    └── NoSuchJobError         8

The number is the exit code of a command that ends with the error. With `--json`, a command also prints the error as a
JSON object, `{"error": {...}}`, in place of its data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTHING = "nothing was sent, and nothing is reserved"


@dataclass(frozen=True)
class Place:
    """A place in a text file; line and column count from 1; `excerpt` is the line without the newline.

    Line 0: `file` alone is the place, such as an option of the command line.
    """

    file: str
    line: int = 0
    column: int = 0
    excerpt: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Fault:
    """A fault: the message, the affected key (`resources.spot`), the place, and the fix (`hint`).

    A rule over several keys gives the places of the further keys in `also`. A fault without a place in the file (a
    command-line override, a missing key's parent at top level) leaves `place` out. `is_warning`: the config may still
    work, so the fault is reported, and not refused.
    """

    message: str
    key: str = ""
    place: Place | None = None
    hint: str = ""
    also: tuple[Place, ...] = ()
    is_warning: bool = False

    def __str__(self) -> str:
        lines = [self.message]
        if self.place is not None:
            lines += [f"  at {self.place}" + (f", {self.key}" if self.key else ""), *_excerpt(self.place)]
        elif self.key:
            lines.append(f"  at {self.key}")
        for other in self.also:
            lines += [f"  and {other}", *_excerpt(other)]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON; `at` is file, line and column, None without a place."""
        place = self.place
        at = None if place is None else {"file": place.file, "line": place.line, "column": place.column}
        return {"message": self.message, "key": self.key, "at": at, "hint": self.hint}


class CloudtrainError(Exception):
    """The base class of all errors that a command reports without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        """Return the report, without the leading `error:`."""
        where = f"\n  at {self.where}" if self.where else ""
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{self.message}{where}{hint}"

    def as_json(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {"message": self.message, "where": self.where, "hint": self.hint, "exit_code": self.exit_code}


class UsageError(CloudtrainError):
    """The command line is invalid."""

    exit_code = 2


class ConfigError(CloudtrainError):
    """The config, or a file named in the config, is wrong. Carries all faults, in the file's order."""

    exit_code = 3

    def __init__(self, faults: Sequence[Fault] | str, *, key: str = "", where: str | Path = "", hint: str = "") -> None:
        """`faults` may be the message of one fault; `key`: the config's key at fault."""
        self.faults = (Fault(faults, key, hint=hint),) if isinstance(faults, str) else tuple(faults)
        super().__init__(self.faults[0].message, where=str(where), hint="" if key else hint)

    def __str__(self) -> str:
        if self.where:
            return super().__str__()
        return "\nerror: ".join(str(fault) for fault in self.faults)

    def as_json(self) -> dict[str, Any]:
        """Return the report for JSON with every fault; place and hint are taken from the first fault."""
        first = self.faults[0]
        where = self.where or str(first.place or first.key)
        found = {**super().as_json(), "where": where, "hint": self.hint or first.hint}
        return {**found, "faults": [fault.as_json() for fault in self.faults]}


def refuse(faults: Iterable[Fault]) -> None:
    """Raise ConfigError with the faults, if any."""
    if listed := tuple(faults):
        raise ConfigError(listed)


def require_all(*asks: Callable[[], object]) -> None:
    """Call each function, and raise a single ConfigError with all their faults, each fault once."""
    errors: list[ConfigError] = []
    for ask in asks:
        try:
            ask()
        except ConfigError as error:
            errors.append(error)
    if errors:
        faults = dict.fromkeys(fault for error in errors for fault in error.faults)
        raise errors[0] if len(errors) == 1 else ConfigError(list(faults))


class CredentialError(CloudtrainError):
    """No credentials, or no permission."""

    exit_code = 4


class CapacityError(CloudtrainError):
    """No quota, or no capacity."""

    exit_code = 5


class BudgetError(CloudtrainError):
    """The budget refuses the job, or was reached. `enough_micro`: the job budget that suffices, in micro-dollars."""

    exit_code = 6
    enough_micro: int | None = None


class UnreachableError(CloudtrainError):
    """The backend does not answer; the state of the job is unknown."""

    exit_code = 7


PASSING = (CapacityError, UnreachableError)  # a later try may succeed: a host boots, or ends an earlier job


class NoSuchJobError(CloudtrainError):
    """No job has the name, id or prefix."""

    exit_code = 8


def in_words(error: Exception) -> str:
    """Return the error on one line; an unexpected exception is named as a failure of cloudtrain."""
    first = (str(error).splitlines() or [""])[0] or type(error).__name__
    is_known = isinstance(error, CloudtrainError | OSError)
    return first if is_known else f"cloudtrain itself failed: {type(error).__name__}: {first}"


def _excerpt(place: Place) -> list[str]:
    """Return the line and a caret under the column; a tab counts as one column, as in the file."""
    text = place.excerpt.rstrip()
    if not text:
        return []
    gutter = f"{place.line:>5} | "
    indent = "".join("\t" if c == "\t" else " " for c in text[: place.column - 1])
    return [gutter + text, " " * (len(gutter) - 2) + "| " + indent + "^"]

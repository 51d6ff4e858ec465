"""The edge of a platform: its errors become cloudtrain's errors, in one sentence with a hint.

A platform's `classify` says what an error means; `answers` and `polls` do the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cloudtrain.entrypoints.format import one_line
from cloudtrain.entrypoints.stores.store import StoreError
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UnreachableError

NO_NAME = "its name cannot be looked up here (no network?)"
_NO_NAME = ("name or service not known", "name resolution", "nodename nor servname", "no address associated")
_NUMBER = re.compile(r"\[Errno -?\d+\] ")


@dataclass(frozen=True)
class RemoteFault:
    """The meaning of a platform's error."""

    kind: type[CloudtrainError]
    """The class of our error."""
    words: str
    """The words after `cannot DO:`."""
    hint: str = ""
    where: str = ""
    """The platform's code, if the words alone do not explain the error."""
    key: str = ""
    """The config's key at fault."""


Classify = Callable[[Exception], RemoteFault | None]  # None for an error that is not the platform's


def translated(fault: RemoteFault, doing: str) -> CloudtrainError:
    """Return our error for the fault of `doing`."""
    message = f"cannot {doing}: {fault.words}"
    if fault.key:
        return ConfigError(message, key=fault.key, hint=fault.hint)
    return fault.kind(message, where=fault.where, hint=fault.hint)


@contextmanager
def answers(doing: str, classify: Classify) -> Iterator[None]:
    """Raise a platform's error of `doing` as one of our errors."""
    try:
        yield
    except Exception as error:
        fault = classify(error)
        if fault is None and isinstance(error, StoreError):  # a stored address that no store can have
            fault = RemoteFault(CloudtrainError, str(error))
        if fault is None:
            raise
        raise translated(fault, doing) from error


@contextmanager
def polls(doing: str, classify: Classify, renew: Callable[[], None] = lambda: None) -> Iterator[None]:
    """As `answers`, but raise every error as UnreachableError, because a failed poll tells nothing about the job.

    `renew` drops the credentials after an answer that new credentials may change.
    """
    try:
        with answers(doing, classify):
            yield
    except UnreachableError:
        raise
    except CloudtrainError as error:
        renew()
        raise UnreachableError(error.message, where=error.where, hint=error.hint) from error


@contextmanager
def importing(lacks: Callable[[ImportError], ConfigError]) -> Iterator[None]:
    """Raise the platform's error for a library that is missing."""
    try:
        yield
    except ImportError as error:
        raise lacks(error) from error


def cause(error: BaseException) -> str:
    """Return the root cause of the error on a single line, in plain words for a network error.

    Libraries wrap the error of the socket; a store may raise the wrapped error from its wrapper.
    """
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) and inner not in chain:
        chain.append(inner)
    inner = chain[-1]
    line = _NUMBER.sub("", one_line(inner))
    return NO_NAME if any(word in line.lower() for word in _NO_NAME) else line

"""Texts of libraries and services, as parts of cloudtrain's sentences."""

from __future__ import annotations

import re

from ..errors import CloudtrainError

NO_NAME = "its name cannot be looked up here (no network?)"
_NO_NAME = ("name or service not known", "name resolution", "nodename nor servname", "no address associated")
_NUMBER = re.compile(r"\[Errno -?\d+\] ")

_SECRET = re.compile(r"(sig|token|key|assertion|password)=[^&\s'\"]+", re.IGNORECASE)


def cause(error: BaseException) -> str:
    """Return the root cause of the error on a single line, in plain words for a network error.

    Libraries wrap the error of the socket; a store may raise the wrapped error from its wrapper.
    """
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) and inner not in chain:
        chain.append(inner)
    inner = chain[-1]
    line = _NUMBER.sub("", one_line(str(inner) or type(inner).__name__))
    return NO_NAME if any(word in line.lower() for word in _NO_NAME) else line


def one_line(text: str, most: int = 400) -> str:
    """Return the text on a single line of at most `most` characters, without tokens, keys and passwords."""
    line = _SECRET.sub(r"\1=...", " ".join(text.split()))
    return line if len(line) <= most else f"{line[:most]}..."


def in_words(error: Exception) -> str:
    """Return the error on one line; an unexpected exception is named as a failure of cloudtrain."""
    first = (str(error).splitlines() or [""])[0] or type(error).__name__
    is_known = isinstance(error, CloudtrainError | OSError)
    return first if is_known else f"cloudtrain itself failed: {type(error).__name__}: {first}"

"""What libraries and services say, as part of a sentence of ours."""

from __future__ import annotations

import re

__all__ = ["cause", "one_line"]

_SECRET = re.compile(r"(sig|token|key|assertion|password)=[^&\s'\"]+", re.IGNORECASE)


def cause(error: BaseException) -> str:
    """Return what was at the root of the error, in one line: libraries wrap what the socket has said."""
    inner = error
    while inner.__cause__ or inner.__context__:
        inner = inner.__cause__ or inner.__context__ or inner
    return one_line(str(inner) or type(inner).__name__)


def one_line(text: str, most: int = 400) -> str:
    """Return the text in one line, not too long, and without what would let anybody in."""
    line = _SECRET.sub(r"\1=...", " ".join(text.split()))
    return line if len(line) <= most else f"{line[:most]}..."

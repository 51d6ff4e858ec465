"""The characters of bars and sparklines: blocks, or ASCII if the locale promises no UTF-8."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ASCII", "UNICODE", "Signs", "signs_of"]


@dataclass(frozen=True)
class Signs:
    """`levels` go from low to high, without a blank; `parts` can be distinguished without colour."""

    levels: str
    full: str
    empty: str
    parts: str
    rule: str
    cut: str
    pointer: str
    encoding: str


UNICODE = Signs("▁▂▃▄▅▆▇█", "█", "░", "█▓▒░", "─", "…", "▶", "utf-8")
ASCII = Signs("_.-:=+*#", "#", ".", "#=:.", "-", "~", ">", "ascii")


def signs_of(environ: Mapping[str, str] = os.environ) -> Signs:
    """Return the characters that the locale can show.

    LC_CTYPE=C.UTF-8 alone proves no UTF-8: Python itself sets the variable at its start if the locale is C (PEP 538).
    """
    asked = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or "C"
    if not environ.get("LC_ALL") and environ.get("LC_CTYPE") == "C.UTF-8":
        asked = environ.get("LANG") or "C"
    return UNICODE if "utf" in asked.lower() else ASCII

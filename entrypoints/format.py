"""Formats sums, time spans and errors for people, by the same rules in the launcher and on the nodes.

A sum has cents, and at least two significant digits: 12.30, 0.17, 0.0041. A span has its two largest units.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_MICRO = 1_000_000
_SPANS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
_ADDRESS = re.compile(r"(https?://)(?:[^\s/?#]*@)?(?![^\s/]*@)([\w\[][\w.~:@/#\[\]!$&()*+,;=%-]{0,1000})")
_SECRET = re.compile(r"(sig|token|key|assertion|password)=[^&\s'\")]+", re.IGNORECASE)


def amount(micro: float) -> str:
    """Return a sum of micro-dollars, rounded to the nearest: `12.30`, `0.0041`."""
    value = micro / _MICRO
    if abs(value) >= 0.995 or value == 0:
        return f"{value:.2f}"
    digits = f"{value:.2g}"
    plain = f"{float(digits):.12f}".rstrip("0") if "e" in digits else digits
    return plain if len(plain.lstrip("-")) >= 4 else f"{value:.2f}"


def counted(count: int, what: str) -> str:
    """Return the number with its noun: `1 node`, `2 nodes`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def failure(rank: int | None, kind: str | None, message: str) -> str:
    """Return the failure of a rank, or of the job if no rank is known: `rank 1: ValueError: no batch`."""
    return f"{'' if rank is None else f'rank {rank}: '}{f'{kind}: ' if kind else ''}{message}"


def dollars(micro: float | None) -> str:
    """Return `12.30 USD`, or `unknown` for None."""
    return "unknown" if micro is None else f"{amount(micro)} USD"


def usd(micro: int) -> str:
    """Return the sum in a sentence, whole dollars without cents: `12.30 USD`, `100 USD`."""
    return whole(dollars(micro))


def up(micro: int) -> int:
    """Return the sum rounded up to the digits of `amount`: a required sum never looks too small."""
    unit = _unit(micro)
    return -(-micro // unit) * unit


def down(micro: int) -> int:
    """Return the sum rounded down to the digits of `amount`: a remaining sum never looks too large."""
    unit = _unit(micro)
    return micro // unit * unit


def most(micro: int | None) -> str:
    """Return spent or held money, or a worst case, rounded up: `12.30 USD`, or `unknown` for None."""
    return dollars(None if micro is None else up(micro))


def cell(micro: int | None) -> str:
    """Return the sum of `most` without the unit, for a table."""
    return most(micro).removesuffix(" USD")


def left(micro: int) -> str:
    """Return remaining money, rounded down and not below zero: `12.30 USD`."""
    return dollars(down(max(0, micro)))


def whole(words: str) -> str:
    """Return the sums of a sentence, whole dollars without cents: `12.30 USD`, `100 USD`."""
    return words.replace(".00 USD", " USD")


def quantity(value: float) -> str:
    """Return the number in three digits: 8.1k, 12.3M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def span(seconds: float, units: int = 2) -> str:
    """Return the time span in at most two units, or `units`: `2h 7m`, `9m 20s`, `3d 4h`, `50s`."""
    left = max(0, round(seconds))
    parts: list[tuple[int, str]] = []
    for unit, size in _SPANS:
        count, left = divmod(left, size)
        if count or parts or unit == "s":
            parts.append((count, unit))
    return " ".join(f"{count}{unit}" for count, unit in parts[:units] if count) or "0s"


def format_duration(seconds: int) -> str:
    """Return the seconds in the largest unit that divides them, days from two up: `24h`, `90m`, `2d`, `61s`."""
    for unit, size in _SPANS:
        least = 2 * size if unit == "d" else size
        if seconds >= least and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def one_line(text: object, most: int = 400) -> str:
    """Return the text of an error on a line of at most `most` characters, without tokens, keys and passwords.

    `text` is the error, whose type stands for an empty text, or the text of a service, which may be empty.
    """
    told = text if isinstance(text, str) else str(text) or type(text).__name__
    line = _SECRET.sub(r"\1=...", " ".join(told.split()))
    return line if len(line) <= most else f"{line[:most]}..."


def address(text: object) -> str:
    """Return the first web address in the text, without a user, a password and a query: they may be secrets."""
    found = _ADDRESS.search(text) if isinstance(text, str) else None
    return f"{found[1]}{found[2]}".rstrip(".,;)") if found else ""


def _unit(micro: int) -> int:
    """Return the smallest unit that `amount` shows for a sum of the same size, in micro-dollars."""
    return int(10 ** min(4, max(0, len(str(abs(micro))) - 2)))

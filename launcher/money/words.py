"""Money and time in people's words."""

from __future__ import annotations

import time

__all__ = ["amount", "as_usd", "clock", "dollars", "moment", "of_limit", "span"]

_MICRO = 1_000_000


def amount(micro: float) -> str:
    """Return an amount as people read it: cents, below a dollar two digits that count: `12.30`, `0.0041`."""
    value = micro / _MICRO
    if abs(value) >= 0.995 or value == 0:
        return f"{value:.2f}"
    digits = f"{value:.2g}"
    plain = f"{value:.9f}".rstrip("0") if "e" in digits else digits
    return plain if len(plain.lstrip("-")) >= 4 else f"{value:.2f}"


def dollars(micro: float | None) -> str:
    """Return `12.30 USD`; `unknown` where it is."""
    return "unknown" if micro is None else f"{amount(micro)} USD"


def of_limit(spent_micro: int | None, limit_micro: int | None) -> str:
    """Return `1.23 USD of 10.00 USD, 12 %`, without a limit the amount alone."""
    if limit_micro is None:
        return dollars(spent_micro)
    share = "" if spent_micro is None or limit_micro == 0 else f", {100 * spent_micro / limit_micro:.0f} %"
    return f"{dollars(spent_micro)} of {dollars(limit_micro)}{share}"


def span(seconds: float) -> str:
    """Return how long in one or two units: `45s`, `30m`, `12m05s`, `3h20m`, `2d04h`."""
    whole = max(0, round(seconds))
    for size, unit, smaller, its in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size}{unit}" + (f"{rest:02d}{its}" if rest else "")
    return f"{whole}s"


def clock(time_s: float, now_s: float) -> str:
    """Return a time by the user's clock: `14:05`, within ten minutes `14:05:30`, of another day `24 Nov 14:05`."""
    there, here = time.localtime(time_s), time.localtime(now_s)
    if abs(time_s - now_s) < 600:
        return time.strftime("%H:%M:%S", there)
    return time.strftime("%H:%M" if there[:3] == here[:3] else "%d %b %H:%M", there)


def moment(time_s: float | None) -> str:
    """Return a time in UTC, in which bills are written: `2026-11-22 14:05:09`."""
    return "-" if time_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))


def as_usd(micro: int | None) -> float | None:
    """Return micro-dollars as a number of dollars, for JSON."""
    return None if micro is None else micro / _MICRO

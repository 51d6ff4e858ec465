"""Text for shares of a budget and for times; entrypoints/format.py formats sums and durations."""

from __future__ import annotations

import time

from cloudtrain.entrypoints.format import dollars


def of_limit(spent_micro: int | None, limit_micro: int | None) -> str:
    """Return `1.23 USD of 10.00 USD, 12 %`, or only the amount if no limit is set."""
    if limit_micro is None:
        return dollars(spent_micro)
    share = "" if spent_micro is None or limit_micro == 0 else f", {100 * spent_micro // limit_micro} %"
    return f"{dollars(spent_micro)} of {dollars(limit_micro)}{share}"


def clock(time_s: float, now_s: float) -> str:
    """Return a local time: `14:05`; within ten minutes of now `14:05:30`; on a different day `24 Nov 14:05`.

    Returns `far away` if the platform cannot represent the time.
    """
    try:
        there, here = time.localtime(time_s), time.localtime(now_s)
    except (OverflowError, ValueError, OSError):
        return "far away"
    if abs(time_s - now_s) < 600:
        return time.strftime("%H:%M:%S", there)
    return time.strftime("%H:%M" if there[:3] == here[:3] else "%d %b %H:%M", there)


def moment(time_s: float | None) -> str:
    """Return a time in UTC, as on bills: `2026-11-22 14:05:09`."""
    return "-" if time_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))


def as_usd(micro: float | None) -> float | None:
    """Return micro-dollars as a number of dollars, for JSON."""
    return None if micro is None else micro / 1_000_000

"""A job's figures as short text, the same on every screen: counts and rates, shares, seconds of a step, memory."""

from __future__ import annotations

__all__ = ["percent", "quantity", "size", "step_time"]


def percent(share: float) -> str:
    """Return `12 %`; `100 %` only for the whole, and `<1 %` for a small share above 0."""
    if 0 < share < 0.01:
        return "<1 %"
    return f"{99 if 0.99 < share < 1 else round(100 * share)} %"


def quantity(value: float) -> str:
    """Return the number with four digits, or three below 0.001 and from 10,000: `0.1234`, `12.3k`, `2.31e-04`."""
    amount = abs(value)
    if 0 < amount < 1e-3:
        return f"{value:.2e}"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if amount >= unit:
            return f"{value / (unit if letter != 'k' else 1e3):.3g}{letter}"
    return f"{value:.4g}"


def step_time(seconds: float) -> str:
    """Return the duration of a step: `1.25 s`, `50 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def size(count: float) -> str:
    """Return bytes as memory is sold: `12.3 GiB`, `404 MiB`, `12 KiB`."""
    if 0 < count < 2**20:
        return f"{count / 2**10:.0f} KiB" if count >= 2**10 else f"{count:.0f} B"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

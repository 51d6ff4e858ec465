"""Money in people's words."""

from __future__ import annotations

__all__ = ["dollars", "of_limit", "usd"]

_MICRO = 1_000_000


def dollars(micro: float | None) -> str:
    """Return an amount as people read it: cents, below a dollar two digits that count; `unknown` where it is."""
    if micro is None:
        return "unknown"
    amount = micro / _MICRO
    if abs(amount) >= 0.995 or amount == 0:
        return f"{amount:.2f} USD"
    digits = f"{amount:.2g}"
    plain = f"{amount:.9f}".rstrip("0") if "e" in digits else digits
    return f"{plain if len(plain.lstrip('-')) >= 4 else f'{amount:.2f}'} USD"


def of_limit(spent_micro: int | None, limit_micro: int | None) -> str:
    """Return `1.23 USD of 10.00 USD, 12 %`, without a limit the amount alone."""
    if limit_micro is None:
        return dollars(spent_micro)
    share = "" if spent_micro is None or limit_micro == 0 else f", {100 * spent_micro / limit_micro:.0f} %"
    return f"{dollars(spent_micro)} of {dollars(limit_micro)}{share}"


def usd(micro: int | None) -> float | None:
    """Return micro-dollars as a number of dollars, for JSON."""
    return None if micro is None else micro / _MICRO

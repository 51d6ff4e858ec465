"""Durations, money, percents and sizes: read from text, written back as text; the text of times.

Values are whole numbers, so that sums are exact: seconds, micro-dollars, percent, gigabytes. Every `parse_*` raises
ValueError with the expected form, never with the given text, which may be a secret. Every `format_*` can be read back
as the same number. The later functions write figures and times for a screen, rounded.
"""

from __future__ import annotations

import re
import time
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from cloudtrain.entrypoints.format import format_duration as format_duration

# Patterns an editor checks with, too: JavaScript's dialect, so no named groups and no flags.
DURATION_PATTERN = r"^[0-9]+(\.[0-9]+)? ?[smhd]( ?[0-9]+(\.[0-9]+)? ?[smhd])*$"
MONEY_PATTERN = r"^\$?[0-9]+(\.[0-9]{1,6})?( ?[Uu][Ss][Dd])?$"
PERCENT_PATTERN = r"^[0-9]+ ?%$"
SIZE_PATTERN = r"^[0-9]+( ?([Gg]|[Tt])[Bb]?)?$"

_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_MICRO = 1_000_000
_TEN_YEARS_S = 3_650 * 86_400  # a longer duration is a typing error, and would overflow the platforms' fields
_MOST_USD = 1_000_000_000
_MONEY = "an amount in US dollars such as `150 USD`"
_ODD_MONEY = (
    (r"^-", "not below 0"),
    (r"€|£|¥|\b(eur|euros?|gbp|chf|jpy|cny|inr|cad|aud)\b", "in US dollars alone: convert it first"),
    (r"[0-9] ?(k|m|mio|thousand|million)\b", "with all its digits, such as `5000 USD`"),
    (r"[0-9]e[+-]?[0-9]", "without an exponent, such as `1000 USD`"),
    (r"[0-9][,_' ][0-9]", "without commas or gaps, and cents after a point: `1000 USD`, `0.50 USD`"),
    (r"\.[0-9]{7}", "with at most six decimals"),
    (r"dollars?|bucks", "the unit is `USD`"),
)


def parse_duration(value: object) -> int:
    """Return whole seconds from `90s`, `10m`, `12h`, `2d` or `1h30m`; of bare numbers only 0 needs no unit."""
    if value in (0, "0") and not isinstance(value, bool):
        return 0
    if not isinstance(value, str) or not re.match(DURATION_PATTERN, value.strip()):
        raise ValueError("a duration with a unit, such as `30s`, `30m` or `30h`")
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?) ?([smhd])", value)
    units = [unit for _, unit in parts]
    if sorted(set(units), key="dhms".index) != units:
        raise ValueError("a duration such as `1h30m`, each unit once, the largest first")
    total = sum((Decimal(number) * _SECONDS[unit] for number, unit in parts), Decimal(0))
    if total != int(total):
        raise ValueError("a duration of whole seconds")
    if total > _TEN_YEARS_S:
        raise ValueError("a duration of at most ten years")
    return int(total)


def stored_s(value: object) -> float | None:
    """Return a duration of a stored config, `30m` or seconds, in seconds; None if not set."""
    return value if value is None or isinstance(value, int | float) else float(parse_duration(value))


def parse_money(value: object) -> int:
    """Return micro-dollars from `150 USD`, `$150`, `0.25 USD`, or from a bare number of dollars."""
    return _micro_of_text(value.strip()) if isinstance(value, str) else _micro_of(_number(value, _MONEY))


@lru_cache  # thousands of jobs have few budgets
def _micro_of_text(text: str) -> int:
    if not re.match(MONEY_PATTERN, text):
        odd = (f" ({words})" for pattern, words in _ODD_MONEY if re.search(pattern, text, re.IGNORECASE))
        raise ValueError(_MONEY + next(odd, ""))
    return _micro_of(Decimal(text.strip("$").upper().removesuffix("USD").strip()))


def _micro_of(amount: Decimal) -> int:
    micro = amount * _MICRO
    if micro != int(micro):
        raise ValueError(f"{_MONEY}, with at most six decimals")
    if not 0 <= amount <= _MOST_USD:
        raise ValueError(f"{_MONEY}, at most a billion")
    return int(micro)


def format_money(micro_usd: int) -> str:
    """Return `150 USD`, `0.25 USD`: no digit more than needed."""
    whole, rest = divmod(micro_usd, _MICRO)
    decimals = f".{rest:06d}".rstrip("0") if rest else ""
    if len(decimals) == 2:
        decimals += "0"  # 2.5 dollars is written 2.50
    return f"{whole}{decimals} USD"


def parse_percent(value: object) -> int:
    """Return 50 from `50%`. A bare number is refused: 0.5 and 50 would both be guesses."""
    if isinstance(value, str) and re.match(PERCENT_PATTERN, value.strip()):
        percent = int(value.strip().rstrip("%"))
        if 1 <= percent <= 1000:
            return percent
    raise ValueError("a whole percentage with its sign, such as `50%`, from `1%` to `1000%`")


def format_percent(percent: int) -> str:
    """Return `50%`."""
    return f"{percent}%"


def parse_size_gb(value: object) -> int:
    """Return gigabytes from `200`, `200 GB` or `2 TB`."""
    wanted = "a whole number of gigabytes such as `200`"
    if isinstance(value, str) and re.match(SIZE_PATTERN, value.strip()):
        number = re.sub(r"\D", "", value)
        size = Decimal(number) * (1000 if "t" in value.lower() else 1)
    else:
        size = _number(value, wanted)
    if size != int(size) or not 1 <= size <= 1_000_000:
        raise ValueError(f"{wanted}, at least 1")
    return int(size)


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


def clock(time_s: float, now_s: float) -> str:
    """Return a local time: `14:05`, within ten minutes `14:05:30`, on another day `24 Nov 14:05`, else `far away`."""
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


def _number(value: object, wanted: str) -> Decimal:
    """Return a YAML number exactly as it was written; True is not 1 here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(wanted)
    try:
        number = Decimal(str(value))
    except (InvalidOperation, ValueError):
        raise ValueError(wanted) from None
    if not number.is_finite():
        raise ValueError(wanted)
    return number

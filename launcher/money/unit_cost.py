"""Unit costs of a job: the price of an epoch, of a million samples or tokens, and of a unit of loss.

Costs are summed over all attempts, so the figures stay correct after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import dollars
from cloudtrain.launcher.metering import meter
from cloudtrain.launcher.store import loss_bins

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Attempt

__all__ = ["Achieved", "CostPoint", "achieved", "as_json", "in_words", "last_words", "points"]

_WINDOW = 0.2  # the last fifth of the money is compared with the fifth before
_MILLION = 1e6


@dataclass(frozen=True)
class CostPoint:
    """The mean loss of `count` steps, and the job's total cost at that point, over all attempts."""

    spent_micro: int
    step: int
    loss: float
    count: int


@dataclass(frozen=True)
class Achieved:
    """Prices in micro-dollars, not rounded, since they may be small; None if the job reports no such figure."""

    epoch_micro: float | None
    million_samples_micro: float | None
    million_tokens_micro: float | None
    loss_micro: float | None  # for a decrease of 1.0 in loss, from the first step to the last fifth of the money
    last_micro: int | None  # the last fifth of the money ...
    last_loss: float | None  # ... and the decrease in loss during that fifth; negative if the loss rose


def achieved(attempts: Sequence[Attempt], now_s: float) -> Achieved:
    """Return the unit costs; all are None if the job costs no money or its price is unknown."""
    spent = meter.spent_micro(meter.legs_of(attempts), now_s)
    if not spent:
        return Achieved(None, None, None, None, None, None)
    samples, tokens = _latest(attempts, "samples"), _latest(attempts, "tokens")
    found = points(attempts, now_s)
    last_micro, last_loss = _last(found)
    return Achieved(
        _each(spent, _latest(attempts, "epoch")),
        _each(spent, None if samples is None else samples / _MILLION),
        _each(spent, None if tokens is None else tokens / _MILLION),
        _each(spent, _gained(found)),
        last_micro,
        last_loss,
    )


def points(attempts: Sequence[Attempt], now_s: float) -> list[CostPoint]:
    """Return the loss over the cumulative cost of all attempts, in order; empty if a price is unknown."""
    found, before = [], 0
    for attempt in sorted(attempts, key=lambda each: each.number):
        legs = meter.legs_of([attempt])
        total = meter.spent_micro(legs, now_s)
        if total is None:
            return []
        for each in loss_bins.load(attempt.progress.get("curve")).bins:
            parts = [meter.part_micro(leg, 0.0, each.time_s, now_s) or 0 for leg in legs]
            found.append(CostPoint(before + sum(parts), each.step, each.loss, each.count))
        before += total
    return found


def as_json(paid: Achieved) -> dict[str, Any]:
    """Return the prices in dollars, with stable names."""
    return {
        "epoch_usd": _dollars(paid.epoch_micro),
        "million_samples_usd": _dollars(paid.million_samples_micro),
        "million_tokens_usd": _dollars(paid.million_tokens_micro),
        "loss_usd": _dollars(paid.loss_micro),
        "last_usd": _dollars(paid.last_micro),
        "last_loss_drop": paid.last_loss,
    }


def in_words(paid: Achieved) -> str:
    """Return the prices on a line: `0.41 USD an epoch, 0.0020 USD per 1M samples`; "" if no price is known."""
    parts = [
        (paid.epoch_micro, "an epoch"),
        (paid.million_tokens_micro, "per 1M tokens"),
        (paid.million_samples_micro if paid.million_tokens_micro is None else None, "per 1M samples"),
    ]
    return ", ".join(f"{dollars(price)} {unit}" for price, unit in parts if price is not None)


def last_words(paid: Achieved) -> str:
    """Return what the last fifth of the money bought: `for the last 40.00 USD it fell by 0.003`."""
    if paid.last_micro is None or paid.last_loss is None:
        return ""
    moved = f"{'fell' if paid.last_loss > 0 else 'rose'} by {abs(paid.last_loss):.2g}"
    return f"for the last {dollars(paid.last_micro)} it {moved if paid.last_loss else 'stayed the same'}"


def _latest(attempts: Sequence[Attempt], key: str) -> float | None:
    """Return the value of the newest attempt that reports `key`; None if no attempt does."""
    for attempt in sorted(attempts, key=lambda each: -each.number):
        value = attempt.progress.get(key)
        if isinstance(value, float | int) and value > 0:
            return float(value)
    return None


def _each(spent_micro: int, units: float | None) -> float | None:
    return spent_micro / units if units is not None and units > 0 else None


def _gained(found: Sequence[CostPoint]) -> float | None:
    """Return the decrease in loss from the first step to the mean of the last fifth of the money."""
    if len(found) < 2:
        return None
    begin, end = found[0].spent_micro, found[-1].spent_micro
    now = _mean([each for each in found if each.spent_micro > end - _WINDOW * (end - begin)] or found[-1:])
    return None if now is None else found[0].loss - now


def _last(found: Sequence[CostPoint]) -> tuple[int | None, float | None]:
    """Return the last fifth of the money, and the mean loss before it minus that in it; single steps are too noisy."""
    if len(found) < 2:
        return None, None
    begin, end = found[0].spent_micro, found[-1].spent_micro
    width = round(_WINDOW * (end - begin))
    late = _mean([each for each in found if each.spent_micro > end - width])
    early = _mean([each for each in found if end - 2 * width < each.spent_micro <= end - width])
    return (None, None) if width == 0 or late is None or early is None else (width, early - late)


def _mean(some: Sequence[CostPoint]) -> float | None:
    count = sum(each.count for each in some)
    return sum(each.loss * each.count for each in some) / count if count else None


def _dollars(micro: float | None) -> float | None:
    return None if micro is None else micro / _MILLION

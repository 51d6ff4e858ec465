"""Unit costs of a job: the price of an epoch, of a million samples or tokens, and of a unit of loss.

Costs are summed over all attempts, so the figures stay correct after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloudtrain.entrypoints.format import dollars

from ..job import Attempt
from ..metering import meter
from ..store import loss_bins
from ..text.units import as_usd

_WINDOW = 0.2  # the last fifth of the money is compared with the fifth before
_UNITS = {"epoch": 1.0, "samples": 1e6, "tokens": 1e6}


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

    epoch_micro: float | None = None
    million_samples_micro: float | None = None
    million_tokens_micro: float | None = None
    loss_micro: float | None = None  # for a decrease of 1.0 in loss, from the first step to the last fifth of the money
    last_micro: int | None = None  # the last fifth of the money ...
    last_loss: float | None = None  # ... and the decrease in loss during that fifth; negative if the loss rose


def achieved(attempts: Sequence[Attempt], now_s: float) -> Achieved:
    """Return the unit costs; all are None if the job costs no money or its price is unknown."""
    spent = meter.spent_micro(meter.legs_of(attempts), now_s)
    if not spent:
        return Achieved()
    found = points(attempts, now_s)
    window = round(_WINDOW * (found[-1].spent_micro - found[0].spent_micro)) if found else 0
    late, early = _mean(found, 0, max(1, window)), _mean(found, window, 2 * window)
    paid = _paid_share(attempts, found)
    epoch, samples, tokens = (_each(spent * unit, _latest(attempts, key), paid) for key, unit in _UNITS.items())
    loss = _each(spent, None if late is None else found[0].loss - late)
    drop = None if late is None or early is None else early - late
    return Achieved(epoch, samples, tokens, loss, None if drop is None else window, drop)


def points(attempts: Sequence[Attempt], now_s: float) -> list[CostPoint]:
    """Return the loss over the cumulative cost of all attempts, in order; empty if a price is unknown."""
    legs = meter.legs_of(attempts)
    if meter.spent_micro(legs, now_s) is None:
        return []
    ordered = sorted(attempts, key=lambda each: each.number)
    bins = [each for attempt in ordered for each in loss_bins.load(attempt.progress.get("curve")).bins]
    spent = [meter.spent_micro(legs, now_s, to_s=each.time_s) or 0 for each in bins]
    return [CostPoint(micro, each.step, each.loss, each.count) for micro, each in zip(spent, bins, strict=True)]


def as_json(paid: Achieved) -> dict[str, Any]:
    """Return the prices in dollars, with stable names."""
    return {
        "epoch_usd": as_usd(paid.epoch_micro),
        "million_samples_usd": as_usd(paid.million_samples_micro),
        "million_tokens_usd": as_usd(paid.million_tokens_micro),
        "loss_usd": as_usd(paid.loss_micro),
        "last_usd": as_usd(paid.last_micro),
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


def _paid_share(attempts: Sequence[Attempt], found: Sequence[CostPoint]) -> float:
    """Return the share of the steps that this job has paid for: `checkpoint.resume: PATH` begins with another's."""
    before, step = attempts[0].progress.get("resumed_step"), attempts[-1].progress.get("step")
    if not found or before is None or step is None or before >= min(found[0].step, step):
        return 1.0
    return 1 - float(before) / float(step)


def _each(spent_micro: float, count: float | None, paid: float = 1.0) -> float | None:
    return spent_micro / (count * paid) if count is not None and count > 0 else None


def _mean(found: Sequence[CostPoint], after: int, before: int) -> float | None:
    """Return the mean loss from `before` to `after` micro-dollars before the end; single steps are too noisy."""
    end = found[-1].spent_micro if found else 0
    some = [each for each in found if end - before < each.spent_micro <= end - after]
    count = sum(each.count for each in some)
    return sum(each.loss * each.count for each in some) / count if count else None

"""The loss over time in a few points, stored with a job's progress; the unit costs are computed from the curve.

Every step event goes into a bin of equal time, and bins are joined when there are more than MOST_BINS: a curve of any
length takes the same space, however the events were split into pages. The curve is stored as a short text, so that a
listing of jobs need not parse the bins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST_BINS = 64
_LEAST_GAP_S = 0.25
_LARGEST = 1e200


@dataclass(frozen=True)
class Bin:
    """The mean loss of `count` step events; the last event has `time_s` (unix seconds) and `step`."""

    time_s: float
    step: int
    loss: float
    count: int = 1


@dataclass(frozen=True)
class Curve:
    """Bins of `gap_s` seconds each; the first bin holds only the first event."""

    gap_s: float
    bins: tuple[Bin, ...]


EMPTY = Curve(_LEAST_GAP_S, ())


def added(curve: Curve, events: Iterable[tuple[float, int, float]]) -> Curve:
    """Return the curve with these events (time, step, loss). A clock that is set back only makes the curve coarser."""
    gap_s, bins = curve.gap_s, list(curve.bins)
    for time_s, step, loss in events:
        if not abs(loss) < _LARGEST:  # drop NaN, infinities and values whose sums would overflow
            continue
        _add(bins, Bin(time_s, step, loss), gap_s)
        while len(bins) > MOST_BINS:
            gap_s *= 2
            all_bins, bins = bins, []
            for each in all_bins:
                _add(bins, each, gap_s)
    return Curve(gap_s, tuple(bins))


def dump(curve: Curve) -> str:
    """Return the curve as text: gap and first time, then for each bin its relative time, step, loss and count."""
    if not curve.bins:
        return ""
    begin_s = round(curve.bins[0].time_s, 2)
    rows = [f"{each.time_s - begin_s:.9g},{each.step},{each.loss:.7g},{each.count}" for each in curve.bins]
    return ";".join([f"{curve.gap_s!r},{begin_s!r}", *rows])


def load(text: str | None) -> Curve:
    """Return the curve of a text from `dump`, an empty curve for a damaged text."""
    if not text:
        return EMPTY
    try:
        (gap_s, begin_s), *rows = (part.split(",") for part in text.split(";"))
        begin = float(begin_s)
        bins = [Bin(begin + float(row[0]), int(row[1]), float(row[2]), int(row[3])) for row in rows]
        return Curve(float(gap_s), tuple(bins))
    except (AttributeError, IndexError, ValueError):
        return EMPTY


def _add(bins: list[Bin], new: Bin, gap_s: float) -> None:
    """Join the bin with the last bin if both are in the same gap, else append the bin."""
    last, begin_s = (bins[-1], bins[0].time_s) if bins else (new, new.time_s)
    if len(bins) > 1 and (new.time_s - begin_s) // gap_s <= (last.time_s - begin_s) // gap_s:
        count = last.count + new.count
        loss = (last.loss * last.count + new.loss * new.count) / count
        bins[-1] = Bin(max(last.time_s, new.time_s), new.step, loss, count)
    else:
        bins.append(new)

"""The figures of how ranks exchange gradients or weights: bytes, averages, staleness, residuals; from step events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.entrypoints.format import quantity

from ..text import sanitize

NAMES = ("bytes_sent", "averages", "density", "threshold", "residual_norm", "tau_mean", "tau_max", "lead", "workers")
_MOST_TAU = 64  # a larger staleness counts as this
_LARGEST = 1e15  # of a figure: a job may write any number
_BARS = "▁▂▃▄▅▆▇█"


def fold(counts: list[int] | None, event: Mapping[str, Any]) -> list[int] | None:
    """Return the updates by staleness, 0 first, with those of a step event; None before the first."""
    told = event.get("tau_counts")
    if not isinstance(told, list):
        return counts
    found = list(counts or ())
    for tau, each in enumerate(told):
        number, place = sanitize.count(each) or 0, min(tau, _MOST_TAU)
        found += [0] * (place + 1 - len(found))
        found[place] += number
    return found


def words(progress: Mapping[str, Any]) -> str:
    """Return the newest figures in a few words; empty without figures."""
    told = ((name, progress.get(name)) for name in NAMES)
    known = {name: value for name, value in told if isinstance(value, float | int) and 0 <= value <= _LARGEST}
    texts: dict[str, Callable[[float], str]] = {
        "bytes_sent": lambda count: f"a rank sends {quantity(float(count))}B a step" if count else "",
        "averages": lambda count: f"{count:.0f} averages",
        "density": lambda share: f"density {100 * share:.2g} %",
        "residual_norm": lambda norm: f"residual norm {norm:.3g}",
        "tau_mean": lambda mean: f"staleness {mean:.2g}, most {known.get('tau_max', 0):.0f}",
        "workers": lambda count: f"{count:.0f} workers",
    }
    return ", ".join(filter(None, (text(known[name]) for name, text in texts.items() if name in known)))


def histogram(progress: Mapping[str, Any], levels: str = _BARS) -> str:
    """Return the updates by staleness as bars, `0 ▁▃█▂ 3`; empty without figures. `levels` go from low to high."""
    counts = progress.get("staleness")
    if not isinstance(counts, list) or not any(counts):
        return ""
    most = max(counts)
    bars = "".join(levels[round((len(levels) - 1) * count / most)] if count else " " for count in counts)
    mean = sum(tau * count for tau, count in enumerate(counts)) / sum(counts)
    return f"0 {bars} {len(counts) - 1}, mean {mean:.2g} of {sum(counts)} updates"

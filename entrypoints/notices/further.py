"""What it takes to go on: the money that a further run needs for the steps that are left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["amount", "more_micro", "number"]

# Of a further run: its steps may take longer than the last ones did, it begins, it saves before its end.
MARGIN, START_S, SAVE_S = 1.1, 60.0, 120.0
_CENT = 10_000


def more_micro(
    limit_micro: int | None,
    spent_micro: int | None,
    rate_micro_h: float | None,
    progress: Mapping[str, Any],
    tail_s: float = 0.0,
    until_s: float | None = None,
) -> int | None:
    """Return what the budget must grow by, in whole cents; as much again where nobody knows how much is left to do.

    Counted as a run: the steps since the last checkpoint again, its start, its save, and what its platform bills beyond
    its limit; `rate_micro_h` is the worst price of all instances. `until_s`: a job that runs goes on for so long, and
    saves then. None where a job has no budget, or no price.
    """
    if limit_micro is None or spent_micro is None or rate_micro_h is None:
        return None
    left_s = number(progress.get("eta_s"))
    if left_s is None:
        return limit_micro
    if until_s is None:
        left_s += _again_s(progress, left_s)
    else:
        spent_micro += round(rate_micro_h * min(until_s, left_s) / 3600)
        left_s -= min(until_s, left_s)
    run_s = left_s * MARGIN + START_S
    cap_s = run_s + min(SAVE_S, run_s / 3) + tail_s
    lacking = rate_micro_h * cap_s / 3600 - max(0, limit_micro - spent_micro)
    return max(_CENT, math.ceil(lacking / _CENT) * _CENT)


def amount(micro: int) -> str:
    """Return the sum as a command line takes it: `12.50USD`."""
    return f"{micro / 1_000_000:.2f}USD"


def number(value: Any) -> float | None:
    """Return the value, where it is a number like any other."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _again_s(progress: Mapping[str, Any], left_s: float) -> float:
    """Return how long the steps since the last checkpoint take again."""
    step, last = number(progress.get("step")), number(progress.get("max_steps"))
    if step is None or last is None or last <= step:
        return 0.0
    return (step - (number(progress.get("checkpoint_step")) or 0.0)) * left_s / (last - step)

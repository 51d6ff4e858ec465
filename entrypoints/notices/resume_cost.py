"""The cost of a resume: the time and the money that another run needs for the remaining steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ExtraBudget", "PriceTerms", "amount", "cap_s", "is_complete", "more", "number", "readable_s"]

# For another run: steps may take longer than the last steps did; the start (torchrun, the import of torch, the
# checkpoint); the time before the limit at which the run saves and leaves, at most a quarter of a short run.
MARGIN, START_S, SAVE_S = 1.1, 30.0, 120.0
_MICRO, _CENT = 1_000_000, 10_000


@dataclass(frozen=True)
class PriceTerms:
    """The price of a job's time: the list price of all instances for an hour, times at most `uncertainty`.

    The platform bills `tail_s` beyond a limit, in units of `unit_s`, at least `least_bill_s`, and may start the job
    `starts` times. The job's own clock begins `lead_s` later; a run shorter than `least_s` is not sent.
    """

    rate_micro_h: float
    uncertainty: float = 1.0
    tail_s: float = 0.0
    lead_s: float = 0.0
    unit_s: float = 1.0
    least_bill_s: float = 0.0
    least_s: float = 0.0
    starts: int = 1

    def worst_micro(self, run_s: float) -> float:
        """Return the highest cost of a run with this limit."""
        billed_s = max(self.least_bill_s, math.ceil((run_s + self.tail_s) / self.unit_s) * self.unit_s)
        return round(self.rate_micro_h * self.uncertainty * billed_s * self.starts / 3600, 3)


@dataclass(frozen=True)
class ExtraBudget:
    """The amount to add to a budget: `micro` = cost of the remaining steps + a reserve - the rest of the budget.

    `finish_micro` is None if the number of remaining steps is unknown.
    """

    micro: int
    finish_micro: int | None
    left_micro: int

    @property
    def words(self) -> str:
        """How the sum is composed."""
        if self.finish_micro is None:
            return "the same amount again: the number of remaining steps is unknown"
        reserve_micro = self.micro + self.left_micro - self.finish_micro
        left = (
            f"less {_plain(self.left_micro)} left" if self.left_micro >= 0 else f"and {_plain(-self.left_micro)} over"
        )
        return f"{_plain(self.finish_micro)} to finish, {_plain(reserve_micro)} in reserve for start and end, {left}"


def cap_s(progress: Mapping[str, Any], tariff: PriceTerms, until_s: float | None = None) -> float | None:
    """Return the time limit within which another run finishes before its deadline; None if unknown.

    Steps since the last checkpoint are counted again. `until_s`: a running job continues for so long, and then saves.
    """
    left_s = _left_s(progress, until_s)
    if left_s is None:
        return None
    run_s = left_s * MARGIN + START_S
    return max(tariff.least_s, tariff.lead_s + run_s + min(SAVE_S, run_s / 3))


def more(
    limit_micro: int,
    spent_micro: int,
    tariff: PriceTerms,
    progress: Mapping[str, Any],
    until_s: float | None = None,
    spent_worst_micro: int | None = None,
) -> ExtraBudget | None:
    """Return the amount to add to the budget for the remaining steps, None if the budget suffices.

    `spent_worst_micro` is the highest possible cost of the job so far, to which the next run is added; `until_s` is as
    in `cap_s`. If the number of remaining steps is unknown, the amount is the present limit again.
    """
    needs_s, left_s = cap_s(progress, tariff, until_s), _left_s(progress, until_s)
    if needs_s is None or left_s is None:
        spent = spent_micro if spent_worst_micro is None else max(spent_micro, spent_worst_micro)
        least = math.ceil(tariff.worst_micro(tariff.least_s)) + spent - limit_micro
        return ExtraBudget(_readable(max(limit_micro, least)), None, limit_micro - spent_micro)
    if until_s is not None:
        runs_s = min(until_s, number(progress.get("eta_s")) or 0.0)
        worst = spent_micro if spent_worst_micro is None else spent_worst_micro
        spent_worst_micro = worst + round(tariff.rate_micro_h * tariff.uncertainty * runs_s / 3600)
        spent_micro += round(tariff.rate_micro_h * runs_s / 3600)
    spent = spent_micro if spent_worst_micro is None else max(spent_micro, spent_worst_micro)
    lacking = math.ceil(tariff.worst_micro(needs_s)) + spent - limit_micro
    if lacking <= 0:
        return None
    return ExtraBudget(_readable(lacking), round(tariff.rate_micro_h * left_s / 3600), limit_micro - spent_micro)


def is_complete(progress: Mapping[str, Any]) -> bool:
    """Return whether the last step is done, and no known checkpoint is older: a resume would train no step."""
    step, last = number(progress.get("step")), number(progress.get("max_steps"))
    saved = number(progress.get("checkpoint_step"))
    return step is not None and last is not None and min(step, step if saved is None else saved) >= last


def amount(micro: int) -> str:
    """Return the sum as a command line takes it: `12.50USD`, `37USD`."""
    return f"{_plain(micro)}USD"


def readable_s(seconds: float) -> int:
    """Return a duration rounded up to a readable value: whole minutes, from ten hours on whole hours."""
    size = 3600 if seconds >= 36_000 else 60
    return math.ceil(seconds / size) * size


def number(value: Any) -> float | None:
    """Return the value as a float if the value is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _plain(micro: int) -> str:
    """Return dollars with cents, without cents if whole: `0.84`, `37`."""
    return f"{micro // _MICRO}" if micro % _MICRO == 0 else f"{micro / _MICRO:.2f}"


def _readable(micro: int) -> int:
    """Return the sum rounded up to two significant digits, at least whole cents: 37.2 USD is 38, 204.80 is 210."""
    size = max(_CENT, int(10 ** (len(str(micro)) - 2)))
    return -(-micro // size) * size


def _left_s(progress: Mapping[str, Any], until_s: float | None) -> float | None:
    """Return the time that another run needs for its steps."""
    left_s = number(progress.get("eta_s"))
    if left_s is None:
        return None
    return left_s + _again_s(progress, left_s) if until_s is None else left_s - min(until_s, left_s)


def _again_s(progress: Mapping[str, Any], left_s: float) -> float:
    """Return the time of the steps since the last checkpoint; below 0 if the checkpoint is newer than that step.

    A checkpoint of unknown step counts as of the last step that was reported before the save.
    """
    step, last = number(progress.get("step")), number(progress.get("max_steps"))
    if step is None or last is None or last <= step:
        return 0.0
    known, after = number(progress.get("checkpoint_step")), number(progress.get("saved_after"))
    saved = min(last, (after or 0.0) if known is None else known)
    return (step - saved) * left_s / (last - step)

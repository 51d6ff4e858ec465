"""The results of a sweep's trials, and the cost of a segment from the measured pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from cloudtrain.entrypoints.sweep.search import Allowance

from ..store import series, sweeps

if TYPE_CHECKING:
    from ..job import Attempt
    from ..plan import Plan
    from ..store.database import Database
    from ..store.sweeps import SegmentRecord

SLACK = 1.5  # a segment's time limit, in expected times
SAVE_S = 120  # between a segment's deadline and its limit (metering.limit.STOP_MARGIN_S)


@dataclass(frozen=True)
class SegmentPace:
    """The measured seconds of a segment's start, and of a step, evaluations included."""

    start_s: float
    step_s: float

    def limit_s(self, steps: int) -> int:
        """Return the time limit of a segment of so many steps."""
        return ceil(SLACK * (self.start_s + steps * self.step_s)) + SAVE_S

    def allowance(self, plan: Plan, left_micro: int) -> Allowance:
        """Return the money that is left, and the highest cost of a segment at the plan's price."""
        terms = plan.terms
        rate = (plan.price_micro or 0) * plan.instances * plan.uncertainty * terms.starts / 3600
        fixed_s = max(SLACK * self.start_s + SAVE_S + 1 + terms.tail_s + terms.unit_s, terms.minimum_bill_s)
        return Allowance(left_micro, fixed_s * rate, SLACK * self.step_s * rate)


def results_of(segments: Sequence[SegmentRecord]) -> dict[tuple[int, int], float | None]:
    """Return the results of the ended segments by (trial, rung); None for a failed or stopped segment."""
    return {(each.trial, each.rung): each.value for each in segments if each.state in sweeps.ENDED}


def value_at(database: Database, job_id: str, step: int | None, metric: str) -> float | None:
    """Return the metric of the job's evaluation or pause after the step; None without a result.

    If `step` is None: of the last evaluation, or of a script's last step.
    """
    points = [each for each in series.read(database, job_id).points if step in (None, each.step)]
    found = [each.fields.get("metrics", {}).get(metric) for each in points if each.kind in ("eval", "paused")]
    if step is None and not found:
        found = [each.fields.get(metric) for each in points if each.kind == "step"]
    value = found[-1] if found else None
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def pace_of(database: Database, ended: Sequence[tuple[SegmentRecord, Attempt]]) -> SegmentPace | None:
    """Return the pace by the median of the ended segments' attempts; None before the first."""
    import statistics  # the import takes 10 ms

    found = [pace for segment, attempt in ended if (pace := _pace(database, segment, attempt)) is not None]
    if not found:
        return None
    return SegmentPace(max(each.start_s for each in found), statistics.median(each.step_s for each in found))


def _pace(database: Database, segment: SegmentRecord, attempt: Attempt) -> SegmentPace | None:
    state = attempt.state
    points = [
        each
        for each in series.read(database, segment.job_id).points
        if each.kind in ("step", "eval") and each.attempt == attempt.number and each.step is not None
    ]
    if state.started_s is None or state.ended_s is None or not points:
        return None
    whole_s = state.billed_s or state.ended_s - state.started_s
    first, last = points[0], points[-1]
    steps = (last.step or 0) - (first.step or 0)
    step_s = (last.time_s - first.time_s) / steps if steps else whole_s / max(1, last.step or 1)
    return SegmentPace(max(0.0, whole_s - steps * step_s), step_s)

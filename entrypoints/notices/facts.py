"""The facts about a job from which alerts and resume advice follow; the launcher and the job's own agent gather them.

Money in micro-dollars, times in unix seconds; None means unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..terms import CostRate, Terms


@dataclass(frozen=True)
class StepFacts:
    """The last reported step, and the newest checkpoint.

    `saved_after`: the last step that was reported before the save; `eta_s`: the time of the remaining steps.
    """

    step: int | None = None
    max_steps: int | None = None
    checkpoint_step: int | None = None
    saved_after: int | None = None
    eta_s: float | None = None

    @classmethod
    def load(cls, progress: Mapping[str, Any]) -> StepFacts:
        """Return the facts in a stored row or in a log's events, both of which may be damaged."""
        names = "step", "max_steps", "checkpoint_step", "saved_after"
        counts = {name: int(count) for name in names if (count := _number(progress.get(name))) is not None}
        return cls(**counts, eta_s=_number(progress.get("eta_s")))

    @property
    def is_complete(self) -> bool:
        """Whether the last step is done, and no known checkpoint is older: a resume would train no step."""
        if self.step is None or self.max_steps is None:
            return False
        return min(self.step, self.step if self.checkpoint_step is None else self.checkpoint_step) >= self.max_steps


@dataclass(frozen=True)
class JobFacts:
    """The state, the cost and the limits of a job's attempt.

    `cap_at_s`: when the platform ends the job; `deadline_at_s`: when the job begins to leave, after a save if it
    `saves`, or without one if the limit `is_hard`; `finish_at_s`: after the last step, at the present pace;
    `hits_limit`: whether a limit, of time or money, comes before the finish. `limit_reason`: the source of the limit.
    `spent_worst_micro`: the highest possible cost so far. `rate`: of price 0 if unknown. `terms`: those of a resume.
    `moved`: why the job left its last candidate, and which is next; `moves`: a number of the move in the attempt.
    `is_saved`: a checkpoint is known, perhaps without a step. `most_attempts`: above `attempt`, if the end may be
    followed by a retry. `hang_s`: the hang timeout.
    """

    job: str
    backend: str
    attempt: int
    state: str = "running"
    reason: str | None = None
    error: Mapping[str, Any] = field(default_factory=dict)
    progress: StepFacts = StepFacts()
    spent_micro: int | None = None
    spent_worst_micro: int | None = None
    limit_micro: int | None = None
    burn_micro_h: int | None = None
    total_micro: int | None = None
    rate: CostRate = field(default_factory=lambda: CostRate(1, 0))
    terms: Terms = field(default_factory=Terms)
    alert_at: Sequence[int] = ()
    on_limit: str | None = None
    limit_reason: str | None = None
    max_duration_s: float | None = None
    began_s: float | None = None
    cap_at_s: float | None = None
    deadline_at_s: float | None = None
    finish_at_s: float | None = None
    hits_limit: bool | None = None
    is_hard: bool = False
    stalled_s: float | None = None
    hang_s: float = math.inf
    unreachable_since_s: float | None = None
    restarts: int = 0
    moved: str = ""
    moves: int = 0
    most_attempts: int = 1
    saves: bool = True
    is_saved: bool = False
    is_resumable: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the job may still be running."""
        return self.state in ("pending", "running", "stopping")

    @property
    def leaves_at_s(self) -> float | None:
        """When the job leaves or is ended."""
        return self.deadline_at_s or self.cap_at_s

    @property
    def is_over_budget(self) -> bool:
        """Whether the forecast cost is above the budget."""
        return self.limit_micro is not None and (self.total_micro or 0) > self.limit_micro

    @property
    def is_short_of_money(self) -> bool:
        """Whether the budget ends the job before its last step; a budget with `on_limit: alert` ends no job."""
        ends = self.hits_limit and self.limit_micro is not None and self.on_limit != "alert"
        return bool(ends) and (self.is_over_budget or self.limit_reason == "budget")


def is_limit_first(
    finish_at_s: float | None, leaves_at_s: float | None, total_micro: int | None, limit_micro: int | None
) -> bool | None:
    """Return whether a limit, of time or money, comes before the finish; None if unknown."""
    if finish_at_s is None or leaves_at_s is None:
        return None
    return finish_at_s > leaves_at_s or (limit_micro is not None and (total_micro or 0) > limit_micro)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None

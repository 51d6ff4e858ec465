"""Forecast of a running job's cost and end, by its throughput, price and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloudtrain.entrypoints.notices.facts import is_limit_first

from ..job import Attempt, Job
from ..metering import meter
from ..metering.money import Money
from ..store import loss_bins
from ..text.units import parse_money

_GRACE_S, _GRACE_STEPS = 60.0, 3  # how long a job's own forecast stays valid after its time has passed


@dataclass(frozen=True)
class Forecast(Money):
    """The job's money; times in unix seconds; None if unknown or not applicable."""

    worst_micro: int | None  # the most that may be billed until now
    burn_micro_h: int | None  # the cost per hour now, all instances; 0 once no instance runs
    cap_at_s: float | None  # when the backend ends the job
    deadline_at_s: float | None  # when the job starts to leave; a script gets SIGTERM
    finish_at_s: float | None  # by throughput; also None once the job stalls for longer than the grace time
    hits_limit: bool | None  # whether a limit, of time or money, comes before the finish
    stalled_s: float | None  # since the last step; None before the first
    checkpoint_step: int | None = None  # of the newest checkpoint, possibly saved by an earlier attempt
    saved_attempt: int | None = None  # the attempt of the newest checkpoint, and the time of the save
    saved_s: float | None = None


def forecast(job: Job, attempts: Sequence[Attempt], now_s: float) -> Forecast:
    """Return the forecast at `now_s`; `attempts` are all attempts, and `job.attempt` replaces the last."""
    last = job.attempt
    known = up_to(last, attempts)
    legs = meter.legs_of(known)
    spent, burn, limit = meter.spent_micro(legs, now_s), meter.burn_micro_h(legs), limit_micro(job)
    worst = meter.spent_at_worst_micro(known, now_s)
    amount = last.plan.worst_case_micro
    held_s = meter.held_s(last, now_s) if job.active and not last.state.waits_again else None
    cap_at_s = deadline_at_s = finish_at_s = stalled_s = None
    if held_s is not None:
        began_s = now_s - held_s  # as if the job had never waited between two runs
        cap_at_s = began_s + last.plan.cap_s
        deadline_at_s = began_s + last.plan.deadline_s if last.plan.deadline_s else None  # 0: a damaged row
        finish_at_s = _finish_at_s(last.progress, now_s)
        stepped_s = last.progress.get("stepped_s")
        stalled_s = None if stepped_s is None else max(0.0, now_s - stepped_s)
    total = spent if not job.active else None
    if finish_at_s is not None and spent is not None and burn is not None:
        total = spent + round(burn * (finish_at_s - now_s) / 3600)
    hits_limit = is_limit_first(finish_at_s, cap_at_s if deadline_at_s is None else deadline_at_s, total, limit)
    held = None
    if spent is not None and worst is not None and (amount is not None or not job.active):
        own = meter.spent_at_worst_micro([last], now_s) if job.active else None
        held = worst - spent + (max(0, (amount or 0) - (own or 0)) if job.active else 0)
    ends = (worst, burn, cap_at_s, deadline_at_s, finish_at_s, hits_limit, stalled_s)
    return Forecast(spent, held, limit, total, *ends, *newest_save([last, *attempts]))


def up_to(last: Attempt, attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts with `last` in the place of the stored attempt of its number."""
    return [*(each for each in attempts if each.number != last.number), last]


def newest_save(attempts: Sequence[Attempt]) -> tuple[int | None, int | None, float | None]:
    """Return step, attempt and time of the newest checkpoint that any attempt has reported or resumed from."""
    for attempt in sorted(attempts, key=lambda each: -each.number):
        step, saved_s = attempt.progress.get("checkpoint_step"), attempt.progress.get("saved_s")
        if step is not None or saved_s is not None:
            return step, attempt.number, saved_s
    return None, None, None


def limit_micro(job: Job) -> int | None:
    """Return the job's budget; None without a budget, and on own machines without a price, where no budget applies."""
    return None if job.attempt.plan.unpriced_budget_micro is not None else budget_micro(job)


def budget_micro(job: Job) -> int | None:
    """Return the budget in the job's config, or None."""
    return None if job.asked.budget is None else parse_money(job.asked.budget)


def _finish_at_s(progress: dict[str, Any], now_s: float) -> float | None:
    """Return when the remaining steps are done, by the job's own estimate, else by its pace so far.

    Shortly after the forecast time the job is expected to end now; later the finish is unknown (None).
    """
    rest_s = left_s(progress)
    if rest_s is None:
        return None
    stepped_s = progress.get("stepped_s")
    finish_at_s = rest_s + (now_s if stepped_s is None else stepped_s)
    grace_s = max(_GRACE_S, _GRACE_STEPS * (step_s(progress) or 0.0))
    return max(now_s, finish_at_s) if now_s - finish_at_s <= grace_s else None


def left_s(progress: dict[str, Any]) -> float | None:
    """Return the remaining seconds at the last step: as the job reported, else by its pace so far, as of a script."""
    if (eta_s := progress.get("eta_s")) is not None:
        return float(eta_s)
    step, most, pace_s = progress.get("step"), progress.get("max_steps"), step_s(progress)
    if most is None or step is None or pace_s is None:
        return None
    return max(0.0, pace_s * float(most - step))


def step_s(progress: dict[str, Any]) -> float | None:
    """Return the seconds of a step: as the job reported last, else by the times of its steps so far."""
    reported = progress.get("step_s")
    if isinstance(reported, float | int):
        return float(reported)
    bins = loss_bins.load(progress.get("curve")).bins
    if len(bins) < 2 or bins[-1].step <= bins[0].step:
        return None
    return (bins[-1].time_s - bins[0].time_s) / (bins[-1].step - bins[0].step)

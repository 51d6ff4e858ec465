"""Resume advice for a job that has stopped or will stop: the command, with the necessary money and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.notices import resume_cost
from cloudtrain.entrypoints.notices.resume_cost import ExtraBudget, PriceTerms
from cloudtrain.launcher.metering.limit import PARTS, parts
from cloudtrain.launcher.metering.spent import metered_at_worst_micro
from cloudtrain.launcher.money.forecast import Forecast, left_s
from cloudtrain.launcher.text.units import format_duration, parse_duration

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Job
    from cloudtrain.launcher.plan import Plan

__all__ = ["ResumeAdvice", "is_short_of_money", "only_alerts", "resume_advice", "tariff"]


@dataclass(frozen=True)
class ResumeAdvice:
    """The command, valid once the job has ended, and an explanation of the sum."""

    command: str
    words: str = ""


def resume_advice(job: Job, forecast: Forecast) -> ResumeAdvice | None:
    """Return the resume advice; None if the job is finished, has no checkpoint, or will finish within its limits.

    A job stopped after its last step gets no advice. A failed job may lack files that a resume writes.
    The command includes the money and the time for the remaining steps, so that the resume is not refused.
    """
    state = job.attempt.state
    if state.state == "succeeded" or job.attempt.phase == "never_sent" or (not job.active and not state.resumable):
        return None
    if job.active and not _has_end_before_finish(job, forecast):
        return None
    until_s, progress = _until_s(job, forecast), _progress(job, forecast)
    if state.state != "failed" and resume_cost.is_complete(progress):
        return None
    # The user fixes the code: after an exception, or an exit code that is not 0.
    is_in_code = state.state == "failed" and (state.error or {}).get("kind") in ("exception", "exit")
    command = f"cloudtrain resume {job.id}{' --update-code' if is_in_code else ''}"
    more = _more(job, forecast, progress, until_s)
    if more is not None:
        command += f" --budget +{resume_cost.amount(more.micro)}"
    longer = _longer(job, progress, until_s)
    return ResumeAdvice(command + longer, "" if more is None else more.words)


def is_short_of_money(job: Job, forecast: Forecast) -> bool:
    """Return whether the budget ends the job before its last step."""
    if not forecast.hits_limit or forecast.limit_micro is None or only_alerts(job):
        return False
    is_over = forecast.total_micro is not None and forecast.total_micro > forecast.limit_micro
    return is_over or job.attempt.plan.cap_reason == "budget"


def only_alerts(job: Job) -> bool:
    """Return whether the job's budget only alerts and never ends the job."""
    return job.asked.on_limit == "alert"


def tariff(plan: Plan, hourly_usd: float) -> PriceTerms:
    """Return the price terms of a stored plan."""
    return PriceTerms(
        rate_micro_h=hourly_usd * 1e6,
        uncertainty=parts(plan.uncertainty) / PARTS,
        tail_s=plan.tail_s,
        lead_s=max(0, plan.cap_s - (plan.own_limit_s or plan.cap_s)),
        unit_s=plan.unit_s,
        least_bill_s=plan.minimum_bill_s,
        least_s=plan.useful_s or 0,
        starts=plan.attempts,
    )


def _has_end_before_finish(job: Job, forecast: Forecast) -> bool:
    """Return whether a limit will end the running job, by the forecast; without a forecast, whether money set the cap.

    A budget with `on_limit: alert` never ends a job.
    """
    if forecast.hits_limit is None:
        return job.attempt.plan.cap_reason == "budget"
    end_s = forecast.deadline_at_s or forecast.cap_at_s
    is_late = forecast.finish_at_s is not None and end_s is not None and forecast.finish_at_s > end_s
    return is_late or is_short_of_money(job, forecast)


def _progress(job: Job, forecast: Forecast) -> dict[str, Any]:
    return {
        **job.attempt.progress,
        "eta_s": left_s(job.attempt.progress),
        "checkpoint_step": forecast.checkpoint_step,
    }


def _until_s(job: Job, forecast: Forecast) -> float | None:
    """Return the seconds from a running job's last step until its deadline, when the job saves and leaves."""
    at_s, rest_s = forecast.deadline_at_s or forecast.cap_at_s, left_s(job.attempt.progress)
    if not job.active or at_s is None or rest_s is None or forecast.finish_at_s is None:
        return None
    return max(0.0, at_s - (forecast.finish_at_s - rest_s))


def _more(job: Job, forecast: Forecast, progress: dict[str, Any], until_s: float | None) -> ExtraBudget | None:
    """Return the extra budget for a resume; None if no more money is needed or asked for, or if the need is unknown."""
    plan, hourly_usd = job.attempt.plan, job.attempt.hourly_usd
    limit, spent = forecast.limit_micro, forecast.spent_micro
    if limit is None or spent is None or not hourly_usd or only_alerts(job):
        return None
    worst = metered_at_worst_micro(plan, job.attempt.number, spent)
    costs = tariff(plan, hourly_usd)
    is_unknown = progress["eta_s"] is None
    if is_unknown and not job.active and job.attempt.state.reason != "budget":
        least = costs.worst_micro(costs.least_s) + worst
        return None if least <= limit else resume_cost.more(limit, spent, costs, progress, until_s, worst)
    return resume_cost.more(limit, spent, costs, progress, until_s, worst)


def _longer(job: Job, progress: dict[str, Any], until_s: float | None) -> str:
    """Return the option for the time that the next attempt needs, if the config's limit is too short."""
    asked = job.asked.max_duration
    costs = tariff(job.attempt.plan, job.attempt.hourly_usd or 0.0)
    needs_s = resume_cost.cap_s(progress, costs, until_s)
    if asked is None or needs_s is None or needs_s <= parse_duration(asked):
        return ""
    return f" --set limits.max_duration={format_duration(resume_cost.readable_s(needs_s))}"

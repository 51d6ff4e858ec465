"""Alerts that are due for a job now: budget thresholds, nearby limits, its end. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import dollars, span
from cloudtrain.entrypoints.notices.message import (
    Facts,
    Notice,
    budget_key,
    budget_words,
    compose,
    deadline_key,
    end_key,
    leaving,
    threshold,
)
from cloudtrain.entrypoints.notices.resume_cost import number
from cloudtrain.launcher.money.forecast import Forecast, left_s
from cloudtrain.launcher.money.resume_advice import is_short_of_money, resume_advice
from cloudtrain.launcher.planning.job_spec import default_hang_timeout_s

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Job

__all__ = ["corrects", "standing", "unsent", "wanted"]

STALLED_S = 120.0  # the shortest time that counts as a stall
STEPS = 10  # and at least the time of STEPS steps
UNREACHABLE_S = 600.0
SURE_PART = 10  # of the time left: an estimate within a tenth of the limit does not correct a forecast
SURE_S, SURE_SHARE = 60.0, 20  # a run's first steps are slow and give no forecast


def standing(job: Job, forecast: Forecast, now_s: float) -> list[Notice]:
    """Return all notices that hold for the job now, including notices already reported."""
    facts = _facts(job, forecast)
    if not job.active:
        return [*_threshold(job, forecast, facts, now_s), *_end(job, facts, now_s)]
    return [
        *_life(job, facts, now_s),
        *_threshold(job, forecast, facts, now_s),
        *_projected(job, forecast, facts, now_s),
        *_deadline(job, forecast, facts, now_s),
        *_stalled(job, forecast, facts, now_s),
    ]


def unsent(notices: list[Notice], keys: Collection[str]) -> list[Notice]:
    """Return the notices not in the reported `keys`; no threshold below a reported one, even after a corrected cost."""
    return [
        notice
        for notice in notices
        if notice.key not in keys and not _has_higher(notice.key, keys) and corrects(notice, keys)
    ]


def corrects(notice: Notice, keys: Collection[str]) -> bool:
    """Return True unless the notice corrects a forecast that was never reported."""
    kind, _, which = notice.key.partition(":")
    return kind != "within" or f"projected:{which}" in keys


def wanted(notice: Notice, on: Collection[str]) -> bool:
    """Return whether a channel with the events `on` receives the notice; `budget` includes forecasts and deadlines."""
    return not {notice.event, *notice.also}.isdisjoint(on)


def _facts(job: Job, forecast: Forecast) -> Facts:
    attempt, state, progress = job.attempt, job.attempt.state, job.attempt.progress
    resume = resume_advice(job, forecast)
    return Facts(
        job=job.id,
        backend=job.backend,
        attempt=attempt.number,
        state=state.state,
        reason=state.reason,
        spent_micro=forecast.spent_micro,
        limit_micro=forecast.limit_micro,
        burn_micro_h=forecast.burn_micro_h,
        total_micro=forecast.total_micro if job.active else None,
        cap_at_s=forecast.cap_at_s,
        deadline_at_s=None if _is_hard(job) else forecast.deadline_at_s,
        finish_at_s=forecast.finish_at_s,
        step=progress.get("step"),
        max_steps=progress.get("max_steps"),
        checkpoint_step=forecast.checkpoint_step,
        saved=forecast.saved_attempt is not None or state.resumable,
        resume=None if resume is None else resume.command,
        resume_words="" if resume is None else resume.words,
        saves=job.saves,
    )


def _life(job: Job, facts: Facts, now_s: float) -> Iterator[Notice]:
    """Yield the notices of the attempt's start, restarts and lost contact."""
    attempt, state = job.attempt, job.attempt.state
    if state.state == "running":
        again = f"attempt {attempt.number} runs" if attempt.number > 1 else "it runs"
        also = ("restarted",) if attempt.number > 1 else ()
        yield compose(f"started:{attempt.number}", "started", again, facts, now_s, also=also)
    if state.restarts:
        headline = f"its ranks were started again ({state.restarts} time{'s' if state.restarts > 1 else ''})"
        yield compose(f"restarted:{attempt.number}:{state.restarts}", "restarted", headline, facts, now_s)
    since_s = attempt.unreachable_since_s
    if since_s is not None and now_s - since_s >= UNREACHABLE_S:
        headline = f"{job.backend} has not answered for {span(now_s - since_s)}; the job is unaffected"
        yield compose(f"unreachable:{attempt.number}:{since_s:.0f}", "unreachable", headline, facts, now_s)


def _threshold(job: Job, forecast: Forecast, facts: Facts, now_s: float) -> Iterator[Notice]:
    """Yield the highest budget threshold that the cost has reached."""
    limit, state = forecast.limit_micro, job.attempt.state
    is_its_end = not job.active and state.reason == "budget"
    reached = threshold(_alert_at(job), forecast.spent_micro, limit, is_its_end=is_its_end)
    if limit is None or reached is None:
        return
    percent, headline = reached
    if percent >= 100 and job.active and job.asked.on_limit == "alert":
        headline += "; it runs on (on_limit: alert)"
    yield compose(budget_key(percent, limit), "budget", headline, facts, now_s)


def _projected(job: Job, forecast: Forecast, facts: Facts, now_s: float) -> Iterator[Notice]:
    """Yield a forecast that a limit comes before the last step, once reliable, or the correction of a forecast."""
    began_s, finish_s = job.attempt.state.started_s, forecast.finish_at_s
    if forecast.hits_limit is None or began_s is None or finish_s is None:
        return
    if forecast.limit_micro and (forecast.spent_micro or 0) >= forecast.limit_micro:  # reported as a threshold
        return
    at_s = forecast.deadline_at_s or forecast.cap_at_s or finish_s
    needs = "" if forecast.total_micro is None else f", for {dollars(forecast.total_micro)} in all"
    done, which = f"done in {span(finish_s - now_s)}", f"{job.attempt.number}@{forecast.limit_micro or 0}"
    if not forecast.hits_limit:
        if finish_s + (finish_s - now_s) / SURE_PART <= at_s:
            headline = f"will finish within its limits, by the newest estimate: {done}{needs}"
            yield compose(f"within:{which}", "projected", headline, facts, now_s, also=("budget",))
        return
    is_spent = bool(forecast.limit_micro) and (forecast.spent_micro or 0) * SURE_SHARE >= (forecast.limit_micro or 0)
    if not is_spent and now_s - began_s < min(SURE_S, job.attempt.plan.cap_s / SURE_SHARE):
        return
    is_over = forecast.limit_micro is not None and (forecast.total_micro or 0) > forecast.limit_micro
    if is_over or is_short_of_money(job, forecast):
        headline = f"will not finish within {budget_words(facts, at_s, now_s)}: {done}{needs}"
    else:
        headline = f"will reach its time limit before it finishes: {done}, and it has {span(at_s - now_s)}"
    yield compose(f"projected:{which}", "projected", headline, facts, now_s, also=("budget",))


def _deadline(job: Job, forecast: Forecast, facts: Facts, now_s: float) -> Iterator[Notice]:
    """Yield a notice that the job's deadline is near, unless the job will finish before."""
    at_s, began_s = forecast.deadline_at_s or forecast.cap_at_s, job.attempt.state.started_s
    if at_s is None or began_s is None:
        return
    is_money = job.attempt.plan.cap_reason == "budget"
    headline = leaving(facts, at_s, began_s, now_s, is_money=is_money, is_hard=_is_hard(job))
    if headline is None:
        return
    yield compose(deadline_key(job.attempt.number), "deadline", headline, facts, now_s, also=("budget",))


def _stalled(job: Job, forecast: Forecast, facts: Facts, now_s: float) -> Iterator[Notice]:
    """Yield a notice of a stall: no step for half the hang timeout, and at least for STEPS steps' time."""
    if forecast.stalled_s is None or job.attempt.state.state != "running":
        return
    default_s = default_hang_timeout_s(job.asked.timeout_s, is_task=not job.asked.is_script)
    hang_s = _seconds(job.asked.hang_timeout) or default_s
    progress = job.attempt.progress
    rest_s, step, last = left_s(progress), number(progress.get("step")), number(progress.get("max_steps"))
    step_s = rest_s / (last - step) if rest_s and step is not None and last and last > step else 0.0
    if forecast.stalled_s < max(STALLED_S, hang_s / 2, STEPS * step_s):
        return
    headline = f"no progress for {span(forecast.stalled_s)}; it costs money all the same"
    yield compose(f"stalled:{job.attempt.number}@{progress.get('step')}", "stalled", headline, facts, now_s)


def _end(job: Job, facts: Facts, now_s: float) -> Iterator[Notice]:
    state, number = job.attempt.state, job.attempt.number
    reason = f" ({state.reason})" if state.reason else ""
    headline = f"{state.state}{reason}" + (", resumable" if state.resumable else "")
    if state.state != "succeeded" and state.reason in job.asked.retry_on and number < job.asked.max_attempts:
        headline += f"; attempt {number} of at most {job.asked.max_attempts}"
    if message := (state.error or {}).get("message"):
        headline += f": {str(message)[:300]}"
    also = (state.reason,) if state.reason in ("preempted", "budget") else ()
    yield compose(
        end_key(state.state, state.reason, number),
        state.state,
        headline,
        replace(facts, cap_at_s=None),
        now_s,
        also=also,
    )


def _has_higher(key: str, keys: Collection[str]) -> bool:
    """Return whether a higher threshold of the same limit has been reported."""
    percent, limit = _threshold_of(key)
    return bool(percent) and any(_threshold_of(each)[0] > percent for each in keys if _threshold_of(each)[1] == limit)


def _threshold_of(key: str) -> tuple[int, str]:
    kind, _, rest = key.partition(":")
    percent, _, limit = rest.partition("@")
    return (int(percent), limit) if kind == "budget" else (0, "")


def _is_hard(job: Job) -> bool:
    """Return whether the limit ends the job without a save (on_limit: stop)."""
    return 0 < job.attempt.plan.deadline_s == job.attempt.plan.own_limit_s


def _alert_at(job: Job) -> list[int]:
    """Return the thresholds in percent; a stored config contains text such as `80%`."""
    return [int(str(each).strip().rstrip("%")) for each in job.asked.alert_at]


def _seconds(value: Any) -> float | None:
    """Return the seconds of a duration from a stored config: `30m`, or seconds."""
    from cloudtrain.launcher.text.units import parse_duration

    return None if value is None else float(parse_duration(value))

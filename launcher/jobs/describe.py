"""The description of a job in `status` and `list`: an object with stable names for scripts, a few words for people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cloudtrain.entrypoints.format import down, usd
from cloudtrain.entrypoints.notices.resume_cost import ResumeAdvice

from ..job import Attempt, Job, exit_code
from ..metering import meter
from ..money.forecast import Forecast, forecast, limit_micro
from ..store import gpu_figures
from ..store.database import Database
from ..store.progress import data_share
from ..store.registry import submitter_lives
from ..text.money import as_usd
from ..text.visible import shown
from . import causes


def as_json(job: Job, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the job's state; money in US dollars, times in unix seconds. `attempts` are all attempts of the job."""
    attempt, state, progress = job.attempt, job.attempt.state, job.attempt.progress
    now_s = time.time()
    money = forecast(job, attempts, now_s)
    earlier = [each for each in attempts if each.number != attempt.number]
    return {
        "job": job.id,
        "name": job.name,
        "backend": job.backend,
        "project": job.asked.project,
        "tags": job.asked.tags,
        "state": state.state,
        "phase": attempt.phase,
        "reason": state.reason,
        "resumable": state.resumable,
        "attempt": attempt.number,
        "restarts": state.restarts,
        "platform_name": attempt.name,
        "platform_number": attempt.platform_number,
        "url": state.url,
        "instances": attempt.plan.instances,
        "ranks": attempt.plan.ranks,
        "step": progress.get("step"),
        "max_steps": progress.get("max_steps"),
        "loss": progress.get("loss"),
        "metrics": progress.get("metrics"),
        "parent": progress.get("parent"),
        "samples_per_s": progress.get("samples_per_s"),
        "tokens_per_s": progress.get("tokens_per_s"),
        "mfu": progress.get("mfu"),
        "data_share": data_share(progress),
        "gpus": gpu_figures.as_list(progress),
        "gpu_words": gpu_figures.words(progress),
        "gpu_warning": gpu_figures.warning(progress) if job.active else "",
        "eta_s": None if money.finish_at_s is None else max(0.0, money.finish_at_s - now_s),
        "checkpoint_step": money.checkpoint_step,
        "checkpoint_at_s": money.saved_s,
        "unkept": progress.get("unkept", []),
        "spend_usd": as_usd(money.spent_micro),
        "limit_usd": as_usd(money.limit_micro),
        "burn_usd_per_hour": as_usd(money.burn_micro_h),
        "projected_usd": as_usd(money.total_micro),
        "projected_finish_s": money.finish_at_s,
        "cap_at_s": money.cap_at_s,
        "deadline_at_s": money.deadline_at_s,
        "hits_limit": money.hits_limit,
        "stalled_s": money.stalled_s,
        "idle_usd": attempt.idle_usd,
        "error": state.error,
        "likely": causes.likely(state.error, job.config),
        "detail": state.detail,
        "queue": state.queue,
        "created_s": job.created_s,
        "started_s": state.started_s,
        "ended_s": state.ended_s,
        "unreachable_since_s": attempt.unreachable_since_s,
        "exit_code": None if job.active else exit_code(state),
        "attempts": [_attempt(each, after, now_s) for each, after in pairs([*earlier, attempt])],
    }


def pairs(attempts: Sequence[Attempt]) -> list[tuple[Attempt, Attempt | None]]:
    """Return each attempt with the next attempt, None after the last."""
    return list(zip(attempts, [*attempts[1:], None], strict=True))


def _attempt(attempt: Attempt, after: Attempt | None, now_s: float) -> dict[str, Any]:
    state = attempt.state
    return {
        "number": attempt.number,
        "state": state.state,
        "phase": attempt.phase,
        "reason": state.reason,
        "created_s": attempt.created_s,
        "started_s": state.started_s,
        "ended_s": state.ended_s,
        "spend_usd": as_usd(meter.spent_micro(meter.legs_of([attempt]), now_s)),
        "step": attempt.progress.get("step"),
        "checkpoint_step": saved_step(attempt, after),
    }


def headline(error: dict[str, Any]) -> str:
    """Return the failure on a single line, without terminal control codes: `rank 1: ValueError: no batch`."""
    who = f"rank {error['rank']}: " if error.get("rank") is not None else ""
    kind = f"{error['type']}: " if error.get("type") else ""
    return shown(f"{who}{kind}{error['message']}".partition("\n")[0], colour=False)


def saved_step(attempt: Attempt, after: Attempt | None) -> int | None:
    """Return the step of an attempt's newest checkpoint; the next attempt, `after`, may have found a newer checkpoint.

    An attempt that dies right after a save may not have reported the save.
    """
    found = [attempt.progress.get("checkpoint_step"), after and after.progress.get("resumed_step")]
    return max((step for step in found if isinstance(step, int)), default=None)


def outcome(job: Job) -> str:
    """Return the state in words: `stopped (user), resumable`."""
    state = job.attempt.state
    if job.attempt.word != state.state:
        return job.attempt.word
    if state.reason == "paused":
        step, most = job.attempt.progress.get("step"), job.attempt.progress.get("max_steps")
        return "paused" if step is None else f"paused (step {step}{f' of {most}' if most else ''})"
    reason = f" ({state.reason})" if state.reason else ""
    return f"{state.state}{reason}" + (", resumable" if state.resumable else "")


def in_line(job: Job) -> str:
    """Return the place of a waiting job: `2 of 3 in line`; empty for a job that does not wait in line."""
    queue = job.attempt.state.queue if job.attempt.word == "queued" else None
    return f"{queue['place']} of {queue['of']} in line" if queue and queue.get("place") else ""


def next_step(job: Job, attempts: Sequence[Attempt] = ()) -> list[str]:
    """Return commands that the user may want to run next; `attempts`, all of the job, give the budget of a resume."""
    if job.attempt.phase == "damaged":
        return [f"cloudtrain rm {job.id}"]
    if job.attempt.phase == "intent" and not submitter_lives(job.attempt):
        return [f"cloudtrain status {job.id}", f"cloudtrain stop --forget {job.id}"]
    if job.attempt.phase == "queued":
        return ["cloudtrain advance", f"cloudtrain stop {job.id}"]
    if job.active:
        return [f"cloudtrain watch {job.id}", f"cloudtrain logs -f {job.id}", f"cloudtrain stop {job.id}"]
    if job.attempt.state.state == "succeeded":
        return []
    if job.attempt.phase == "never_sent":
        return ["submit it again"]
    rank = (job.attempt.state.error or {}).get("rank")
    of_rank = "" if rank is None else f"--rank {rank} "
    hint = [f"cloudtrain logs {of_rank}--tail 50 {job.id}"] if job.attempt.state.state == "failed" else []
    resume = resume_advice_of(job, attempts)
    return [*hint, *([] if resume is None else [resume.command])]


def resume_advice_of(job: Job, attempts: Sequence[Attempt]) -> ResumeAdvice | None:
    """Return the resume advice: how to continue the job, with the necessary money and time."""
    from cloudtrain.entrypoints.notices.resume_cost import resume_advice

    from ..money.job_facts import job_facts

    return resume_advice(job_facts(job, forecast(job, attempts, time.time())))


def lacking_budgets(database: Database, job: Job, attempts: Sequence[Attempt]) -> list[str]:
    """Return a line for each budget of this installation that would refuse the advised resume, with the command first.

    The worst case of the next run is chosen as a resume chooses it, by the terms of the last plan.
    """
    from ..metering import limit
    from ..metering.meter import spent_at_worst_micro
    from ..store import budgets, ledger

    plan, resume = job.attempt.plan, None if job.active else resume_advice_of(job, attempts)
    now_s, longest_s = time.time(), (resume and resume.limit_s) or plan.cap_s
    if resume is None or not plan.price_micro:
        return []
    rate = limit.CostRate(plan.instances, plan.price_micro, plan.uncertainty)
    terms = limit.Terms(plan.tail_s, 1, plan.unit_s, plan.attempts, plan.minimum_bill_s)
    amount_micro = limit.worst_case_micro(int(longest_s), rate, terms)
    if resume.limit_micro is not None:
        spent_micro = spent_at_worst_micro(attempts, now_s) or 0
        chosen = limit.choose(resume.limit_micro, spent_micro, rate, terms, int(longest_s))
        if isinstance(chosen, limit.LimitRefusal):
            return []
        amount_micro = chosen.worst_case_micro
    return [
        f"{standing.budget.title} has {usd(down(max(0, standing.room_micro)))} left: "
        f"{budgets.raising(standing, amount_micro)} first"
        for standing in ledger.standings(database, now_s, job.asked.project or budgets.OVERALL)
        if any(budgets.refusal(standing, amount_micro)) and not standing.unknown
    ]


def unattended(job: Job) -> list[str]:
    """Return how to follow and to stop the job, and how to get alerts if alerts need a follower."""
    found = [f"  follow it   cloudtrain logs -f {job.id}", f"  stop it     cloudtrain stop {job.id}"]
    places = job.asked.notify
    others = [each for each in places if not each.get("from_job")]
    if others:
        channels = "all that `notify` names" if len(others) == len(places) else "those of `notify` without `from_job`"
        found.append(f"  get alerts  cloudtrain watch {job.id}")
        found.append(f"              (while no command follows the job, {channels} receive nothing;")
        found.append("              `from_job: true` in an entry of `notify` makes the job itself send alerts)")
    elif not places and limit_micro(job) is not None:
        found.append(f"  get alerts  cloudtrain watch {job.id}   (of its budget; or set `notify`)")
    return found


def limit_words(job: Job, money: Forecast) -> str:
    """Return in words the limit that comes before the finish."""
    end_s = money.deadline_at_s or money.cap_at_s
    if end_s is None or money.finish_at_s is None or money.finish_at_s <= end_s:
        return "the budget is used up before the finish"
    which = "budget's cap" if job.attempt.plan.cap_reason == "budget" else "time limit"
    return f"the {which} comes before the finish"

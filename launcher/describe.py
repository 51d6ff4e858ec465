"""A job in the words of `status` and `list`: for scripts as one object with stable names, for people as lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.figures import dollars, span
from cloudtrain.launcher.job import Attempt, Job, exit_code
from cloudtrain.launcher.money.outlook import Outlook, outlook
from cloudtrain.launcher.money.words import as_usd, clock, of_limit
from cloudtrain.launcher.progress import shown

if TYPE_CHECKING:
    from cloudtrain.launcher.money.onward import Onward

__all__ = ["as_json", "as_lines", "limit_words", "next_step", "outcome", "project_of"]


def as_json(job: Job, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the job's state; money in US dollars, times in unix seconds. `attempts`, all of its, make up its money."""
    attempt, state, progress = job.attempt, job.attempt.state, job.attempt.progress
    money = outlook(job, attempts, time.time())
    return {
        "job": job.id,
        "name": job.name,
        "backend": job.backend,
        "project": project_of(job),
        "tags": job.config.get("tags") or {},
        "state": state.state,
        "reason": state.reason,
        "resumable": state.resumable,
        "attempt": attempt.number,
        "restarts": state.restarts,
        "platform_name": attempt.name,
        "url": state.url,
        "instances": attempt.plan["instances"],
        "ranks": attempt.plan["ranks"],
        "step": progress.get("step"),
        "max_steps": progress.get("max_steps"),
        "loss": progress.get("loss"),
        "metrics": progress.get("metrics"),
        "samples_per_s": progress.get("samples_per_s"),
        "eta_s": progress.get("eta_s") if job.active else None,
        "checkpoint_step": money.checkpoint_step,
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
        "detail": state.detail,
        "created_s": job.created_s,
        "started_s": state.started_s,
        "ended_s": state.ended_s,
        "unreachable_since_s": attempt.unreachable_since_s,
        "exit_code": None if job.active else exit_code(state),
    }


def as_lines(job: Job, attempts: Sequence[Attempt]) -> list[str]:
    """Return one screen about the job; `attempts`, all of its, make up its money."""
    attempt, state = job.attempt, job.attempt.state
    plan = attempt.plan
    lines = [f"{job.id}  {outcome(job)}"]
    ranks = f"{plan['instances']} x {plan['nproc_per_node']} = {plan['ranks']} rank{'s' if plan['ranks'] != 1 else ''}"
    again = f", {state.restarts} restart{'s' if state.restarts != 1 else ''}" if state.restarts else ""
    lines.append(f"  backend     {job.backend}, {ranks}, attempt {attempt.number}{again}")
    if job.backend != "local" and attempt.ref is not None:
        lines.append(f"  there       {attempt.name}, as {job.backend} knows it{f': {state.url}' if state.url else ''}")
    if text := shown(attempt.progress):
        lines.append(f"  progress    {text}{_pace(attempt.progress) if job.active else ''}")
    if metrics := attempt.progress.get("metrics"):
        lines.append("  metrics     " + ", ".join(f"{key} {_number(value)}" for key, value in metrics.items()))
    now_s = time.time()
    money = outlook(job, attempts, now_s)
    if money.checkpoint_step is not None:
        lines.append(f"  checkpoint  step {money.checkpoint_step}")
    lines += _money_lines(job, attempts, money, now_s)
    if attempt.unreachable_since_s is not None:
        lines.append("  backend     does not answer; this is what it said last")
    lines += _error_lines(state.error)
    if state.detail:
        lines.append(f"  detail      {state.detail}")
    lines += [f"  next        {line}" for line in next_step(job, attempts)]
    resume = None if job.active else _onward(job, attempts)
    return [*lines, *([f"              ({resume.words})"] if resume and resume.words else [])]


def project_of(job: Job) -> str | None:
    """Return the name of the project that the job counts against."""
    project = job.config.get("project")
    return project.get("name") if isinstance(project, dict) else project


def outcome(job: Job) -> str:
    """Return the state in words: `stopped (user), resumable`."""
    state = job.attempt.state
    reason = f" ({state.reason})" if state.reason else ""
    return f"{state.state}{reason}" + (", resumable" if state.resumable else "")


def next_step(job: Job, attempts: Sequence[Attempt] = ()) -> list[str]:
    """Return what the user may want to do now; `attempts`, all of its, say what a job out of money needs."""
    if job.active:
        return [f"cloudtrain logs -f {job.id}", f"cloudtrain stop {job.id}"]
    if job.attempt.state.state == "succeeded":
        return []
    if job.attempt.phase == "never_sent":
        return ["submit it again"]
    hint = [f"cloudtrain logs --tail 50 {job.id}"] if job.attempt.state.state == "failed" else []
    resume = _onward(job, attempts)
    return [*hint, *([] if resume is None else [resume.command])]


def _onward(job: Job, attempts: Sequence[Attempt]) -> Onward | None:
    """Return how to go on with the job, with the money and the time that it needs."""
    from cloudtrain.launcher.money.onward import onward

    return onward(job, outlook(job, attempts, time.time()))


def _money_lines(job: Job, attempts: Sequence[Attempt], money: Outlook, now_s: float) -> list[str]:
    """Return the time and the money: how much of both is gone, what is to come, and what has been paid for what."""
    attempt, state = job.attempt, job.attempt.state
    spent = of_limit(money.spent_micro, money.limit_micro)
    lines = []
    if state.started_s:
        took_s = (state.ended_s or now_s) - state.started_s
        lines.append(f"  time        {span(took_s)} of at most {span(attempt.plan['cap_s'])}")
    if job.active:
        burn = f"; {dollars(money.burn_micro_h)}/h" if money.burn_micro_h else ""
        lines.append(f"  spend       {spent}{burn}")
        lines += _limit_lines(money, now_s) + _outlook_lines(job, money, now_s)
    else:
        from cloudtrain.launcher.money.achieved import achieved, in_words

        bought = in_words(achieved([*attempts[:-1], attempt], now_s))
        lines.append(f"  cost        {spent}{f' ({bought})' if bought else ''}")
    if attempt.idle_usd:
        lines.append(f"  idle        up to {attempt.idle_usd:.2f} USD more while its machines idle after it")
    return lines


def _limit_lines(money: Outlook, now_s: float) -> list[str]:
    """Return when it leaves and when it is ended, by the user's clock."""
    if money.cap_at_s is None or money.deadline_at_s is None:
        return []
    leaves, ended = clock(money.deadline_at_s, now_s), clock(money.cap_at_s, now_s)
    return [f"  limit       saves and leaves at {leaves}, is ended at {ended}"]


def _outlook_lines(job: Job, money: Outlook, now_s: float) -> list[str]:
    if money.finish_at_s is None:
        return []
    cost = f" for {dollars(money.total_micro)}" if money.total_micro else ""
    finish = f"done at {clock(money.finish_at_s, now_s)}, in {span(money.finish_at_s - now_s)},{cost}".rstrip(",")
    if not money.hits_limit:
        return [f"  outlook     {finish}"]
    return [f"  outlook     {limit_words(job, money)}", f"              it would be {finish}"]


def limit_words(job: Job, money: Outlook) -> str:
    """Return which limit comes before the finish."""
    end_s = money.deadline_at_s or money.cap_at_s
    if end_s is None or money.finish_at_s is None or money.finish_at_s <= end_s:
        return "the budget is used up before the finish"
    which = "budget's cap" if job.attempt.plan.get("cap_reason") == "budget" else "time limit"
    return f"the {which} comes before the finish"


def _pace(progress: dict[str, Any]) -> str:
    rate, eta = progress.get("samples_per_s"), progress.get("eta_s")
    text = f", {rate:.0f} samples/s" if isinstance(rate, float | int) else ""
    return text + (f", {span(eta)} to go" if isinstance(eta, float | int) else "")


def _error_lines(error: dict[str, Any] | None) -> list[str]:
    if not error:
        return []
    who = f"rank {error['rank']}: " if error.get("rank") is not None else ""
    kind = f"{error['type']}: " if error.get("type") else ""
    first, *rest = f"{who}{kind}{error['message']}".splitlines() or [""]
    trace = "" if error.get("kind") == "config" else error.get("traceback") or ""
    frames = [line for line in trace.splitlines() if line.startswith("  ")]
    return [f"  error       {first}", *(f"              {line}" for line in rest + frames[-6:])]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

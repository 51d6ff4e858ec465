"""A job in the words of `status` and `list`: for scripts as one object with stable names, for people as lines."""

from __future__ import annotations

import time
from typing import Any

from cloudtrain.launcher.job import Job, exit_code
from cloudtrain.launcher.progress import shown
from cloudtrain.launcher.units import format_duration

__all__ = ["as_json", "as_lines", "next_step", "outcome"]


def as_json(job: Job, spend_usd: float | None) -> dict[str, Any]:
    """Return the job's state; money in US dollars, times in unix seconds. `spend_usd` is for all its attempts."""
    attempt, state, progress = job.attempt, job.attempt.state, job.attempt.progress
    return {
        "job": job.id,
        "name": job.name,
        "backend": job.backend,
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
        "checkpoint_step": progress.get("checkpoint_step"),
        "spend_usd": spend_usd,
        "idle_usd": attempt.idle_usd,
        "error": state.error,
        "detail": state.detail,
        "created_s": job.created_s,
        "started_s": state.started_s,
        "ended_s": state.ended_s,
        "unreachable_since_s": attempt.unreachable_since_s,
        "exit_code": None if job.active else exit_code(state),
    }


def as_lines(job: Job, spend_usd: float | None) -> list[str]:
    """Return one screen about the job."""
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
    if attempt.progress.get("checkpoint_step") is not None:
        lines.append(f"  checkpoint  step {attempt.progress['checkpoint_step']}")
    if state.started_s:
        took = (state.ended_s or time.time()) - state.started_s
        lines.append(f"  time        {format_duration(round(took))} of at most {format_duration(plan['cap_s'])}")
    idle = f", and up to {attempt.idle_usd:.2f} USD while its machines idle after it" if attempt.idle_usd else ""
    lines.append("  spend       " + ("unknown" if spend_usd is None else f"{spend_usd:.2f} USD{idle}"))
    if attempt.unreachable_since_s is not None:
        lines.append("  backend     does not answer; this is what it said last")
    lines += _error_lines(state.error)
    if state.detail:
        lines.append(f"  detail      {state.detail}")
    return [*lines, *(f"  next        {line}" for line in next_step(job))]


def outcome(job: Job) -> str:
    """Return the state in words: `stopped (user), resumable`."""
    state = job.attempt.state
    reason = f" ({state.reason})" if state.reason else ""
    return f"{state.state}{reason}" + (", resumable" if state.resumable else "")


def next_step(job: Job) -> list[str]:
    """Return what the user may want to do now."""
    if job.active:
        return [f"cloudtrain logs -f {job.id}", f"cloudtrain stop {job.id}"]
    if job.attempt.state.state == "succeeded":
        return []
    if job.attempt.phase == "never_sent":
        return ["submit it again"]
    hint = [f"cloudtrain logs --tail 50 {job.id}"] if job.attempt.state.state == "failed" else []
    return [*hint, *([f"cloudtrain resume {job.id}"] if job.attempt.state.resumable else [])]


def _pace(progress: dict[str, Any]) -> str:
    rate, eta = progress.get("samples_per_s"), progress.get("eta_s")
    text = f", {rate:.0f} samples/s" if isinstance(rate, float | int) else ""
    return text + (f", {format_duration(round(eta))} to go" if isinstance(eta, float | int) else "")


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

"""The effects of the buttons: the same functions and rules as `cloudtrain stop` and `cloudtrain resume`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import BudgetError, UsageError
from ..jobs import retry, stopping
from ..jobs.approval import cost_words
from ..jobs.refresh import refresh

if TYPE_CHECKING:
    from ..job import Job
    from ..planning.prepare import Prepared
    from ..store.registry import Registry


@dataclass(frozen=True)
class ResumeOffer:
    """The next attempt that a resume would send, described as by `resume` before its question.

    The user agrees to `attempt` and `worst_micro` (None: price unknown); an attempt with different values is not sent.
    `refusal`: why a resume would be refused.
    """

    attempt: int
    lines: list[str]
    cost: str
    worst_micro: int | None
    refusal: str = ""


def stop(registry: Registry, job_id: str, *, now: bool) -> str:
    """Ask the job to save and stop, or with `now` to end at once; return a message. Raises CloudtrainError."""
    return stopping.ask(registry, job_id, now=now).words


def offer(registry: Registry, job_id: str, budget: str = "") -> ResumeOffer:
    """Return the next attempt, with the budget raised by `+50` or set to `200 USD`.

    Raises CloudtrainError if the job cannot be resumed or the attempt cannot be planned.
    """
    from ..jobs import submit
    from ..jobs.retry import ALL_DAMAGED

    job = refresh(registry, registry.find(job_id))
    number = job.attempt.number + 1
    try:
        prepared = _prepared(registry, job, budget)
        submit.require_room(registry, prepared, is_first=False)
    except BudgetError as error:
        return ResumeOffer(number, [], "", None, refusal=str(error))
    lines = prepared.lines(job)
    if job.attempt.state.all_damaged:
        lines.insert(0, ALL_DAMAGED)
    elif not job.attempt.state.resumable:
        lines.insert(0, "no checkpoint of this job yet: starting from the beginning")
    return ResumeOffer(number, lines, cost_words(prepared.plan), prepared.plan.worst_case_micro)


def resume(registry: Registry, job_id: str, *, attempt: int, worst_micro: int | None, budget: str = "") -> str:
    """Send the next attempt if the offer still holds; return a message. Raises CloudtrainError."""
    from ..jobs import submit

    job = refresh(registry, registry.find(job_id))
    prepared = _prepared(registry, job, budget)
    if job.attempt.number + 1 != attempt:
        raise UsageError(f"{job.id} was already resumed", hint="look at the job")
    now_micro = prepared.plan.worst_case_micro
    if worst_micro is not None and (now_micro is None or now_micro > worst_micro):
        message = f"it may now cost {cost_words(prepared.plan)}, which is more than was shown"
        raise UsageError(message, hint="look at it again")
    submit.require_room(registry, prepared, is_first=False)
    job = submit.resend(registry, job, prepared, start_over=job.attempt.state.all_damaged)
    return f"sent: {job.id}, attempt {job.attempt.number}"


def _prepared(registry: Registry, job: Job, budget: str) -> Prepared:
    retry.require_ended(registry, job)
    return retry.prepare_next(registry, job, [retry.budget_setting(job, budget)] if budget else [])

"""The facts about a job in the registry, for alerts and for resume advice (entrypoints/notices/facts.py)."""

from __future__ import annotations

from collections.abc import Sequence

from cloudtrain.entrypoints.notices.facts import JobFacts, StepFacts
from cloudtrain.entrypoints.terms import CostRate

from ..job import Attempt, Job, last_number
from ..planning.job_spec import default_hang_timeout_s, resume_terms
from ..store import tries
from ..text.units import stored_s
from .forecast import Forecast, left_s


def job_facts(job: Job, forecast: Forecast, attempts: Sequence[Attempt]) -> JobFacts:
    """Return the facts at the time of the forecast; `attempts` are all attempts of the job."""
    attempt, plan, state, asked = job.attempt, job.attempt.plan, job.attempt.state, job.asked
    moves, moved = tries.moved(attempts)
    progress = {"eta_s": left_s(attempt.progress), "checkpoint_step": forecast.checkpoint_step}
    hang_s = stored_s(asked.hang_timeout) or default_hang_timeout_s(asked.timeout_s, is_task=not asked.is_script)
    return JobFacts(
        job=job.id,
        backend=job.backend,
        attempt=attempt.number,
        state=state.state,
        reason=state.reason,
        error=state.error or {},
        progress=StepFacts.load(attempt.progress | progress),
        spent_micro=forecast.spent_micro,
        spent_worst_micro=forecast.worst_micro,
        limit_micro=forecast.limit_micro,
        burn_micro_h=forecast.burn_micro_h,
        total_micro=forecast.projected_micro if job.active else None,
        rate=CostRate(1, round((attempt.hourly_usd or 0.0) * 1e6), plan.uncertainty),
        terms=resume_terms(plan),
        alert_at=[int(str(each).strip().rstrip("%")) for each in asked.alert_at],  # stored as text such as `80%`
        on_limit=asked.on_limit,
        limit_reason=plan.cap_reason,
        max_duration_s=stored_s(asked.max_duration),
        began_s=None if forecast.cap_at_s is None else forecast.cap_at_s - plan.cap_s,
        cap_at_s=forecast.cap_at_s,
        deadline_at_s=forecast.deadline_at_s,
        finish_at_s=forecast.finish_at_s,
        hits_limit=forecast.hits_limit,
        is_hard=0 < plan.deadline_s == plan.own_limit_s,  # on_limit: stop
        stalled_s=forecast.stalled_s,
        hang_s=hang_s,
        unreachable_since_s=attempt.unreachable_since_s,
        restarts=state.restarts,
        moved=moved,
        moves=moves,
        most_attempts=last_number(job, attempts) if state.reason in asked.retry_on else 1,
        saves=job.saves,
        is_saved=forecast.saved_attempt is not None or state.resumable,
        is_resumable=state.resumable and attempt.phase != "never_sent",
    )

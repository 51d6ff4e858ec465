"""A job's page: the facts of `status`, in parts that update themselves, and the data of the charts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .. import backend as backends
from ..errors import CloudtrainError
from ..job import Attempt, Job
from ..jobs.describe import as_json, limit_words, next_step
from ..jobs.overview import lines_before
from ..money import unit_cost
from ..money.forecast import forecast
from ..store.registry import Registry
from .site import Pages
from .sse import Shown

PARTS = ("head", "actions", "facts", "error", "attempts", "stop")


def shown(pages: Pages, registry: Registry, job_id: str, fault: str) -> Shown:
    """Return the current parts of the page; `fault`: the error of the last poll of the job."""
    values = facts(registry, job_id, fault)
    parts = {name: pages.render(f"_job_{name}.html", **values) for name in PARTS}
    marks = registry.database.execute(
        "SELECT COUNT(*), MAX(attempt), MAX(time_s) FROM points WHERE job_id = ?", (values["job"]["job"],)
    )[0]
    return Shown(parts, is_live=values["is_active"], curves=tuple(marks))


def facts(registry: Registry, job_id: str, fault: str = "") -> dict[str, Any]:
    """Return the templates' values of a job. Raises NoSuchJobError."""
    now_s = time.time()
    job = registry.find(job_id)
    attempts = registry.attempts(job)
    money = forecast(job, attempts, now_s)
    found, state, plan = as_json(job, attempts), job.attempt.state, job.attempt.plan
    began_s = state.started_s
    return {
        "job": found,
        "tags": job.asked.tags,
        "config_file": job.config_file,
        "is_active": job.active,
        "can_stop": job.active and job.attempt.ref is not None and state.state != "stopping",
        "can_kill": _can_kill(job),
        "saves": job.saves,
        "can_resume": not job.active and state.state != "succeeded" and not registry.never_ran(job),
        "plan": plan,
        "took_s": None if began_s is None else (state.ended_s or now_s) - began_s,
        "limit_words": limit_words(job, money) if job.active and money.hits_limit else "",
        "bought": "" if job.active else unit_cost.in_words(unit_cost.achieved(attempts, now_s)),
        "next_steps": next_step(job, attempts),
        "attempts": [_attempt(*each, now_s) for each in zip(found["attempts"][::-1], attempts[::-1], strict=True)],
        "trace": _trace(state.error),
        "before": [] if job.active else lines_before(registry, job),
        "fault": fault,
    }


def curves(registry: Registry, job_id: str) -> dict[str, Any]:
    """Return the data of a job's charts."""
    from ..report.data import chart_data
    from ..store import series

    job: Job = registry.find(job_id)
    attempts: Sequence[Attempt] = registry.attempts(job)
    return chart_data(job, attempts, series.drawable(series.read(registry.database, job.id)), time.time())


def _attempt(described: dict[str, Any], attempt: Attempt, now_s: float) -> dict[str, Any]:
    """Return the attempt as in the description of the job, with the further values of the page."""
    state = attempt.state
    more = {
        "detail": state.detail,
        "restarts": state.restarts,
        "began_s": state.started_s or attempt.created_s,
        "took_s": None if state.started_s is None else (state.ended_s or now_s) - state.started_s,
        "ranks": attempt.plan.ranks,
        "url": state.url,
    }
    return {**described, **more, **({} if attempt.phase == "sent" else {"spend_usd": 0.0})}


def _can_kill(job: Job) -> bool:
    """Return whether the job can be ended without a save."""
    if not job.active or job.attempt.ref is None:
        return False
    try:
        return backends.load(job.backend).pace(job.attempt.ref).can_kill
    except CloudtrainError:  # a plug-in that was removed
        return False


def _trace(error: dict[str, Any] | None) -> str:
    """Return the traceback if it adds to the message."""
    if not error or error.get("kind") == "config":
        return ""
    return str(error.get("traceback") or "")[:20_000]

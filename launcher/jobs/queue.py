"""The line of jobs that are not sent yet: for want of capacity at the submit, or for their next candidate.

A job in line is a row of the registry that is not sent, with its worst case held. The order is priority, then the time
of the submit. After a refusal for want of capacity, later jobs for the same machines are not tried: none overtakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import CloudtrainError, UnreachableError
from ..job import Job, no_machines
from ..money import shared_ledger_sync
from ..planning.job_spec import PRIORITIES
from ..store.registry import Registry
from ..text.terminal import say
from . import failover, listing, retry, stopping

RECENT = 100  # jobs that are looked at for an end, and for lost agents
TRY_S = 15.0  # between two tries of a job, however long the job has waited; a job's end causes a try at once


def advance_queue(registry: Registry) -> list[str]:
    """Send the jobs in line that are due; return a line of text for each job that was sent or has left the line.

    A job whose own waiting agents were lost, for example at a reboot, is sent again, to the end of the line. Any number
    of processes may call the function at once: each job is sent once. A try is one call of the backend for each kind of
    machines, at most every TRY_S seconds.
    """
    from . import submit

    lost = [job for job in registry.jobs(limit=RECENT) if "places" not in job.attempt.submitter and _was_lost(job)]
    told = [line for job in lost for line in _send_again(registry, job)]
    active = registry.jobs(active=True)
    for job in active:
        if stopping.wait_is_over(job) and not failover.is_on(job.attempt):
            with suppress(CloudtrainError):
                stopping.followed(registry, job)
    told += [line for job in active if failover.is_on(job.attempt) for line in _advance(registry, job)]
    queued = [job for job in active if job.attempt.phase == "queued" and not failover.is_on(job.attempt)]
    waiting = sorted(queued, key=lambda job: (-PRIORITIES.get(job.asked.priority, 50), job.attempt.created_s, job.seq))
    refused: dict[tuple[Any, ...], str] = {}
    recent = registry.jobs(limit=RECENT) if waiting else ()
    ended_s = max((job.attempt.state.ended_s or 0.0 for job in recent if not job.active), default=0.0)
    for place, job in enumerate(waiting, 1):
        now_s, asked = time.time(), job.asked.resources
        kind = job.backend, *(str(asked.get(key)) for key in ("instance_type", "accelerators", "spot"))  # share a quota
        if failover.is_past(job.asked.max_wait, job.attempt.created_s):
            message = "no machines within limits.max_wait"
            listing.end_unsent(registry, job.attempt, no_machines(message, ended_s=now_s))
            shared_ledger_sync.push(registry.database)
            told.append(f"{job.id} has left the line: {message}")
            continue
        status = {**(job.attempt.state.queue or {}), "place": place, "of": len(waiting)}
        tried_s = status.get("tried_s") or 0.0
        if kind in refused or (abs(now_s - tried_s) < TRY_S and ended_s < tried_s):  # clocks may be set back
            refused.setdefault(kind, str(status.get("reason") or ""))
            _show(registry, job, status)
            continue
        try:
            sent = submit.send_queued(registry, job)
        except CloudtrainError as error:
            told.append(f"{job.id} is not sent: {error.message}")
            refused[kind] = error.message
            continue
        if sent is not None and sent.attempt.phase == "queued":
            refused[kind] = str((sent.attempt.state.queue or {}).get("reason") or "")
            _show(registry, sent, {**status, **(sent.attempt.state.queue or {})})
        elif sent is not None:
            told.append(f"sent: {job.id}")
    return told


def drive(registry: Registry, job: Job) -> Job:
    """Do what is due in the search of a job with several candidates, and return the job as it is then.

    A candidate in line is sent when due, and after a refusal the next, while one is due. Raises the
    errors of a send: the search has ended then, also by CapacityError at its limits.
    """
    if not failover.is_on(job.attempt):
        return job
    while failover.is_due(registry, job):
        from . import submit  # not for a watch that sends nothing

        try:
            sent = submit.send_queued(registry, job, partial(retry.prepare_unasked, registry))
        except UnreachableError:
            if (sent := registry.find(job.id)).attempt.phase != "queued":
                raise
        if sent is None:
            break
        job = sent
    job = registry.find(job.id)
    if not job.active:
        shared_ledger_sync.push(registry.database)
    return job


def until_sent(registry: Registry, job: Job, look: Callable[[Job], object]) -> Job:
    """Return the job's newest attempt once it is sent or over, driving the search of several candidates meanwhile.

    `look` gets the job in line after each move.
    """
    told = None
    while failover.is_on(job.attempt):
        found = drive(registry, stopping.followed(registry, registry.find(job.id)))
        if found.attempt.phase not in ("intent", "queued") or not found.active:
            return found
        due_s = (found.attempt.state.queue or {}).get("start_s") or 0.0
        if due_s > time.time() and (detail := found.attempt.state.detail) != told:
            told = detail
            say(f"in line: {detail}")
            look(found)
        time.sleep(min(max(due_s - time.time(), 0.5), TRY_S))
    return job


def _advance(registry: Registry, job: Job) -> list[str]:
    """Drive the job's search, and return a line if the job was sent or has ended."""
    try:
        found = drive(registry, stopping.followed(registry, job))
    except CloudtrainError as error:
        return [f"{job.id} is not sent: {error.message}"]
    if found.attempt.phase == "sent" and (job.attempt.number, job.attempt.phase) != (found.attempt.number, "sent"):
        return [f"sent: {job.id}"]
    return [] if found.active else [f"{job.id} has left the line: {found.attempt.state.detail}"]


def _was_lost(job: Job) -> bool:
    """Return whether the job has lost its place in line, or got no machines: its wait is not over."""
    state, now_s = job.attempt.state, time.time()
    is_lost = state.state == "failed" and state.reason in ("node_failure", "no_machines") and state.started_s is None
    is_over = failover.is_past(job.asked.max_wait, job.created_s) or abs(now_s - (state.ended_s or now_s)) < TRY_S
    return job.asked.waits and is_lost and job.attempt.phase == "sent" and not is_over


def _send_again(registry: Registry, job: Job) -> list[str]:
    from . import submit

    try:
        sent = submit.resend(registry, job, retry.prepare_next(registry, job))
    except CloudtrainError as error:
        return [f"{job.id} is not sent again: {error.message}"]
    why = "it had got no machines" if job.attempt.state.reason == "no_machines" else "its agents were lost in line"
    return [f"sent again after {why}: {sent.id}, attempt {sent.attempt.number}"]


def _show(registry: Registry, job: Job, status: dict[str, Any]) -> None:
    """Store the place in line, if the place or the reason has changed."""
    if status != job.attempt.state.queue:
        registry.mark_queued(job.attempt, status)

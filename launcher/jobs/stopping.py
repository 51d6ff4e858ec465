"""Sends stop requests, without a wait for the stop: a user's, and those of a wait for machines that is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from .. import backend as backends
from ..backend_table import traits
from ..errors import CloudtrainError, UnreachableError, UsageError
from ..job import Job, State
from ..money import shared_ledger_sync
from ..store import agent_limit
from ..store.progress import unkept
from ..store.registry import Registry, submitter_lives
from ..text.terminal import say
from ..text.units import moment
from . import failover, listing
from .refresh import refresh, settle


@dataclass(frozen=True)
class StopResult:
    """The job as found, and the result of the stop request.

    `verdict`: `asked`; `ended` before; `unqueued`: the job has left the line, and was not sent; `unsent`: the submit is
    in progress; `doubtful`: the backend does not answer, and the job may have been sent or not; `forgotten`; or `kept`:
    the user has not agreed. `kills`: the job ends at once, because the user wants a kill and the backend is able to
    kill.
    """

    job: Job
    verdict: Literal["asked", "ended", "unqueued", "unsent", "doubtful", "forgotten", "kept"]
    wants_kill: bool = False
    kills: bool = False

    @property
    def how(self) -> str:
        """How the job is stopped."""
        if self.kills:
            return "at once, without saving"
        attempt = self.job.attempt
        if attempt.state.state == "pending" and attempt.state.detail and attempt.state.started_s is None:
            return "before its start"  # the platform has told why the job waits
        saved = "only files in CLOUDTRAIN_CHECKPOINT_DIR are saved"
        if attempt.plan.keeps:
            saved = "the files of `keep` are saved"
            is_first = attempt.number == 1  # a later attempt has the files of the earlier attempts
            saved += "; none was seen so far" if is_first and not attempt.progress.get("checkpoint") else ""
        lost = unkept(attempt.progress)
        signal = attempt.plan.stop_signal
        return "after saving" if self.job.saves else f"with {signal} ({saved}{'; ' * bool(lost)}{lost})"

    @property
    def note(self) -> str:
        """Why the job is not killed as the user wants; empty otherwise."""
        is_otherwise = self.wants_kill and not self.kills and self.verdict == "asked"
        return f"{self.job.backend} always lets a job leave by itself first" if is_otherwise else ""

    @property
    def words(self) -> str:
        """The message for the user."""
        name, state, at = self.job.id, self.job.attempt.state.state, moment(self.job.attempt.state.ended_s)
        return {
            "asked": f"stopping {name} {self.how}{f': {self.note}' if self.note else ''}",
            "ended": f"{name} ended at {at} UTC with state {state}; there is nothing to stop",
            "unqueued": f"{name} has left the line; nothing was sent",
            "unsent": f"{name} is just being submitted; try again in a moment",
            "kept": "not stopped",
            "doubtful": f"{self.job.backend} does not answer: {name} may exist there as {self.job.attempt.name}",
            "forgotten": f"{name} is forgotten: nothing is reserved for it any more",
        }[self.verdict]


def ask(
    registry: Registry, name: str, *, now: bool = False, agrees: Callable[[StopResult], bool] = lambda _: True
) -> StopResult:
    """Ask the job to stop; `now` kills the job, if the backend can. Returns before the job has stopped.

    `agrees` gets the planned request, and returns whether to send it. Raises NoSuchJobError, UsageError for a name of
    several active jobs, UnreachableError, CredentialError, ConfigError.
    """
    job = registry.find(name, sole=lambda job: job.active)
    if job.attempt.phase == "never_sent":
        with suppress(CloudtrainError):  # the job may exist all the same
            settled = settle(registry, job.attempt, backends.load(job.backend_of(job.attempt)))
            job = refresh(registry, replace(job, attempt=settled))
    else:
        job = refresh(registry, job)
    ref = job.attempt.ref
    if job.attempt.phase == "queued":
        if not agrees(StopResult(job, "unqueued")):
            return StopResult(job, "kept")
        if not registry.claim(job.attempt):  # sent meanwhile
            return ask(registry, job.id, now=now)
        state = State("stopped", "user", detail="left the line", ended_s=time.time())
        listing.end_unsent(registry, job.attempt, state)
        shared_ledger_sync.push(registry.database)
        return StopResult(registry.find(job.id), "unqueued")
    if ref is None and job.active:
        return StopResult(job, "unsent" if submitter_lives(job.attempt) else "doubtful")
    if ref is None:
        return StopResult(job, "ended")
    backend = backends.load(job.backend_of(job.attempt))
    kills = now and job.active and backend.pace(ref).can_kill
    asked = StopResult(job, "asked" if job.active else "ended", now, kills)
    if job.active and not agrees(asked):
        return replace(asked, verdict="kept")
    searches = failover.is_on(job.attempt) or "gave_up_s" in job.attempt.submitter  # the end is the user's
    if job.active and searches and not registry.mark(job.attempt, stopped=True, gave_up_s=None):  # moved on meanwhile
        return ask(registry, job.id, now=now)
    try:
        backend.stop(ref, now=now)  # also after the job's end: killed agents may have left processes
    except UnreachableError as error:
        if job.active:
            never = f"if {job.backend} will never answer for it: cloudtrain stop --forget {job.id}"
            error.hint = "; ".join(filter(None, [error.hint, never]))
        raise
    return asked


def followed(registry: Registry, job: Job) -> Job:
    """Return the job as the backend describes it now, for a process that follows the job: the process ends its wait.

    A platform may have no limit of its own for a wait. The stop only asks: the job has got no machines once the
    platform reports the end, and the late start of a job counts as a run.
    """
    job = refresh(registry, job)
    attempt, key = job.attempt, wait_is_over(job)
    if not key or attempt.ref is None:
        return job
    if not attempt.submitter.get("gave_up_s"):
        marks = {"gave_up_s": time.time(), "gave_up": key}
        if not registry.mark(attempt, **marks):  # a later attempt exists
            return job
        job = replace(job, attempt=replace(attempt, submitter={**attempt.submitter, **marks}))
        say(f"{job.id}: no machines within {key}, so the job is stopped")
    with suppress(CloudtrainError):  # the next poll asks again
        backends.load(job.backend_of(attempt)).stop(attempt.ref, now=failover.is_on(attempt))
    return job


def wait_is_over(job: Job) -> str:
    """Return the key of the limit that the wait of a sent attempt for machines has reached, "" before that.

    A job that cannot be polled may have begun.
    """
    attempt, state = job.attempt, job.attempt.state
    waits = state.state == "pending" and state.started_s is None and not state.restarts
    if not waits or attempt.phase != "sent" or attempt.unreachable_since_s is not None:
        return ""
    most = {"capacity.wait": job.asked.capacity.get("wait") if failover.is_on(attempt) else None}
    most |= {"limits.max_wait": job.asked.max_wait if traits(job.backend_of(attempt)).queues else None}
    return next((key for key, wait in most.items() if failover.is_past(wait, attempt.created_s)), "")


def forget(registry: Registry, name: str, agrees: Callable[[StopResult], bool]) -> StopResult:
    """Give up a job whose backend does not answer, and free its money; a job that runs there is not stopped.

    An attempt that may never have been sent frees all its money; a sent attempt keeps the cost until now. Raises
    NoSuchJobError; UsageError for a job that can be stopped.
    """
    job = registry.find(name, sole=lambda job: job.active)
    with suppress(CloudtrainError):  # a missing plug-in counts as a backend that does not answer
        job = refresh(registry, job)
    attempt = job.attempt
    if not job.active:
        return StopResult(job, "ended")
    if attempt.phase == "intent" and submitter_lives(attempt):
        return StopResult(job, "unsent")
    if attempt.phase == "sent" and attempt.unreachable_since_s is None:
        raise UsageError(f"{job.backend} answers: {job.id} need not be forgotten", hint=f"cloudtrain stop {job.id}")
    if not agrees(StopResult(job, "doubtful")):
        return StopResult(job, "kept")
    if attempt.plan.most_micro != 0:
        agent_limit.require_word(f"forget {job.id}")
    state = replace(attempt.state, state="failed", reason="error", ended_s=time.time(), resumable=False)
    state = replace(state, detail=f"forgotten by its user while {job.backend} did not answer")
    if attempt.phase == "intent":
        listing.end_unsent(registry, attempt, state)
    else:
        with registry.database.transaction():
            registry.set_state(attempt, state, attempt.progress)
            listing.keep(registry, job.id)
    shared_ledger_sync.push(registry.database)
    return StopResult(registry.find(job.id), "forgotten")


def where_to_look(job: Job) -> str:
    """Return how to search for the job without cloudtrain: the backend's command, else the job's name there."""
    name = job.attempt.name
    with suppress(CloudtrainError):
        if isinstance(backend := backends.load(job.backend_of(job.attempt)), backends.Sought):
            return backend.where_to_look(backends.Request.load(name, job.attempt.request))
    return f"look for {name} where {job.backend} lists its jobs"

"""Bringing the registry up to what the backends say, and settling submits that died half-way.

A poll that fails says nothing about the job: it stays what it was, and is shown as unreachable.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import progress as progresses
from cloudtrain.launcher.errors import ConfigError, UnreachableError
from cloudtrain.launcher.job import ACTIVE, Attempt, Job, State
from cloudtrain.launcher.lastword import LastWord
from cloudtrain.launcher.money import meter
from cloudtrain.launcher.registry import Registry, submitter_lives

__all__ = ["NEVER_SENT", "refresh"]

MOST_LATE_S = 5.0  # a command waits for the progress in a job's last lines; its state is known
NEVER_SENT = "the submit ended before the job was known to be sent, and the backend knows none; nothing runs"


def refresh(registry: Registry, job: Job) -> Job:
    """Return the job as its backend describes it now, and store that."""
    attempt = job.attempt
    if not job.active:
        return job
    backend = backends.load(job.backend)
    try:
        if attempt.phase == "intent":
            attempt = registry.attempt(job, attempt.number)  # it may have been sent since
            job = replace(job, attempt=attempt)
        if attempt.phase == "intent":
            if submitter_lives(attempt):
                return job
            attempt = _settle(registry, attempt, backend)
        if attempt.phase == "sent":
            attempt = _update(registry, replace(job, attempt=attempt), backend)
    except UnreachableError:
        registry.set_unreachable(attempt)
        attempt = replace(attempt, unreachable_since_s=attempt.unreachable_since_s or time.time())
    if attempt.state.state not in ACTIVE:
        from cloudtrain.launcher.money import teams

        teams.tell(registry.database)  # what cannot be told now is told by the next command
    return replace(job, attempt=attempt)


def _settle(registry: Registry, attempt: Attempt, backend: backends.Backend) -> Attempt:
    """Adopt what the dead submitter has sent, or close the attempt: never send again."""
    ref = backend.find(backends.Request.load(attempt.name, attempt.request), registry.folder)
    if ref is not None:
        registry.mark_sent(attempt, ref)
        return replace(attempt, phase="sent", ref=ref)
    state = State("failed", "error", resumable=False, detail=NEVER_SENT, ended_s=time.time())
    registry.mark_never_sent(attempt, state)
    return replace(attempt, phase="never_sent", state=state, unreachable_since_s=None)


def _update(registry: Registry, job: Job, backend: backends.Backend) -> Attempt:
    attempt = job.attempt
    assert attempt.ref is not None
    # The state first: lines written before the end are then all there to be read.
    state = backend.state(attempt.ref)
    if state.started_s is None and attempt.state.started_s is not None:  # the platform has forgotten what was paid
        state = replace(state, started_s=attempt.state.started_s, billed_s=attempt.state.billed_s)
    state = meter.steady(attempt.state, state, time.time())
    progress = attempt.progress
    with contextlib.suppress(UnreachableError):  # a log that cannot be read must not hide how the job is
        progress = _follow_events(attempt, backend, state)
    if (state, progress) != (attempt.state, attempt.progress) or attempt.unreachable_since_s is not None:
        with contextlib.suppress(ConfigError):  # a full disk under the registry must not hide what is known
            if not registry.set_state(attempt, state, progress):  # another one has seen the end meanwhile
                return registry.attempt(job, attempt.number)
    return replace(attempt, state=state, progress=progress, unreachable_since_s=None)


def _follow_events(attempt: Attempt, backend: backends.Backend, state: State) -> dict[str, Any]:
    """Read on in rank 0's log from where the last look ended; after the job's end, to its last word."""
    assert attempt.ref is not None
    pace = backend.pace(attempt.ref)
    late_s = min(pace.late_s, MOST_LATE_S)
    last_word = None if state.state in ACTIVE else LastWord(replace(pace, late_s=late_s), state)
    progress = dict(attempt.progress)
    while True:
        page = backend.logs(attempt.ref, progress.get("cursor"), frozenset({0}))
        progress = progresses.fold(progress, ((line.text, line.time_s) for line in page.lines)) | {
            "cursor": page.cursor
        }
        if last_word.has_come(page) if last_word else not (page.lines or page.left_out):
            return progress
        if not (page.lines or page.left_out):
            time.sleep(pace.lines_s)

"""Updates the registry from the backends, and settles interrupted submits.

A failed poll says nothing about the job: the stored state stays, and the job is shown as unreachable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cloudtrain.entrypoints import events

from .. import backend as backends
from ..errors import CloudtrainError, ConfigError, UnreachableError
from ..job import ACTIVE, Attempt, Job, State, no_machines
from ..logs.late_lines import EndDetector
from ..metering import meter
from ..store import progress as progresses
from ..store import series, sweeps
from ..store.registry import Registry, submitter_lives
from ..text import sanitize
from . import failover, listing

MOST_LATE_S = 5.0  # most time a command waits for the last lines of an ended job; the state is known by then
NEVER_SENT = "the submit ended before the job was known to be sent, and the backend knows none; nothing runs"


@dataclass(frozen=True)
class _LogFacts:
    """The result of reading rank 0's log: progress with the log's cursor; points and reports since the last poll."""

    progress: dict[str, Any]
    points: list[series.Point]
    reports: list[sweeps.SegmentRecord] = field(default_factory=list)


def refresh_active(registry: Registry, words: str = "{job} is counted as it was last seen: {why}") -> list[str]:
    """Refresh the jobs that may be running; return a line in these words for each that was not described."""
    failures = []
    for job in registry.jobs(active=True):
        try:
            found = refresh(registry, job)
            is_silent = found.active and found.attempt.unreachable_since_s is not None
            why = f"{job.backend} does not answer" if is_silent else ""
        except CloudtrainError as error:  # a removed plug-in, an expired login: continue with the next job
            why = error.message
        failures += [words.format(job=job.id, why=why)] if why else []
    return failures


def refresh(registry: Registry, job: Job) -> Job:
    """Return the job as the backend describes it now, and store the state; after a move, with its next attempt."""
    attempt = job.attempt
    if not job.active:
        return job
    try:
        if attempt.phase == "intent":
            attempt = registry.attempt(job, attempt.number)  # the attempt may have been sent since
            job = replace(job, attempt=attempt)
        backend = backends.load(job.backend_of(attempt))
        if attempt.phase == "intent":
            if submitter_lives(attempt):
                return job
            attempt = settle(registry, attempt, backend)
            job = registry.find(job.id)  # of an attempt that was never sent, the job does not keep the config
        if attempt.phase == "sent":
            attempt = _update(registry, replace(job, attempt=attempt), backend)
    except UnreachableError:
        registry.set_unreachable(attempt)
        attempt = replace(attempt, unreachable_since_s=attempt.unreachable_since_s or time.time())
    if attempt.state.state not in ACTIVE or (attempt.state.started_s and not job.attempt.state.started_s):
        from ..money import shared_ledger_sync

        shared_ledger_sync.push(registry.database)  # the next command repeats a failed update
    may_move = attempt.state.state not in ACTIVE and failover.is_on(attempt)
    return registry.find(job.id) if may_move else replace(job, attempt=attempt)


def settle(registry: Registry, attempt: Attempt, backend: backends.Backend) -> Attempt:
    """Adopt the job of the dead submitter, or close the attempt; never send again. Raises the errors of `find`."""
    ref = backend.find(backends.Request.load(attempt.name, attempt.request), registry.folder)
    if ref is not None:
        registry.mark_sent(attempt, ref)
        return replace(attempt, phase="sent", ref=ref, state=State("pending"))
    if attempt.phase == "never_sent":
        return attempt
    if attempt.submitter.get("queued"):  # sent from the line by a process that died: the job keeps its place
        registry.mark_queued(attempt, {"reason": "the process that was sending the job ended"})
        return registry.find(attempt.job_id).attempt
    state = State("failed", "error", resumable=False, detail=NEVER_SENT, ended_s=time.time())
    listing.end_unsent(registry, attempt, state)
    return replace(attempt, phase="never_sent", state=state, unreachable_since_s=None)


def _update(registry: Registry, job: Job, backend: backends.Backend) -> Attempt:
    attempt = job.attempt
    assert attempt.ref is not None
    # Read the state first: all lines written before the end can then be read.
    state = sanitize.state_of(backend.state(attempt.ref))
    if state.started_s is None and attempt.state.started_s is not None:  # the platform no longer knows the paid time
        state = replace(state, started_s=attempt.state.started_s, billed_s=attempt.state.billed_s)
    if state.state not in ACTIVE and state.started_s is not None and state.ended_s is None:
        # At the latest when the platform's own limit was up. Its tail holds the idle time, which the cost adds again.
        terms = attempt.plan.terms
        most_s = (attempt.plan.cap_s + terms.tail_s) * terms.starts - (state.idle_s or 0.0)
        state = replace(state, ended_s=min(time.time(), state.started_s + most_s))
    state = meter.steady(attempt.state, state, time.time())
    known = attempt
    while True:
        facts = _LogFacts(known.progress, [])
        with contextlib.suppress(UnreachableError):  # an unreadable log must not hide the job's state
            facts = _follow_events(known, backend, state)
        if (state, facts.progress) == (attempt.state, attempt.progress) and attempt.unreachable_since_s is None:
            return replace(attempt, state=state, progress=facts.progress, unreachable_since_s=None)
        try:
            kept = _store(registry, job, known, state, facts)
        except ConfigError:  # a full disk under the registry must not hide the known state
            return replace(attempt, state=state, progress=facts.progress, unreachable_since_s=None)
        if kept is not None:
            return kept
        known = registry.attempt(job, attempt.number)


def _store(registry: Registry, job: Job, known: Attempt, state: State, facts: _LogFacts) -> Attempt | None:
    """Store the result of a poll, and return the attempt as stored; concurrent polls store each event only once.

    If a concurrent poll has read further in the log, the stored progress stays, because this poll began earlier. If the
    job has ended as well, return None: no later poll will come, so the caller reads the rest from the stored cursor.
    """
    with registry.database.transaction():
        stored = registry.attempt(job, known.number)
        if stored.state.state not in ACTIVE:  # a concurrent poll has stored the end
            return stored
        if stored.progress.get("cursor") != known.progress.get("cursor"):
            if state.state not in ACTIVE:
                return None
            facts = _LogFacts(stored.progress, [])
        state = _end_of_wait(stored, state)
        if not registry.set_state(known, state, facts.progress):
            return registry.attempt(job, known.number)
        if state.started_s is not None and stored.state.started_s is None:
            failover.began(registry, stored)
        if state.state not in ACTIVE:
            failover.ended(registry, job, replace(stored, state=state))
        series.append(registry.database, job.id, facts.points)
        sweeps.take(registry.database, job.id, facts.reports)
        listing.keep(registry, job.id)
    return replace(known, state=state, progress=facts.progress, unreachable_since_s=None)


def _end_of_wait(attempt: Attempt, state: State) -> State:
    """Return the state; the end by our own stop, for a wait that was over, is a lack of machines and no user's stop."""
    if not attempt.submitter.get("gave_up_s") or (state.state, state.reason) != ("stopped", "user"):
        return state
    detail = f"no machines within {attempt.submitter.get('gave_up')}"
    if state.started_s is not None and not failover.is_on(attempt):
        return replace(state, reason="time_limit", detail=f"{detail}; they came while the job was being stopped")
    return replace(state, state="failed", reason="no_machines", error=no_machines(detail).error)


def _follow_events(attempt: Attempt, backend: backends.Backend, state: State) -> _LogFacts:
    """Read rank 0's log from the stored cursor; after the job's end, to the end of the log."""
    assert attempt.ref is not None
    pace = backend.pace(attempt.ref)
    late_s = min(pace.late_s, MOST_LATE_S)
    end_detector = None if state.state in ACTIVE else EndDetector(replace(pace, late_s=late_s), state)
    read: Callable[..., backends.LogPage] = backend.logs
    if isinstance(backend, backends.Searchable):
        read = partial(backend.logs_with, events.MARK)
    progress, points, reports = dict(attempt.progress), list[series.Point](), list[sweeps.SegmentRecord]()
    while True:
        page = read(attempt.ref, progress.get("cursor"), frozenset({0}))
        lines = [(line.text, line.time_s) for line in page.lines if page.counts or events.MARK in line.text]
        counts: Sequence[int | None] = page.counts or events.weights([text for text, _ in lines])
        points += series.gather(attempt.number, lines, points[-1].seq + 1 if points else 0, counts)
        points = series.thinned(points)
        lines = [line for line, count in zip(lines, counts, strict=True) if count]
        progress = progresses.fold(progress, lines) | {"cursor": page.cursor}
        reports += sweeps.reports_in(lines)
        if end_detector.is_last(page) if end_detector else not (page.lines or page.left_out):
            return _LogFacts(progress, points, reports)
        if not (page.lines or page.left_out):
            time.sleep(pace.lines_s)

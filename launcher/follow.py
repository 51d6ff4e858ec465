"""Following a job to its end: its lines as they come, then how it ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.describe import as_lines
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.job import Attempt, Job, exit_code
from cloudtrain.launcher.logs import View
from cloudtrain.launcher.refresh import refresh
from cloudtrain.launcher.registry import Registry
from cloudtrain.launcher.terminal import print_lines, say

__all__ = ["follow", "show", "wait"]

POLL_S = 0.1  # for lines; a local read of a few files' ends
STATE_POLL_S = 0.2
BACK_OFF_S = 5.0


def follow(registry: Registry, job: Job, view: View, *, tail: int | None = None) -> int:
    """Print the job's lines until it ends, then its state on standard error; return its exit code.

    Ctrl-C leaves the job running, says how to come back and how to stop it, and returns 130.
    """
    try:
        job = _stream(registry, job, view, tail)
    except KeyboardInterrupt:
        say(f"\nleft running: {job.id}")
        say(f"  come back   cloudtrain logs -f {job.id}\n  stop it     cloudtrain stop {job.id}")
        return 130
    for line in as_lines(job, registry.spent_usd(job)):
        say(line)
    return exit_code(job.attempt.state)


def show(job: Job, attempt: Attempt, view: View, *, tail: int | None = None) -> dict[str, Any] | None:
    """Print the lines that are there now, the last `tail` of them if given; return where they end."""
    if attempt.ref is None:
        return None
    backend = backends.load(job.backend)
    last: deque[str] = deque(maxlen=tail)
    cursor: dict[str, Any] | None = None
    while True:
        page = backend.logs(attempt.ref, cursor, view.ranks)
        cursor = page.cursor
        lines = [view.show(line) for line in page.lines if view.wants(line)]
        if tail is None:
            print_lines(lines)
        else:
            last.extend(lines)
        if not page.lines:
            print_lines(list(last))
            return cursor


def wait(
    registry: Registry, jobs: list[Job], timeout_s: float | None, tell: Callable[[Job], None], *, quiet: bool = False
) -> int:
    """Wait for all to end, telling of each; return the first bad exit code, 0, or 124 when the time is out."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    codes = {}
    waiting = list(jobs)
    while waiting:
        for job in list(waiting):
            job = refresh(registry, job)
            waiting = [job if other.id == job.id else other for other in waiting]
            if not job.active:
                waiting.remove(job)
                codes[job.id] = exit_code(job.attempt.state)
                tell(job)
        if waiting and end is not None and time.monotonic() >= end:
            if not quiet:
                say(f"still running: {', '.join(job.id for job in waiting)}")
            return 124
        if waiting:
            time.sleep(POLL_S)
    return next((code for code in (codes[job.id] for job in jobs) if code), 0)


def _stream(registry: Registry, job: Job, view: View, tail: int | None) -> Job:
    backend = backends.load(job.backend)
    # What is there already: the last of it, where only a tail is wanted.
    cursor = show(job, job.attempt, view, tail=tail) if tail is not None else None
    state_due = 0.0
    while True:
        # The state before the lines: what was written before the end is then in the last page.
        if time.monotonic() >= state_due:
            job = refresh(registry, job)
            state_due = time.monotonic() + (BACK_OFF_S if job.attempt.unreachable_since_s else STATE_POLL_S)
        over = not job.active
        got_lines = False
        if job.attempt.ref is not None:
            try:
                page = backend.logs(job.attempt.ref, cursor, view.ranks)
            except UnreachableError as error:
                say(f"the backend does not answer, the job is not touched: {error.message}")
                time.sleep(BACK_OFF_S)
                continue
            got_lines = bool(page.lines)
            cursor = page.cursor
            print_lines([view.show(line) for line in page.lines if view.wants(line)])
        if over and not got_lines:
            return job
        if not got_lines:
            time.sleep(POLL_S)


def view_of(job: Job, view: View) -> View:
    """Return the view with what the job itself decides: its attempt, and a prefix where there are several ranks."""
    return replace(view, attempt=job.attempt.number, prefix=job.attempt.plan["ranks"] > 1)

"""Following a job to its end: its lines as they come, then how it ended."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import retry
from cloudtrain.launcher.describe import as_lines
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.job import ACTIVE, Attempt, Job, exit_code
from cloudtrain.launcher.lastword import LastWord
from cloudtrain.launcher.logs.view import View
from cloudtrain.launcher.notices.herald import Herald
from cloudtrain.launcher.refresh import refresh
from cloudtrain.launcher.registry import Registry
from cloudtrain.launcher.terminal import print_lines, say

__all__ = ["follow", "show", "wait"]

BACK_OFF_S = 5.0
SAY_S = 3.0  # before a wait is explained
PATIENCE_S = 60.0  # with lines that are there and cannot be read
SHOW_S, SMALL = 2.0, 500  # after so long, of a job that runs, a page of fewer lines is the last


def follow(registry: Registry, job: Job, view: View, *, tail: int | None = None) -> int:
    """Print the job's lines until it ends, then its state on standard error; return its exit code.

    An attempt that the job's `retry` asks for is sent, and followed too. What people are to be told is told meanwhile.
    Ctrl-C leaves the job running, says how to come back and how to stop it, and returns 130.
    """
    herald = Herald(registry)
    try:
        seen_active = job.active  # else it is an old story that is read, and nothing is begun
        job = _stream(registry, job, view, tail, herald)
        while seen_active and (again := retry.earned(registry, job)) is not None:
            job = again
            job = _stream(registry, job, replace(view, attempt=job.attempt.number), None, herald)
    except KeyboardInterrupt:
        herald.close(0.0)
        if not job.active:
            say(f"\ninterrupted: `cloudtrain status {job.id}` tells whether a further attempt was sent")
            return 130
        say(f"\nleft running: {job.id}")
        say(f"  come back   cloudtrain logs -f {job.id}\n  stop it     cloudtrain stop {job.id}")
        return 130
    for line in as_lines(job, registry.attempts(job)):
        say(line)
    herald.close()
    return exit_code(job.attempt.state)


def show(job: Job, attempt: Attempt, view: View, *, tail: int | None = None) -> dict[str, Any] | None:
    """Print the lines that are there now, the last `tail` of them if given; return where they end.

    Those of a job that runs up to this moment: more may come faster than they can be read.
    """
    if attempt.ref is None:
        return None
    backend = backends.load(job.backend)
    pace = backend.pace(attempt.ref)
    last: deque[str] = deque(maxlen=tail)
    cursor: dict[str, Any] | None = None
    begin_s, end_s = time.monotonic(), time.monotonic() + PATIENCE_S
    while True:
        page = backend.logs(attempt.ref, cursor, view.ranks, now=True)
        cursor = page.cursor
        lines = [view.show(line) for line in page.lines if view.wants(line)]
        if tail is None:
            print_lines(lines)
        else:
            last.extend(lines)
        came = len(page.lines) + page.left_out
        # What comes now in small pieces is being written now.
        is_past = 0 < came < SMALL and attempt.state.state in ACTIVE and time.monotonic() - begin_s > SHOW_S
        if came and not is_past:
            end_s = time.monotonic() + PATIENCE_S
        elif is_past or page.is_clean or time.monotonic() > end_s:
            print_lines(list(last))
            if not page.is_clean and not is_past:
                say("some lines could not be read: the backend refuses them for now")
            return cursor
        else:
            time.sleep(pace.lines_s)


def wait(
    registry: Registry,
    jobs: list[Job],
    timeout_s: float | None,
    tell: Callable[[Job], None],
    *,
    quiet: bool = False,
    retrying: bool = True,
) -> int:
    """Wait for all to end, telling of each; return the first bad exit code, 0, or 124 when the time is out.

    An attempt that a job's `retry` asks for is sent, and waited for too, where the job was seen active; not with
    `retrying` off, as somebody waits who has stopped it.
    """
    herald = Herald(registry)
    try:
        code = _wait(registry, jobs, timeout_s, tell, herald, quiet=quiet, retrying=retrying)
    except BaseException:
        herald.close(0.0)
        raise
    herald.close()
    return code


def _wait(
    registry: Registry,
    jobs: list[Job],
    timeout_s: float | None,
    tell: Callable[[Job], None],
    herald: Herald,
    *,
    quiet: bool,
    retrying: bool,
) -> int:
    end = None if timeout_s is None else time.monotonic() + timeout_s
    codes = {}
    waiting, seen_active = list(jobs), set()
    due = dict.fromkeys((job.id for job in jobs), 0.0)
    while waiting:
        for job in [job for job in waiting if due[job.id] <= time.monotonic()]:
            job = refresh(registry, job)
            herald.look(job)
            due[job.id] = time.monotonic() + _pace(job).state_s
            waiting = [job if other.id == job.id else other for other in waiting]
            if job.active:
                seen_active.add(job.id)
            elif retrying and job.id in seen_active and (again := retry.earned(registry, job)) is not None:
                waiting = [again if other.id == job.id else other for other in waiting]
            else:
                waiting.remove(job)
                codes[job.id] = exit_code(job.attempt.state)
                tell(job)
        if waiting and end is not None and time.monotonic() >= end:
            if not quiet:
                say(f"still running: {', '.join(job.id for job in waiting)}")
            return 124
        if waiting:
            time.sleep(max(0.0, min(min(due[job.id] for job in waiting), end or math.inf) - time.monotonic()))
    return next((code for code in (codes[job.id] for job in jobs) if code), 0)


def _stream(registry: Registry, job: Job, view: View, tail: int | None, herald: Herald) -> Job:
    backend, pace = backends.load(job.backend), _pace(job)
    # What is there already: the last of it, where only a tail is wanted.
    cursor = show(job, job.attempt, view, tail=tail) if tail is not None else None
    state_due = 0.0
    last_word: LastWord | None = None
    told, has_said = None, False
    outage: str | None = None
    while True:
        # The state before the lines: what was written before the end is then in the last page.
        if time.monotonic() >= state_due:
            job = refresh(registry, job)
            herald.look(job)
            state_due = time.monotonic() + (BACK_OFF_S if job.attempt.unreachable_since_s else pace.state_s)
        if job.active and job.attempt.state.detail != told:
            told = job.attempt.state.detail
            say(f"{job.attempt.state.state}: {told}" if told else job.attempt.state.state)
        if not job.active and last_word is None:
            last_word = LastWord(pace, job.attempt.state)
        page = backends.LogPage([], {})
        if job.attempt.ref is not None:
            pace = _pace(job)
            try:
                page = backend.logs(job.attempt.ref, cursor, view.ranks)
            except UnreachableError as error:
                hint = f" ({error.hint})" if error.hint else ""
                if outage != error.message:
                    outage = error.message
                    say(f"the log cannot be read for now, the job is not touched: {outage}{hint}")
                time.sleep(BACK_OFF_S)
                if last_word is not None and last_word.is_out_of_patience():
                    return job
                continue
            cursor = page.cursor
            if outage is not None:
                outage = None
                say("the log can be read again")
            print_lines([view.show(line) for line in page.lines if view.wants(line)])
        if last_word is not None and last_word.has_come(page):
            return job
        if last_word is not None and not has_said and time.monotonic() - last_word.quiet_since_s > SAY_S:
            has_said = True
            say("the job is over; looking for its last lines")
        if not (page.lines or page.left_out):
            time.sleep(pace.lines_s)


def _pace(job: Job) -> backends.Pace:
    return backends.load(job.backend).pace(job.attempt.ref) if job.attempt.ref else backends.Pace()


def view_of(job: Job, view: View) -> View:
    """Return the view with what the job itself decides: its attempt, and a prefix where there are several ranks."""
    return replace(view, attempt=job.attempt.number, prefix=job.attempt.plan["ranks"] > 1)

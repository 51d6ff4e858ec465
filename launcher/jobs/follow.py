"""Follows a job to the end: prints the lines as they come, then how the job ended."""

from __future__ import annotations

import gc
import queue
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace

from ..backend import LogLine
from ..job import Attempt, Job, exit_code
from ..logs.printer import Printer
from ..logs.reader import BACK_OFF_S, read_on
from ..logs.stream import LogStream
from ..logs.view import View
from ..notices.notifier import Notifier
from ..store.registry import Registry
from ..text.tables import labelled, width
from ..text.terminal import aside, say, say_each
from . import queue as line
from . import retry, stopping, watch
from .overview import as_lines
from .poller import Pacing, Poller, Seen
from .view import lacking_budgets, read_view

SAY_S = 3.0  # before a wait is explained
MANY = 200_000  # objects between two garbage collections
REPLAY_S = 30.0  # most time for which alerts wait for earlier lines

Tell = Callable[[str], None]
Look = Callable[[Job], object]
Followed = Generator[tuple[Job, list[LogLine] | None], None, None]


def follow(registry: Registry, job: Job, view: View, *, tail: int | None = None) -> int:
    """Print the job's lines until the end, then its state on standard error; return the exit code.

    A retry that the config asks for is sent, and followed too. Notifications are sent meanwhile. Ctrl-C leaves the job
    running, prints the commands that follow and stop the job, and returns 130.
    """
    notifier, printer = Notifier(registry), Printer(view, is_live=True)

    def look(job: Job) -> None:
        printer.clear()
        notifier.look(job)

    try:
        with closing(_followed(registry, job, view, tail, printer.say, look)) as pages:
            for job, lines in pages:
                if lines is None:
                    printer.finish()
                    notifier.look(job)
                    continue
                if job.attempt.number > printer.view.attempt:
                    printer.view = replace(view, attempt=job.attempt.number)
                printer.print(lines)
    except KeyboardInterrupt:
        printer.clear()
        notifier.close(0.0)
        if not job.active:
            say(f"\ninterrupted: `cloudtrain status {job.id}` shows whether a retry was sent")
            return 130
        say(f"\nleft running: {job.id}")
        say_each(labelled([("come back", f"cloudtrain logs -f {job.id}"), ("stop it", f"cloudtrain stop {job.id}")]))
        return 130
    finally:
        printer.clear()
    shown = read_view(registry, job)
    lacking = lacking_budgets(registry.database, shown)
    say_each(as_lines(shown, size=(width(sys.stderr), None), lacking=lacking))
    notifier.close()
    return exit_code(job.attempt.state)


def show(registry: Registry, job: Job, attempt: Attempt, view: View, *, tail: int | None = None) -> None:
    """Print the lines written so far, only the last `tail` lines if given.

    For a running job, stop at the present moment: new lines may come faster than the reader. Raises UnreachableError.
    """
    printer = Printer(view, is_live=False)
    gc.set_threshold(MANY)  # lines form no cycles, and the search for cycles takes a fifth of the time
    with closing(LogStream(registry, job, attempt, view, now=True, tell=aside)) as stream:
        for lines in _existing(stream, view, tail):
            printer.print(lines)
        printer.finish()
        if not stream.is_clean and not stream.came:
            aside("some lines could not be read: the backend refuses them for now")


def read(
    registry: Registry, job: Job, view: View, *, tail: int | None = None, following: bool = False
) -> Generator[tuple[int, list[LogLine]], None, None]:
    """Yield the number of the attempt and the view's lines: up to now, or with `following` to the job's end.

    Following sends retries and notifications, as `follow` does. Raises UnreachableError, unless following.
    """
    printer, notifier, number = Printer(view, is_live=False), Notifier(registry), job.attempt.number
    try:
        if following:
            with closing(_followed(registry, job, view, tail, aside, notifier.look)) as pages:
                for job_now, lines in pages:
                    found = printer.bars() if lines is None else printer.ended(lines)
                    yield job_now.attempt.number, view.chosen(found)
        else:
            with closing(LogStream(registry, job, job.attempt, view, now=True, tell=aside)) as stream:
                for lines in _existing(stream, view, tail):
                    yield number, view.chosen(printer.ended(lines))
            yield number, view.chosen(printer.bars())
    except BaseException:  # GeneratorExit too: the caller reads no further
        notifier.close(0.0)
        raise
    notifier.close()


def tails(registry: Registry, job: Job, attempts: list[Attempt], view: View, count: int) -> dict[int, int]:
    """Return by attempt number how many of the last `count` lines of all attempts are in each attempt."""
    found = {}
    for attempt in reversed(attempts):
        with closing(LogStream(registry, job, attempt, view, now=True, tell=aside)) as stream:
            found[attempt.number] = len(stream.tail(count, _wanted(view))) if count else 0
        count -= found[attempt.number]
    return found


def wait(
    registry: Registry,
    jobs: list[Job],
    timeout_s: float | None,
    tell: Callable[[Job], None],
    *,
    quiet: bool = False,
    retrying: bool = True,
) -> int:
    """Wait for all jobs to end, and call `tell` for each; return the first bad exit code, 0, or 124 after the timeout.

    A job that was seen active gets the retries of its config, which are waited for too. `retrying` is off if the user
    has stopped the jobs.
    """
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    codes: dict[str, int] = {}
    waiting, unseen, seen_active = {job.id: job for job in jobs}, {job.id for job in jobs}, set[str]()
    found = queue.SimpleQueue[Seen]()

    def left() -> float:
        return retry.PATIENCE_S if end_s is None else min(retry.PATIENCE_S, end_s - time.monotonic())

    def end(job: Job) -> None:
        if waiting.pop(job.id, None):
            codes[job.id] = exit_code(job.attempt.state)
            tell(job)

    for job in jobs:  # those that have ended already, in their order; polls tell of the others as they end
        if not job.active:
            end(job)
    with Poller(registry.folder, watch.notifying(_refreshed), found.put, Pacing(least_s=0.0, rest=0.0)) as poller:
        poller.take(*jobs)
        while waiting or unseen:
            left_s = None if end_s is None or unseen else end_s - time.monotonic()
            try:
                seen = found.get(timeout=None if left_s is None else max(0.0, left_s))
            except queue.Empty:
                if not quiet:
                    say(f"still running: {', '.join(waiting)}")
                return 124
            if seen.fault is not None:
                raise seen.fault
            job = seen.job
            unseen.discard(job.id)
            if job.active:
                seen_active.add(job.id)
            elif retrying and job.id in seen_active and (again := retry.send_patiently(registry, job, left())):
                poller.take(again)
            else:
                end(job)
    return next((code for code in (codes[job.id] for job in jobs) if code), 0)


def _refreshed(registry: Registry, notifier: Notifier, job: Job) -> Seen:
    job = line.drive(registry, stopping.followed(registry, job))
    notifier.look(job)
    return Seen(job)


def _existing(stream: LogStream, view: View, tail: int | None) -> Iterator[list[LogLine]]:
    if tail is not None:
        yield stream.tail(tail, _wanted(view))
    yield from stream.backlog()


def _followed(registry: Registry, job: Job, view: View, tail: int | None, tell: Tell, look: Look) -> Followed:
    """Yield the job and its lines to the end, with its retries; None in place of lines at the end of each attempt."""
    was_active = job.active  # for a job that had already ended, no retry is sent
    while True:
        if was_active:
            job = line.until_sent(registry, job, look)
        with closing(LogStream(registry, job, job.attempt, view, tell=aside)) as stream:
            pages = _read_on(registry, job, stream, view, tail, tell, look)
            for job, lines in pages:
                yield job, lines
            yield job, None
        again: Job | None = registry.find(job.id) if was_active else None
        if again is not None and again.attempt.number == job.attempt.number:
            again = retry.send_patiently(registry, job)
        if again is None:
            return
        job, tail = again, None


def _read_on(
    registry: Registry, job: Job, stream: LogStream, view: View, tail: int | None, tell: Tell, look: Look
) -> Followed:
    """Yield the job and the attempt's lines; `tell` gets messages, `look` the job after refreshes."""
    begin_s, state_due = time.monotonic(), 0.0
    shown_detail, outage = None, ""
    is_through = has_said = False  # `is_through`: all lines from before the start are read

    def update() -> Attempt:
        nonlocal job, state_due, shown_detail
        if time.monotonic() < state_due:
            return job.attempt
        number = job.attempt.number
        job = stopping.followed(registry, job)
        if job.attempt.number != number:  # the next attempt, after a move
            job = replace(job, attempt=registry.attempt(job, number))
        state_due = time.monotonic() + (BACK_OFF_S if job.attempt.unreachable_since_s else stream.pace.state_s)
        if job.active and job.attempt.state.detail != shown_detail:
            shown_detail = job.attempt.state.detail
            tell(f"{job.attempt.state.state}: {shown_detail}" if shown_detail else job.attempt.state.state)
        if is_through or time.monotonic() - begin_s > REPLAY_S:  # new alerts come below earlier lines
            look(job)
        return job.attempt

    for news in read_on(stream, update, time.sleep, tail=tail, wants=_wanted(view)):
        if news.outage != outage:
            outage = news.outage
            tell(outage or "the log can be read again")
        yield job, news.lines
        if not has_said and stream.is_waiting_s > SAY_S and not stream.is_over:
            has_said = True
            tell("the job is over; looking for its last lines")
        if not (is_through or outage or stream.came):
            is_through, state_due = True, min(state_due, time.monotonic() + stream.pace.lines_s)


def _wanted(view: View) -> Callable[[LogLine], bool] | None:
    """Return a filter of the lines that a tail counts, None for all lines."""
    is_narrow = view.node is not None or view.since_s is not None or view.grep is not None
    return view.wants if is_narrow else None


def log_view(job: Job, view: View) -> View:
    """Return the view with the job's attempt, and with rank prefixes if the job has several ranks."""
    return replace(view, attempt=job.attempt.number, prefix=job.attempt.plan.ranks > 1)

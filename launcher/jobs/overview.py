"""A job as text: the output of `status`, the last lines after following a job, and the line of `watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from math import ceil
from typing import Any

from cloudtrain.entrypoints.format import cell, counted, dollars, most, span
from cloudtrain.entrypoints.rank import tracebacks

from ..backend_table import traits
from ..job import Attempt
from ..metering import meter
from ..money import unit_cost
from ..store import exchange_figures, loss_bins, tries
from ..store.progress import data_share, lineage, unkept
from ..store.progress import shown as progress_words
from ..store.registry import submitter_lives
from ..text import charts
from ..text.tables import INDENT, LABEL, labelled, table, wrapped
from ..text.terminal import when
from ..text.units import clock, parse_duration, percent, quantity, step_time
from ..text.units import size as bytes_of
from ..text.visible import shown
from .view import JobView, failure_lines, in_line, outcome, saved_step, with_reason

Rows = list[tuple[str, str]]  # label and text; a row without a label continues the row above

_BAR, _SPARK = 20, 12  # columns
_ATTEMPTS = 5  # the newest attempts in the table
# Lines of a traceback, and lines before the failure. The first pair that fits the screen counts.
_MOST = ((6, 10), (6, 6), (4, 4), (2, 3))
_STILL_S = 120.0  # without a step and without a forecast; after that time the pause is shown

_SPEED: dict[str, Callable[[float], str]] = {
    "samples_per_s": lambda rate: f"{quantity(rate)} samples/s",
    "tokens_per_s": lambda rate: f"{quantity(rate)} tokens/s",
    "mfu": lambda share: f"mfu {100 * share:.2g} %",
    "bubble": lambda share: f"bubble {100 * share:.2g} %",
    "step_s": lambda seconds: f"{step_time(seconds)} a step",
    "data_share": lambda share: f"{100 * share:.0f} % of it waits for data",
    "memory_bytes": lambda count: f"{bytes_of(count)} of memory",
}


def as_lines(
    view: JobView,
    before: Sequence[str] = (),
    size: tuple[int | None, int | None] = (None, None),
    lacking: Sequence[str] = (),
    tests: Sequence[str] = (),
    trials: Sequence[str] = (),
) -> list[str]:
    """Return a screen about the job.

    `before`: the last lines of the failing rank. `size`: columns and rows of the terminal; lines are broken at words,
    and a long failure is cut to fit the rows. `lacking`: the budgets that would refuse the resume.
    `tests`: the tests of the job's weights; `trials`: those of a sweep.
    """
    columns, rows = size
    saved, lost = _newest_checkpoint(view), unkept(view.progress)
    figures = [*_head(view), *_pending(view), *_progress(view), *_below("trials", trials), *_below("test", tests)]
    figures += [*saved, *([("" if saved else "checkpoint", lost)] if lost else [])]
    head = [f"{view.job.id}  {outcome(view.job)}", *labelled([*figures, *_money(view)])]
    tail = [*try_lines(view, columns), *_attempt_lines(view, columns), *labelled([*_next(view), *_below("", lacking)])]
    lines: list[str] = []
    for frames, line_count in _MOST:
        lines = wrapped(
            [*head, *labelled(_failure(view, before[-line_count:], frames, columns if rows else None)), *tail], columns
        )
        if rows is None or len(lines) < rows:
            break
    return lines


def as_line(view: JobView) -> str:
    """Return the job for people, on a single line."""
    job, money, clock = view.job, view.money, time.strftime("%H:%M:%S")
    limit = f" of {dollars(money.limit_micro)}" if money.limit_micro else ""
    parts = [f"{clock} {job.id}  {outcome(job)}", in_line(job), progress_words(view.progress)]
    parts.append(f"{most(money.spent_micro)}{limit}")
    if job.active and money.burn_micro_h:
        parts.append(f"{dollars(money.burn_micro_h)} an hour")
    if job.active and view.left_s is not None:
        parts.append(f"done in {span(view.left_s)}")
    if job.active and money.cap_at_s is not None:
        parts.append(f"{span(money.cap_at_s - view.now_s)} left")
    if job.attempt.unreachable_since_s is not None:
        parts.append(f"{job.backend} does not answer")
    return ", ".join(part for part in parts if part)


def _below(label: str, texts: Sequence[str]) -> Rows:
    """Return a row for each text, the first with the label."""
    return [("" if place else label, text) for place, text in enumerate(texts)]


def _head(view: JobView) -> Iterator[tuple[str, str]]:
    job, attempt = view.job, view.job.attempt
    yield "backend", view.place
    if attempt.unreachable_since_s is not None:
        since = when(attempt.unreachable_since_s, view.now_s)
        yield "", f"does not answer, first {since}; this is what it said last"
    if parent := lineage(job.config, attempt.progress):
        yield "parent", parent
    if attempt.ref is not None and not traits(job.backend).runs_here:
        number = f", job {attempt.platform_number}" if attempt.platform_number else ""
        url = f": {view.state.url}" if view.state.url else ""
        yield "there", f"{attempt.name}{number}, the job's name on {job.backend}{url}"


def _pending(view: JobView) -> Rows:
    """Return the reason, the time and the limit of a pending job's wait."""
    job, attempt = view.job, view.job.attempt
    if attempt.state.state != "pending":
        return []
    again_s = attempt.state.ended_s  # of a job that has run already
    waited = f"for {span(view.now_s - (again_s or attempt.created_s))}"
    if attempt.phase == "intent":
        who = attempt.submitter
        if not submitter_lives(attempt):
            return [("waiting", f"{waited}: {job.backend} has not said yet whether it was sent, as {attempt.name}")]
        return [("waiting", f"{waited}, to be sent by process {who.get('pid')} on {who.get('host')}")]
    waits = [job.asked.max_wait]
    if attempt.phase == "sent" and "places" in attempt.submitter:
        waits.append(job.asked.capacity.get("wait"))
    shortest = None if again_s else min(filter(None, waits), key=parse_duration, default=None)
    detail = f": {attempt.state.detail}" if attempt.state.detail else " for its machines to start"
    queue = attempt.state.queue or {}
    if (start_s := queue.get("start_s")) and "next" not in queue:
        detail += f"; starts by {clock(start_s, view.now_s)}"
    return [("waiting", f"{waited}{detail}{f'; given up after {shortest}' if shortest else ''}")]


def _progress(view: JobView) -> Rows:
    progress, rows = view.progress, Rows()
    trend = _trend(progress)
    if text := progress_words(progress | ({"loss": None} if trend else {})):
        share, signs = view.share_done, charts.signs_of()
        done = "" if share is None else f"{charts.bar(share, _BAR, signs)} {percent(share)}  "
        rows.append(("progress", f"{done}{text}{_left(view)}"))
    elif view.state.state == "running":
        rows += [("progress", "no step reported yet"), *_script_hint(view, "reports steps: docs/scripts.md, Curves")]
    figures = progress | {"data_share": data_share(progress), "step_s": view.step_s}
    speed = [words(number) for name, words in _SPEED.items() if isinstance(number := figures.get(name), float | int)]
    known = (
        ("speed", ", ".join(speed) if view.job.active else ""),
        ("exchange", exchange_figures.words(progress)),
        ("staleness", exchange_figures.histogram(progress, charts.signs_of().levels)),
        ("GPUs", view.gpus),
        ("", view.gpu_warning and f"warning: {view.gpu_warning}"),
        ("loss", trend),
        ("metrics", view.metrics),
        ("run", progress.get("run_url") or ""),
    )
    return [*rows, *((label, words) for label, words in known if words)]


def _script_hint(view: JobView, words: str) -> Rows:
    return [] if view.job.asked.task else [("", f"(how a script {words})")]


def _left(view: JobView) -> str:
    """Return the remaining time; for a job without progress, the time since its last step."""
    if not view.job.active:
        return ""
    if view.left_s is not None:
        return f", {span(view.left_s)} to go"
    is_still = view.money.stalled_s is not None and view.money.stalled_s >= _STILL_S
    return f", no step for {span(view.money.stalled_s or 0.0)}" if is_still else ""


def _trend(progress: dict[str, Any]) -> str:
    """Return the loss over this attempt: first mean, curve, last mean, last loss itself; "" before a curve."""
    bins = loss_bins.load(progress.get("curve")).bins
    if len(bins) < 3:
        return ""
    picture = charts.chart([one.loss for one in bins], _SPARK, 1, charts.signs_of())[0]
    newest = progress.get("loss")
    newest = f"{newest:.4g}" if isinstance(newest, float | int) else newest
    last = f"{bins[-1].loss:.4g}"
    words = f"{bins[0].loss:.4g} {picture} {last}, steps {bins[0].step} to {bins[-1].step}"
    return words if newest in (None, last) else f"smoothed {words}; last {newest}"


def _newest_checkpoint(view: JobView) -> Rows:
    """Return the newest checkpoint, its age, and the amount of work that would be lost or was lost."""
    money, progress, state = view.money, view.progress, view.state
    step, saved_s, number = money.checkpoint_step, money.saved_s, money.saved_attempt
    at = view.job.attempt.progress.get("step")  # steps of earlier attempts after their save are lost already
    age = f", {when(saved_s, view.now_s)}" if saved_s is not None else ""
    is_earlier = number is not None and number < view.job.attempt.number
    age += f", in attempt {number}" if is_earlier else ""
    if step is None:
        if state.resumable or age:  # a script that reports no step with a save
            return [("checkpoint", f"saved, step not reported{age}")]
        lost = unkept(progress)
        is_running = state.state == "running" and ("step" in progress or bool(lost))
        is_known = bool(lost) or view.job.attempt.plan.keeps
        hint = [] if is_known else _script_hint(view, "keeps checkpoints: docs/scripts.md, Files: keep")
        return [("checkpoint", "no checkpoint yet"), *hint] if is_running else []
    risk = ""
    if at is not None and at > step:
        steps = counted(at - step, "step")
        seen_s = view.now_s if view.job.active else (state.ended_s or view.now_s)
        took = f" ({span(seen_s - saved_s)})" if saved_s is not None and not is_earlier and seen_s > saved_s else ""
        risk = f"; {steps} since{took} {'not yet' if view.job.active else 'were not'} saved"
    return [("checkpoint", f"step {step}{age}{risk}")]


def _money(view: JobView) -> Iterator[tuple[str, str]]:
    """Yield time and money: the used amounts and the expected amounts; after the end, the cost of the results."""
    attempt, state, now_s = view.job.attempt, view.state, view.now_s
    if (took_s := view.took_s) is not None:
        last_run = "last run " if state.waits_again else ""
        ended = f", {last_run}ended {when(state.ended_s, now_s)}" if state.ended_s else ""
        which = f" in attempt {attempt.number}," if attempt.number > 1 else ""
        yield "time", f"{span(took_s)}{which} of at most {span(attempt.plan.cap_s)}{ended}"
    if view.job.active:
        yield "spend", f"{view.spent}{_gpu_hours(view)}"
        if view.money.deadline_at_s is not None and view.limit_times:
            yield "limit", view.limit_times
        if view.money.finish_at_s is not None and view.left_s is not None:
            cost = f" for {dollars(view.money.projected_micro)}" if view.money.projected_micro else ""
            finish = f"done at {clock(view.money.finish_at_s, now_s)}, in {span(view.left_s)},{cost}".rstrip(",")
            yield from _below("outlook", [view.limit_first, f"it would be {finish}"] if view.limit_first else [finish])
    else:
        bought = unit_cost.in_words(unit_cost.achieved(view.attempts, now_s))
        yield "cost", f"{view.spent}{f' ({bought})' if bought else _gpu_hours(view)}"
    if attempt.idle_usd:
        yield "idle", f"up to {most(ceil(attempt.idle_usd * 1e6))} more while its machines idle after it"


def _gpu_hours(view: JobView) -> str:
    """Return the time of the GPUs of a job without a price, in words; "" for a job with a price or without GPUs."""
    plan = view.job.attempt.plan
    if plan.price_micro != 0 or not plan.gpus_per_instance:
        return ""
    used = [(attempt.plan.gpus_per_instance, leg) for attempt in view.attempts for leg in meter.legs_of([attempt])]
    seconds = sum(leg.instances * gpus * leg.seconds(view.now_s) for gpus, leg in used)
    return f", {seconds / 3600:,.2f} GPU-hours"


def _failure(view: JobView, before: Sequence[str], most_frames: int, columns: int | None) -> Rows:
    """Return the first failing rank's exception, traceback, lines before, and likely cause; long lines are cut."""
    state = view.state
    rows = _error(state.error, most_frames, columns)
    if before and state.error:
        rows += _below("before it", [_cut(line, columns) for line in before])
    if state.detail and state.state != "pending":
        rows.append(("detail", state.detail))
    return [*rows, *([("likely", view.likely)] if view.likely else [])]


def _error(error: dict[str, Any] | None, most_frames: int, columns: int | None) -> Rows:
    if not error:
        return []
    first, *rest = failure_lines(error)
    trace = "" if error.get("kind") == "config" else error.get("traceback") or ""
    known = tracebacks.frames_of(trace)[0]
    frames = tracebacks.chosen(known, lambda lines: len(lines) - lines.count(tracebacks.GAP) <= most_frames)
    # The user's code may have written the message: the first of many lines are the most useful.
    rest = rest if len(rest) <= most_frames else [*rest[:most_frames], "…"]
    return _below("error", [first, *rest, *(_cut(line, columns) for line in frames)])


def _cut(line: str, columns: int | None) -> str:
    """Return a line written by the job, without terminal control codes, cut to the room beside a label."""
    line, room = shown(line, colour=False), None if columns is None else columns - len(INDENT) - LABEL
    return line if room is None or len(line) <= room else f"{line[: room - 1]}…"


def try_lines(view: JobView, columns: int | None) -> list[str]:
    """Return the table of the tries of a job with several candidates."""
    rows = [each.cells for each in view.tries]
    if not rows:
        return []
    room = None if columns is None else columns - len(INDENT)
    lines = table(tries.HEAD, rows[-tries.MOST :], drop=("ROUND",), shorten={"PLACE": 20}, below="RESULT", columns=room)
    earlier = [f"{INDENT}and {len(rows) - tries.MOST} before"] * (len(rows) > tries.MOST)
    away = tries.out_of_reach(view.attempts)
    passed = [f"{INDENT}passed over since the first save, for it cannot read the checkpoints: {name}" for name in away]
    return [*(f"{INDENT}{line}" for line in lines), *earlier, *passed]


def _attempt_lines(view: JobView, columns: int | None) -> list[str]:
    """Return a table of several attempts: how each ended, its cost, and its last step."""
    attempts = view.runs
    if len(attempts) < 2:
        return []
    rows = [
        _attempt_row(attempt, attempts[place - 1] if place else None, after, view.now_s)
        for place, (attempt, after) in enumerate(zip_longest(attempts, attempts[1:]))
    ][-_ATTEMPTS:]
    head = ("ATTEMPT", "STATE", "TIME", "USD", "STEP", "SAVED")
    room = None if columns is None else columns - len(INDENT)
    earlier = len(attempts) - len(rows)
    lines = table(head, rows, drop=("SAVED", "TIME"), shorten={"STATE": 12}, columns=room)
    return [*(f"{INDENT}{line}" for line in lines), *([f"{INDENT}and {earlier} before"] if earlier else [])]


def _attempt_row(attempt: Attempt, before: Attempt | None, after: Attempt | None, now_s: float) -> tuple[str, ...]:
    state, progress, saved = attempt.state, attempt.progress, saved_step(attempt, after)
    spent, took = meter.spent_micro(meter.legs_of([attempt]), now_s), meter.held_s(attempt, now_s)
    # An earlier attempt's checkpoint makes an attempt resumable, too.
    has_saved = "saved_s" in progress or (state.resumable and not (before and before.state.resumable))
    return (
        str(attempt.number),
        attempt.word if attempt.word != state.state else with_reason(state),
        "-" if took is None else span(took),
        cell(spent),
        str(progress.get("step", "-")),
        ("yes" if has_saved else "-") if saved is None else str(saved),
    )


def _next(view: JobView) -> Rows:
    commands = view.next_steps or [f"cloudtrain report {view.job.id}"] * (view.state.state == "succeeded")
    hint = [f"({view.advice.words})"] if view.advice and view.advice.words else []
    return [*_below("next", commands), *_below("", hint)]

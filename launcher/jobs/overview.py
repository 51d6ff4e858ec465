"""A screen about a job: the output of `status`, and the last lines after following a job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from cloudtrain.entrypoints.format import amount, counted, dollars, span
from cloudtrain.entrypoints.notices.message import at_deadline
from cloudtrain.entrypoints.rank import tracebacks

from ..backend_table import traits
from ..job import Attempt, Job
from ..metering import meter
from ..money.forecast import Forecast, forecast
from ..store import exchange_figures, gpu_figures, loss_bins
from ..store.progress import data_share, lineage, unkept
from ..store.progress import shown as progress_words
from ..store.registry import Registry, submitter_lives
from ..text import charts
from ..text.money import clock, of_limit
from ..text.tables import table, wrapped
from ..text.terminal import when
from ..text.units import percent, quantity, step_time
from ..text.units import size as bytes_of
from ..text.visible import shown
from . import causes
from .describe import (
    headline,
    limit_words,
    next_step,
    outcome,
    pairs,
    resume_advice_of,
    saved_step,
)

_BAR, _SPARK = 20, 12  # columns
_ATTEMPTS = 5  # the newest attempts in the table
# Lines of a traceback, and lines before the failure. The first pair that fits the screen counts.
_MOST = ((6, 10), (6, 6), (4, 4), (2, 3))
_STILL_S = 120.0  # without a step and without a forecast; after that time the pause is shown
_HANG = " " * 14  # indent of a section's text
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (  # how Python joins tracebacks
    "\nThe above exception was the direct cause of the following exception:\n\n",
    "\nDuring handling of the above exception, another exception occurred:\n\n",
)


def as_lines(
    job: Job,
    attempts: Sequence[Attempt],
    before: Sequence[str] = (),
    size: tuple[int | None, int | None] = (None, None),
    lacking: Sequence[str] = (),
    tests: Sequence[str] = (),
) -> list[str]:
    """Return a screen about the job; `attempts` are all attempts of the job.

    `before`: the last lines of the failing rank. `size`: columns and rows of the terminal; lines are broken at words,
    and a long failure is cut to fit. `lacking`: the budgets that would refuse the resume.
    `tests`: the tests of the job's weights.
    """
    columns, rows = size
    now_s = time.time()
    money = forecast(job, attempts, now_s)
    head = [*_head(job, now_s), *_pending(job, now_s), *_progress_lines(job, money, now_s)]
    head += [f"  {'test' if place == 0 else '':11} {line}" for place, line in enumerate(tests)]
    head += [*_checkpoint_lines(job, money, now_s), *_money_lines(job, attempts, money, now_s)]
    tail = [*_attempt_lines(job, attempts, columns, now_s), *_next_lines(job, attempts)]
    tail += [f"{_HANG}{line}" for line in lacking]
    found: list[str] = []
    for frames, line_count in _MOST:
        found = wrapped([*head, *_failure_lines(job, before[-line_count:], frames, columns), *tail], columns)
        if rows is None or len(found) < rows:
            break
    return found


def lines_before(registry: Registry, job: Job) -> list[str]:
    """Return the last lines of the failing rank: from the exit report, else from the cached log.

    A platform may pass on few lines of an exit report, or no lines. No backend is asked.
    """
    error = job.attempt.state.error or {}
    # A rank that was restarted has printed the traceback of its first start.
    repeated = {line.strip() for line in str(error.get("traceback") or "").splitlines()}
    lines: list[str] = [line for line in error.get("lines") or () if str(line).strip() not in repeated]
    rank = error.get("rank")
    if job.active or rank is None:
        return lines
    from cloudtrain.entrypoints.agent import last_lines

    from ..logs import cache

    if len(lines) >= last_lines.MOST:
        return lines
    place = cache.place(registry.database, job.id, job.attempt.number)
    if place is None or not place.is_complete:
        return lines
    from ..logs.stream import LogStream

    with closing(LogStream(registry, job, job.attempt, ranks=frozenset({rank}))) as stream:
        text = "\n".join(line.text for line in stream.tail(300))
    before, mark, _ = text.rpartition(_TRACEBACK)
    while before.endswith(_CHAINED) and _TRACEBACK in before:  # the exceptions that led to the last exception
        before = before.rpartition(_TRACEBACK)[0]
    found = [line for line in last_lines.of_text(before if mark else text) if line.strip() not in repeated]
    return found if len(found) > len(lines) else lines


def where(job: Job) -> str:
    """Return the backend, the ranks and the attempt in words: `ssh, 2 x 4 = 8 ranks, attempt 1, 2 restarts`."""
    plan, restarts = job.attempt.plan, job.attempt.state.restarts
    ranks = f"{plan.instances} x {plan.nproc_per_node} = {counted(plan.ranks, 'rank')}"
    again = f", {counted(restarts, 'restart')}" if restarts else ""
    return f"{job.backend}, {ranks}, attempt {job.attempt.number}{again}"


def share_done(progress: dict[str, Any]) -> float | None:
    """Return the share of steps done, 0 to 1; None if unknown."""
    step, most = progress.get("step"), progress.get("max_steps")
    if not isinstance(step, int) or not isinstance(most, int) or most <= 0:
        return None
    return min(1.0, max(0.0, step / most))


def metrics(progress: dict[str, Any]) -> str:
    """Return the metrics of the last evaluation in words."""
    values = progress.get("metrics") or {}
    return ", ".join(f"{key} {quantity(value) if isinstance(value, float) else value}" for key, value in values.items())


def spent(job: Job, money: Forecast) -> str:
    """Return the cost in words; for an active job also the cost per hour."""
    burn = f"; {dollars(money.burn_micro_h)}/h" if job.active and money.burn_micro_h else ""
    return f"{of_limit(money.spent_micro, money.limit_micro)}{burn}"


def limit_times(job: Job, money: Forecast, now_s: float) -> str:
    """Return when the job leaves, and when the platform ends the job, by the user's clock; empty without a limit."""
    if money.cap_at_s is None:
        return ""
    ended = f"is ended at {clock(money.cap_at_s, now_s)}"
    if money.deadline_at_s is None:
        return ended
    return f"{at_deadline(saves=job.saves)} at {clock(money.deadline_at_s, now_s)}, {ended}"


def _head(job: Job, now_s: float) -> list[str]:
    attempt, state = job.attempt, job.attempt.state
    lines = [f"{job.id}  {outcome(job)}", f"  backend     {where(job)}"]
    if attempt.unreachable_since_s is not None:
        since = when(attempt.unreachable_since_s, now_s)
        lines.append(f"{_HANG}does not answer, first {since}; this is what it said last")
    if parent := lineage(job.config, attempt.progress):
        lines.append(f"  parent      {parent}")
    if attempt.ref is not None and not traits(job.backend).runs_here:
        number = f", job {attempt.platform_number}" if attempt.platform_number else ""
        place = f": {state.url}" if state.url else ""
        lines.append(f"  there       {attempt.name}{number}, as {job.backend} knows it{place}")
    return lines


def _pending(job: Job, now_s: float) -> list[str]:
    """Return the reason, the time and the limit of a pending job's wait."""
    attempt = job.attempt
    if attempt.state.state != "pending":
        return []
    waited = f"for {span(now_s - attempt.created_s)}"
    if attempt.phase == "intent":
        who = attempt.submitter
        if not submitter_lives(attempt):
            return [f"  waiting     {waited}: {job.backend} has not said yet whether it was sent, as {attempt.name}"]
        return [f"  waiting     {waited}, to be sent by process {who.get('pid')} on {who.get('host')}"]
    most = job.asked.max_wait
    detail = f": {attempt.state.detail}" if attempt.state.detail else " for its machines to start"
    if start_s := (attempt.state.queue or {}).get("start_s"):
        detail += f"; starts by {clock(start_s, now_s)}"
    return [f"  waiting     {waited}{detail}{f'; given up after {most}' if most else ''}"]


def _progress_lines(job: Job, money: Forecast, now_s: float) -> list[str]:
    progress, lines = job.attempt.progress, list[str]()
    trend = _trend(progress)
    if text := progress_words(progress | ({"loss": None} if trend else {})):
        lines.append(f"  progress    {_done(progress)}{text}{_left(job, money, now_s)}")
    elif job.attempt.state.state == "running":
        lines += ["  progress    no step reported yet", *_script_hint(job, "reports steps: docs/scripts.md, Curves")]
    if job.active and (speed := _speed(progress)):
        lines.append(f"  speed       {speed}")
    if exchanged := exchange_figures.words(progress):
        lines.append(f"  exchange    {exchanged}")
    if staleness := exchange_figures.histogram(progress, charts.signs_of().levels):
        lines.append(f"  staleness   {staleness}")
    if gpus := gpu_figures.words(progress):
        lines.append(f"  GPUs        {gpus}")
    if job.active and (warning := gpu_figures.warning(progress)):
        lines.append(f"{_HANG}warning: {warning}")
    if trend:
        lines.append(f"  loss        {trend}")
    if words := metrics(progress):
        lines.append(f"  metrics     {words}")
    return lines


def _script_hint(job: Job, words: str) -> list[str]:
    return [] if job.asked.task else [f"{_HANG}(how a script {words})"]


def _done(progress: dict[str, Any]) -> str:
    """Return a bar and the percentage of the steps that are done; empty if the number of steps is unknown."""
    share = share_done(progress)
    return "" if share is None else f"{charts.bar(share, _BAR, charts.signs_of())} {percent(share)}  "


def _left(job: Job, money: Forecast, now_s: float) -> str:
    """Return the remaining time; for a job without progress, the time since its last step."""
    if not job.active:
        return ""
    if money.finish_at_s is not None:
        return f", {span(money.finish_at_s - now_s)} to go"
    is_still = money.stalled_s is not None and money.stalled_s >= _STILL_S
    return f", no step for {span(money.stalled_s or 0.0)}" if is_still else ""


def _speed(progress: dict[str, Any]) -> str:
    """Return the throughput, the used share of the machine, and the parts of a step."""
    parts = []
    for key, unit in (("samples_per_s", "samples/s"), ("tokens_per_s", "tokens/s")):
        if isinstance(rate := progress.get(key), float | int):
            parts.append(f"{quantity(rate)} {unit}")
    if isinstance(used := progress.get("mfu"), float | int):
        parts.append(f"mfu {100 * used:.2g} %")
    if isinstance(idle := progress.get("bubble"), float | int):
        parts.append(f"bubble {100 * idle:.2g} %")
    if isinstance(step_s := progress.get("step_s"), float | int):
        parts.append(f"{step_time(step_s)} a step")
    if (share := data_share(progress)) is not None:
        parts.append(f"{100 * share:.0f} % of it waits for data")
    if isinstance(memory := progress.get("memory_bytes"), float | int):
        parts.append(f"{bytes_of(memory)} of memory")
    return ", ".join(parts)


def _trend(progress: dict[str, Any]) -> str:
    """Return the loss over this attempt: the first and the last mean, the curve between, and the last loss itself.

    "" before there is a curve.
    """
    bins = loss_bins.load(progress.get("curve")).bins
    if len(bins) < 3:
        return ""
    picture = charts.chart([each.loss for each in bins], _SPARK, 1, charts.signs_of())[0]
    newest = progress.get("loss")
    newest = f"{newest:.4g}" if isinstance(newest, float | int) else newest
    last = f"{bins[-1].loss:.4g}"
    words = f"{bins[0].loss:.4g} {picture} {last}, steps {bins[0].step} to {bins[-1].step}"
    return words if newest in (None, last) else f"smoothed {words}; last {newest}"


def _checkpoint_lines(job: Job, money: Forecast, now_s: float) -> list[str]:
    """Return the newest checkpoint, its age, the amount of work that would be lost or was lost, and lost files."""
    found, lost = _checkpoint(job, money, now_s), unkept(job.attempt.progress)
    return [*found, f"{_HANG if found else '  checkpoint  '}{lost}"] if lost else found


def _checkpoint(job: Job, money: Forecast, now_s: float) -> list[str]:
    step, progress, state = money.checkpoint_step, job.attempt.progress, job.attempt.state
    saved_s, at, number = money.saved_s, progress.get("step"), money.saved_attempt
    age = f", {when(saved_s, now_s)}" if saved_s is not None else ""
    is_earlier = number is not None and number < job.attempt.number
    age += f", in attempt {number}" if is_earlier else ""
    if step is None:
        if state.resumable or age:  # a script that reports no step with a save
            return [f"  checkpoint  saved, step not reported{age}"]
        lost = unkept(progress)
        is_running = state.state == "running" and ("step" in progress or bool(lost))
        is_known = bool(lost) or job.attempt.plan.keeps
        hint = [] if is_known else _script_hint(job, "keeps checkpoints: docs/scripts.md, Files: keep")
        return ["  checkpoint  no checkpoint yet", *hint] if is_running else []
    risk = ""
    if isinstance(at, int) and at > step:
        steps = counted(at - step, "step")
        seen_s = now_s if job.active else (state.ended_s or now_s)
        took = f" ({span(seen_s - saved_s)})" if saved_s is not None and not is_earlier and seen_s > saved_s else ""
        risk = f"; {steps} since{took} {'not yet' if job.active else 'were not'} saved"
    return [f"  checkpoint  step {step}{age}{risk}"]


def _money_lines(job: Job, attempts: Sequence[Attempt], money: Forecast, now_s: float) -> list[str]:
    """Return time and money: the used amounts and the expected amounts; after the end, the cost of the results."""
    attempt, state = job.attempt, job.attempt.state
    lines = []
    if state.started_s:
        took_s = state.billed_s if state.waits_again and state.billed_s else (state.ended_s or now_s) - state.started_s
        last_run = "last run " if state.waits_again else ""
        ended = f", {last_run}ended {when(state.ended_s, now_s)}" if state.ended_s else ""
        which = f" in attempt {attempt.number}," if attempt.number > 1 else ""
        lines.append(f"  time        {span(took_s)}{which} of at most {span(attempt.plan.cap_s)}{ended}")
    if job.active:
        lines.append(f"  spend       {spent(job, money)}{_gpu_hours(attempts, attempt, now_s)}")
        if money.deadline_at_s is not None and (limit := limit_times(job, money, now_s)):
            lines.append(f"  limit       {limit}")
        lines += _outlook_lines(job, money, now_s)
    else:
        from ..money.unit_cost import achieved, in_words

        bought = in_words(achieved([*attempts[:-1], attempt], now_s))
        more = f" ({bought})" if bought else _gpu_hours(attempts, attempt, now_s)
        lines.append(f"  cost        {spent(job, money)}{more}")
    if attempt.idle_usd:
        lines.append(f"  idle        up to {attempt.idle_usd:.2f} USD more while its machines idle after it")
    return lines


def _gpu_hours(attempts: Sequence[Attempt], last: Attempt, now_s: float) -> str:
    """Return the time of the GPUs of a job without a price, in words; "" for a job with a price or without GPUs."""
    if last.plan.price_micro != 0 or not last.plan.gpus_per_instance:
        return ""
    from ..metering import meter

    seconds = sum(
        leg.instances * each.plan.gpus_per_instance * leg.seconds(now_s)
        for each in [*attempts[:-1], last]
        for leg in meter.legs_of([each])
    )
    return f", {seconds / 3600:,.2f} GPU-hours"


def _outlook_lines(job: Job, money: Forecast, now_s: float) -> list[str]:
    if money.finish_at_s is None:
        return []
    cost = f" for {dollars(money.total_micro)}" if money.total_micro else ""
    finish = f"done at {clock(money.finish_at_s, now_s)}, in {span(money.finish_at_s - now_s)},{cost}".rstrip(",")
    if not money.hits_limit:
        return [f"  outlook     {finish}"]
    return [f"  outlook     {limit_words(job, money)}", f"{_HANG}it would be {finish}"]


def _failure_lines(job: Job, before: Sequence[str], most_frames: int, columns: int | None) -> list[str]:
    """Return the first failing rank's exception, its traceback, the lines before, and the likely cause.

    Long lines of code and of the log are cut: a broken line would look like several lines.
    """
    state = job.attempt.state
    lines = _error_lines(state.error, most_frames, columns)
    if before and state.error:
        lines += [
            _cut(f"{_HANG if place else '  before it   '}{line}", columns)
            for place, line in enumerate(map(_plain, before))
        ]
    if state.detail and state.state != "pending":
        lines.append(f"  detail      {state.detail}")
    if cause := causes.likely(state.error, job.config):
        lines.append(f"  likely      {cause}")
    return lines


def _error_lines(error: dict[str, Any] | None, most_frames: int, columns: int | None) -> list[str]:
    if not error:
        return []
    first, rest = headline(error), list(map(_plain, str(error["message"]).splitlines()[1:]))
    trace = "" if error.get("kind") == "config" else error.get("traceback") or ""
    frames = tracebacks.chosen(
        tracebacks.frames_of(trace)[0], lambda lines: len(lines) - lines.count(tracebacks.GAP) <= most_frames
    )
    # The user's code may have written the message: the first of many lines are the most useful.
    rest = rest if len(rest) <= most_frames else [*rest[:most_frames], "…"]
    below = [*rest, *(_cut(f"{_HANG}{_plain(line)}", columns)[len(_HANG) :] for line in frames)]
    return [f"  error       {first}", *(f"{_HANG}{line}" for line in below)]


def _plain(line: str) -> str:
    """Return a line written by the job, without terminal control codes."""
    return shown(line, colour=False)


def _cut(line: str, columns: int | None) -> str:
    return line if columns is None or len(line) <= columns else f"{line[: columns - 1]}…"


def _attempt_lines(job: Job, attempts: Sequence[Attempt], columns: int | None, now_s: float) -> list[str]:
    """Return a table of several attempts: how each ended, its cost, and its last step."""
    if len(attempts) < 2:
        return []
    known = [*attempts[:-1], job.attempt]
    rows = [
        _attempt_row(each, known[place - 1] if place else None, after, now_s)
        for place, (each, after) in enumerate(pairs(known))
    ][-_ATTEMPTS:]
    head = ("ATTEMPT", "STATE", "TIME", "USD", "STEP", "SAVED")
    room = None if columns is None else columns - 2
    earlier = len(attempts) - len(rows)
    lines = table(head, rows, drop=("SAVED", "TIME"), shorten={"STATE": 12}, columns=room)
    return [*(f"  {line}" for line in lines), *([f"  and {earlier} before"] if earlier else [])]


def _attempt_row(attempt: Attempt, before: Attempt | None, after: Attempt | None, now_s: float) -> tuple[str, ...]:
    state, progress, saved = attempt.state, attempt.progress, saved_step(attempt, after)
    spent = meter.spent_micro(meter.legs_of([attempt]), now_s)
    took = "-" if state.started_s is None else span((state.ended_s or now_s) - state.started_s)
    reason = f" ({state.reason})" if state.reason else ""
    # An earlier attempt's checkpoint makes an attempt resumable, too.
    has_saved = "saved_s" in progress or (state.resumable and not (before and before.state.resumable))
    return (
        str(attempt.number),
        attempt.word if attempt.word != state.state else f"{state.state}{reason}",
        took,
        "?" if spent is None else amount(spent),
        str(progress.get("step", "-")),
        ("yes" if has_saved else "-") if saved is None else str(saved),
    )


def _next_lines(job: Job, attempts: Sequence[Attempt]) -> list[str]:
    found = next_step(job, attempts) or [f"cloudtrain report {job.id}"] * (job.attempt.state.state == "succeeded")
    lines = [f"{_HANG if place else '  next        '}{line}" for place, line in enumerate(found)]
    resume = None if job.active else resume_advice_of(job, attempts)
    return [*lines, *([f"{_HANG}({resume.words})"] if resume and resume.words else [])]

"""The sections of a job's screen: each returns a few rows, or no row without data. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from cloudtrain.entrypoints.format import dollars, span

from ..jobs import overview
from ..jobs.describe import limit_words, next_step, outcome
from ..store import exchange_figures, gpu_figures
from ..text import charts
from ..text.charts import Signs
from ..text.money import clock
from ..text.units import percent, quantity, size, step_time
from ..text.visible import cleaned
from .model import Curves, Track, WatchedJob
from .rows import (
    BAD,
    GOOD,
    LABEL,
    QUIET,
    STATE_STYLES,
    WARNS,
    Part,
    in_job,
    labelled,
    row,
    sides,
)

SLOW_S = 5.0  # a poll slower than this is shown
_LEAST_BAR = 6  # columns; a shorter bar is not drawn
_MOST_BAR = 60
_FAR = 20.0  # a loss whose maximum is so many times its minimum is drawn on a log scale
_PART_COLOURS = ("green", "magenta", "yellow", "blue")
_ALERTS = {
    "projected": "will reach its limit first",
    "within": "will finish within its limits",
    "deadline": "its deadline is near",
    "stalled": "no progress",
    "unreachable": "backend silent",
    "restarted": "ranks started again",
}
_ENDS = ("started", "succeeded", "failed", "stopped", "preempted")


def heading(watched: WatchedJob, width: int, signs: Signs, now_s: float) -> list[Text]:
    """Return the job's id, its state and reason, and its run time."""
    job, state = watched.job, watched.job.attempt.state
    left: list[Part] = [(job.id, "bold"), "  ", (cleaned(outcome(job)), STATE_STYLES.get(job.attempt.word, "bold"))]
    took = ""
    if state.started_s is not None:
        took = span((state.ended_s or now_s) - state.started_s)
        took += f" of at most {span(job.attempt.plan.cap_s)}" if job.active else ""
    return [sides(width, signs, left, [(took, QUIET)] if took else [])]


def trouble(watched: WatchedJob, width: int, signs: Signs, now_s: float) -> list[Text]:
    """Return a warning if the picture may be out of date."""
    backend, since_s = watched.job.backend, watched.job.attempt.unreachable_since_s
    if watched.fault:
        return [row(width, signs, (f"! {cleaned(watched.fault)}", WARNS))]
    if since_s is not None:
        ago = span(now_s - since_s)
        words = f"! {backend} has not answered for {ago}; showing its last report; the job is unaffected"
        return [row(width, signs, (words, WARNS))]
    if watched.asks_since_s is not None and (waited_s := now_s - watched.asks_since_s) > SLOW_S:
        return [row(width, signs, (f"! {backend} was asked {span(waited_s)} ago, no answer yet", WARNS))]
    return []


def place(watched: WatchedJob, width: int, signs: Signs) -> list[Text]:
    """Return the backend, the ranks and the attempt."""
    return [labelled(width, signs, "backend", overview.where(watched.job))]


def progress(watched: WatchedJob, width: int, signs: Signs, now_s: float) -> list[Text]:
    """Return the progress, with a bar if the last step is known, and the expected finish."""
    job, fields = watched.job, watched.job.attempt.progress
    if "step" not in fields:
        detail = cleaned(job.attempt.state.detail or "")
        if not job.active:
            return [labelled(width, signs, "progress", detail or "no step reported")]
        words = {"pending": "waiting to begin"}.get(job.attempt.state.state, "no step reported yet")
        return [labelled(width, signs, "progress", f"{words}: {detail}" if detail else words)]
    share = overview.share_done(fields)
    if share is None:
        return [labelled(width, signs, "progress", f"step {fields['step']}")]
    left = f"step {fields['step']}/{fields['max_steps']} "
    right = percent(share)
    finish_s = watched.forecast.finish_at_s if watched.forecast is not None else None
    if job.active and finish_s is not None:
        right += f", done in {span(finish_s - now_s)}, at {clock(finish_s, now_s)}"
    room = min(_MOST_BAR, width - LABEL - len(left) - len(right) - 1)
    drawn = charts.bar(share, room, signs) + " " if room >= _LEAST_BAR else ""
    return [labelled(width, signs, "progress", left, (drawn, "cyan"), right)]


def error(watched: WatchedJob, width: int, signs: Signs) -> list[Text]:
    """Return the exception of the first failing rank."""
    failure = watched.job.attempt.state.error
    if not failure:
        return []
    who = f"rank {failure['rank']}: " if failure.get("rank") is not None else ""
    kind = f"{failure['type']}: " if failure.get("type") else ""
    words = [in_job(cleaned(line)) for line in f"{who}{kind}{failure.get('message', '')}".splitlines() if line.strip()]
    rows = [labelled(width, signs, "error", (words[0] if words else "unknown", BAD))]
    return [*rows, *(labelled(width, signs, "", (line, BAD)) for line in words[1:3])]


def following(watched: WatchedJob, width: int, signs: Signs) -> list[Text]:
    """Return suggested commands for an ended job."""
    if watched.job.active:
        return []
    commands = next_step(watched.job, watched.attempts)
    return [labelled(width, signs, "" if place else "next", command) for place, command in enumerate(commands)]


def track(curve: Track | None, width: int, height: int, signs: Signs) -> list[Text]:
    """Return a curve with its newest, minimum and maximum values."""
    if curve is None:
        return []
    newest = quantity(curve.newest) if isinstance(curve.newest, float) else curve.newest.upper()
    style = "bold" if isinstance(curve.newest, float) else BAD
    range_words = ""
    if curve.least is not None and curve.largest is not None:
        range_words = f"  least {quantity(curve.least):<7} largest {quantity(curve.largest):<7}"
    words = f"{newest:>8}"
    room = width - LABEL - len(words) - len(range_words) - 1
    if room < _LEAST_BAR:
        range_words, room = "", width - LABEL - len(words) - 1
    values, name = _by_decades(curve)
    drawn = charts.chart(values, max(0, room), height, signs)
    first: list[Part] = [(f"{drawn[0]:<{max(0, room)}}", "cyan"), (f" {words}", style), (range_words, QUIET)]
    return [labelled(width, signs, name, *first), *(labelled(width, signs, "", (each, "cyan")) for each in drawn[1:])]


def _by_decades(curve: Track) -> tuple[Sequence[float | None], str]:
    """Return the values to draw and their name: the logarithm of a loss with a large range, else its end looks flat."""
    if curve.name != "loss" or not curve.least or curve.least <= 0 or (curve.largest or 0.0) < _FAR * curve.least:
        return curve.values, curve.name
    return [None if value is None else math.log10(value) for value in curve.values], f"{curve.name} (log)"


def metrics(watched: WatchedJob, width: int, signs: Signs) -> list[Text]:
    """Return the metrics of the last evaluation."""
    words = overview.metrics(watched.job.attempt.progress)
    return [labelled(width, signs, "metrics", cleaned(words))] if words else []


def split(curves: Curves, width: int, signs: Signs) -> list[Text]:
    """Return the step time, and the share of each part."""
    if curves.step_s is None:
        return []
    took = f"{step_time(curves.step_s)} "
    if not curves.split:
        return [labelled(width, signs, "step time", took)]
    shares = [seconds / curves.step_s for _, seconds in curves.split]
    legend: list[Part] = []
    for place, ((name, _), share) in enumerate(zip(curves.split, shares, strict=True)):
        sign = signs.parts[place % len(signs.parts)]
        legend += [" ", (sign, _PART_COLOURS[place % 4]), f"{name} {percent(share)}"]
    used = sum(len(part if isinstance(part, str) else part[0]) for part in legend)
    room = min(_MOST_BAR, width - LABEL - len(took) - used)
    runs = charts.stacked(shares, room if room >= _LEAST_BAR else 0, signs)
    drawn = [(run, _PART_COLOURS[place % 4]) for place, run in enumerate(runs)]
    return [labelled(width, signs, "step time", took, *drawn, *legend[0 if room >= _LEAST_BAR else 1 :])]


def exchange(watched: WatchedJob, width: int, signs: Signs) -> list[Text]:
    """Return what the ranks exchange, and the staleness of updates."""
    progress = watched.job.attempt.progress
    bars = exchange_figures.histogram(progress, signs.levels)
    found = (("exchange", exchange_figures.words(progress)), ("staleness", bars))
    return [labelled(width, signs, name, words) for name, words in found if words]


def gpus(watched: WatchedJob, width: int, signs: Signs) -> list[Text]:
    """Return the GPU utilization, and a warning about idle GPUs."""
    fields = watched.job.attempt.progress
    found = [labelled(width, signs, "GPUs", words)] if (words := gpu_figures.words(fields)) else []
    if watched.job.active and (warning := gpu_figures.warning(fields)):
        found.append(row(width, signs, (f"! {warning}", WARNS)))
    return found


def memory(curves: Curves, width: int, signs: Signs) -> list[Text]:
    """Return the peak memory of rank 0: of its GPU, as a share if the total is known."""
    if curves.memory_bytes is None:
        return []
    label = "GPU memory" if curves.is_gpu else "memory"
    total = curves.memory_total_bytes
    if total is None:
        return [labelled(width, signs, label, f"{size(curves.memory_bytes)} at most so far, on rank 0")]
    share = curves.memory_bytes / total
    words = f" {percent(share)}, {size(curves.memory_bytes)} of {size(total)} at most so far, on rank 0"
    room = min(_MOST_BAR, width - LABEL - len(words))
    drawn = charts.bar(share, room, signs) if room >= _LEAST_BAR else ""
    colour = WARNS if share > 0.9 else "cyan"
    return [labelled(width, signs, label, (drawn, colour), words if drawn else words.lstrip())]


def spend(watched: WatchedJob, width: int, signs: Signs) -> list[Text]:
    """Return the cost and its share of the limit, the cost per hour, and the forecast cost."""
    found = watched.forecast
    if found is None:
        return []
    words = overview.spent(watched.job, found)
    if watched.job.active and found.total_micro:
        words += f"; {dollars(found.total_micro)} when done"
    if not found.limit_micro or found.spent_micro is None:
        return [labelled(width, signs, "spend", words)]
    share = found.spent_micro / found.limit_micro
    room = min(_MOST_BAR, width - LABEL - len(words) - 1)
    if room < _LEAST_BAR:
        return [labelled(width, signs, "spend", words)]
    style = BAD if share >= 1 else WARNS if share >= 0.8 else GOOD
    return [labelled(width, signs, "spend", (charts.bar(share, room, signs), style), f" {words}")]


def limit(watched: WatchedJob, width: int, signs: Signs, now_s: float) -> list[Text]:
    """Return when the job leaves and when it is ended, and the limit that comes before its finish."""
    found = watched.forecast
    if found is None or found.cap_at_s is None or not watched.job.active:
        return []
    parts: list[Part] = [overview.limit_times(watched.job, found, now_s)]
    if found.hits_limit:
        parts.append((f"; ! {limit_words(watched.job, found)}", WARNS))
    return [labelled(width, signs, "limit", *parts)]


def checkpoint(watched: WatchedJob, width: int, signs: Signs, now_s: float) -> list[Text]:
    """Return the newest checkpoint and its age."""
    saved = watched.curves.checkpoint if watched.curves is not None else None
    step = watched.forecast.checkpoint_step if watched.forecast is not None else None
    if saved is not None:
        at = "" if saved[0] is None else f"step {saved[0]}, "
        return [labelled(width, signs, "checkpoint", f"{at}{span(now_s - saved[1])} ago")]
    if step is not None:
        return [labelled(width, signs, "checkpoint", f"step {step}")]
    return []


def alerts(watched: WatchedJob, width: int, signs: Signs, now_s: float) -> list[Text]:
    """Return the alerts sent, the newest first, with their channels."""
    words: list[str] = []
    for alert in reversed(watched.alerts):
        kind, _, rest = alert.key.partition(":")
        if kind in _ENDS:
            continue
        what = f"{rest.partition('@')[0]} % of the budget" if kind == "budget" else _ALERTS.get(kind, kind)
        where = ", ".join(channel for channel in alert.channels if channel != "terminal")
        words.append(f"{clock(alert.told_s, now_s)} {cleaned(what)}{f' ({where})' if where else ''}")
    return [labelled(width, signs, "alerts", ("; ".join(words), WARNS))] if words else []


def attempts(watched: WatchedJob, width: int, signs: Signs, now_s: float) -> list[Text]:
    """Return how the earlier attempts ended, the newest first."""
    before = [each for each in watched.attempts if each.number < watched.job.attempt.number]
    words = []
    for each in reversed(before):
        state = each.state
        reason = f" ({state.reason})" if state.reason else ""
        took = ""
        if state.started_s is not None and state.ended_s is not None:
            took = f" after {span(state.ended_s - state.started_s)}"
        words.append(f"{each.number} {state.state}{reason}{took}")
    return [labelled(width, signs, "before", f"attempt {'; '.join(words)}")] if words else []

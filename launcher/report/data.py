"""The data of a job's charts: a JSON object, the same for the report, the comparison and the web page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from cloudtrain.entrypoints.format import span

from ..job import Attempt
from ..jobs.view import JobView
from ..metering import meter
from ..store.series import Point, Series
from ..text.units import as_usd

# Figures of the trainer's step events; a script's own figures follow.
_COLUMNS = (
    *("loss", "lr", "grad_norm", "samples_per_s", "tokens_per_s", "mfu", "step_s", "data_s", "compute_s"),
    *("communication_s", "checkpoint_s", "memory_bytes", "epoch", "samples"),
)
_UNDRAWN = frozenset({"eta_s", "tokens", "scale", "skipped", "seconds"})
_OURS = frozenset({"attempt", "time_s", "step", "usd", "weight"})  # columns of every row
_MOST_OWN = 8  # maximum number of a script's own columns
_DIGITS = 6  # significant digits of a figure in the file


def chart_data(view: JobView, series: Series) -> dict[str, Any]:
    """Return the job's series in columns; money in US dollars, times in unix seconds.

    An absent number is null, a number that is not finite is text (`nan`, `inf`). `usd` is the cost of the whole job up
    to the row's time; if a price is unknown, `usd` is null and `spend` empty.
    `weight`, if present: the number of events that a row averages; 0 for an outlier.
    """
    at, marks = spent_at(view.attempts, view.now_s), [point for point in series.marks if point.kind != "eval"]
    return {
        "job": view.as_json(),
        "as_of_s": round(view.now_s, 3),
        "attempts": [_attempt(attempt, series, view.now_s) for attempt in view.runs],
        "steps": _columns(series.steps, at),
        "evals": [
            _placed(point, at) | {"metrics": {name: _rounded(value) for name, value in metrics.items()}}
            for point in series.marks
            if point.kind == "eval" and (metrics := point.fields.get("metrics"))
        ],
        "marks": [{"kind": point.kind} | _placed(point, at) | {"text": _mark_text(point)} for point in marks],
        "spend": spend_curve(view.attempts, view.now_s),
        "limit_usd": as_usd(view.money.limit_micro),
    }


def spend_curve(attempts: Sequence[Attempt], now_s: float) -> list[list[float]]:
    """Return the corners of the job's cost over time, `[time_s, usd]`, linear between; empty if a price is unknown."""
    at = spent_at(attempts, now_s)
    legs = [leg for leg in meter.legs_of(attempts) if leg.runs or leg.ended_s is not None]
    corners = sorted({time for leg in legs for time in (leg.started_s, leg.end_s(now_s)) if time is not None})
    return [[round(time_s, 3), usd] for time_s in corners if (usd := at(time_s)) is not None]


def spent_at(attempts: Sequence[Attempt], now_s: float) -> Callable[[float], float | None]:
    """Return a function from a time to the cost by then; None if unknown."""
    legs = meter.legs_of(attempts)
    if meter.spent_micro(legs, now_s) is None:
        return lambda time_s: None
    return lambda time_s: as_usd(meter.spent_micro(legs, now_s, to_s=time_s))


def _mark_text(point: Point) -> str:
    fields = point.fields
    if point.kind == "start":
        ranks = fields.get("ranks")
        return f"started, {ranks} ranks" if isinstance(ranks, int) else "started"
    if point.kind == "restart":
        return f"went on from step {point.step}" if fields.get("path") else "started from step 0"
    if point.kind == "checkpoint":
        return _checkpoint_text(point)
    if point.kind == "preempt":
        reason = fields.get("reason")
        return f"saved and left ({reason})" if reason else "saved and left"
    if point.kind == "error":
        return str(fields.get("message") or fields.get("kind") or "error")[:300]
    return point.kind


def _checkpoint_text(point: Point) -> str:
    fields = point.fields
    for key, words in (("failed", "not saved"), ("damaged", "damaged"), ("mirror_fault", "not in the mirror")):
        if fields.get(key):
            return f"{words}: {fields[key]}"[:300]
    if "mirror_s" in fields:
        return f"step {point.step} is in the mirror"
    seconds = fields.get("seconds")
    what = fields.get("path") if point.step is None else f"step {point.step}"
    return f"saved {what}" + (f" in {seconds:.2g} s" if isinstance(seconds, float | int) else "")


def _attempt(attempt: Attempt, series: Series, now_s: float) -> dict[str, Any]:
    state = attempt.state
    steps = [point.step for point in series.steps if point.attempt == attempt.number and point.step is not None]
    marks = [point for point in series.marks if point.attempt == attempt.number]
    origins = [point for point in marks if point.kind in ("start", "restart")]
    began = next((point.step for point in origins if point.step is not None), None)
    ended_s = state.ended_s if state.state not in ("pending", "running", "stopping") else None
    took_s = meter.held_s(attempt, now_s)
    return {
        "number": attempt.number,
        "state": state.state,
        "reason": state.reason,
        "detail": state.detail,
        "restarts": state.restarts,
        "began_s": state.started_s,
        "ended_s": ended_s,
        "took": None if took_s is None else span(took_s),
        "first_step": began if began is not None else min(steps, default=None),
        "last_step": steps[-1] if steps else None,
        "spent_usd": as_usd(meter.spent_micro(meter.legs_of([attempt]), now_s)),
    }


def _columns(steps: Sequence[Point], at: Callable[[float], float | None]) -> dict[str, list[Any]]:
    counts = Counter(name for point in steps for name in point.fields)
    own = [name for name, _ in counts.most_common() if name not in _COLUMNS and name not in _UNDRAWN | _OURS]
    names = [name for name in _COLUMNS if name in counts] + sorted(own[:_MOST_OWN])
    found: dict[str, list[Any]] = {
        "attempt": [point.attempt for point in steps],
        "time_s": [round(point.time_s, 3) for point in steps],
        "step": [point.step for point in steps],
        "usd": [at(point.time_s) for point in steps],
    }
    if any(point.weight != 1 for point in steps):
        found["weight"] = [point.weight for point in steps]
    return found | {name: [_rounded(point.fields.get(name)) for point in steps] for name in names}


def _placed(point: Point, at: Callable[[float], float | None]) -> dict[str, Any]:
    return {"attempt": point.attempt, "time_s": round(point.time_s, 3), "step": point.step, "usd": at(point.time_s)}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value

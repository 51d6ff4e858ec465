"""The model of the views: an immutable picture of jobs, of a job's curves (`curves_of`), and of its log's end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..backend import LogLine
from ..job import Job
from ..jobs.view import JobView, view_of
from ..notices.outbox import Sent
from ..store.progress import as_read
from ..store.series import Point, Series

BINS = 256  # stretches of a track: the columns of the widest sparkline
_PARTS = (("compute_s", "compute"), ("communication_s", "communication"), ("data_s", "data"), ("checkpoint_s", "save"))
_NEWEST = 20  # the split is a mean over the newest step events, few of which contain a save


@dataclass(frozen=True)
class Track:
    """A figure over the steps: means over equal stretches, None before the first; `newest` is text if not finite."""

    name: str
    values: tuple[float | None, ...]
    newest: float | str
    least: float | None
    largest: float | None


@dataclass(frozen=True)
class Curves:
    """The curves from a job's events. Times in seconds, sizes in bytes; None if never reported."""

    loss: Track | None = None
    rate: Track | None = None
    split: tuple[tuple[str, float], ...] = ()
    """The parts of a step's time by name, as shares: means over the newest windows of the newest attempt."""
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    is_gpu: bool = False


@dataclass(frozen=True)
class WatchedJob:
    """A job as last seen. Times in unix seconds."""

    view: JobView
    curves: Curves | None = None
    trials: Sequence[str] = ()
    """Lines about a sweep's trials."""
    alerts: tuple[Sent, ...] = ()
    fault: str = ""
    """The error of the last poll."""
    seen_s: float | None = None
    """The end of the last poll."""
    asks_since_s: float | None = None
    """The start of the poll in progress."""

    @property
    def job(self) -> Job:
        """The job."""
        return self.view.job


@dataclass(frozen=True)
class Scene:
    """All watched jobs, in list order; `notes` are cloudtrain's own messages with their times."""

    jobs: tuple[WatchedJob, ...]
    now_s: float
    notes: tuple[tuple[float, str], ...] = ()

    def of(self, job_id: str) -> WatchedJob | None:
        """Return the job's model."""
        return next((watched for watched in self.jobs if watched.job.id == job_id), None)


@dataclass(frozen=True)
class TailShot:
    """The end of a job's log. `fault`: why the log cannot be read now; `is_read`: a first answer has come.

    `newest`: the last step and save of the attempt `number` up to these lines, if they have rank 0.
    """

    lines: Sequence[LogLine] = ()
    newest: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    fault: str = ""
    is_read: bool = False
    is_over: bool = False
    is_prefixed: bool = True


def with_log(watched: WatchedJob, tail: TailShot) -> WatchedJob:
    """Return the job with the step and save of the log below it: state and log are read at different times."""
    attempt = watched.job.attempt
    if not watched.job.active or tail.number != attempt.number:
        return watched
    job = replace(watched.job, attempt=replace(attempt, progress=as_read(attempt.progress, tail.newest)))
    return replace(watched, view=view_of(job, watched.view.attempts))


def curves_of(series: Series) -> Curves:
    """Return the curves of the points."""
    steps, marks = series.steps, series.marks
    last = [point for point in steps if point.attempt == steps[-1].attempt]
    memory = next((value for point in reversed(steps) if _is_size(value := point.fields.get("memory_bytes"))), None)
    start = next((point.fields for point in reversed(marks) if point.kind == "start"), {})
    total = start.get("memory_total_bytes")
    return Curves(
        loss=_track("loss", steps, lambda point: point.fields.get("loss")),
        rate=_rate(steps),
        split=_split(last[-_NEWEST:]),
        memory_bytes=memory,
        memory_total_bytes=total if _is_size(total) else None,
        is_gpu=str(start.get("device", "")).startswith("cuda"),
    )


def _rate(steps: Sequence[Point]) -> Track | None:
    """Return the reported throughput; without a report, steps per second, by the reported time of a step if any."""
    for name, label in (("samples_per_s", "samples/s"), ("tokens_per_s", "tokens/s")):
        track = _track(label, steps, lambda point, name=name: point.fields.get(name))  # type: ignore[misc]
        if track is not None:
            return track
    paces: dict[int, float] = {}
    for before, after in itertools.pairwise(steps):
        is_next = before.attempt == after.attempt and before.step is not None and after.step is not None
        if isinstance(step_s := after.fields.get("step_s"), float | int) and step_s > 0:
            paces[id(after)] = 1 / step_s
        elif is_next and after.step > before.step and after.time_s > before.time_s:  # type: ignore[operator]
            paces[id(after)] = (after.step - before.step) / (after.time_s - before.time_s)  # type: ignore[operator]
    return _track("steps/s", steps, lambda point: paces.get(id(point)))


def _track(name: str, steps: Sequence[Point], value_of: Callable[[Point], Any]) -> Track | None:
    """Return the values over the steps, or over the events if they have no steps; None without values.

    A step repeated after a resume counts with the value of its last attempt. A point that represents many points has
    their weight; an outlier kept with weight 0 counts as minimum or maximum, but not in a mean.
    """
    pairs = [(point, value) for point in steps if (value := value_of(point)) is not None]
    if not pairs:
        return None
    by_place: dict[int, tuple[float, int]] = {}  # value and weight
    for place, (point, value) in enumerate(pairs):
        if isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value):
            by_place[place if point.step is None else point.step] = float(value), point.weight
    newest = pairs[-1][1]
    if not by_place:
        return Track(name, (), _shown(newest), None, None)
    values = [value for value, _ in by_place.values()]
    return Track(name, _binned(by_place), _shown(newest), min(values), max(values))


def _binned(by_place: dict[int, tuple[float, int]]) -> tuple[float | None, ...]:
    """Return the means over equal stretches; a stretch without values repeats the stretch before."""
    low, high = min(by_place), max(by_place)
    count = min(BINS, len(by_place))
    sums, counts = [0.0] * count, [0] * count
    for place, (value, weight) in by_place.items():
        here = min(count - 1, (place - low) * count // max(1, high - low))
        sums[here] += value * weight
        counts[here] += weight
    found: list[float | None] = []
    for total, many in zip(sums, counts, strict=True):
        found.append(total / many if many else (found[-1] if found else None))
    return tuple(found)


def _split(steps: Sequence[Point]) -> tuple[tuple[str, float], ...]:
    """Return the reported parts of a step (saves included) as shares of their sum."""
    newest = [point.fields for point in steps if point.weight]
    sums = {
        label: [float(fields[name]) for fields in newest if isinstance(fields.get(name), float | int)]
        for name, label in _PARTS
    }
    means = {label: sum(values) / len(values) for label, values in sums.items() if values}
    whole_s = sum(means.values())
    return tuple((label, seconds / whole_s) for label, seconds in means.items()) if whole_s > 0 else ()


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shown(value: Any) -> float | str:
    return float(value) if isinstance(value, float | int) else str(value)

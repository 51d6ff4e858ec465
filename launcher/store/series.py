"""The training events of rank 0 over time, stored in the registry: the data of the curves.

A poll (`refresh`) writes the events in the transaction that stores the log's cursor: each event once, even with several
polls at a time. A job of any length has about the same number of rows: close events are replaced by their mean, and
extremes stay, so that the highest loss of the job remains the highest. The weight of a row is the number of events that
the row represents: an average of rows by weight is an average of events.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from cloudtrain.entrypoints import events

from ..text import sanitize
from .database import Database
from .progress import finite

KINDS = ("start", "step", "eval", "checkpoint", "preempt", "paused", "restart", "error", "done")
MOST = 2000  # rows an attempt, of all kinds; more are thinned
_AFTER = 1500  # rows after thinning, so that a job with many events is not thinned at every poll
_MOST_DRAWN, _LEAST_DRAWN = 6000, 250  # most points on a page, and least points of an attempt
_BINS = {"step": 250, "eval": 60, "checkpoint": 150}  # stretches of events in which extremes are searched, by kind
_MARK_BINS = 40
_STANDING_OUT = ("loss", "samples_per_s", "grad_norm")  # figures of a step whose extremes are kept
_PARTS = ("data_s", "compute_s", "communication_s", "checkpoint_s")  # of a step's time; a missing part counts as 0
_MEANT = ("loss", "grad_norm", "samples_per_s", "tokens_per_s", "mfu", "step_s", *_PARTS)  # the rest is from the middle
_MOST_FIELDS, _MOST_METRICS = 24, 12
_LONGEST_TEXT, _LONGEST_VALUE = 1000, 2000  # characters
_NAME = re.compile(r"[A-Za-z_][\w.@/-]{0,39}", re.ASCII)
_SAID_ELSEWHERE = frozenset({"e", "step", "max_steps"})


@dataclass(frozen=True)
class Point:
    """An event of rank 0."""

    attempt: int
    kind: str  # start step eval checkpoint preempt paused restart error done
    time_s: float  # unix time
    step: int | None
    # Of a step numbers, or text for `nan` and `inf`, which JSON cannot hold; an eval's are `metrics`
    fields: dict[str, Any]
    seq: int = 0  # counts the attempt's events, with gaps after thinning
    weight: int = 1  # events that the point stands for: above 1 a mean; 0 an extreme, which another point counts


@dataclass(frozen=True)
class Series:
    """All stored points of a job, by attempt and then by time. Steps repeat after a resume, in a new attempt."""

    points: tuple[Point, ...]

    @property
    def steps(self) -> tuple[Point, ...]:
        """The points of steps."""
        return tuple(point for point in self.points if point.kind == "step")

    @property
    def marks(self) -> tuple[Point, ...]:
        """All points except the steps."""
        return tuple(point for point in self.points if point.kind != "step")


def gather(
    attempt: int, lines: Iterable[tuple[str, float]], seq: int = 0, counts: Iterable[int | None] = repeat(1)
) -> list[Point]:
    """Return the points in the lines of rank 0, each with the line's write time; `seq` is the first point's number.

    A script may print event lines with any content: invalid values are left out. `counts`: the lines' weights.
    """
    found: list[Point] = []
    for (line, time_s), weight in zip(lines, counts, strict=False):
        if weight is None or events.MARK not in line:
            continue
        _, event = events.parse(line)
        if event is not None and "trial" not in event:  # a sweep prints the events of its trials too
            point = _point(attempt, event, time_s, seq + len(found))
            found += [] if point is None else [point if weight == 1 else replace(point, weight=weight)]
    return found


def append(database: Database, job_id: str, points: Sequence[Point]) -> None:
    """Append points of an attempt to the stored points, in the transaction that stores the cursor."""
    if not points:
        return
    attempt = points[0].attempt
    sql = "SELECT COUNT(*) AS count, MAX(seq) AS last FROM points WHERE job_id = ? AND attempt = ?"
    known = database.execute(sql, (job_id, attempt))[0]
    begin = 0 if known["last"] is None else known["last"] + 1
    new = [replace(point, seq=begin + point.seq) for point in points]
    if known["count"] + len(new) > MOST:
        stored = _select(database, "WHERE job_id = ? AND attempt = ? ORDER BY seq", job_id, attempt)
        new = thinned([*stored, *new], _AFTER)
        database.execute("DELETE FROM points WHERE job_id = ? AND attempt = ?", (job_id, attempt))
    rows = ((job_id, attempt, p.seq, p.kind, p.time_s, p.step, json.dumps(p.fields), p.weight) for p in new)
    database.execute_each("INSERT INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)


def read(database: Database, job_id: str) -> Series:
    """Return the stored points of the job."""
    return Series(tuple(_select(database, "WHERE job_id = ? ORDER BY attempt, seq", job_id)))


def drawable(found: Series, most: int = _MOST_DRAWN) -> Series:
    """Return the series thinned to the points that a page can show; each attempt has an equal share."""
    attempts: dict[int, list[Point]] = {}
    for point in found.points:
        attempts.setdefault(point.attempt, []).append(point)
    share = max(_LEAST_DRAWN, most // max(1, len(attempts)))
    return Series(tuple(point for some in attempts.values() for point in thinned(some, share)))


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """Return at most `most` points (250 at least) of an attempt; fewer points stay unchanged.

    The events are cut into stretches of equal count, whenever the events were stored. The first and last point of each
    kind stay. Of a stretch stay the least and the greatest values of watched figures, the first value that is not
    finite, and a point from the middle that represents all: with the means of all, and their count as weight.
    """
    share = most / MOST
    kept = list(points)
    while len(kept) > most and share > 0.001:  # with many extremes in every stretch, stretches become longer
        points, kept = kept, []
        for kind in KINDS:
            some = [point for point in points if point.kind == kind]
            if some:
                kept += _kept(kind, some, max(1, round(_BINS.get(kind, _MARK_BINS) * share)))
        share *= 0.8
    return sorted(kept, key=lambda point: point.seq)


Watch = Callable[[Point], Any]


def _kept(kind: str, points: Sequence[Point], bins: int) -> Iterator[Point]:
    """Yield the remaining points of a kind, in their final form."""
    watched = _watched(kind, points)
    ends = {points[0].seq, points[-1].seq}
    # The job's extremes of every figure are kept, and each stretch's extremes of a few watched figures.
    summits = {seq for watch in watched.values() for seq in _extremes(points, watch)}
    begin, width = points[0].seq, (points[-1].seq - points[0].seq) / bins or 1.0
    stretches: dict[int, list[Point]] = {}
    for point in points:
        stretches.setdefault(int((point.seq - begin) / width), []).append(point)
    closely = (
        list(watched.values())[:3] if kind == "eval" else [watched[name] for name in _STANDING_OUT if name in watched]
    )
    for stretch in stretches.values():
        standing = summits.union(*(_extremes(stretch, watch) for watch in closely))
        yield from (point for point in stretch if point.seq in ends)
        yield from _together([point for point in stretch if point.seq not in ends], standing)


def _watched(kind: str, points: Sequence[Point]) -> dict[str, Watch]:
    """Return by figure name the functions that read the figure from a point, to find the extremes of the kind."""

    def figures(point: Point) -> dict[str, Any]:
        return point.fields if kind == "step" else point.fields.get("metrics", {}) if kind == "eval" else {}

    names = dict.fromkeys(name for point in points for name in figures(point))
    return {name: lambda point, name=name: figures(point).get(name) for name in names}  # type: ignore[misc]


def _extremes(points: Sequence[Point], watch: Watch) -> set[int]:
    """Return the seq of the minimum, of the maximum, and of the first value that is not finite."""
    values = [(watch(point), point.seq) for point in points]
    numbers = [each for each in values if isinstance(each[0], float | int)]
    found = {min(numbers)[1], max(numbers)[1]} if numbers else set()
    return found | set([seq for value, seq in values if isinstance(value, str)][:1])


def _together(stretch: Sequence[Point], standing: set[int]) -> Iterator[Point]:
    """Yield the extremes of a stretch, and a point that represents the whole stretch."""
    rest = [point for point in stretch if point.seq not in standing]
    if len(rest) <= 1:
        yield from stretch
        return
    yield from (replace(point, weight=0) for point in stretch if point.seq in standing)
    weight = sum(point.weight for point in stretch)
    if weight:
        middle = sum(point.seq * point.weight for point in stretch) / weight
        carrier = min(rest, key=lambda point: abs(point.seq - middle))
        means = _means(stretch, weight) if carrier.kind == "step" else {}
        yield replace(carrier, fields=carrier.fields | means, weight=weight)


def _means(stretch: Sequence[Point], weight: int) -> dict[str, float]:
    """Return the means of a step's figures over the stretch's events."""
    found = {}
    for name in _MEANT:
        values = [(point.fields[name], point.weight) for point in stretch if name in point.fields]
        numbers = [(value, times) for value, times in values if times and isinstance(value, float | int)]
        if numbers:
            among = weight if name in _PARTS else sum(times for _, times in numbers)
            mean = sum(value * times for value, times in numbers) / among
            if math.isfinite(mean):
                found[name] = float(f"{mean:.7g}")
    return found


def _select(database: Database, rest: str, *values: Any) -> list[Point]:
    rows = database.execute(f"SELECT attempt, kind, time_s, step, fields, seq, weight FROM points {rest}", values)
    return [Point(row[0], row[1], row[2], row[3], json.loads(row[4]), row[5], row[6]) for row in rows]


def _point(attempt: int, event: dict[str, Any], time_s: float, seq: int) -> Point | None:
    kind = event["e"]
    if not isinstance(kind, str) or kind not in KINDS:
        return None
    step = sanitize.count(event.get("step"))
    if kind == "step":
        fields = _numbers(event, _MOST_FIELDS)
        return Point(attempt, kind, time_s, step, fields, seq) if fields or step is not None else None
    if kind in ("eval", "paused"):  # `metrics` and fields hold the same; a script may give either
        metrics = event.get("metrics")
        source = metrics if isinstance(metrics, dict) else event
        seconds = _numbers({"seconds": event.get("seconds")}, 1)
        numbers = _numbers({name: value for name, value in source.items() if name != "seconds"}, _MOST_METRICS)
        return Point(attempt, kind, time_s, step, {"metrics": numbers, **seconds}, seq)
    return Point(attempt, kind, time_s, step, _short(event), seq)


def _numbers(values: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the values that are numbers, with seven digits; numbers that are not finite as text."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        number = sanitize.value(value)
        if number is not None and name not in _SAID_ELSEWHERE and _NAME.fullmatch(name):
            found[name] = float(f"{number:.7g}") if isinstance(number, float) else number
        if len(found) == most:
            break
    return found


def _short(event: dict[str, Any]) -> dict[str, Any]:
    """Return a mark's fields; long texts are cut, and values too long to store are left out."""
    found: dict[str, Any] = {}
    for name, value in event.items():
        if name in ("e", "step") or not _NAME.fullmatch(name):
            continue
        if isinstance(value, str):
            found[name] = value[:_LONGEST_TEXT]
        elif value is not None and len(json.dumps(small := finite(value))) <= _LONGEST_VALUE:
            found[name] = small
        if len(found) == 2 * _MOST_FIELDS:
            break
    return found

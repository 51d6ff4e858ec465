"""The cost of a sweep by trial and rung, the share of the starts, and the money that pauses have saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import amount, counted, dollars

from ..metering import meter
from ..planning import search_spec
from ..planning.search_spec import unit_of
from ..store import sweeps
from ..store.sweeps import SegmentRecord
from ..text.units import as_usd, percent

if TYPE_CHECKING:
    from ..job import Attempt
    from ..store.database import Database
    from ..store.sweeps import SweepRecord

_NONE = SegmentRecord("", -1, 0, "", 0, None)  # before the first segment
MOST_ROWS = 20  # trials in the table, the most expensive first


@dataclass(frozen=True)
class SegmentCost:
    """A segment with its cost in micro-dollars, None if a price is unknown; `steps` are the steps that it trained.

    `start_s`: the seconds of `run_s` before and after the steps, 0 if no step was reported. `ended_s`: None while the
    segment runs.
    """

    segment: SegmentRecord
    micro: int | None
    steps: int
    starts: int
    start_s: float
    run_s: float
    ended_s: float | None


@dataclass(frozen=True)
class SweepCost:
    """The segments of a sweep with their costs; `limit_micro` is the envelope, `counted_micro` the cost in the ledger.

    `is_shared`: the trials share the machines of a single job, and the cost is divided by the seconds in slots;
    `idle_micro` is the cost of the slots' other time. `saved_steps` are the steps that paused trials have not trained.
    """

    sweep: SweepRecord
    segments: tuple[SegmentCost, ...]
    rungs: tuple[int, ...]
    counted_micro: int
    saved_steps: int
    paused: int
    is_shared: bool = False
    trials: Mapping[int, tuple[SegmentCost, ...]] = field(default_factory=dict)
    idle_micro: int = 0

    @property
    def spent_micro(self) -> int | None:
        """The metered cost of all segments and idle slots; None if a price is unknown."""
        segments = total(self.segments)
        return None if segments is None else segments + self.idle_micro

    @property
    def unit(self) -> str:
        """The unit of the rungs: steps, samples or epochs."""
        return unit_of(self.sweep.config)

    @property
    def starts_share(self) -> float | None:
        """The share of the paid time before and after the steps; None without a reported step, and if shared."""
        whole_s = sum(each.run_s for each in self.segments)
        start_s = sum(each.start_s for each in self.segments)
        return None if self.is_shared or not whole_s or not start_s else start_s / whole_s

    @property
    def saved_micro(self) -> int | None:
        """The estimated cost of the steps that paused trials have not trained, at the cost of the trained steps."""
        steps, spent = sum(each.steps for each in self.segments), total(self.segments)
        if spent is None or not steps:
            return None
        return round(spent * (1 - (self.starts_share or 0.0)) * self.saved_steps / steps)


def costs_of(database: Database, sweep: SweepRecord, now_s: float) -> SweepCost:
    """Return the cost of the sweep until `now_s`."""
    search, rows = search_spec.search_of(sweep.config), sweeps.segments(database, sweep.id)
    attempts = sweeps.attempts(database, sweep.id)
    paces = sweeps.paces(database, sweep.id)
    is_shared = any(each.job_id == sweep.id for each in rows)
    idle_micro = 0
    if is_shared:
        found, idle_micro = _shared(rows, attempts.get(sweep.id, []), search.rungs, now_s)
    else:
        befores = [last.attempt if last.trial == each.trial else 0 for last, each in pairwise([_NONE, *rows])]
        found = [
            _own(each, _between(attempts.get(each.job_id, ()), before, each.attempt), paces, search.rungs, now_s)
            for before, each in zip(befores, rows, strict=True)
        ]
    trials = defaultdict[int, list[SegmentCost]](list)
    for cost in found:
        trials[cost.segment.trial].append(cost)
    last, active = len(search.rungs) - 1, [each.trial for each in rows if each.state in ("due", "sent")]
    ends = [some[-1].segment for trial, some in trials.items() if trial not in active]
    paused = [each for each in ends if each.state == "done" and each.rung < last]
    saved_steps = sum(search.rungs[-1] - search.rungs[each.rung] for each in paused)
    counted_micro, _ = sweeps.spent_and_held(database, sweep.id)
    by_trial = {trial: tuple(some) for trial, some in trials.items()}
    return SweepCost(
        sweep, tuple(found), search.rungs, counted_micro, saved_steps, len(paused), is_shared, by_trial, idle_micro
    )  # fmt: skip


def lines(found: SweepCost) -> tuple[list[str], list[str]]:
    """Return the lines of the sum, and notes about rows that are left out and about estimates."""
    spent, limit_micro = dollars(found.spent_micro), found.sweep.limit_micro
    limit = "" if limit_micro is None else f"; {dollars(found.counted_micro)} of {dollars(limit_micro)} in the budget"
    shown = [f"spent       {spent}{limit}"]
    if found.starts_share is not None:
        count = counted(sum(each.starts for each in found.segments), "start")
        shown.append(f"starts      {count}, {percent(found.starts_share)} of the paid time")
    if found.paused and found.saved_micro is not None:
        words = f"{found.saved_steps:,} untrained {found.unit} of {counted(found.paused, 'paused trial')}"
        shown.append(
            f"saved       about {dollars(found.saved_micro)}: {words} at the price of the trained {found.unit}"
        )
    left = len(found.trials) - MOST_ROWS
    notes = [f"{counted(left, 'cheaper trial')} left out: --csv has all trials"] if left > 0 else []
    if found.is_shared:
        share = found.idle_micro / found.spent_micro if found.spent_micro else 0.0
        shown.insert(1, f"idle        {dollars(found.idle_micro)}, {percent(share)}: the job's start, and free slots")
    return shown, notes


def cells(found: SweepCost, *, is_whole: bool) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table by trial and rung, the most expensive trial first; a row of sums at the end.

    Without `is_whole`, at most MOST_ROWS trials.
    """
    head = ["TRIAL", *(f"TO {found.unit.upper().removesuffix('S')} {step}" for step in found.rungs), "USD", "STATE"]
    ranked = sorted(found.trials, key=lambda trial: (-(total(found.trials[trial]) or 0), trial))
    rows = [
        [
            str(trial),
            *_by_rung(found.trials[trial], found.rungs),
            _text(total(found.trials[trial])),
            state_of(found, trial),
        ]
        for trial in (ranked if is_whole else ranked[:MOST_ROWS])
    ]
    return head, [*rows, ["all", *_by_rung(found.segments, found.rungs), _text(found.spent_micro), ""]]


def as_json(found: SweepCost) -> dict[str, Any]:
    """Return the cost with stable names: money in dollars."""
    limit_micro = found.sweep.limit_micro
    at = [[each for each in found.segments if each.segment.rung == rung] for rung in range(len(found.rungs))]
    return {
        "sweep": found.sweep.id,
        "state": found.sweep.state,
        "spend_usd": as_usd(found.spent_micro),
        "counted_usd": as_usd(found.counted_micro),
        "limit_usd": as_usd(limit_micro),
        "starts": sum(each.starts for each in found.segments),
        "starts_share": found.starts_share,
        "saved_steps": found.saved_steps,
        "saved_usd_estimate": as_usd(found.saved_micro),
        "is_shared": found.is_shared,
        "idle_usd": as_usd(found.idle_micro),
        "rungs": [
            {"rung": rung + 1, "step": found.rungs[rung], "segments": len(some), "usd": as_usd(total(some))}
            for rung, some in enumerate(at)
        ],
        "trials": [
            {
                "trial": trial,
                "job": some[0].segment.job_id,
                "usd": as_usd(total(some)),
                "rungs": [{"rung": each.segment.rung + 1, "usd": as_usd(each.micro)} for each in some],
            }
            for trial, some in sorted(found.trials.items())
        ],
    }


def _between(attempts: Sequence[Attempt], before: int, last: int) -> list[Attempt]:
    """Return the attempts after the segment before, until the segment's last attempt."""
    return [each for each in attempts if before < each.number <= last and each.phase != "never_sent"]


def _own(
    segment: SegmentRecord,
    attempts: Sequence[Attempt],
    paces: Mapping[tuple[str, int], tuple[float, int]],
    rungs: Sequence[int],
    now_s: float,
) -> SegmentCost:
    """Return the cost of a segment by its attempts of the trial's job."""
    legs = meter.legs_of(attempts)
    run_s = sum(leg.seconds(now_s) for leg in legs)
    reported = [paces[key] for each in attempts if (key := (each.job_id, each.number)) in paces]
    trained_s, steps = sum(seconds for seconds, _ in reported), sum(count for _, count in reported)
    if segment.state == "done" and steps:  # the first report comes after some steps
        trained_s, steps = trained_s / steps * _steps(segment, rungs), _steps(segment, rungs)
    start_s = max(0.0, run_s - trained_s) if reported else 0.0
    ended_s = max((each.state.ended_s or 0.0 for each in attempts), default=0.0) or None
    return SegmentCost(segment, meter.spent_micro(legs, now_s), steps, len(attempts), start_s, run_s, ended_s)


def _shared(
    rows: Sequence[SegmentRecord], attempts: Sequence[Attempt], rungs: Sequence[int], now_s: float
) -> tuple[list[SegmentCost], int]:
    """Return the costs of the segments of a packed sweep, by their seconds in slots, and the cost of idle slots."""
    legs = meter.legs_of(attempts)
    spent, used_s = meter.spent_micro(legs, now_s), sum(each.seconds or 0.0 for each in rows)
    slots_s = sum(
        max(1, attempt.plan.slots * attempt.plan.instances) * leg.seconds(now_s)
        for attempt in attempts
        for leg in meter.legs_of([attempt])
    )
    rate = None if spent is None else spent / max(1.0, slots_s, used_s)
    found = []
    for row in rows:
        seconds = row.seconds or 0.0
        micro = None if rate is None else round(rate * seconds)
        found.append(SegmentCost(row, micro, _steps(row, rungs), 0, 0.0, seconds, row.ended_s))
    return found, max(0, (spent or 0) - (total(found) or 0))


def _steps(segment: SegmentRecord, rungs: Sequence[int]) -> int:
    before = rungs[segment.rung - 1] if segment.rung else 0
    return rungs[segment.rung] - before if segment.state in sweeps.ENDED else 0


def _by_rung(some: Sequence[SegmentCost], rungs: Sequence[int]) -> list[str]:
    at = [[each for each in some if each.segment.rung == rung] for rung in range(len(rungs))]
    return [_text(total(each)) if each else "-" for each in at]


def state_of(found: SweepCost, trial: int) -> str:
    """Return the trial's state in a word."""
    last = found.trials[trial][-1].segment
    if last.state in ("due", "sent"):
        return "running"
    if last.state != "done":
        return last.state
    return "finished" if last.rung == len(found.rungs) - 1 else "paused"


def total(some: Sequence[SegmentCost]) -> int | None:
    """Return the cost of the segments; None if a price is unknown."""
    costs = [each.micro for each in some]
    return None if None in costs else sum(each or 0 for each in costs)


def _text(micro: int | None) -> str:
    return "?" if micro is None else amount(micro)

"""The cost of a sweep by trial and rung, by the seconds in slots, and the money that pauses have saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import cell, counted, dollars, most

from ..metering import meter
from ..money import bill
from ..planning import search_spec
from ..planning.search_spec import unit_of
from ..store import sweeps
from ..store.sweeps import SegmentRecord
from ..text.units import as_usd, percent

if TYPE_CHECKING:
    from ..job import Job
    from ..jobs.view import JobView
    from ..metering.money import Money
    from ..store.database import Database

MOST_ROWS = 20  # trials in the table, the most expensive first


@dataclass(frozen=True)
class SegmentCost:
    """A segment with its cost in micro-dollars, None if a price is unknown; `steps` are the steps that it trained."""

    segment: SegmentRecord
    micro: int | None
    steps: int


@dataclass(frozen=True)
class SweepCost:
    """The segments of a sweep with their costs: those of its job, divided by the seconds in slots.

    `idle_micro` is the cost of the slots' other time, `money` is that of the job.
    `saved_steps` are the steps that paused trials have not trained.
    """

    job: Job
    segments: tuple[SegmentCost, ...]
    rungs: tuple[int, ...]
    saved_steps: int
    paused: int
    money: Money
    idle_micro: int
    trials: Mapping[int, tuple[SegmentCost, ...]]

    @property
    def unit(self) -> str:
        """The unit of the rungs: steps, samples, epochs or scripts."""
        return unit_of(self.job.config)

    @property
    def saved_micro(self) -> int | None:
        """The estimated cost of the steps that paused trials have not trained, at the cost of the trained steps."""
        steps, spent = sum(each.steps for each in self.segments), total(self.segments)
        return None if spent is None or not steps else round(spent * self.saved_steps / steps)


def costs_of(database: Database, view: JobView) -> SweepCost:
    """Return the cost of the sweep at the time of the view."""
    job, search = view.job, search_spec.search_of(view.job.config)
    found = _shares(sweeps.segments(database, job.id), view, search.rungs)
    # The segments are in the order of their trials.
    by_trial = {trial: tuple(some) for trial, some in groupby(found, lambda cost: cost.segment.trial)}
    last = len(search.rungs) - 1
    ends = [some[-1].segment for some in by_trial.values()]
    paused = [each for each in ends if each.state == "done" and each.rung < last]
    saved_steps = sum(search.rungs[-1] - search.rungs[each.rung] for each in paused)
    idle_micro = max(0, (view.money.spent_micro or 0) - (total(found) or 0))
    return SweepCost(job, tuple(found), search.rungs, saved_steps, len(paused), view.money, idle_micro, by_trial)


def lines(found: SweepCost) -> tuple[list[str], list[str]]:
    """Return the lines of the sum, and notes about rows that are left out and about estimates."""
    share = found.idle_micro / found.money.spent_micro if found.money.spent_micro else 0.0
    shown = [f"idle        {most(found.idle_micro)}, {percent(share)}: the job's start, and free slots"]
    if found.paused and found.saved_micro is not None:
        words = f"{found.saved_steps:,} untrained {found.unit} of {counted(found.paused, 'paused trial')}"
        words += f" at the price of the trained {found.unit}"
        shown.append(f"saved       about {dollars(found.saved_micro)}: {words}")
    left = len(found.trials) - MOST_ROWS
    return shown, [f"{counted(left, 'cheaper trial')} left out: --csv has all trials"] if left > 0 else []


def cells(found: SweepCost, *, is_whole: bool) -> tuple[list[str], list[list[str]]]:
    """Return head and rows by trial and rung, the most expensive first (all if `is_whole`), and a row of sums."""
    unit = found.unit.upper().removesuffix("S")
    rungs = ["TO ITS END"] if found.unit == "scripts" else [f"TO {unit} {step}" for step in found.rungs]
    head = ["TRIAL", *rungs, "USD", "STATE"]
    ranked = sorted(found.trials.items(), key=lambda each: (-(total(each[1]) or 0), each[0]))
    rows = [
        [str(trial), *_by_rung(some, found.rungs), cell(total(some)), state_of(found, trial)]
        for trial, some in (ranked if is_whole else ranked[:MOST_ROWS])
    ]
    return head, [*rows, ["all", *_by_rung(found.segments, found.rungs), cell(found.money.spent_micro), ""]]


def as_json(found: SweepCost) -> dict[str, Any]:
    """Return the cost with stable names: money in dollars."""
    at = [[each for each in found.segments if each.segment.rung == rung] for rung in range(len(found.rungs))]
    return {
        "saved_steps": found.saved_steps,
        "saved_usd_estimate": as_usd(found.saved_micro),
        "idle_usd": as_usd(found.idle_micro),
        "rungs": [
            {"rung": rung + 1, "step": found.rungs[rung], "segments": len(some), "usd": as_usd(total(some))}
            for rung, some in enumerate(at)
        ],
        "trials": [
            {
                "trial": trial,
                "usd": as_usd(total(some)),
                "rungs": [{"rung": each.segment.rung + 1, "usd": as_usd(each.micro)} for each in some],
            }
            for trial, some in sorted(found.trials.items())
        ],
    }


def bill_json(database: Database, view: JobView) -> dict[str, Any]:
    """Return the bill of a job for scripts, of a sweep with the cost of its trials in `sweep`."""
    job, tries = view.job, [asdict(each) for each in view.tries]
    who = {"job": job.id, "name": job.name, "backend": job.backend, "state": job.attempt.state.state, "tries": tries}
    trials = {"sweep": as_json(costs_of(database, view))} if job.config.get("sweep") else {}
    return who | bill.as_json(bill.bill(view.money, view.runs, view.now_s)) | trials


def _shares(rows: Sequence[SegmentRecord], view: JobView, rungs: Sequence[int]) -> list[SegmentCost]:
    """Return the costs of the segments by their seconds in slots, rounded down: the rest is idle."""
    spent, used_s = view.money.spent_micro, sum(each.seconds for each in rows)
    spans = [(attempt.plan, leg.seconds(view.now_s)) for attempt in view.attempts for leg in meter.legs_of([attempt])]
    slots_s = sum(max(1, plan.slots * plan.instances / plan.slot_instances) * seconds for plan, seconds in spans)
    rate = None if spent is None else spent / max(1.0, slots_s, used_s)
    micros = [None if rate is None else int(rate * row.seconds) for row in rows]
    return [SegmentCost(row, micro, _steps(row, rungs)) for row, micro in zip(rows, micros, strict=True)]


def _steps(segment: SegmentRecord, rungs: Sequence[int]) -> int:
    before = rungs[segment.rung - 1] if segment.rung else 0
    return rungs[segment.rung] - before if segment.state in sweeps.ENDED else 0


def _by_rung(some: Sequence[SegmentCost], rungs: Sequence[int]) -> list[str]:
    at = [[each for each in some if each.segment.rung == rung] for rung in range(len(rungs))]
    return [cell(total(each)) if each else "-" for each in at]


def state_of(found: SweepCost, trial: int) -> str:
    """Return the trial's state in a word."""
    last = found.trials[trial][-1].segment
    if last.state != "done":
        return "saved" if last.state == "running" and not found.job.active else last.state
    return "finished" if last.rung == len(found.rungs) - 1 else "paused"


def total(some: Sequence[SegmentCost]) -> int | None:
    """Return the cost of the segments; None if a price is unknown."""
    return meter.sum_micro(each.micro for each in some)

"""A platform that only bills: no job of it runs, but each has a course, a report for the launcher, and a bill.

The bill is computed here from the course alone, by the rules that the platform's terms state in words. Reports may be
late, may lack times, or may be the platform's own count. `event` is called before each effect; it may raise any error,
or do something else in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import events
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import CapacityError, ConfigError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.plan import Plan

ENDS = (("succeeded", None), ("failed", "error"), ("failed", "preempted"), ("failed", "node_failure"))


@dataclass
class BilledJob:
    """One attempt on the platform. `runs`: its spans of time on machines; `over_s`: when it has ended."""

    home: Path
    job_id: str
    number: int
    asked: dict[str, Any]
    micro_h: int
    """What an instance costs in an hour, as billed."""
    runs: list[tuple[float, float]]
    over_s: float
    end: tuple[str, str | None]
    told_s: float | None = None
    """The seconds that the report of the end gives, without the idle time afterwards."""

    def lengths(self, at_s: float) -> list[float]:
        """Return how long each run has taken until then."""
        return [min(end, at_s) - begin for begin, end in self.runs if min(end, at_s) > begin]


class Platform:
    """The stand-in for a backend; terms, price and the form of reports are drawn."""

    def __init__(self, rnd: random.Random, clock: Callable[[], float], event: Callable[[str], None]) -> None:
        self.rnd, self.clock, self.event = rnd, clock, event
        self.jobs, self.refused = dict[str, BilledJob](), set[str]()
        starts = rnd.choice([1, 1, 1, 4])
        self.stop_s, self.idle_s = rnd.choice([0, 20, 60, 300]), 0 if starts > 1 else rnd.choice([0, 0, 120])
        units = {"unit_s": rnd.choice([1, 1, 30, 60]), "minimum_bill_s": rnd.choice([0, 0, 60])}
        limits = {"tail_s": self.stop_s + self.idle_s, "lead_s": rnd.choice([0, 300]), "warns": rnd.random() < 0.3}
        self.terms = backends.Terms(starts=starts, **units, **limits)  # type: ignore[arg-type]
        self.form = "count" if starts > 1 else rnd.choice(["times", "count", "no end"])  # of a report
        self.late_s = rnd.choice([0, 0, 30, 7200])
        self.list_micro = rnd.choice([100_000, 3_060_000, 98_000_000, rnd.randrange(1000, 10**8)])
        self.uncertainty = rnd.choice([1.0, 1.05, 1.155, 1.4333])

    def worst_micro(self, seconds: float, instances: int) -> Fraction:
        """Return what seconds of a single run cost at the highest possible price."""
        rate = instances * self.list_micro * Fraction(str(self.uncertainty))
        return rate * self._billed_s([seconds]) / 3600

    def bill_micro(self, job: BilledJob) -> Fraction:
        """Return the bill until now."""
        return Fraction(job.asked["instances"] * job.micro_h * self._billed_s(job.lengths(self.clock())), 3600)

    # -- the calls of the launcher

    def capacity(self, config: Any) -> backends.Capacity:
        """Return the price, and no GPUs."""
        usd = None if "unpriced" in config.tags else self.list_micro / 1e6
        return backends.Capacity(0, usd, "the test's price", self.terms, self.uncertainty)

    def request(self, plan: Plan, config: Any, job_id: str, attempt: int, sha256: str) -> backends.Request:
        """Return a request with the limit, and with what the user has asked for."""
        budget = None if config.budget is None or config.budget.on_limit == "alert" else config.budget.limit
        asked = {"instances": plan.instances, "cap_s": plan.cap_s, "budget": budget, "sweep": config.sweep is not None}
        asked |= {"project": config.project and config.project.name, "unpriced": "unpriced" in config.tags}
        return backends.Request(f"{job_id}-{attempt}", {"job": [job_id, attempt], "asked": asked}, "")

    def check(self, request: backends.Request) -> list[Any]:
        """Find no fault."""
        return []

    def send(self, request: backends.Request, shipment: backends.Shipment) -> dict[str, Any]:
        """Create the job; the request or the answer may be lost."""
        shipment.sending.prepares()
        self.event("upload")
        shipment.sending.creates()
        self.event("create")
        if (chance := self.rnd.random()) < 0.1:
            raise CapacityError("no machines") if chance < 0.06 else ConfigError("refused")
        if request.name in self.refused:
            raise ConfigError("a search for the job came before its request")
        assert request.name not in self.jobs, "sent twice"
        self.jobs[request.name] = self._job(shipment.home, *request.body["job"], request.body["asked"])
        self.event("created")
        return {"name": request.name}

    def find(self, request: backends.Request, home: Any) -> dict[str, Any] | None:
        """Return the job's handle, or None and never create the job."""
        self.event("find")
        if request.name in self.jobs:
            return {"name": request.name}
        self.refused.add(request.name)
        return None

    def state(self, ref: dict[str, Any]) -> State:
        """Return the state as it was some time ago."""
        self.event("state")
        job, seen_s = self.jobs[ref["name"]], self.clock() - self.late_s
        lengths, is_over = job.lengths(seen_s), seen_s >= job.over_s
        if not lengths:
            return State("failed", "node_failure", True, ended_s=job.over_s) if is_over else State("pending")
        count_s = float(lengths[0] if self.terms.starts == 1 else self._billed_s(lengths))
        known = {"started_s": job.runs[0][0], "billed_s": count_s if self.form == "count" else None}
        if not is_over:
            return State("running" if any(begin <= seen_s < end for begin, end in job.runs) else "pending", **known)
        job.told_s = count_s  # a platform with several starts reports its count, so the times are of a single run
        known |= {"ended_s": None if self.form == "no end" else job.runs[-1][1], "idle_s": float(self.idle_s) or None}
        return State(*job.end, job.end[0] != "succeeded", **known)  # type: ignore[arg-type]

    def logs(self, ref: dict[str, Any], cursor: Any, ranks: Any = None, *, now: bool = False) -> backends.LogPage:
        """Return the reports of a sweep's trials, once."""
        job, begin, lines = self.jobs[ref["name"]], (cursor or {}).get("at", 0), list[backends.LogLine]()
        if job.asked["sweep"] and not begin and job.lengths(self.clock()):
            for trial, state in ((0, "running"), (0, "paused"), (job.number, "running"), (job.number, "paused")):
                fields = {"trial": trial, "rung": 0, "state": state, "value": 1.0, "step": 90, "seconds": 10.0}
                lines.append(backends.LogLine(events.format_line("trial", "a trial", fields), 0, 0, self.clock()))
        return backends.LogPage(lines, {"at": begin + len(lines)})

    def pace(self, ref: dict[str, Any]) -> backends.Pace:
        """Return no pause."""
        return backends.Pace()

    def stop(self, ref: dict[str, Any], *, now: bool) -> None:
        """End the job at once, or after some time for a save."""
        self.event("stop")
        job, at_s = self.jobs[ref["name"]], self.clock()
        if at_s < job.over_s:
            end_s = _whole(at_s if now else at_s + self.rnd.uniform(0, 120))
            job.runs = [(begin, min(end, end_s)) for begin, end in job.runs if begin <= at_s]
            job.over_s, job.end = max([at_s, *(end for _, end in job.runs)]), ("stopped", "user")

    # -- the platform's own rules

    def _job(self, home: Path, job_id: str, number: int, asked: dict[str, Any]) -> BilledJob:
        rnd = self.rnd
        over_s, runs, end = _whole(self.clock() + rnd.uniform(1, 900)), [], ENDS[-1]
        for _ in range(0 if rnd.random() < 0.05 else rnd.randint(1, self.terms.starts)):
            begin_s = over_s if not runs else _whole(over_s + rnd.uniform(60, 600))
            most_s = asked["cap_s"] + rnd.choice([0.0, 1.0, rnd.random()]) * self.stop_s
            is_whole = rnd.random() < 0.4
            over_s = begin_s + _whole(most_s if is_whole else rnd.uniform(1, asked["cap_s"]))
            end = ("stopped", "budget") if is_whole else rnd.choice(ENDS)
            runs.append((begin_s, over_s))
        least, most = self.list_micro, int(self.list_micro * self.uncertainty)
        micro_h = rnd.choice([least, most, rnd.randint(least, most)])
        return BilledJob(home, job_id, number, asked, micro_h, runs, over_s, end)

    def _billed_s(self, lengths: list[float]) -> int:
        """Return the billed seconds of an instance: each start by itself, the idle time with the last."""
        unit, idle = self.terms.unit_s, [0] * (len(lengths) - 1) + [self.idle_s]
        whole = (-(-Fraction(length + more) // unit) * unit for length, more in zip(lengths, idle, strict=False))
        return sum(max(self.terms.minimum_bill_s, each) for each in whole)


def _whole(seconds: float) -> float:
    """Return a time that a float holds exactly, also in sums."""
    return round(seconds * 64) / 64

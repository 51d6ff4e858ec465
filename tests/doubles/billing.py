"""A platform that only bills: no job of it runs, but each has a course, a report for the launcher, and a bill.

The bill is computed here from the course alone, by the rules that the platform's terms state in words. Reports may be
late, may lack times, or may be the platform's own count. `event` is called before each effect; it may raise any error,
or do something else in between.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import events
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import CapacityError, ConfigError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.plan import Plan

FORMS = ("times", "count", "no end")  # of a report: start and end; the platform's own seconds; no time of the end
ENDS = (("succeeded", None), ("failed", "error"), ("failed", "preempted"), ("failed", "node_failure"))


@dataclass
class BilledJob:
    """One attempt on the platform. `runs`: its spans of time on machines; `over_s`: when it has ended."""

    name: str
    home: Path
    job_id: str
    number: int
    instances: int
    micro_h: int
    """What an instance costs in an hour, as billed."""
    request: dict[str, Any]
    runs: list[tuple[float, float]]
    over_s: float
    end: tuple[str, str | None]
    billing: Callable[[list[float]], int] = field(repr=False)
    told_s: float | None = None
    """The seconds that the report of the end gives, without the idle time afterwards."""

    def lengths(self, at_s: float) -> list[float]:
        """Return how long each run has taken until then."""
        return [min(end, at_s) - begin for begin, end in self.runs if min(end, at_s) > begin]

    def bill_micro(self, at_s: float) -> Fraction:
        """Return the bill until then."""
        return Fraction(self.instances * self.micro_h * self.billing(self.lengths(at_s)), 3600)

    def share(self, from_s: float, to_s: float, at_s: float) -> float:
        """Return the share of the bill that falls between two times, by the time from the first start to the end."""
        if not self.lengths(at_s):
            return 0.0
        begin, end = self.runs[0][0], min(at_s, self.runs[-1][1])
        return max(0.0, min(end, to_s) - max(begin, from_s)) / (end - begin)


class Platform:
    """The stand-in for a backend; terms, price and the form of reports are drawn."""

    def __init__(self, rnd: random.Random, clock: Callable[[], float], event: Callable[[str], None]) -> None:
        self.rnd, self.clock, self.event = rnd, clock, event
        self.jobs: dict[str, BilledJob] = {}
        self.refused: set[str] = set()  # names that `find` has not found: a late request cannot take them
        starts = rnd.choice([1, 1, 1, 4])
        self.stop_s, self.idle_s = rnd.choice([0, 20, 60, 300]), 0 if starts > 1 else rnd.choice([0, 0, 120])
        self.terms = backends.Terms(
            tail_s=self.stop_s + self.idle_s,
            unit_s=rnd.choice([1, 1, 30, 60]),
            starts=starts,
            minimum_bill_s=rnd.choice([0, 0, 60]),
            lead_s=rnd.choice([0, 300]),
            warns=rnd.random() < 0.3,
        )
        self.form = "count" if starts > 1 else rnd.choice(FORMS)
        self.late_s = rnd.choice([0, 0, 30, 7200])
        self.list_micro = rnd.choice([100_000, 3_060_000, 98_000_000, rnd.randrange(1000, 10**8)])
        self.uncertainty = rnd.choice([1.0, 1.05, 1.155, 1.4333])

    def worst_micro(self, seconds: float, instances: int) -> Fraction:
        """Return what seconds of a single run cost at the highest possible price."""
        rate = instances * self.list_micro * Fraction(str(self.uncertainty))
        return rate * self._billed_s([seconds]) / 3600

    # -- the calls of the launcher

    def capacity(self, config: Any) -> backends.Capacity:
        """Return the price, and no GPUs."""
        usd = None if "unpriced" in config.tags else self.list_micro / 1e6
        return backends.Capacity(0, usd, "the test's price", self.terms, self.uncertainty)

    def request(self, plan: Plan, config: Any, job_id: str, attempt: int, sha256: str) -> backends.Request:
        """Return a request with the limit, and with what the user has asked for."""
        budget = None if config.budget is None or config.budget.on_limit == "alert" else config.budget.limit
        body = {"job": job_id, "number": attempt, "cap_s": plan.cap_s, "instances": plan.instances}
        project, is_unpriced = config.project and config.project.name, "unpriced" in config.tags
        asked = {"budget": budget, "project": project, "sweep": config.sweep is not None, "unpriced": is_unpriced}
        return backends.Request(f"{job_id}-{attempt}", {**body, **asked}, "")

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
        self.jobs[request.name] = self._job(request, shipment.home)
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
        count_s = float(self._count_s(lengths)) if self.form == "count" else None
        begun_s = job.runs[0][0]
        if not is_over:
            runs = any(begin <= seen_s < end for begin, end in job.runs)
            return State("running" if runs else "pending", started_s=begun_s, billed_s=count_s)
        end_s = job.runs[-1][1]
        job.told_s = end_s - begun_s if count_s is None else count_s
        state, reason = job.end
        ended_s = None if self.form == "no end" else end_s
        common = {"started_s": begun_s, "ended_s": ended_s, "billed_s": count_s, "idle_s": float(self.idle_s) or None}
        return State(state, reason, state != "succeeded", **common)  # type: ignore[arg-type]

    def logs(self, ref: dict[str, Any], cursor: Any, ranks: Any = None, *, now: bool = False) -> backends.LogPage:
        """Return the reports of a sweep's trials, once."""
        job, begin = self.jobs[ref["name"]], (cursor or {}).get("at", 0)
        texts = []
        if job.request["sweep"] and not begin and job.lengths(self.clock()):
            for trial, state in itertools.product((0, job.number), ("running", "paused")):
                fields = {"trial": trial, "rung": 0, "state": state, "value": 1.0, "step": 90, "seconds": 10.0}
                texts.append(events.format_line("trial", "a trial", fields))
        lines = [backends.LogLine(text, 0, 0, self.clock()) for text in texts]
        return backends.LogPage(lines, {"at": begin + len(lines)})

    def pace(self, ref: dict[str, Any]) -> backends.Pace:
        """Return no pause."""
        return backends.Pace()

    def stop(self, ref: dict[str, Any], *, now: bool) -> None:
        """End the job at once, or after some time for a save."""
        self.event("stop")
        job, at_s = self.jobs[ref["name"]], self.clock()
        if at_s >= job.over_s:
            return
        end_s = _whole(at_s if now else at_s + self.rnd.uniform(0, 120))
        job.runs = [(begin, min(end, end_s)) for begin, end in job.runs if begin <= at_s]
        job.over_s = max([at_s, *(end for _, end in job.runs)])
        job.end = ("stopped", "user")

    # -- the platform's own rules

    def _job(self, request: backends.Request, home: Path) -> BilledJob:
        body, rnd = request.body, self.rnd
        at_s, runs, end = _whole(self.clock() + rnd.uniform(1, 900)), [], ("failed", "node_failure")
        for _ in range(0 if rnd.random() < 0.05 else rnd.randint(1, self.terms.starts)):
            is_whole = rnd.random() < 0.4
            seconds = body["cap_s"] + rnd.choice([0.0, 1.0, rnd.random()]) * self.stop_s
            seconds = _whole(seconds if is_whole else rnd.uniform(1, body["cap_s"]))
            runs.append((at_s, at_s + seconds))
            at_s = _whole(at_s + seconds + rnd.uniform(60, 600))
            end = ("stopped", "budget") if is_whole else rnd.choice(ENDS)
        micro_h = rnd.randint(self.list_micro, int(self.list_micro * self.uncertainty))
        micro_h = rnd.choice([self.list_micro, int(self.list_micro * self.uncertainty), micro_h])
        over_s = runs[-1][1] if runs else at_s
        who = (request.name, home, body["job"], body["number"], body["instances"])
        return BilledJob(*who, micro_h, body, runs, over_s, end, self._billed_s)

    def _billed_s(self, lengths: list[float]) -> int:
        """Return the billed seconds of an instance: each start by itself, the idle time with the last."""
        if not lengths:
            return 0
        return sum(self._units(length) for length in lengths[:-1]) + self._units(lengths[-1] + self.idle_s)

    def _count_s(self, lengths: list[float]) -> float:
        """Return the seconds that the platform reports: of a single start, before any rounding."""
        return lengths[0] if self.terms.starts == 1 else sum(map(self._units, lengths))

    def _units(self, seconds: float) -> int:
        unit = self.terms.unit_s
        return max(self.terms.minimum_bill_s, -(-Fraction(seconds) // unit) * unit)


def _whole(seconds: float) -> float:
    """Return a time that a float holds exactly, also in sums."""
    return round(seconds * 64) / 64

"""A platform whose machines are scarce, by a table: place, type and spot -> the answers of its tries, in order.

It counts live jobs, and bills by its own course. It is as strict as the facts: a second live job, a name that is taken,
and a create after the end of the search are errors of the test. Each call may be the last of a process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import CapacityError, ConfigError, UnreachableError
from cloudtrain.launcher.job import State, no_machines
from cloudtrain.launcher.plan import Plan

# refused: quota, stock; accepted: failed, pending (until its stop), late (begins at its stop), taken (spot), runs
ANSWERS = ("quota", "stock", "failed", "pending", "late", "taken", "lost before", "lost after", "runs", "broken")
TERMS = backends.Terms(lead_s=300)
Place = tuple[str, str, bool]


@dataclass
class ScarceJob:
    """A job on the platform. `runs`: from, to; `over_s`: when it ends if nobody stops it, None if never."""

    name: str
    place: Place
    answer: str
    micro_h: int
    cap_s: int
    over_s: float | None
    runs: tuple[float, float] | None = None
    stopped_s: float | None = None

    def is_live(self, now_s: float) -> bool:
        """Return whether the platform may still run the job."""
        return self.over_s is None or now_s < self.over_s

    def bill_micro(self, now_s: float) -> float:
        """Return the bill until now."""
        begin, end = self.runs or (now_s, now_s)
        return self.micro_h * max(0.0, min(end, now_s) - begin) / 3600


@dataclass
class ScarcePlatform:
    """The backend's methods. `event` is called before each effect, and may end the process."""

    rnd: random.Random
    clock: Callable[[], float]
    event: Callable[[str], None]
    table: dict[Place, list[str]] = field(default_factory=dict)
    prices: dict[Place, int] = field(default_factory=dict)
    jobs: dict[tuple[str, str], ScarceJob] = field(default_factory=dict)
    """By region and name: a region knows no names of another."""
    tries: list[tuple[float, Place, str]] = field(default_factory=list)
    refused: set[tuple[str, str]] = field(default_factory=set)

    def live(self) -> list[ScarceJob]:
        """Return the jobs that have not ended."""
        return [job for job in self.jobs.values() if job.is_live(self.clock())]

    def bill_micro(self) -> float:
        """Return the sum of all bills."""
        return sum(job.bill_micro(self.clock()) for job in self.jobs.values())

    def price_region(self, config: Any) -> str | None:
        """Return the config's region."""
        return str(config.sagemaker.region)

    def quotes(self, config: Any, region: str, types: tuple[str, ...]) -> list[Any]:
        """Return no quote."""
        return []

    def capacity(self, config: Any) -> backends.Capacity:
        """Return the price of the place, and no GPUs."""
        place = config.sagemaker.region, config.resources.instance_type, config.resources.spot
        return backends.Capacity(0, self.prices[place] / 1e6, "the test's price", machine=place[1], terms=TERMS)

    def request(self, plan: Plan, config: Any, job_id: str, attempt: int, sha256: str) -> backends.Request:
        """Return a request with the place and the limit."""
        place = [config.sagemaker.region, config.resources.instance_type, config.resources.spot]
        return backends.Request(f"{job_id}-{attempt}", {"place": place, "cap_s": plan.cap_s}, "")

    def check(self, request: backends.Request) -> list[Any]:
        """Find no fault."""
        return []

    def send(self, request: backends.Request, shipment: backends.Shipment) -> dict[str, Any]:
        """Create the job, as the table says."""
        shipment.sending.prepares()
        self.event("upload")
        region, kind, spot = request.body["place"]
        place, key = (region, kind, spot), (region, request.name)
        answers = self.table[place]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        self.tries.append((self.clock(), place, answer))
        shipment.sending.creates()
        self.event("create")
        if answer in ("quota", "stock"):
            of = f" of {kind.split(',')[0]}" if "," in kind else ""  # a list is refused for one type
            raise CapacityError(f"the quota{of} is used up" if answer == "quota" else "no machines of this type")
        if answer == "broken":
            raise ConfigError("no such image")
        if answer == "lost before":
            raise UnreachableError("no answer")
        assert not self.live(), ("two jobs at once", key, self.live())
        assert key not in self.jobs, ("sent twice", key)
        assert not any(job.answer == "runs" and job.runs for job in self.jobs.values()), ("sent after a run", key)
        if key in self.refused:
            raise ConfigError("a search for the job came before its request")
        self.jobs[key] = self._job(request.name, place, "runs" if answer == "lost after" else answer, request.body)
        self.event("created")
        if answer == "lost after":
            raise UnreachableError("no answer")
        return {"region": region, "name": request.name}

    def find(self, request: backends.Request, home: Any) -> dict[str, Any] | None:
        """Return the job's handle; the search is made in the region of the request."""
        self.event("find")
        region = request.body["place"][0]
        return {"region": region, "name": request.name} if (region, request.name) in self.jobs else None

    def state(self, ref: dict[str, Any]) -> State:
        """Return the state."""
        self.event("state")
        job, now_s = self.jobs[ref["region"], ref["name"]], self.clock()
        has_begun = job.runs is not None and job.runs[0] <= now_s
        started_s = job.runs[0] if job.runs is not None and has_begun else None
        if job.is_live(now_s):
            return State("running" if has_begun else "pending", started_s=started_s)
        if job.stopped_s is not None:
            return State("stopped", "user", started_s=started_s, ended_s=job.over_s)
        if job.answer == "failed":
            return no_machines("unable to provision", ended_s=job.over_s)
        end = ("failed", "preempted") if job.answer == "taken" else ("succeeded", None)
        return State(*end, started_s=started_s, ended_s=job.over_s)  # type: ignore[arg-type]

    def logs(self, ref: dict[str, Any], cursor: Any, ranks: Any = None, *, now: bool = False) -> backends.LogPage:
        """Return no line."""
        return backends.LogPage([], {})

    def pace(self, ref: dict[str, Any]) -> backends.Pace:
        """Return no pause."""
        return backends.Pace()

    def stop(self, ref: dict[str, Any], *, now: bool) -> None:
        """End the job after some time; a late job begins before."""
        self.event("stop")
        job, now_s = self.jobs[ref["region"], ref["name"]], self.clock()
        if not job.is_live(now_s) or job.stopped_s is not None:
            return
        job.stopped_s, job.over_s = now_s, now_s + self.rnd.uniform(0, 120)
        if job.runs is not None:
            job.runs = (job.runs[0], min(job.runs[1], job.over_s)) if job.runs[0] <= now_s else None
        elif job.answer == "late":
            job.runs = (now_s + 1, now_s + 1 + self.rnd.uniform(0, TERMS.lead_s))
            job.over_s = job.runs[1]

    def _job(self, name: str, place: Place, answer: str, body: dict[str, Any]) -> ScarceJob:
        now_s, cap_s = self.clock(), body["cap_s"]
        begin_s = now_s + self.rnd.uniform(1, 120)
        length_s = {"taken": self.rnd.uniform(0, cap_s), "runs": float(cap_s)}.get(answer)
        runs = None if length_s is None else (begin_s, begin_s + length_s)
        over_s = {"failed": begin_s, "pending": None, "late": None}.get(answer, runs and runs[1])
        return ScarceJob(name, place, answer, self.prices[place], cap_s, over_s, runs)

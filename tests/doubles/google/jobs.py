"""A custom job: its request, its state, and its pending orders."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.cloud.aiplatform_v1 import types

from doubles.google.names import NUMBER, PROJECT

if TYPE_CHECKING:
    from doubles.google.replica import Replica

__all__ = ["ENDS", "STRATEGIES", "Job", "Pool"]

PREFIX = "JOB_STATE_"
ENDS = tuple(PREFIX + name for name in ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"))
STRATEGIES = types.Scheduling.Strategy


@dataclass(frozen=True)
class Pool:
    """A worker pool that has replicas."""

    number: int
    replicas: int
    spec: Any  # WorkerPoolSpec

    @property
    def name(self) -> str:
        """Return the pool's name, as in CLUSTER_SPEC."""
        return f"workerpool{self.number}"


@dataclass
class Job:
    """One job; `changed` guards the mutable fields and wakes waiting threads."""

    id: str
    region: str
    asked: Any  # CustomJob, protobuf's own, as created
    created: float
    number: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    orders: dict[str, dict[str, Any]] = field(default_factory=dict)  # requested and not done yet
    state: str = "JOB_STATE_PENDING"
    history: list[tuple[str, float]] = field(default_factory=list)
    started: float | None = None  # first time JOB_STATE_RUNNING
    ended: float | None = None
    updated: float = 0.0
    error: tuple[int, str] | None = None
    attempts: int = 0  # of the whole job
    replicas: list[Replica] = field(default_factory=list)
    thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Return the job's resource name."""
        return f"projects/{NUMBER}/locations/{self.region}/customJobs/{self.id}"

    @property
    def spec(self) -> Any:
        """Return the CustomJobSpec."""
        return self.asked.job_spec

    @property
    def pools(self) -> list[Pool]:
        """Return the pools that have replicas."""
        told = enumerate(self.spec.worker_pool_specs)
        return [Pool(number, spec.replica_count, spec) for number, spec in told if spec.replica_count]

    @property
    def is_flex(self) -> bool:
        """Return whether all replicas start together."""
        return bool(self.spec.scheduling.strategy == STRATEGIES.FLEX_START)

    @property
    def timeout_s(self) -> float:
        """Return the time limit of the job: seven days by default."""
        return _seconds(self.spec.scheduling.timeout) or 7 * 86400.0

    @property
    def max_wait_s(self) -> float | None:
        """Return the time limit of waiting for machines under FLEX_START: a day by default, None for no limit."""
        scheduling = self.spec.scheduling
        if not self.is_flex:
            return None
        return (_seconds(scheduling.max_wait_duration) or None) if scheduling.HasField("max_wait_duration") else 86400.0

    @property
    def logs_url(self) -> str:
        """Return the console's page for errors."""
        return (
            f"https://console.cloud.google.com/logs/viewer?project={PROJECT}"
            f"&resource=ml_job%2Fjob_id%2F{self.id}&advancedFilter=resource.type%3D%22ml_job%22%0A"
            f"resource.labels.job_id%3D%22{self.id}%22"
        )

    def resource(self) -> Any:
        """Return the CustomJob in the service's form."""
        told = type(self.asked)()
        told.CopyFrom(self.asked)
        with self.changed:
            told.name, told.state = self.name, types.JobState[self.state].value
            for name, moment in (("create", self.created), ("update", self.updated)):
                getattr(told, f"{name}_time").FromNanoseconds(int(moment * 1e9))
            for name, time_or_none in (("start", self.started), ("end", self.ended)):
                if time_or_none is not None:
                    getattr(told, f"{name}_time").FromNanoseconds(int(time_or_none * 1e9))
            if self.error is not None:
                told.error.code, told.error.message = self.error
        return told

    def enter_first(self, state: str) -> None:
        """Enter the first state."""
        self.state, self.updated = state, self.created
        self.history.append((state, self.created))

    def enter(self, state: str, error: tuple[int, str] | None = None) -> None:
        """Enter the next state, unless a cancel has overtaken the state."""
        with self.changed:
            if self.state == state or self.state in ENDS:
                return
            if self.state == "JOB_STATE_CANCELLING" and state not in ENDS:
                return
            now = time.time()
            self.state, self.updated, self.error = state, now, error
            self.history.append((state, now))
            if state == "JOB_STATE_RUNNING" and self.started is None:
                self.started = now
            if state in ENDS:
                self.ended = now
            self.changed.notify_all()

    def order(self, name: str, **details: Any) -> None:
        """Order a change: cancel, preempt, begin, end, abandon."""
        with self.changed:
            self.orders[name] = details
            self.changed.notify_all()

    def wake(self) -> None:
        """Wake all threads that wait for a change."""
        with self.changed:
            self.changed.notify_all()


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)

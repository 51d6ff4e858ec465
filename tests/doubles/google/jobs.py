"""A custom job: its request, its state, and its pending orders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.cloud.aiplatform_v1 import types

from doubles.google.names import NUMBER, PROJECT
from doubles.kit import life

if TYPE_CHECKING:
    from doubles.google.replica import Replica

PREFIX = "JOB_STATE_"
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


@dataclass(kw_only=True)
class Job(life.Job):
    """One custom job."""

    ENDS = tuple(PREFIX + name for name in ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"))
    CANCELLING, RUNNING = "JOB_STATE_CANCELLING", "JOB_STATE_RUNNING"
    id: str
    region: str
    asked: Any  # CustomJob, protobuf's own, as created
    replicas: list[Replica] = field(default_factory=list)

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
    def timeout_s(self) -> float:
        """Return the time limit of the job: seven days by default."""
        limit = self.spec.scheduling.timeout
        return float(limit.seconds + limit.nanos / 1e9) or 7 * 86400.0

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
            told.name, told.state = self.name, types.JobState[self.status].value
            for name, moment in (("create", self.created), ("update", self.history[-1][1])):
                getattr(told, f"{name}_time").FromNanoseconds(int(moment * 1e9))
            for name, time_or_none in (("start", self.started), ("end", self.ended)):
                if time_or_none is not None:
                    getattr(told, f"{name}_time").FromNanoseconds(int(time_or_none * 1e9))
            if self.error is not None:
                told.error.code, told.error.message = self.error
        return told

"""The settings of the stand-in's Google that a test may change: durations, resources, and permissions."""

from dataclasses import dataclass, field
from typing import ClassVar

from doubles.google.billing import BillingSettings
from doubles.google.logentries import LogSettings
from doubles.google.storage import StorageSettings
from doubles.kit import settings


@dataclass(frozen=True)
class Settings(settings.Settings, LogSettings, StorageSettings, BillingSettings):
    """Times in seconds of real time. Settings of logs (log_*), storage (storage_*) and prices (sku_*) are inherited.

    A job that is not executed keeps its first state until begin() and end() of the handle.
    """

    CHOICES: ClassVar = {
        "timeout_state": ("JOB_STATE_CANCELLED", "JOB_STATE_FAILED"),
        "single_cluster_spec": ("full", "empty", "missing"),
    }
    queued_s: float = 0.0
    """In JOB_STATE_QUEUED, which is skipped at 0."""
    queued: bool = False
    """Whether new jobs stay in JOB_STATE_QUEUED until the setting is false again, as without quota."""
    pending_s: float = 0.0
    """From JOB_STATE_PENDING to the first replica's start."""
    pending: bool = False
    """Whether jobs find no machines: they stay in JOB_STATE_PENDING until the setting is false or they expire."""
    stagger_s: float = 0.0
    """From a replica's start to the next replica's; FLEX_START starts all at once."""
    restart_s: float = 0.0
    """From the end of a replica to its next start."""
    stockout: bool = False
    """Whether jobs fail in JOB_STATE_PENDING for lack of machines, with code 8."""
    quotas: dict[str, int] = field(default_factory=dict)
    """Limits by metric, as of custom_model_training_nvidia_a100_gpus; other metrics have no limit."""
    worker_restarts: int = 5
    job_restarts: int = 3
    """Both from Google's "Understand the custom training service"."""
    cancel_grace_s: float = 30.0
    """From SIGTERM to SIGKILL, after a cancel or the timeout. Assumed: Kubernetes' default; Google states none."""
    preempt_grace_s: float = 0.0
    """The same, at a preemption; 0: killed without a warning."""
    cancelling_s: float = 0.0
    """From the end of the replicas to JOB_STATE_CANCELLED."""
    timeout_state: str = "JOB_STATE_CANCELLED"
    """The job's state after scheduling.timeout. Assumed, after tensorflow/tfx issue 6223: "it gets cancelled"."""
    gcs: bool = True
    """Whether replicas have /gcs/BUCKET: the objects at the start, read-only. Google's mount is writable
    and shows the present objects."""
    single_cluster_spec: str = "full"
    """CLUSTER_SPEC of a job of one replica: as for more ("full"), "" ("empty"), or not set ("missing")."""
    token_s: float = 3600.0
    """Lifetime of a token."""
    refresh_revoked: bool = False
    """Whether the user's refresh token has been revoked."""
    denied: tuple[str, ...] = ()
    """Operations that are forbidden to the user (403), for example "jobs.create" or "storage.*"."""
    job_denied: tuple[str, ...] = ()
    """The same, for the jobs' account."""
    page_size: int = 100
    """Default size of a page of the list of jobs."""

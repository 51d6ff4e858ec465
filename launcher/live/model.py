"""The model of the views: an immutable picture of jobs, of a job's curves, and of its log's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cloudtrain.launcher.backend import LogLine
from cloudtrain.launcher.job import Attempt, Job
from cloudtrain.launcher.money.forecast import Forecast
from cloudtrain.launcher.notices.outbox import Sent

__all__ = ["Curves", "Scene", "TailShot", "Track", "WatchedJob"]


@dataclass(frozen=True)
class Track:
    """A figure over the steps: means over equal stretches, None before the first value; newest, minimum, maximum.

    `newest` is text if the value is not finite: `nan`, `inf`.
    """

    name: str
    values: tuple[float | None, ...]
    newest: float | str
    least: float | None
    largest: float | None


@dataclass(frozen=True)
class Curves:
    """The curves from a job's events. Times in seconds, sizes in bytes; None if never reported.

    `split`: the parts of a step's time by name, means over the newest windows; `step_s` is their sum.
    """

    loss: Track | None = None
    rate: Track | None = None
    step_s: float | None = None
    split: tuple[tuple[str, float], ...] = ()
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    is_gpu: bool = False
    checkpoint: tuple[int | None, float] | None = None  # step, and time of the save


@dataclass(frozen=True)
class WatchedJob:
    """A job as last seen. Times in unix seconds.

    `asks_since_s`: start of the poll in progress; `seen_s`: end of the last poll; `fault`: error of the last poll.
    """

    job: Job
    attempts: tuple[Attempt, ...] = ()
    forecast: Forecast | None = None
    curves: Curves | None = None
    alerts: tuple[Sent, ...] = ()
    fault: str = ""
    seen_s: float | None = None
    asks_since_s: float | None = None


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
    """The end of a job's log. `fault`: why the log cannot be read now; `is_read`: a first answer has come."""

    lines: Sequence[LogLine] = field(default=())
    fault: str = ""
    is_read: bool = False
    is_over: bool = False
    is_prefixed: bool = True

"""What the views draw: a frozen picture of jobs, of one job's curves, and of its log's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cloudtrain.launcher.backend import LogLine
from cloudtrain.launcher.job import Attempt, Job
from cloudtrain.launcher.money.outlook import Outlook
from cloudtrain.launcher.notices.claims import Told

__all__ = ["Curves", "Scene", "Sight", "TailShot", "Track"]


@dataclass(frozen=True)
class Track:
    """One figure over the steps: its mean in equal stretches of them, None where none came; least, largest, newest.

    `newest` is text where the figure is not finite: `nan`, `inf`.
    """

    name: str
    values: tuple[float | None, ...]
    newest: float | str
    least: float | None
    largest: float | None


@dataclass(frozen=True)
class Curves:
    """What the events of a job have told. Times in seconds, sizes in bytes; None is what was never told.

    `split`: the parts of a step's time by name, means of its newest windows; `step_s` what they make up.
    """

    loss: Track | None = None
    rate: Track | None = None
    step_s: float | None = None
    split: tuple[tuple[str, float], ...] = ()
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    is_gpu: bool = False
    checkpoint: tuple[int | None, float] | None = None  # step, and when it was saved


@dataclass(frozen=True)
class Sight:
    """One job as it was last seen. Times in unix seconds.

    `asks_since_s`: since when a look is under way; `seen_s`: when the last one ended; `fault`: why it brought nothing.
    """

    job: Job
    attempts: tuple[Attempt, ...] = ()
    outlook: Outlook | None = None
    curves: Curves | None = None
    alerts: tuple[Told, ...] = ()
    fault: str = ""
    seen_s: float | None = None
    asks_since_s: float | None = None


@dataclass(frozen=True)
class Scene:
    """All that is watched, in the order of the list; `notes` are what our own parts said, with their times."""

    sights: tuple[Sight, ...]
    now_s: float
    notes: tuple[tuple[float, str], ...] = ()

    def of(self, job_id: str) -> Sight | None:
        """Return one job's."""
        return next((sight for sight in self.sights if sight.job.id == job_id), None)


@dataclass(frozen=True)
class TailShot:
    """The end of a job's log. `fault`: why it cannot be read now; `is_read`: there was a first answer."""

    lines: Sequence[LogLine] = field(default=())
    fault: str = ""
    is_read: bool = False
    is_over: bool = False
    is_prefixed: bool = True

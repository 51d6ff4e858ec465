"""What a test may set about the stand-in's AWS: how long things take, and whether jobs run at all."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """Times in seconds of real time."""

    execute: bool = True
    """Whether containers run; else a job trains until it is stopped, told to end, or out of time."""
    starting_s: float = 0.0
    downloading_s: float = 0.0
    uploading_s: float = 0.0
    restart_s: float = 0.0
    """From an interruption to the next start."""
    stop_grace_s: float = 120.0
    """From SIGTERM to SIGKILL, after StopTrainingJob and when a time limit is reached."""
    failed_grace_s: float = 5.0
    """The same, for the other containers when one has failed."""
    interrupt_grace_s: float = 120.0
    """The same, when spot machines are taken away."""
    sync_every_s: float = 1.0
    """Between two copies of checkpoints and TensorBoard files to S3."""
    sync_at_interrupt: bool = True
    """Whether what was written since the last copy is copied too when spot machines are taken away."""
    log_lag_s: float = 0.0
    """From a log event's arrival to its first appearance in an answer."""
    pending: bool = False
    """Whether new jobs find no machines: they stay in Starting until this is false again."""
    capacity: int | None = None
    """How many jobs may have machines at a time; the others stay in Starting."""
    spot_billing: float = 0.3
    """Billable seconds of a training second on spot machines. Invented: AWS says only that it is less than 1."""
    quota: float = 10_000.0
    """Of every service quota that was not set by its name."""
    cost_tags: tuple[str, ...] = ("cloudtrain:job",)
    """Tags that somebody has activated for Cost Explorer."""
    cost_currency: str = "USD"
    price_page_size: int = 100
    """Of GetProducts."""
    price_damage: str = ""
    """Of the price list: `truncated`, in another `currency`, of another `form`."""

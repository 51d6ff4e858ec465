"""The settings of the stand-in's AWS that a test may change: durations, and whether jobs run at all."""

from dataclasses import dataclass

from doubles.kit import settings


@dataclass(frozen=True)
class Settings(settings.Settings):
    """Times in seconds of real time. A job that is not executed trains until a stop, an order, or its time limit."""

    stop_grace_s: float = 120.0
    """From SIGTERM to SIGKILL, after StopTrainingJob and when a time limit is reached."""
    interrupt_grace_s: float = 120.0
    """The same, when spot machines are taken away."""
    log_lag_s: float = 0.0
    """From a log event's arrival to its first appearance in an answer."""
    s3_page_size: int = 1000
    """Objects per page of S3's list."""
    price_page_size: int = 100
    """Rows per page of GetProducts."""
    price_damage: str = ""
    """Damage of the price list: `truncated`, wrong `currency`, wrong `form`."""

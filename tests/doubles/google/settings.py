"""The settings of the stand-in's Google that a test may change: durations and permissions."""

from dataclasses import dataclass

from doubles.google.billing import BillingSettings
from doubles.google.logentries import LogSettings
from doubles.google.storage import StorageSettings
from doubles.kit import settings


@dataclass(frozen=True)
class Settings(settings.Settings, LogSettings, StorageSettings, BillingSettings):
    """Times in seconds of real time. Settings of logs (log_*), storage (storage_*) and prices (sku_*) are inherited.

    A job that is not executed keeps its first state until begin() and end() of the handle.
    """

    cancelling_s: float = 0.0
    """From the end of the replicas to JOB_STATE_CANCELLED."""
    gcs: bool = True
    """Whether replicas have /gcs/BUCKET: the objects at the start; what a container writes becomes objects at its end.
    Google's mount shows the present objects."""
    token_s: float = 3600.0
    """Lifetime of a token."""
    refresh_revoked: bool = False
    """Whether the user's refresh token has been revoked."""
    denied: tuple[str, ...] = ()
    """Operations that are forbidden to the user (403), for example "jobs.create" or "storage.*"."""

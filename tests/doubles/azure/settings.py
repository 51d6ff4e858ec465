"""The settings of the stand-in's Azure: durations, permissions, and whether jobs run at all."""

from dataclasses import dataclass
from typing import ClassVar

from doubles.kit import settings

ROLES = ("contributor", "reader", "none")


@dataclass(frozen=True)
class Settings(settings.Settings):
    """Times in seconds of real time. A job that is not executed waits in NotStarted for the handle's begin and end."""

    CHOICES: ClassVar = {
        "restart_logs": ("append", "replace"),
        "datastore_credentials": ("key", "sas", "none"),
        "storage_role": ROLES,
        "job_storage_role": ROLES,
    }
    restart_logs: str = "append"
    """Log files after a restart: continued ("append"), or new blobs with a new creation time ("replace")."""
    log_lag_s: float = 0.0
    """From a line of a container to its append to the log file."""
    token_s: float = 3600.0
    """Lifetime of a token."""
    datastore_credentials: str = "key"
    """Credentials of datastores: an account key, a SAS, or none (identity-based)."""
    storage_role: str = "contributor"
    """Role of token bearers on blobs."""
    storage_keys: bool = True
    """Whether the storage account accepts SharedKey and SAS."""
    vault_access: bool = True
    """Whether the user may write, read and delete secrets."""
    job_storage_role: str = "contributor"
    """Role of a job's identity on blobs."""
    blob_page_size: int = 5000
    """Blobs per page of the list, as Azure's greatest `maxresults`."""
    price_page_size: int = 100
    """Prices per page of the list."""
    price_currency: str = "USD"
    """Currency of all prices, independent of the query."""

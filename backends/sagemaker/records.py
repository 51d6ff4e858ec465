"""The stored records of a SageMaker job: the handle, and the sending plan beside the request."""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.entrypoints.contract import ContainerOrder
from cloudtrain.launcher.backend import StoredRecord

from ..cloud import CloudRef


@dataclass(frozen=True)
class SageMakerRef(CloudRef, optional="hourly_usd"):
    """The handle of a training job."""

    region: str
    profile: str | None
    """Of AWS's own config."""
    endpoints: dict[str, str]
    """Service to address."""
    checkpoint_uri: str
    secrets_prefix: str
    """Of the job's parameters in Parameter Store."""
    secrets: list[str]
    """Names; no name: nothing to remove."""
    job_uri: str = ""
    """As in the sending plan; empty for a job of an older version."""
    hourly_usd: dict[str, float] | None = None
    """As in the sending plan."""

    @property
    def uris(self) -> tuple[str, ...]:
        """The addresses of the job's files, with the order's."""
        return *super().uris, self.job_uri


@dataclass(frozen=True)
class SageMakerSending(StoredRecord, optional="hourly_usd"):
    """The sending plan. `region`, `profile` and `endpoints` as in the handle."""

    region: str
    profile: str | None
    endpoints: dict[str, str]
    default_of: str | None
    """The account whose default bucket has the job's files, None for a bucket of the config."""
    code_uri: str
    """The folder of the channel `code`, with a slash at the end."""
    job_uri: str
    """The folder of the channel `job`, with a slash at the end."""
    owner_uri: str
    """The object with the claim of the name."""
    order: ContainerOrder
    """Without the fields that only a send knows."""
    hourly_usd: dict[str, float] | None = None
    """Of a list of types: the price of an instance of each for an hour."""

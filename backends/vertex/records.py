"""The stored records of a Vertex AI job: the handle, and the sending plan beside the request."""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.entrypoints.contract import ContainerOrder
from cloudtrain.launcher.backend import StoredRecord

from ..cloud import CloudRef


@dataclass(frozen=True)
class VertexRef(CloudRef):
    """The handle of a custom job. `name` is the job's resource name."""

    project: str
    location: str
    endpoints: dict[str, str]
    """Service to address."""
    kind: str
    """The machines' kind: spot, flex_start, ..."""
    label: str
    """The attempt's name."""
    owner: str
    """The home folder's identity."""
    job: str
    """The number at the end of `name`."""
    limit_s: int
    """Seconds of the platform's limit."""
    ended_uri: str
    """The prefix of the exit reports."""
    secret: str | None
    """The job's entry in Secret Manager, None if nothing is to be removed."""
    url: str
    sent_s: float
    """In unix seconds."""
    doubtful_until_s: float
    """The end of the search for a second job with the label, in unix seconds."""

    @property
    def uris(self) -> tuple[str, ...]:
        """The addresses of the job's files, with those of the order and of the exit reports."""
        return *super().uris, self.ended_uri


@dataclass(frozen=True)
class VertexSending(StoredRecord):
    """The sending plan. The fields of the handle's names have the handle's meaning."""

    project: str
    location: str
    endpoints: dict[str, str]
    code_uri: str
    wheel_uri: str | None
    """None without a prebuilt image."""
    order_uri: str
    owner_uri: str
    """The object with the claim of the name."""
    checkpoint_uri: str | None
    output_uri: str
    order: ContainerOrder
    """Without the fields that only a send knows."""
    kind: str
    limit_s: int

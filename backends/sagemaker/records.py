"""The stored records of a SageMaker job: the handle, and the sending plan beside the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cloudtrain.entrypoints.contract import ContainerOrder
from cloudtrain.launcher.backend import StoredRecord


@dataclass(frozen=True)
class SageMakerRef(StoredRecord):
    """The handle of a training job.

    `region`, `profile` (of AWS's own config) and `endpoints` (service to address) reach the account. `name`: the
    training job's. `nodes`: the number of instances. `limit_reason`: time_limit or budget, for the platform's limit.
    `secrets_prefix` and `secrets` (names) are the job's parameters in Parameter Store; no name: nothing to remove.
    """

    region: str
    profile: str | None
    endpoints: dict[str, str]
    name: str
    nodes: int
    nproc_per_node: int
    limit_reason: str
    checkpoint_uri: str
    output_uri: str
    secrets_prefix: str
    secrets: list[str]


@dataclass(frozen=True)
class SageMakerSending(StoredRecord):
    """The sending plan. `region`, `profile` and `endpoints` as in the handle.

    `default_of`: the account whose default bucket has the job's files, None for a bucket of the config. `code_uri` and
    `job_uri` are the channels' folders, with a slash at the end; `owner_uri` is the object with the claim of the name.
    `spec`: the container order without the fields that only a send knows.
    """

    region: str
    profile: str | None
    endpoints: dict[str, str]
    default_of: str | None
    code_uri: str
    job_uri: str
    owner_uri: str
    spec: dict[str, Any]

    @property
    def order(self) -> ContainerOrder:
        """The container order in `spec`."""
        return ContainerOrder.load(self.spec)

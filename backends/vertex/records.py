"""The stored records of a Vertex AI job: the handle, and the sending plan beside the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cloudtrain.entrypoints.contract import ContainerOrder
from cloudtrain.launcher.backend import StoredRecord


@dataclass(frozen=True)
class VertexRef(StoredRecord):
    """The handle of a custom job.

    `project`, `location` and `endpoints` (service to address) reach the jobs. `checkpoint_uri`: None outside Cloud
    Storage. `kind`: the machines' kind (spot, flex_start, ...). `name`: the job's resource name; `job`: the number at
    the name's end; `label`: the attempt's name; `owner`: the home folder's identity. `nodes`: the number of replicas.
    `limit_s`: seconds of the platform's limit, because of `limit_reason` (time_limit or budget). `ended_uri`: the
    prefix of the exit reports. `secret`: the job's entry in Secret Manager, None if nothing is to be removed. In unix
    seconds: `sent_s`, and `doubtful_until_s`, the end of the search for a second job with the label.
    """

    project: str
    location: str
    endpoints: dict[str, str]
    checkpoint_uri: str | None
    output_uri: str
    kind: str
    name: str
    label: str
    owner: str
    job: str
    nodes: int
    nproc_per_node: int
    limit_s: int
    limit_reason: str
    ended_uri: str
    secret: str | None
    url: str
    sent_s: float
    doubtful_until_s: float


@dataclass(frozen=True)
class VertexSending(StoredRecord):
    """The sending plan. The fields of the handle's names have the handle's meaning.

    `code_uri`, `wheel_uri` (None without a prebuilt image), `order_uri` and `owner_uri` (the claim of the name) are
    objects. `order`: the container order without the fields that only a send knows. `label`: the machines' name for
    people. `limit_s`: None in the oldest plans, where the order has the limit.
    """

    project: str
    location: str
    endpoints: dict[str, str]
    code_uri: str
    wheel_uri: str | None
    order_uri: str
    owner_uri: str
    checkpoint_uri: str | None
    output_uri: str
    order: dict[str, Any]
    label: str
    kind: str
    limit_s: int | None = None

    @property
    def container_order(self) -> ContainerOrder:
        """The container order in `order`."""
        return ContainerOrder.load(self.order)

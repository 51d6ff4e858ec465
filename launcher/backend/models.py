"""A model for a registry or an endpoint, the vendor's requests for the model, and an endpoint's price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

MANIFEST = "SHA256SUMS"  # of a model folder, over all other files
# The container's command: the server of `cloudtrain serve`, which finds the folder where the platform has put it.
SERVE = ("python3", "-m", "cloudtrain.entrypoints.serve", "--host", "0.0.0.0")


@dataclass(frozen=True)
class CheckedModel:
    """A model folder with a passed check, under the name for the registry.

    `digest`: the sha256 of the folder's checksums; `files`: sha256 by name. `metrics` are of the split `split`, and
    `metrics_file` is the folder's file that holds them. `image`: the container image to serve with, None if not named.
    """

    path: Path
    name: str
    digest: str
    files: Mapping[str, str]
    split: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_file: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None

    @property
    def version(self) -> str:
        """The model's version: the first 12 digits of the digest."""
        return self.digest[:12]

    @property
    def uploads(self) -> list[str]:
        """The names of all files besides the checksums; with the signature, if the folder has one."""
        return [*sorted(self.files), *(path.name for path in self.path.glob(f"{MANIFEST}.sig"))]

    @property
    def about(self) -> str:
        """The description of a version: the whole digest, by which `find` knows the version, and the metrics."""
        told = ", ".join(f"{name} {value:.6g}" for name, value in self.metrics.items())
        return f"cloudtrain sha256:{self.digest}" + (f"; on {self.split}: {told}" if told else "")

    def tags(self) -> dict[str, str]:
        """Return the facts, the digest and the metrics, whose names begin with the split."""
        numbers = {f"{self.split}.{name}": f"{value:.10g}" for name, value in self.metrics.items()}
        return {"cloudtrain.sha256": self.digest, **self.facts, **numbers}

    def place(self, root: str) -> str:
        """Return the URI of the model's files below a folder of a store; with a slash at the end."""
        return f"{root}/models/{self.name}/{self.version}/"


@dataclass(frozen=True)
class VendorCall:
    """A request, by the vendor's name of the call."""

    name: str
    body: dict[str, Any]


def as_requests(uri: str, model: CheckedModel, calls: tuple[VendorCall, ...]) -> dict[str, Any]:
    """Return the upload and the requests, for a dry run."""
    requests = [{"call": call.name, "body": call.body} for call in calls]
    return {"upload": {"to": uri, "files": [*model.uploads, MANIFEST]}, "requests": requests}


class ModelRegistry(Protocol):
    """A model's place in a registry. Only the methods need the network and the SDK, and CredentialError, ConfigError,
    UnreachableError.
    """

    @property
    def uri(self) -> str:
        """The folder of the files in a store."""

    @property
    def calls(self) -> tuple[VendorCall, ...]:
        """The requests of a new version."""

    def find(self) -> str | None:
        """Return the registered version of the same name and digest, or None."""

    def upload(self) -> None:
        """Upload the folder's files to `uri`, the checksums last; a complete copy stays as it is."""

    def create(self) -> str:
        """Register the version and return its name; of several processes, only one makes a version."""


@dataclass(frozen=True)
class EndpointWish:
    """An endpoint as asked for. `ends_s`: when the platform is to delete the endpoint, in unix seconds."""

    model: CheckedModel
    name: str
    instances: int
    ttl_s: int
    ends_s: float


@dataclass(frozen=True)
class EndpointPlan:
    """An endpoint's requests and price. `hourly_usd`: of one instance; `uncertainty` as in Capacity.

    `delete`: the vendor's command that deletes the endpoint. `ref`: the backend's handle, JSON. `unenforced`: why the
    platform cannot delete the endpoint by itself; empty if the platform can.
    """

    name: str
    uri: str
    calls: tuple[VendorCall, ...]
    machine: str
    hourly_usd: float | None
    price_source: str
    uncertainty: float
    delete: str
    ref: dict[str, Any] = field(default_factory=dict)
    unenforced: str = ""

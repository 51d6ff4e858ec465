"""The stored records of an Azure ML job: the handle, and the sending plan beside the request."""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.launcher.backend import StoredRecord

from ..cloud import CloudRef


@dataclass(frozen=True)
class Workspace(StoredRecord):
    """Where jobs are kept; `cloud` is a name from `az cloud list`."""

    subscription: str
    resource_group: str
    name: str
    cloud: str = "AzureCloud"

    @property
    def arm_id(self) -> str:
        """The workspace's id, with a leading slash and no trailing slash."""
        group = f"/subscriptions/{self.subscription}/resourceGroups/{self.resource_group}"
        return f"{group}/providers/Microsoft.MachineLearningServices/workspaces/{self.name}"


def plain_region(name: str) -> str:
    """Return the region in the form of price lists: `East US` is eastus."""
    return name.lower().replace(" ", "")


@dataclass(frozen=True)
class AzureMLRef(CloudRef):
    """The handle of a run."""

    workspace: Workspace
    limit_s: int
    """Seconds of the platform's limit."""
    history: str | None
    """The URL of the run history, None if Azure has not given the URL yet."""
    studio: str | None
    """The run's web page."""
    vault: str | None
    """The URL of the job's entry in the key vault, None if nothing is to be removed."""
    idle_s: float
    """Seconds that the cluster's machines idle after the job."""
    has_price: bool
    """Whether the plan has a price; else the run's machines may have a price, in the run's region or `region`."""
    region: str | None


@dataclass(frozen=True)
class AzureMLSending(StoredRecord):
    """The sending plan. The fields of the handle's names have the handle's meaning."""

    workspace: Workspace
    compute: str | None
    """The cluster's name, None for serverless machines."""
    instance_type: str | None
    datastore: str
    code_dir: str
    """The code folder, from the config's folder."""
    checkpoint_uri: str | None
    output_uri: str
    secrets: list[str]
    """Names."""
    nodes: int
    nproc_per_node: int
    limit_s: int
    limit_reason: str
    region: str | None
    has_price: bool
    """Whether the config sets a price."""
    counted_idle_s: float | None = None
    """The idle time that the plan's price counts, in seconds; None without a price."""
    priced_region: str | None = None
    """The region of the plan's price from a list."""

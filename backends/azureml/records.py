"""The stored records of an Azure ML job: the handle, and the sending plan beside the request."""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.launcher.backend import StoredRecord


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
class Unpriced(StoredRecord):
    """A plan without a price: the run's machines have the price in the run's region, else in `region`."""

    region: str | None


@dataclass(frozen=True)
class AzureMLRef(StoredRecord):
    """The handle of a run.

    `checkpoint_uri`: None without a checkpoint output. `nodes`: the number of instances. `limit_s`: seconds of the
    platform's limit, because of `limit_reason` (time_limit or budget). `history`: the URL of the run history, None if
    Azure has not given the URL yet. `studio`: the run's web page. `vault`: the URL of the job's entry in the key vault,
    None if nothing is to be removed. `idle_s`: seconds that the cluster's machines idle after the job. `prices`: None
    if the plan has a price.
    """

    workspace: Workspace
    checkpoint_uri: str | None
    output_uri: str
    nodes: int
    nproc_per_node: int
    limit_s: int
    limit_reason: str
    name: str
    history: str | None
    studio: str | None
    vault: str | None
    idle_s: float
    prices: Unpriced | None


@dataclass(frozen=True)
class AzureMLSending(StoredRecord):
    """The sending plan. The fields of the handle's names have the handle's meaning.

    `compute`: the cluster's name, None for serverless machines. `code_dir`: the code folder, from the config's folder.
    `secrets`: names. `has_price`: the config sets a price. With a price in the plan, `counted_idle_s` is the counted
    idle time in seconds, and `priced_region` the region of a price from a list.
    """

    workspace: Workspace
    compute: str | None
    instance_type: str | None
    datastore: str
    code_dir: str
    checkpoint_uri: str | None
    output_uri: str
    secrets: list[str]
    nodes: int
    nproc_per_node: int
    limit_s: int
    limit_reason: str
    region: str | None
    has_price: bool
    counted_idle_s: float | None = None
    priced_region: str | None = None

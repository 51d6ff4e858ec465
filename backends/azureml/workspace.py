"""An Azure ML workspace, by the parts of its id."""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.launcher.backend import StoredRecord

__all__ = ["Workspace", "plain_region"]


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

"""An Azure ML workspace, by the parts of its id."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Workspace", "plain_region"]


@dataclass(frozen=True)
class Workspace:
    """Where jobs live; `cloud` is the name that `az cloud list` gives it."""

    subscription: str
    resource_group: str
    name: str
    cloud: str = "AzureCloud"

    @property
    def arm_id(self) -> str:
        """The workspace's id, with a slash at its start and none at its end."""
        group = f"/subscriptions/{self.subscription}/resourceGroups/{self.resource_group}"
        return f"{group}/providers/Microsoft.MachineLearningServices/workspaces/{self.name}"


def plain_region(name: str) -> str:
    """Return the region as lists of prices have it: `East US` is eastus there."""
    return name.lower().replace(" ", "")

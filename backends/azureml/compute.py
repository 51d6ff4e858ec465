"""The cluster that a job names: whether it fits, and how long its machines idle after the job."""

from __future__ import annotations

import contextlib
from typing import Any

from cloudtrain.backends.azureml import rest, status
from cloudtrain.backends.azureml.workspace import Workspace
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.errors import ConfigError, Fault

__all__ = ["idle_s", "require"]

IDLE_S = 120.0  # of a cluster that does not say; Azure's own default


def require(workspace: Workspace, request: Request) -> float:
    """Return how long the cluster's machines idle after a job, 0 where there is none, having looked whether it fits.

    Raises ConfigError: a wrong name would be told only after the upload.
    """
    wanted = request.beside["compute"]
    if wanted is None:
        return 0.0
    try:
        there = rest.get_json(workspace, f"/computes/{wanted}")["properties"]
    except rest.AzureError as error:
        if not rest.is_absent(error):
            raise
        found = rest.get_json(workspace, "/computes").get("value") or []
        names = ", ".join(sorted(str(each.get("name")) for each in found)) or "none"
        hint = f"there are: {names}; without `compute` it runs serverless"
        message = f"there is no compute `{wanted}` in the workspace"
        raise ConfigError([Fault(message, key="azureml.compute", hint=hint)]) from error
    own: dict[str, Any] = there.get("properties") or {}
    size, planned = str(own.get("vmSize") or ""), request.beside["instance_type"]
    if size and planned and size.lower() != planned.lower():
        message = f"the machines of `{wanted}` are {size}, not {planned}"
        raise ConfigError([Fault(message, key="resources.instance_type", hint=f"write {size}, or another compute")])
    most = (own.get("scaleSettings") or {}).get("maxNodeCount")
    if isinstance(most, int) and most < request.beside["nodes"]:
        message = f"`{wanted}` grows to {most} machines, and the job wants {request.beside['nodes']}"
        raise ConfigError([Fault(message, key="resources.instances", hint="fewer instances, or let the cluster grow")])
    return _idle_of(own)


def idle_s(workspace: Workspace, request: Request) -> float:
    """Return how long the cluster's machines idle, as far as it can be asked."""
    if request.beside["compute"] is None:
        return 0.0
    with contextlib.suppress(rest.AzureError, KeyError):
        found = rest.get_json(workspace, f"/computes/{request.beside['compute']}")
        return _idle_of(found["properties"].get("properties") or {})
    return IDLE_S


def _idle_of(properties: dict[str, Any]) -> float:
    """Return the seconds after which idle machines are let go, 0 for those that always stay."""
    scale = properties.get("scaleSettings") or {}
    if scale.get("minNodeCount"):
        return 0.0
    told = status.duration_s(scale.get("nodeIdleTimeBeforeScaleDown"))
    return IDLE_S if told is None else told

"""The compute cluster that a job names: whether the job fits, the region, and how long machines idle after a job."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from cloudtrain.entrypoints.format import span
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.prices import catalog
from cloudtrain.launcher.text.times import duration_s
from cloudtrain.launcher.text.units import format_duration

from . import api
from .api import AzureAccess
from .machine import CLUSTER_IDLE_S
from .records import AzureMLSending, plain_region


@dataclass(frozen=True)
class Cluster:
    """A cluster in Azure's description: `most` machines, None if Azure gives no limit, and the machines' idle time."""

    size: str
    most: int | None
    priority: str
    state: str
    idle_s: float
    region: str


def fitting(access: AzureAccess, name: str, instance_type: str | None, instances: int) -> Cluster:
    """Return the cluster of that name. Raises ConfigError if the cluster is missing, or the job does not fit."""
    try:
        there = api.get_json(access, f"/computes/{name}")["properties"]
    except api.AbsentError as error:
        found = api.get_json(access, "/computes").get("value") or []
        names = ", ".join(sorted(str(each.get("name")) for each in found)) or "none"
        hint = f"there are: {names}; without `compute` it runs serverless"
        raise ConfigError(f"there is no compute `{name}` in the workspace", key="azureml.compute", hint=hint) from error
    own: dict[str, Any] = there.get("properties") or {}
    size, most = str(own.get("vmSize") or ""), (own.get("scaleSettings") or {}).get("maxNodeCount")
    if size and instance_type and size.lower() != instance_type.lower():
        message = f"the machines of `{name}` are {size}, not {instance_type}"
        hint = f"write {catalog.spelled(size, catalog.types('azureml'))}, or another compute"
        raise ConfigError(message, key="resources.instance_type", hint=hint)
    most = most if isinstance(most, int) else None
    if most is not None and most < instances:
        message = f"`{name}` grows to {most} machines, and the job needs {instances}"
        raise ConfigError(message, key="resources.instances", hint="fewer instances, or let the cluster grow")
    priority, state = str(own.get("vmPriority") or "dedicated").lower(), str(there.get("provisioningState") or "?")
    return Cluster(size, most, priority, state, _idle_of(own, instances), str(there.get("computeLocation") or ""))


def require(access: AzureAccess, plan: AzureMLSending) -> float:
    """Return the seconds that the cluster's machines idle after a job, 0 without a cluster; check that the job fits.

    Raises ConfigError for a wrong name (Azure reports it after the upload), region, or idle time above the plan's.
    """
    if plan.compute is None:
        _require_region(access, plan.priced_region, "")
        return 0.0
    found = fitting(access, plan.compute, plan.instance_type, plan.nodes)
    _require_region(access, plan.priced_region, found.region)
    counted_s = plan.counted_idle_s
    if counted_s is not None and found.idle_s > counted_s:
        idle, counted = span(found.idle_s), span(counted_s)
        message = f"`{plan.compute}` keeps idle machines for {idle}, and the plan counts {counted} of it"
        hint = f"write `idle: {format_duration(int(found.idle_s))}`, or set the cluster to release them sooner"
        raise ConfigError(message, key="azureml.idle", hint=hint)
    return found.idle_s


def idle_s(access: AzureAccess, plan: AzureMLSending) -> float:
    """Return the seconds that the cluster's machines idle; CLUSTER_IDLE_S if Azure cannot be asked."""
    if plan.compute is None:
        return 0.0
    with contextlib.suppress(api.AzureError, KeyError):
        found = api.get_json(access, f"/computes/{plan.compute}")
        return _idle_of(found["properties"].get("properties") or {}, plan.nodes)
    return CLUSTER_IDLE_S


def _require_region(access: AzureAccess, priced: str | None, cluster_region: str) -> None:
    """Raise ConfigError if the plan's price is for a region other than the machines'.

    A cluster reports its region, which may differ from the workspace's; without one the workspace's region counts.
    """
    if priced is None:
        return
    there = cluster_region or str(api.get_json(access, "").get("location") or "")
    if there and plain_region(there) != plain_region(priced):
        message = f"the machines are in {plain_region(there)}, and the price that is counted with is {priced}'s"
        raise ConfigError(message, key="azureml.region", hint=f"write `region: {plain_region(there)}`")


def _idle_of(properties: dict[str, Any], instances: int) -> float:
    """Return the seconds after which idle machines are released, 0 if enough machines for the job always stay."""
    scale = properties.get("scaleSettings") or {}
    least = scale.get("minNodeCount")
    if isinstance(least, int) and least >= instances:
        return 0.0
    idle = duration_s(scale.get("nodeIdleTimeBeforeScaleDown"))
    return CLUSTER_IDLE_S if idle is None else idle

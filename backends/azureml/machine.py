"""The Azure machine that a config requests, and where: type, price, workspace."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cloudtrain.launcher.errors import ConfigError, Fault, refuse
from cloudtrain.launcher.metering.rate import Machine
from cloudtrain.launcher.planning import request_rules
from cloudtrain.launcher.prices import catalog

from ..cloud import machine_of_type, machine_with, misnamed
from .records import Workspace, plain_region

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

    from .block import AzureML

REGIONS_AS_OF = "2026"
CLUSTER_IDLE_S = 120  # before a cluster releases idle machines: Azure's default, which a cluster may change

_TYPE = re.compile(r"Standard_[A-Za-z]+\d[A-Za-z0-9_-]*")
_SUBSCRIPTION = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# General purpose, compute and memory: families without accelerators, as in clusters.
_CPU_FAMILY = re.compile(r"Standard_[ABDEFHLM][\w-]*", re.IGNORECASE)


def block_of(config: JobConfig | None) -> AzureML:
    """Return the config's `azureml` block, or a block of defaults."""
    from .block import AzureML  # a poll of a job's state needs no config

    return AzureML() if config is None else config.block(AzureML)


def region_of(block: AzureML) -> str | None:
    """Return the region in the form of price lists: `East US` is eastus."""
    return None if block.region is None else plain_region(block.region)


def unknown_region(config: JobConfig) -> Fault | None:
    """Return a warning if the config's region is not known."""
    return request_rules.unknown_region("azureml", "region", region_of(block_of(config)), REGIONS_AS_OF)


def idle_s_of(block: AzureML) -> int:
    """Return the seconds that machines idle after the job, by the config; 0 for serverless machines."""
    if block.compute is None:
        return 0
    return CLUSTER_IDLE_S if block.idle is None else block.idle


def choose(config: JobConfig) -> Machine:
    """Return the machine type that the config requests. Raises ConfigError if the config names none, or an unknown one.

    If the config names only a cluster, the type stays empty, and the run reports the type later.
    """
    resources, block = config.resources, block_of(config)
    if resources.instance_type is not None:
        return named(resources.instance_type, region_of(block), config.distributed.nproc_per_node)
    if resources.accelerators is not None:
        return machine_with("azureml", "Azure", resources.accelerators, region_of(block))
    if block.compute is None:
        hint = "write `accelerators: A100:4`, `instance_type: Standard_NC96ads_A100_v4`, or `azureml.compute`"
        raise ConfigError("Azure ML needs to know which machines", key="resources", hint=hint)
    if config.distributed.nproc_per_node == "auto":
        message = f"how many GPUs the machines of `{block.compute}` have is not known here"
        hint = "say `resources.instance_type`, or distributed.nproc_per_node"
        raise ConfigError(message, key="azureml.compute", hint=hint)
    return Machine("", "", int(config.distributed.nproc_per_node))


def named(instance_type: str, region: str | None, nproc: int | str, *, key: str = "resources.instance_type") -> Machine:
    """Return the machine type of this name; `key` sets the name. Raises ConfigError for a wrong name.

    Azure's own answers mix upper and lower case; `Standard_` may be missing.
    """
    name = _spelled(instance_type)
    if not _TYPE.fullmatch(name) or not catalog.unknown(instance_type):
        known = catalog.types("azureml")
        raise misnamed(instance_type, "an Azure machine size", known, "Standard_NC24ads_A100_v4", key)
    return machine_of_type("azureml", name, region, nproc, is_cpu=bool(_CPU_FAMILY.fullmatch(name)))


def _spelled(instance_type: str) -> str:
    """Return the size as price lists write it: `STANDARD_D4S_V3` is Standard_D4s_v3."""
    name = re.sub(r"(?i)^standard_", "", instance_type)
    if not name.isupper() and not name.islower():
        return f"Standard_{name}"
    size, *others = name.split("_")  # family in capitals and features; then an accelerator, and a version
    family = re.match(r"[A-Za-z]*", size)
    size = size.lower().replace(family[0].lower(), family[0].upper(), 1) if family else size
    parts = [each.lower() if re.fullmatch(r"(?i)v\d+", each) else each.upper() for each in others]
    return "_".join(["Standard", size, *parts])


def workspace_of(block: AzureML, environ: Mapping[str, str] = os.environ) -> Workspace:
    """Return the workspace. Raises ConfigError with all missing settings."""
    subscription = block.subscription or environ.get("AZURE_SUBSCRIPTION_ID")
    account = "`az account show --query id`, or export AZURE_SUBSCRIPTION_ID"
    groups = "`az ml workspace list` shows yours"
    parts = (
        ("subscription", subscription, "no Azure subscription", account),
        ("resource_group", block.resource_group, "no resource group", f"{groups} with their groups"),
        ("workspace", block.workspace, "no workspace", groups),
    )
    faults = [Fault(words, key=f"azureml.{key}", hint=hint) for key, value, words, hint in parts if not value]
    faults += [
        Fault(f"`{value}` cannot be part of an Azure id", key=f"azureml.{key}", hint="only the name, without a path")
        for key, value, _, _ in parts
        if value and re.search(r"[/?#\s]", value)
    ]
    if subscription and not faults and not _SUBSCRIPTION.fullmatch(subscription):
        message = f"`{subscription}` is not a subscription id"
        hint = "32 digits, as `az account show --query id -o tsv` prints them"
        faults.append(Fault(message, key="azureml.subscription", hint=hint))
    refuse(faults)
    return Workspace(str(subscription), str(block.resource_group), str(block.workspace), block.cloud)

"""The files of an Azure ML online endpoint, for `az ml model create` and `az ml online-...`."""

from __future__ import annotations

from cloudtrain.launcher.backend.model_files import ServedModel, ServingFiles
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.planning import serving
from cloudtrain.launcher.planning.serving import Blank

from .machine import block_of, named, region_of

MACHINE = "Standard_DS3_v2"  # 4 cores, 14 GB
_MOST_NAME = 19  # letters of the model's name in the endpoint's, which is unique in a region and has at most 32
_SUBSCRIPTION = Blank("SUBSCRIPTION", "the id of the subscription", "00000000-0000-0000-0000-000000000000")
_GROUP = Blank("GROUP", "the workspace's resource group", "ml")
_WORKSPACE = Blank("WORKSPACE", "the workspace", "research")
_REGISTRY = Blank("REGISTRY", "the name of a container registry in Azure", "researchimages")
_VENDOR = serving.Vendor(
    "azureml",
    "Azure ML",
    {"model.yml": "ModelFile", "endpoint.yml": "EndpointFile", "deployment.yml": "DeploymentFile"},
    {"instance_type": "--machine", "name": "--name", "endpoint_name": "--name"},
    (_SUBSCRIPTION, _GROUP, _WORKSPACE, _REGISTRY),
)


def files(model: ServedModel, config: JobConfig) -> ServingFiles:
    """Return the files; pure. Raises ConfigError for a value that Azure ML refuses."""
    block = block_of(config)
    machine = named(model.machine or MACHINE, region_of(block), 1, key="--machine")
    values = {
        "endpoint": f"{model.name[:_MOST_NAME].rstrip('-')}-{model.version}",
        "image": f"{_REGISTRY.mark}.azurecr.io/{model.name}:{model.version}",
        "registry": _REGISTRY.mark,
        "subscription": block.subscription or _SUBSCRIPTION.mark,
        "group": block.resource_group or _GROUP.mark,
        "workspace": block.workspace or _WORKSPACE.mark,
        "machine": machine.instance_type,
    }
    return serving.rendered(_VENDOR, model, values, gpus=machine.count, place=None)

"""An Azure ML online endpoint as requests with a price. Nothing is sent: no small part of Azure ends an endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.launcher.backend.models import EndpointPlan, EndpointWish, VendorCall
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.prices import catalog

from .machine import block_of, choose, workspace_of

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

PORT = 8080
UNENFORCED = "Azure ML deletes no endpoint by itself: a Logic App or a runbook of yours would have to"


def plan(wish: EndpointWish, config: JobConfig) -> EndpointPlan:
    """Return the requests and the price; the model must be registered. Raises ConfigError for a missing setting."""
    block, workspace, machine, model = block_of(config), workspace_of(block_of(config)), choose(config), wish.model
    if not machine.instance_type:
        hint = "--instance-type Standard_DS3_v2"
        raise ConfigError("an endpoint needs a machine size", key="resources.instance_type", hint=hint)
    if block.region is None:
        raise ConfigError("an endpoint needs its region", key="azureml.region", hint="write `region: eastus`")
    image = model.image or config.image
    if image is None:
        hint = "--image with an image that has cloudtrain and torch, and starts the server: see docs/deploy.md"
        raise ConfigError("an endpoint needs a container image", key="image", hint=hint)
    home = workspace.arm_id
    environment, endpoint = f"{home}/environments/cloudtrain-serve/versions/{model.version}", f"{home}/onlineEndpoints"
    routes = {"livenessRoute": "/v2/health/live", "readinessRoute": "/v2/health/ready", "scoringRoute": "/score"}
    inference = {name: {"path": path, "port": PORT} for name, path in routes.items()}
    properties = {"authMode": "Key", "publicNetworkAccess": "Enabled"}
    identity, location = {"type": "SystemAssigned"}, {"location": block.region}
    deployment = {
        "endpointComputeType": "Managed",
        "model": f"{home}/models/{model.name}/versions/{model.version}",
        "environmentId": environment,
        "instanceType": machine.instance_type,
        "requestSettings": {"maxConcurrentRequestsPerInstance": 32, "requestTimeout": "PT60S"},
        "livenessProbe": {"initialDelay": "PT60S", "period": "PT10S", "timeout": "PT2S", "failureThreshold": 30},
        "readinessProbe": {"initialDelay": "PT60S", "period": "PT10S", "timeout": "PT2S", "failureThreshold": 30},
    }
    sku = {"sku": {"name": "Default", "capacity": wish.instances}}
    image_only = {"image": image, "osType": "Linux", "inferenceConfig": inference}
    traffic = {**properties, "traffic": {"blue": 100}}
    calls = (
        VendorCall(f"PUT {environment}", {"properties": image_only}),
        VendorCall(f"PUT {endpoint}/{wish.name}", {**location, "identity": identity, "properties": properties}),
        VendorCall(f"PUT {endpoint}/{wish.name}/deployments/blue", {**location, **sku, "properties": deployment}),
        VendorCall(f"PUT {endpoint}/{wish.name}", {**location, "identity": identity, "properties": traffic}),
    )
    place = f"-g {workspace.resource_group} -w {workspace.name}"
    delete = f"az ml online-endpoint delete -n {wish.name} {place} --yes"
    listed, name = (machine.hourly_usd, machine.price_source, machine.uncertainty), machine.instance_type
    price = catalog.serving("azureml", block.price_per_hour, listed, name, block.region)
    uri = f"azureml:{model.name}:{model.version}"
    return EndpointPlan(wish.name, uri, calls, name, *price, delete, unenforced=UNENFORCED)

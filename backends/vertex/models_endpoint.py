"""A Vertex AI endpoint as requests with a price. Nothing is sent: the end by Cloud Tasks was not built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.backend.models import EndpointPlan, EndpointWish, VendorCall
from cloudtrain.launcher.prices import catalog

from . import prices
from .machine import block_of, choose, place_of
from .models import VertexRegistry

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

    from .api import Google

UNENFORCED = "Vertex AI deletes no endpoint by itself: a Cloud Tasks task of yours would have to"


def plan(wish: EndpointWish, config: JobConfig, google: Google) -> EndpointPlan:
    """Return the requests and the price. Raises ConfigError for a missing setting."""
    place, block, choice, name = place_of(config), block_of(config), choose(config), wish.name
    registry = VertexRegistry(wish.model, config, google)
    parent = f"projects/{place.project}/locations/{place.location}"
    machine: dict[str, Any] = {"machineType": choice.machine_type}
    if choice.accelerator is not None:
        machine |= {"acceleratorType": choice.accelerator, "acceleratorCount": choice.count}
    deployed: dict[str, Any] = {
        "model": f"{parent}/models/{wish.model.name}@v-{wish.model.version}",
        "displayName": name,
        "dedicatedResources": {
            "machineSpec": machine,
            "minReplicaCount": wish.instances,
            "maxReplicaCount": wish.instances,
        },
    }
    if block.service_account is not None:
        deployed["serviceAccount"] = block.service_account
    labels = {"cloudtrain_sha256": wish.model.version}
    calls = (
        *registry.calls,
        VendorCall(f"POST /v1/{parent}/endpoints?endpointId={name}", {"displayName": name, "labels": labels}),
        VendorCall(
            f"POST /v1/{parent}/endpoints/{name}:deployModel",
            {"deployedModel": deployed, "trafficSplit": {"0": 100}},
        ),
    )
    where = f"--project {place.project} --region {place.location}"
    undeploy = f"gcloud ai endpoints undeploy-model {name} {where} --deployed-model-id ID"
    delete = f"{undeploy} && gcloud ai endpoints delete {name} {where}"
    offer = prices.hourly(choice.machine, "standard")
    listed = (offer.usd, offer.source, offer.uncertainty)
    price = catalog.serving("vertex", block.price_per_hour, listed, choice.label, place.location)
    return EndpointPlan(name, registry.uri, calls, choice.label, *price, delete, unenforced=UNENFORCED)

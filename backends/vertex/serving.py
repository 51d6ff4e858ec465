"""The requests of a Vertex AI endpoint, as bodies for curl: `gcloud ai` takes no file of a whole request.

The image holds the model: the container needs no files in Cloud Storage then.
"""

from __future__ import annotations

from cloudtrain.launcher.backend.model_files import ServedModel, ServingFiles
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.planning import serving
from cloudtrain.launcher.planning.serving import Blank

from .machine import block_of, named, project_of, region_of

MACHINE = "n1-standard-4"  # 4 cores, 15 GB
_PROJECT = Blank("PROJECT", "the id of your Google Cloud project", "my-project")
_LOCATION = Blank("LOCATION", "the region", "europe-west4")
_VENDOR = serving.Vendor(
    "vertex",
    "Vertex AI",
    {
        "upload-model.json": "UploadModelRequest",
        "create-endpoint.json": "Endpoint",
        "deploy-model.json": "DeployModelRequest",
    },
    {
        "deployedModel.dedicatedResources.machineSpec": "--machine",
        "deployedModel.serviceAccount": "vertex.service_account",
    },
    (_PROJECT, _LOCATION),
)


def files(model: ServedModel, config: JobConfig) -> ServingFiles:
    """Return the files; pure. Raises ConfigError for a value that Vertex AI refuses."""
    block = block_of(config)
    known, project = region_of(block), project_of(block) or _PROJECT.mark
    choice = named(model.machine or MACHINE, "--machine", known)
    location = known or _LOCATION.mark
    registry, parent = f"{location}-docker.pkg.dev", f"projects/{project}/locations/{location}"
    values = {
        "model_id": f"{model.name}-{model.version}",
        "image": f"{registry}/{project}/cloudtrain/{model.name}:{model.version}",
        "registry": registry,
        "parent": parent,
        "url": f"https://{location}-aiplatform.googleapis.com/v1/{parent}",
        "project": project,
        "location": location,
        "machine": choice.machine_type,
        "accelerator": choice.accelerator,
        "accelerators": choice.count,
        "service_account": block.service_account,
    }
    return serving.rendered(_VENDOR, model, values, gpus=choice.count, place=serving.PLACE)

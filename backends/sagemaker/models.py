"""A model in SageMaker's registry: a model package group is the name, a model package is a version."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.backend.models import MANIFEST, CheckedModel, VendorCall

from . import api, files, request_images
from .api import AwsAccess, AwsClients
from .machine import block_of, place_of

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

MOST_METADATA = 50  # entries of CustomerMetadataProperties (botocore's model, 2026-11)
_NOT_ALLOWED = re.compile(r"[^\w .:/=+\-@]")


class SageMakerRegistry:
    """A model's place in the registry. AWS counts the versions; the token makes a repeated request the same version."""

    def __init__(self, model: CheckedModel, config: JobConfig, clients: AwsClients) -> None:
        self._model, self._access = model, access_of(config, clients)
        self.uri = model.place(place_of(config).root)
        name, kind = model.name, {"ContentType": "application/json"}
        package: dict[str, Any] = {
            "ModelPackageGroupName": name,
            "ModelPackageDescription": model.about[:1024],
            "ModelApprovalStatus": "PendingManualApproval",
            "InferenceSpecification": {
                "Containers": [{**container(model, config, self.uri), "Framework": "PYTORCH"}],
                "SupportedContentTypes": [kind["ContentType"]],
                "SupportedResponseMIMETypes": [kind["ContentType"]],
            },
            "CustomerMetadataProperties": _metadata(model),
            "MetadataProperties": {"GeneratedBy": f"cloudtrain/{model.facts.get('job', name)}"},
            "ClientToken": hashlib.sha256(f"{name}\n{model.digest}".encode()).hexdigest()[:32],
        }
        if model.metrics_file:
            digest = {"ContentDigest": f"sha256:{model.files[model.metrics_file]}"}
            statistics = {**kind, **digest, "S3Uri": f"{self.uri}{model.metrics_file}"}
            package["ModelMetrics"] = {"ModelQuality": {"Statistics": statistics}}
        group = {"ModelPackageGroupName": name, "ModelPackageGroupDescription": "Registered by cloudtrain"}
        self.calls = (VendorCall("CreateModelPackageGroup", group), VendorCall("CreateModelPackage", package))

    def find(self) -> str | None:
        """Return the version whose description has the digest."""
        with api.answers("list the model's versions"):
            pages = api.client(self._access, "sagemaker").get_paginator("list_model_packages")
            try:
                for page in pages.paginate(ModelPackageGroupName=self._model.name):
                    for each in page["ModelPackageSummaryList"]:
                        if f"sha256:{self._model.digest}" in each.get("ModelPackageDescription", ""):
                            return _version(each["ModelPackageArn"])
            except Exception as error:
                if api.code_of(error) not in ("ValidationException", "ResourceNotFound"):
                    raise
        return None

    def upload(self) -> None:
        """Upload the files to the job's bucket."""
        files.of(self._access).put_model(self.uri, self._model.path, self._model.uploads, MANIFEST)

    def create(self) -> str:
        """Make the group unless it exists, then the version."""
        client = api.client(self._access, "sagemaker", patient=True)
        group, package = self.calls
        with api.answers("register the model"):
            try:
                client.create_model_package_group(**group.body)
            except Exception as error:
                if "already exist" not in str(error):
                    raise
            return _version(client.create_model_package(**package.body)["ModelPackageArn"])


def access_of(config: JobConfig, clients: AwsClients) -> AwsAccess:
    """Return the access to the account that the config's jobs use. Raises ConfigError for a missing setting."""
    block = block_of(config)
    return AwsAccess(place_of(config).region, block.profile, tuple(sorted(block.endpoints.items())), clients)


def container(model: CheckedModel, config: JobConfig, uri: str, gpus: int = 0) -> dict[str, Any]:
    """Return image and files of the model's container. SageMaker itself starts the image with the word `serve`."""
    source = {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
    image = model.image or config.image or request_images.default_image(place_of(config).region, gpus)
    return {"Image": image, "ModelDataSource": {"S3DataSource": source}}


def _metadata(model: CheckedModel) -> dict[str, str]:
    """Return the tags in the characters that SageMaker allows."""
    plain = {
        _NOT_ALLOWED.sub("_", key)[:128]: _NOT_ALLOWED.sub("_", value)[:256] for key, value in model.tags().items()
    }
    return dict([(key, value) for key, value in plain.items() if value][:MOST_METADATA])


def _version(arn: str) -> str:
    """Return name and number of a version: `digits/3`."""
    return "/".join(arn.rsplit("/", 2)[1:])

"""A model in Vertex AI's registry: an alias made of the manifest's hash names a version.

An upload takes no request id, and a repeated upload would make a second version: a mark in the bucket admits one
process at a time.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.backend.models import MANIFEST, SERVE, CheckedModel, VendorCall
from cloudtrain.launcher.errors import ConfigError, UnreachableError
from cloudtrain.launcher.models.exclusive import alone

from ..http import object_in
from . import api, files
from .api import Google, GoogleError, VertexAccess
from .machine import block_of, place_of

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

PORT = 8080
WAIT_S, PAUSE_S = 300.0, 1.0  # for an upload, which is an operation at Google
_LABEL = re.compile(r"[^a-z0-9_-]")


class VertexRegistry:
    """A model's place in the registry."""

    def __init__(self, model: CheckedModel, config: JobConfig, google: Google) -> None:
        place, block = place_of(config), block_of(config)
        endpoints = tuple(sorted(block.endpoints.items()))
        self._model, self._access = model, VertexAccess(place.project, place.location, endpoints, google)
        self.uri = model.place(place.root)
        self._alias = f"v-{model.version}"
        labels = {"cloudtrain_sha256": model.version, "cloudtrain_job": model.facts.get("job", "")}
        resource = {
            "displayName": model.name,
            "description": "Registered by cloudtrain",
            "versionDescription": model.about,
            "versionAliases": [self._alias],
            "labels": {key: _LABEL.sub("-", value.lower())[:63] for key, value in labels.items() if value},
            "artifactUri": self.uri.rstrip("/"),
            "containerSpec": container(model, config),
        }
        path = f"POST /v1/{self._access.parent}/models:upload"
        # Of a later version, `parentModel` takes the place of `modelId`: `create` looks which.
        self.calls = (VendorCall(path, {"modelId": model.name, "model": resource}),)

    def find(self) -> str | None:
        """Return the version with the alias."""
        with api.answers("look for the model's version"):
            found = self._get(f"{self._model.name}@{self._alias}")
        return None if found is None else f"{self._model.name}@{found['versionId']}"

    def upload(self) -> None:
        """Upload the files to the job's bucket."""
        files.require_bucket(self._access, self.uri)
        with api.answers("upload the model", needs=files.ROLE):
            files.of(self._access).put_model(self.uri, self._model.path, self._model.uploads, MANIFEST)

    def create(self) -> str:
        """Make the version, unless another process has made the same version meanwhile."""
        with (
            api.answers("register the model"),
            alone(files.of(self._access).open_at, self.uri),
        ):
            if (known := self.find()) is not None:
                return known
            body = dict(self.calls[0].body)
            if self._get(self._model.name) is not None:
                body = {"parentModel": f"{self._access.parent}/models/{body.pop('modelId')}", **body}
            url = f"{self._access.url('aiplatform')}/v1/{self._access.parent}/models:upload"
            # A single try: `find` knows after a lost answer, and the next call of `register` asks.
            found = object_in(api.call(self._access, "POST", url, body=body, tries=1))
            return f"{self._model.name}@{self._ended(found)['modelVersionId']}"

    def _get(self, name: str) -> dict[str, Any] | None:
        try:
            return api.get_json(self._access, "aiplatform", f"/v1/{self._access.parent}/models/{name}")
        except GoogleError as error:
            if error.status != 404:
                raise
            return None

    def _ended(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Wait for the operation's end; return its response. Raises ConfigError, UnreachableError."""
        end_s = time.monotonic() + WAIT_S
        while not operation.get("done"):
            if time.monotonic() > end_s:
                raise UnreachableError("Google is still registering the model", hint="ask again: cloudtrain register")
            time.sleep(PAUSE_S)
            operation = api.get_json(self._access, "aiplatform", f"/v1/{operation['name']}")
        if "error" in operation:
            raise ConfigError(f"Google refuses the model: {operation['error'].get('message')}")
        found: dict[str, Any] = operation["response"]
        return found


def container(model: CheckedModel, config: JobConfig) -> dict[str, Any]:
    """Return how the model's container starts. Raises ConfigError without an image."""
    image = model.image or config.image
    if image is None:
        hint = "--image with an image in Artifact Registry that has cloudtrain and torch: see docs/deploy.md"
        raise ConfigError("Vertex AI registers no files without a container image", key="image", hint=hint)
    return {
        "imageUri": image,
        "command": list(SERVE),
        "ports": [{"containerPort": PORT}],
        "predictRoute": "/predict",
        "healthRoute": "/v2/health/ready",
    }

"""A model in Azure ML's registry of the workspace: the version is the beginning of the manifest's hash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.backend.models import MANIFEST, CheckedModel, VendorCall
from cloudtrain.launcher.errors import ConfigError

from . import api, files
from .api import Azure, AzureAccess
from .machine import block_of, workspace_of

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig


class AzureRegistry:
    """A model's place in the registry. A name and a version exist once, so a repeated PUT makes no second version."""

    def __init__(self, model: CheckedModel, config: JobConfig, azure: Azure) -> None:
        block, workspace = block_of(config), workspace_of(block_of(config))
        self._model, self._access = model, AzureAccess(workspace, azure)
        home = f"subscriptions/{workspace.subscription}/resourcegroups/{workspace.resource_group}"
        store = f"azureml://{home}/workspaces/{workspace.name}/datastores/{block.datastore}/paths"
        self.uri = model.place(f"{store}/{block.prefix.strip('/')}".rstrip("/"))
        self._path = f"/models/{model.name}/versions/{model.version}"
        properties = {
            "modelType": "custom_model",
            "modelUri": self.uri,
            "description": model.about,
            "tags": model.tags(),
            "properties": {"cloudtrain.sha256": model.digest},
        }
        self.calls = (VendorCall(f"PUT {workspace.arm_id}{self._path}", {"properties": properties}),)

    def find(self) -> str | None:
        """Return the version. Raises ConfigError for a foreign model of the same name and version."""
        with api.answers("look for the model's version"):
            try:
                found: dict[str, Any] = api.get_json(self._access, self._path).get("properties") or {}
            except api.AzureError as error:
                if not api.is_absent(error):
                    raise
                return None
        version = f"{self._model.name}:{self._model.version}"
        if (found.get("properties") or {}).get("cloudtrain.sha256") != self._model.digest:
            raise ConfigError(f"{version} is another model", hint="choose another --name")
        return version

    def upload(self) -> None:
        """Upload the files to the job's datastore."""
        files.put_model(self._access, self.uri, self._model.path, self._model.uploads, MANIFEST)

    def create(self) -> str:
        """Make the version."""
        with api.answers("register the model"):
            api.arm(self._access, "PUT", self._path, body=self.calls[0].body)
        return f"{self._model.name}:{self._model.version}"

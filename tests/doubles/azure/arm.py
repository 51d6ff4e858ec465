"""management.azure.com: the workspace, its clusters and datastores, uploaded code, and environments."""

import time
import uuid
from typing import Any

from doubles.azure import names
from doubles.azure.errors import AzureError
from doubles.azure.world import World
from doubles.wire import Answer, Request, json_answer

ASSETS = {
    ("data", "digits"): ("2", "uri_folder"),
    ("data", "labels"): ("3", "uri_file"),
    ("models", "start"): ("1", "custom_model"),
}
DATASTORES = {"workspaceblobstore": names.CONTAINER, "workspaceartifactstore": names.ARTIFACTS}
_SECRETS = {"key": "AccountKey", "sas": "Sas", "none": "None"}
CHANGED_PATH = "The asset's path is immutable: it cannot be changed once it is set."


def check_workspace(subscription: str, group: str, workspace: str) -> None:
    """Raise AzureError unless the workspace is the stand-in's."""
    if subscription.lower() != names.SUBSCRIPTION:
        raise AzureError(404, "SubscriptionNotFound", f"The subscription '{subscription}' could not be found.")
    expected = names.workspace_id().split("/")
    if group.lower() != expected[4].lower():
        raise AzureError(404, "ResourceGroupNotFound", f"Resource group '{group}' could not be found.")
    if workspace.lower() != names.WORKSPACE:
        message = (
            f"The Resource 'Microsoft.MachineLearningServices/workspaces/{workspace}' under resource group '{group}' "
            "was not found. For more details please go to https://aka.ms/ARMResourceNotFoundFix"
        )
        raise AzureError(404, "ResourceNotFound", message)


def resource(kind: str, path: str, properties: Any, **more: Any) -> dict[str, Any]:
    """Return a resource of the workspace in ARM's form; `path` as in computes/NAME."""
    name = path.rpartition("/")[2]
    full = f"Microsoft.MachineLearningServices/workspaces/{kind}"
    return {"id": f"{names.workspace_id()}/{path}", "name": name, "type": full, "properties": properties, **more}


def get_workspace(world: World, request: Request) -> Answer:
    """Return the workspace."""
    host = f"https://{names.REGION}.api.azureml.ms"
    properties = {
        "friendlyName": names.WORKSPACE,
        "description": "",
        "storageAccount": names.provider_id("Microsoft.Storage", "storageAccounts", names.ACCOUNT),
        "keyVault": names.provider_id("Microsoft.Keyvault", "vaults", names.VAULT),
        "applicationInsights": names.provider_id("Microsoft.insights", "components", f"{names.WORKSPACE}-insights"),
        "containerRegistry": None,
        "hbiWorkspace": False,
        "tenantId": names.TENANT,
        "imageBuildCompute": None,
        "provisioningState": "Succeeded",
        "creationTime": "2026-01-01T00:00:00.0000000Z",
        "v1LegacyMode": False,
        "softDeleteEnabled": False,
        "workspaceId": names.WORKSPACE_ID,
        "discoveryUrl": f"{host}/discovery",
        "mlFlowTrackingUri": f"azureml://{names.REGION}.api.azureml.ms/mlflow/v1.0{names.workspace_id()}",
        "sdkTelemetryAppInsightsKey": None,
        "enableDataIsolation": False,
        "publicNetworkAccess": "Enabled",
        "systemDatastoresAuthMode": "identity" if world.settings.datastore_credentials == "none" else "accesskey",
    }
    identity = {"type": "SystemAssigned", "principalId": names.WORKSPACE_ID, "tenantId": names.TENANT}
    return json_answer(
        {
            "id": names.workspace_id(),
            "name": names.WORKSPACE,
            "type": "Microsoft.MachineLearningServices/workspaces",
            "location": names.REGION,
            "tags": {},
            "kind": "Default",
            "sku": {"name": "Basic", "tier": "Basic"},
            "identity": identity,
            "properties": properties,
        }
    )


def get_compute(world: World, request: Request, name: str) -> Answer:
    """Return a cluster."""
    found = next((one for one in world.computes if one.lower() == name.lower()), None)
    if found is None:
        raise AzureError(
            404, "ResourceNotFound", f"Compute with name {name} was not found in workspace {names.WORKSPACE}."
        )
    return json_answer(_compute(world, found))


def list_computes(world: World, request: Request) -> Answer:
    """Return all clusters."""
    return json_answer({"value": [_compute(world, name) for name in world.computes]})


def get_datastore(world: World, request: Request, name: str) -> Answer:
    """Return a datastore."""
    _check_datastore(name)
    return json_answer(_datastore(world, name))


def list_secrets(world: World, request: Request, name: str) -> Answer:
    """Return the datastore's key or a SAS of its container."""
    _check_datastore(name)
    kind = world.settings.datastore_credentials
    told: dict[str, Any] = {"secretsType": _SECRETS[kind]}
    if kind == "key":
        told["key"] = names.ACCOUNT_KEY
    elif kind == "sas":
        told["sasToken"] = world.sas_uri(DATASTORES[name.lower()], None, "racwdl").partition("?")[2]
    return json_answer(told)


def _compute(world: World, name: str) -> dict[str, Any]:
    return resource("computes", f"computes/{name}", world.computes[name], location=names.REGION, tags={})


def _check_datastore(name: str) -> None:
    if name.lower() not in DATASTORES:
        raise AzureError(404, "UserError", f"Could not find datastore: {name} in this workspace.")


def _datastore(world: World, name: str) -> dict[str, Any]:
    properties = {
        "description": None,
        "tags": None,
        "properties": None,
        "isDefault": name == "workspaceblobstore",
        "credentials": {"credentialsType": _SECRETS[world.settings.datastore_credentials]},
        "datastoreType": "AzureBlob",
        "accountName": names.ACCOUNT,
        "containerName": DATASTORES[name.lower()],
        "endpoint": "core.windows.net",
        "protocol": "https",
        "serviceDataAccessAuthIdentity": "WorkspaceSystemAssignedIdentity",
    }
    return resource("datastores", f"datastores/{name}", properties)


def get_asset(world: World, request: Request, kind: str, name: str, version: str = "") -> Answer:
    """Return a data asset or a model, or its version, of the workspace's fixed list."""
    found = ASSETS.get((kind, name))
    if found is None or version not in ("", found[0]):
        raise AzureError(404, "UserError", f"Not found {kind} {name}:{version}.")
    if not version:
        return json_answer(resource(kind, f"{kind}/{name}", {"latestVersion": found[0]}))
    told = {"dataType" if kind == "data" else "modelType": found[1]}
    return json_answer(resource(f"{kind}/versions", f"{kind}/{name}/versions/{version}", told))


def list_codes(world: World, request: Request, name: str) -> Answer:
    """Return the versions of a code, or the versions of all codes with the content hash `hash`."""
    wanted = request.query.get("hash")
    found = []
    for (code, version), body in world.codes.items():
        hashed = (body["properties"].get("properties") or {}).get("hash_sha256")
        if hashed == wanted if wanted else code == name:
            found.append(_code(world, code, version))
    return json_answer({"value": found})


def get_code(world: World, request: Request, name: str, version: str) -> Answer:
    """Return a code version."""
    if (name, version) not in world.codes:
        raise AzureError(404, "UserError", f"Not found code {name}:{version}.")
    return json_answer(_code(world, name, version))


def put_code(world: World, request: Request, name: str, version: str) -> Answer:
    """Register a code version whose files are uploaded."""
    body = request.json()
    uri = (body.get("properties") or {}).get("codeUri")
    if not uri:
        raise AzureError(400, "UserError", "CodeUri is required.")
    old = world.codes.get((name, version))
    if old is not None and old["properties"]["codeUri"] != uri:
        raise AzureError(409, "UserError", CHANGED_PATH)
    world.codes[name, version] = {**body, "created": time.time()}
    return json_answer(_code(world, name, version), 201 if old is None else 200)


def start_upload(world: World, request: Request, name: str, version: str) -> Answer:
    """Make a container for the files of a code version; return a signature for writing to the container."""
    container = f"5ab50000-{name}"[:63].lower()
    world.blobs.make(container)
    uri = f"https://{names.ACCOUNT}.blob.core.windows.net/{container}"
    reference = {
        "blobUri": uri,
        "storageAccountArmId": names.provider_id("Microsoft.Storage", "storageAccounts", names.ACCOUNT),
        "credential": {"credentialType": "SAS", "sasUri": world.sas_uri(container, None, "rcwl")},
    }
    told = {"pendingUploadId": str(uuid.uuid4()), "pendingUploadType": "TemporaryBlobReference"}
    return json_answer({**told, "blobReferenceForConsumption": reference})


def put_environment(world: World, request: Request, name: str, version: str) -> Answer:
    """Register an environment."""
    body = request.json()
    if not isinstance(body.get("properties"), dict):
        raise AzureError(400, "UserError", "The environment has no properties.")
    is_new = (name, version) not in world.environments
    world.environments[name, version] = {**body, "created": time.time()}
    return json_answer(_environment(world, name, version), 201 if is_new else 200)


def _code(world: World, name: str, version: str) -> dict[str, Any]:
    return _asset(world.codes[name, version], "codes", name, version, description=None)


def _environment(world: World, name: str, version: str) -> dict[str, Any]:
    body = world.environments[name, version]
    return _asset(body, "environments", name, version, environmentType="UserCreated", osType="Linux")


def _asset(body: dict[str, Any], kind: str, name: str, version: str, **more: Any) -> dict[str, Any]:
    told = {"isAnonymous": False, "isArchived": False, "tags": {}, **more, **body["properties"]}
    told["provisioningState"] = "Succeeded"
    when = names.iso_time(body["created"])
    who = {"createdBy": "cloudtrain", "createdByType": "Application", "createdAt": when}
    who |= {"lastModifiedAt": when, "lastModifiedBy": "cloudtrain", "lastModifiedByType": "Application"}
    return resource(f"{kind}/versions", f"{kind}/{name}/versions/{version}", told, systemData=who)

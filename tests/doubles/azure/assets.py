"""management.azure.com: uploaded code, and environments."""

from __future__ import annotations

import time
import uuid
from typing import Any

from doubles.azure.arm import resource
from doubles.azure.errors import AzureError
from doubles.azure.names import ACCOUNT, iso_time, provider_id
from doubles.azure.world import World
from doubles.wire import Answer, Request, json_answer

__all__ = ["get_code", "list_codes", "put_code", "put_environment"]
__all__ += ["start_upload"]

CHANGED_PATH = "The asset's path is immutable: it cannot be changed once it is set."


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
    uri = f"https://{ACCOUNT}.blob.core.windows.net/{container}"
    reference = {
        "blobUri": uri,
        "storageAccountArmId": provider_id("Microsoft.Storage", "storageAccounts", ACCOUNT),
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
    when = iso_time(body["created"])
    who = {"createdBy": "cloudtrain", "createdByType": "Application", "createdAt": when}
    who |= {"lastModifiedAt": when, "lastModifiedBy": "cloudtrain", "lastModifiedByType": "Application"}
    return resource(f"{kind}/versions", f"{kind}/{name}/versions/{version}", told, systemData=who)

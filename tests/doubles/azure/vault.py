"""<vault>.vault.azure.net: write, read and remove secrets."""

import time
import uuid
from typing import Any

from doubles.azure.errors import AzureError
from doubles.azure.names import JOB_CLIENT, VAULT
from doubles.azure.world import World
from doubles.wire import Answer, Request, json_answer

MAX_BYTES = 25 * 1024  # of a value; Azure's documented limit


def put(world: World, request: Request, name: str) -> Answer:
    """Write a new version of a secret."""
    _check(world, request, "setSecret", name)
    told = request.json()
    if not isinstance(told.get("value"), str):
        raise AzureError(400, "BadParameter", "The request body is missing the field value.")
    if len(told["value"].encode()) > MAX_BYTES:
        raise AzureError(400, "BadParameter", f"The secret's value exceeds the maximum of {MAX_BYTES} bytes.")
    if name.lower() in world.deleted_secrets:
        message = (
            f"Secret {name} is currently in a deleted but recoverable state, and its name cannot be reused; in this "
            "state, the secret can only be recovered or purged."
        )
        raise AzureError(409, "Conflict", message)  # the inner error is ObjectIsDeletedButRecoverable
    version = {"value": told["value"], "id": uuid.uuid4().hex, "created": time.time(), "tags": told.get("tags")}
    world.secrets.setdefault(name.lower(), []).append(version)
    return json_answer(_bundle(name, version))


def get(world: World, request: Request, name: str, version: str = "") -> Answer:
    """Return a secret."""
    _check(world, request, "getSecret", name)
    versions = world.secrets.get(name.lower(), [])
    found = [one for one in versions if version in ("", one["id"])]
    if not found:
        raise _missing(name)
    return json_answer(_bundle(name, found[-1]))


def delete(world: World, request: Request, name: str) -> Answer:
    """Remove a secret."""
    _check(world, request, "deleteSecret", name)
    versions = world.secrets.pop(name.lower(), None)
    if not versions:
        raise _missing(name)
    world.deleted_secrets.add(name.lower())  # soft deletion, as in every new vault
    return json_answer(_deleted(name, versions[-1]))


def _check(world: World, request: Request, action: str, name: str) -> None:
    if "api-version" not in request.query:
        raise AzureError(400, "BadParameter", "The api-version is missing.")
    if request.headers.get("x-stand-in-client") != JOB_CLIENT and not world.settings.vault_access:
        message = (
            f"Caller is not authorized to perform action on resource. Action: 'Microsoft.KeyVault/vaults/secrets/"
            f"{action}/action' Resource: '{name}'"
        )
        raise AzureError(403, "Forbidden", message)


def _missing(name: str) -> AzureError:
    return AzureError(404, "SecretNotFound", f"A secret with (name/id) {name} was not found in this key vault.")


def _deleted(name: str, version: dict[str, Any]) -> dict[str, Any]:
    now = int(time.time())
    told = _bundle(name, version)
    del told["value"]
    recovery = f"https://{VAULT}.vault.azure.net/deletedsecrets/{name}"
    return {**told, "recoveryId": recovery, "deletedDate": now, "scheduledPurgeDate": now + 90 * 86_400}


def _bundle(name: str, version: dict[str, Any]) -> dict[str, Any]:
    created = int(version["created"])
    attributes = {"enabled": True, "created": created, "updated": created, "recoveryLevel": "Recoverable+Purgeable"}
    identity = f"https://{VAULT}.vault.azure.net/secrets/{name}/{version['id']}"
    return {"value": version["value"], "id": identity, "attributes": attributes, "tags": version.get("tags") or {}}

"""A job's secrets in transit: one entry of the workspace's key vault, until the job's end is seen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cloudtrain.launcher.errors import ConfigError

from . import api
from .api import AzureAccess

VERSION = "7.4"
ROLE = "Key Vault Secrets Officer on the workspace's key vault"
MAX_BYTES = 25_000  # of one entry


def url_of(access: AzureAccess, job: str) -> str:
    """Return the entry's address, unique for the workspace and job. Raises AzureError, ConfigError."""
    properties = api.get_json(access, "").get("properties") or {}
    vault = str(properties.get("keyVault") or "").rpartition("/")[2]
    if not vault:
        message = f"the workspace {access.workspace.name} has no key vault for secrets"
        raise ConfigError(message, hint="leave `secrets` out")
    name = hashlib.sha256(f"{access.workspace.arm_id}/{job}".lower().encode()).hexdigest()[:32]
    return f"https://{vault}.{api.HOSTS[access.workspace.cloud][2]}/secrets/cloudtrain-{name}"


def put(access: AzureAccess, url: str, secrets: Mapping[str, str]) -> None:
    """Store the values. Raises AzureError, or ConfigError if the values are too long together."""
    text = json.dumps(dict(secrets))
    if len(text.encode()) > MAX_BYTES:
        message = f"the secrets have more than the {MAX_BYTES} bytes that a key vault takes together"
        raise ConfigError(message, key="secrets", hint="put long ones into a file of your own in blob storage")
    _call(access, "PUT", url, {"value": text})


def remove(access: AzureAccess, url: str) -> None:
    """Remove the entry if it exists. Raises AzureError."""
    try:
        _call(access, "DELETE", url)
    except api.AzureError as error:
        if not api.is_absent(error):
            raise


def _call(access: AzureAccess, method: str, url: str, body: Any = None) -> None:
    audience = f"https://{api.HOSTS[access.workspace.cloud][2]}"
    access.call(method, url, audience, params={"api-version": VERSION}, body=body)

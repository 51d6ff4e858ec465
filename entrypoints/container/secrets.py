"""Reads a container's secrets from the platform's own secret store, by name; no request and no file has the values."""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlencode, urlsplit

from ..contract import ParameterSecrets, SecretManagerSecrets, SecretSource
from ..stores import google_access
from ..stores.retries import tries

_BATCH = 10  # SSM's limit per call
_TRIES, _PAUSE_S, _TIMEOUT_S = 5, 2.0, 30.0
_GOOGLE = "https://secretmanager.googleapis.com"


class SecretError(Exception):
    """A secret cannot be read; the message names the secret and the fix."""


def fetch(source: SecretSource | None) -> dict[str, str]:
    """Return the secrets by name, from the store of the secrets; None without secrets. Raises SecretError."""
    if source is None or not source.names:
        return {}
    if isinstance(source, ParameterSecrets):
        found, place = _from_parameters(source), source.prefix
    elif isinstance(source, SecretManagerSecrets):
        found, place = _from_secret_manager(source.secret, source.endpoint or _GOOGLE), source.secret
    elif source.vault is not None:
        found, place = _from_vault(source.vault, is_user=source.identity == "user"), source.vault
    else:
        raise SecretError("the secrets of this job were not stored: submit it with `cloudtrain submit`")
    missing = sorted(set(source.names) - set(found))
    if missing:
        raise SecretError(f"the secrets {', '.join(missing)} are no longer below {place}")
    return {name: found[name] for name in source.names}


def _from_parameters(source: ParameterSecrets) -> dict[str, str]:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise SecretError(
            "the image lacks boto3, which reads the job's secrets: add it to the image, or leave `secrets` out"
        ) from error
    keys = {f"{source.prefix}/{name}": name for name in source.names}
    paths = list(keys)
    found: dict[str, str] = {}
    try:
        client = boto3.client("ssm", region_name=source.region)
        for at in range(0, len(paths), _BATCH):
            answer = client.get_parameters(Names=paths[at : at + _BATCH], WithDecryption=True)
            found |= {keys[item["Name"]]: item["Value"] for item in answer["Parameters"]}
    except (BotoCoreError, ClientError) as error:
        raise SecretError(
            f"the job's secrets cannot be read: {error}; the execution role needs ssm:GetParameters on "
            f"parameter{source.prefix}/*"
        ) from error
    return found


def _from_vault(url: str, *, is_user: bool) -> dict[str, str]:
    """Return the value of an entry of an Azure key vault: a JSON object."""
    host = urlsplit(url).netloc
    try:
        token = _azure_token(f"https://{host.partition('.')[2]}", is_user=is_user)
        return dict(json.loads(_get(f"{url}?api-version=7.4", {"Authorization": f"Bearer {token}"})["value"]))
    except (OSError, ValueError, KeyError) as error:
        raise SecretError(
            f"the job's secrets cannot be read: the job's identity (azureml.identity) needs the role Key Vault Secrets "
            f"User on {host}: {error}"
        ) from error


def _from_secret_manager(name: str, endpoint: str) -> dict[str, str]:
    """Return the value of a secret in Google's Secret Manager, in the named or the latest version: a JSON object."""
    identity = google_access.of_environment()
    secret, _, version = name.partition("/versions/")
    try:
        bearer = {"Authorization": f"Bearer {identity.token()}"}
        answer = _get(f"{endpoint}/v1/{secret}/versions/{version or 'latest'}:access", bearer)
        return dict(json.loads(base64.b64decode(answer["payload"]["data"])))
    except (OSError, ValueError, KeyError) as error:
        raise SecretError(
            f"the job's secrets cannot be read: {identity.who} needs the role Secret Manager Secret Accessor on "
            f"{secret}: {error}"
        ) from error


def _azure_token(resource: str, *, is_user: bool) -> str:
    """Return a token of the job's identity, from the endpoint that Azure ML gives its containers.

    Source: azure-ai-ml 1.35 (on behalf of the user) and azure-identity 1.27 (managed identity).
    """
    query, headers = {"resource": resource}, {}
    if not (is_user and (url := os.environ.get("OBO_ENDPOINT"))):
        if not (url := os.environ.get("MSI_ENDPOINT")):
            raise ValueError("Azure ML gives this container no identity")
        query["api-version"] = "2017-09-01"
        if own := os.environ.get("DEFAULT_IDENTITY_CLIENT_ID"):
            query["clientid"] = own
        headers["secret"] = os.environ.get("MSI_SECRET", "")
    answer = _get(f"{url}?{urlencode(query)}", headers, is_here=True)
    return str(answer.get("access_token") or answer["token"])


def _get(url: str, headers: dict[str, str], *, is_here: bool = False) -> dict[str, Any]:
    """Return the JSON object at the address, with retries: at a job's start many services are not ready yet.

    `is_here`: the address is the machine's own, so the request must not use a proxy.
    """
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))
    request = urllib.request.Request(url, headers=headers)
    for _ in tries(_TRIES, _PAUSE_S, doubles=False):
        try:
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            with error:
                words = " ".join(error.read(500).decode(errors="replace").split())
            failure = OSError(f"HTTP {error.code}: {words}")
            if error.code < 500 and error.code != 429:
                break
        except OSError as error:
            failure = error
    raise failure

"""A job's secrets in Secret Manager: one entry for each job, a JSON object of all values, removed after the job."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping

from ..http import object_in
from . import api
from .api import GoogleError, VertexAccess

ROLE = "Secret Manager Admin (roles/secretmanager.admin)"
LONGEST_S = 30 * 86_400  # until Google removes the entry, even if cloudtrain never does


def put(access: VertexAccess, secret: str, values: Mapping[str, str]) -> None:
    """Store the values as the newest version of `projects/P/secrets/NAME`. Raises GoogleError."""
    base, (_, project, _, name) = access.url("secretmanager"), secret.split("/")
    body = {"replication": {"automatic": {}}, "ttl": f"{LONGEST_S}s", "labels": {"cloudtrain_run": name}}
    try:
        _post(access, f"{base}/v1/projects/{project}/secrets", body, {"secretId": name})
    except GoogleError as error:
        if error.status != 409:  # an earlier try made the entry
            raise
    data = base64.b64encode(json.dumps(dict(values)).encode()).decode()
    try:
        _post(access, f"{base}/v1/{secret}:addVersion", {"payload": {"data": data}})
    except GoogleError:
        with contextlib.suppress(GoogleError):  # a role may allow creating an entry and forbid filling the entry
            remove(access, secret)
        raise


def remove(access: VertexAccess, secret: str) -> None:
    """Remove the entry with all its versions. Raises GoogleError."""
    try:
        api.call(access, "DELETE", f"{access.url('secretmanager')}/v1/{secret}")
    except GoogleError as error:
        if error.status != 404:
            raise


def _post(access: VertexAccess, url: str, body: object, params: Mapping[str, str] | None = None) -> None:
    object_in(api.call(access, "POST", url, params=params, body=body))  # raises for a proxy's page

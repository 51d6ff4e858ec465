"""A job's files in Cloud Storage: the code, named by its content, the container order, the output, the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from cloudtrain.backends.vertex import api
from cloudtrain.backends.vertex.api import GoogleError, VertexAccess
from cloudtrain.entrypoints import job_files
from cloudtrain.launcher.errors import ConfigError, Fault, UsageError

__all__ = [
    "ROLE",
    "account",
    "claim",
    "exists",
    "has_checkpoint",
    "names",
    "owner",
    "put_order",
    "read_order",
    "require_bucket",
    "retract",
]

ROLE = "Storage Object User (roles/storage.objectUser) on the bucket"


def require_bucket(access: VertexAccess, uri: str) -> None:
    """Raise ConfigError if the bucket does not exist. A 403 passes: the upload reports missing permissions."""
    bucket = api.split_uri(uri)[0]
    with api.answers(f"look at the bucket {bucket}", needs=ROLE):
        try:
            api.get_json(access, "storage", f"/storage/v1/b/{quote(bucket, safe='')}", {"fields": "location"})
        except GoogleError as error:
            if error.status == 404:
                hint = f"gcloud storage buckets create gs://{bucket} --location {access.location}, or fix the name"
                fault = Fault(f"there is no bucket {bucket}", key="vertex.staging_bucket", hint=hint)
                raise ConfigError([fault]) from error
            if error.status != 403:
                raise


def exists(access: VertexAccess, uri: str, size: int) -> bool:
    """Return whether the object exists with this size in bytes. Raises GoogleError."""
    try:
        answer = api.object_in(api.call(access, "GET", api.object_url(access, uri), params={"fields": "size"}))
    except GoogleError as error:
        if error.status in (403, 404):  # a role may allow writing and forbid reading
            return False
        raise
    return int(answer.get("size", -1)) == size


def claim(access: VertexAccess, uri: str, owner_id: str) -> None:
    """Claim the job's folder for this owner. Raises UsageError if another owner has the name, or GoogleError.

    The first owner keeps the folder for all attempts; else two machines' jobs of one name would share checkpoints.
    """
    try:
        _put(access, uri, owner_id.encode(), {"ifGenerationMatch": "0"})
    except GoogleError as error:
        if error.status != 412:
            raise
        if owner(access, uri) != owner_id:
            message = f"another machine, or another user, has a job of this name: {uri.rpartition('/')[0]}"
            raise UsageError(message, hint="choose another --name") from error


def owner(access: VertexAccess, uri: str) -> str | None:
    """Return the folder's owner, or None if no owner has claimed the folder. Raises GoogleError."""
    found = _get(access, uri)
    return None if found is None else found.decode(errors="replace")


def put_order(access: VertexAccess, uri: str, order: dict[str, Any]) -> None:
    """Write the container order. Raises GoogleError."""
    _put(access, uri, json.dumps(order, sort_keys=True).encode(), {})


def read_order(access: VertexAccess, uri: str) -> dict[str, Any] | None:
    """Return the container order, or None if the order was retracted. Raises GoogleError."""
    return _object_in(_get(access, uri))


def retract(access: VertexAccess, uri: str) -> None:
    """Remove the job's container order: replicas of a late request find no order, and end. Raises GoogleError."""
    try:
        api.call(access, "DELETE", api.object_url(access, uri))
    except GoogleError as error:
        if error.status != 404:
            raise


def account(access: VertexAccess, uri: str, nodes: int) -> dict[str, Any] | None:
    """Return a container's exit report: the report of the lowest node that has written one. Raises GoogleError."""
    there = set(names(access, uri))
    for name in (f"{uri}-{node}.json" for node in range(nodes)):
        if api.split_uri(name)[1] in there and (found := _object_in(_get(access, name))) is not None:
            return found
    return None


def has_checkpoint(access: VertexAccess, uri: str) -> bool:
    """Return whether the folder has a complete checkpoint, by the same rule as the node's. Raises GoogleError."""
    prefix = api.split_uri(uri)[1].rstrip("/") + "/"
    tops = (name.removeprefix(prefix).partition("/")[0] for name in names(access, uri.rstrip("/") + "/"))
    return any(job_files.is_whole(name) for name in tops)


def names(access: VertexAccess, uri: str) -> Iterator[str]:
    """Yield the object names that begin with the URI's prefix, over all pages. Raises GoogleError."""
    bucket, prefix = api.split_uri(uri)
    asked = {"prefix": prefix, "fields": "items(name),nextPageToken"}
    while True:
        page = api.get_json(access, "storage", f"/storage/v1/b/{quote(bucket, safe='')}/o", asked)
        yield from (item["name"] for item in page.get("items", ()))
        if not page.get("nextPageToken"):
            return
        asked["pageToken"] = page["nextPageToken"]


def _object_in(data: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object in the data, or None if the data holds no JSON object."""
    try:
        found = json.loads(data or b"")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _put(access: VertexAccess, uri: str, data: bytes, conditions: dict[str, str]) -> None:
    name = api.split_uri(uri)[1]
    params = {"uploadType": "media", "name": name, **conditions}
    api.object_in(api.call(access, "POST", api.object_url(access, uri, upload=True), params=params, data=data))


def _get(access: VertexAccess, uri: str) -> bytes | None:
    try:
        found: bytes = api.call(access, "GET", api.object_url(access, uri), params={"alt": "media"}).content
    except GoogleError as error:
        if error.status != 404:
            raise
        return None
    return found

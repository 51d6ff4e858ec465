"""A job's files in Cloud Storage: the code by its content, the job's own order, what has come of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from cloudtrain.backends.vertex import rest
from cloudtrain.backends.vertex.rest import Access, GoogleError
from cloudtrain.entrypoints import places
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


def require_bucket(access: Access, uri: str) -> None:
    """Raise ConfigError where there is no such bucket; who may not ask hears it from the upload."""
    bucket = rest.split_uri(uri)[0]
    with rest.answers(f"look at the bucket {bucket}", needs=ROLE):
        try:
            rest.get_json(access, "storage", f"/storage/v1/b/{quote(bucket, safe='')}", {"fields": "location"})
        except GoogleError as error:
            if error.status == 404:
                hint = f"gcloud storage buckets create gs://{bucket} --location {access.location}, or fix the name"
                fault = Fault(f"there is no bucket {bucket}", key="vertex.staging_bucket", hint=hint)
                raise ConfigError([fault]) from error
            if error.status != 403:
                raise


def exists(access: Access, uri: str, size: int) -> bool:
    """Return whether the object is there with so many bytes. Raises GoogleError."""
    try:
        told = rest.object_in(rest.call(access, "GET", rest.object_url(access, uri), params={"fields": "size"}))
    except GoogleError as error:
        if error.status in (403, 404):  # one may write without leave to read
            return False
        raise
    return int(told.get("size", -1)) == size


def claim(access: Access, uri: str, owner_id: str) -> None:
    """Make the job's folder this owner's. Raises UsageError where another's job has the name, GoogleError.

    The first to write has it, for all attempts: two machines' jobs of one name would share their checkpoints.
    """
    try:
        _put(access, uri, owner_id.encode(), {"ifGenerationMatch": "0"})
    except GoogleError as error:
        if error.status != 412:
            raise
        if owner(access, uri) != owner_id:
            message = f"another machine, or another user, has a job of this name: {uri.rpartition('/')[0]}"
            raise UsageError(message, hint="choose another --name") from error


def owner(access: Access, uri: str) -> str | None:
    """Return whose folder it is, None where nobody has claimed it. Raises GoogleError."""
    found = _get(access, uri)
    return None if found is None else found.decode(errors="replace")


def put_order(access: Access, uri: str, order: dict[str, Any]) -> None:
    """Write what the replicas are to do. Raises GoogleError."""
    _put(access, uri, json.dumps(order, sort_keys=True).encode(), {})


def read_order(access: Access, uri: str) -> dict[str, Any] | None:
    """Return what the replicas are to do, None where it was taken back. Raises GoogleError."""
    return _object_in(_get(access, uri))


def retract(access: Access, uri: str) -> None:
    """Remove the job's order: replicas of a request that is still under way find none, and end. Raises GoogleError."""
    try:
        rest.call(access, "DELETE", rest.object_url(access, uri))
    except GoogleError as error:
        if error.status != 404:
            raise


def account(access: Access, uri: str, nodes: int) -> dict[str, Any] | None:
    """Return how the containers say that it ended: all know, node 0's is taken first. Raises GoogleError."""
    there = set(names(access, uri))
    for name in (f"{uri}-{node}.json" for node in range(nodes)):
        if rest.split_uri(name)[1] in there and (found := _object_in(_get(access, name))) is not None:
            return found
    return None


def has_checkpoint(access: Access, uri: str) -> bool:
    """Return whether there is something to go on from, as the node itself would say. Raises GoogleError."""
    prefix = rest.split_uri(uri)[1].rstrip("/") + "/"
    tops = (name.removeprefix(prefix).partition("/")[0] for name in names(access, uri.rstrip("/") + "/"))
    return any(places.is_whole(name) for name in tops)


def names(access: Access, uri: str) -> Iterator[str]:
    """Yield the names of the objects below the bucket whose names begin so, over all pages. Raises GoogleError."""
    bucket, prefix = rest.split_uri(uri)
    asked = {"prefix": prefix, "fields": "items(name),nextPageToken"}
    while True:
        page = rest.get_json(access, "storage", f"/storage/v1/b/{quote(bucket, safe='')}/o", asked)
        yield from (item["name"] for item in page.get("items", ()))
        if not page.get("nextPageToken"):
            return
        asked["pageToken"] = page["nextPageToken"]


def _object_in(data: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object in the data; None where there is none, whoever has put something else there."""
    try:
        found = json.loads(data or b"")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _put(access: Access, uri: str, data: bytes, conditions: dict[str, str]) -> None:
    name = rest.split_uri(uri)[1]
    params = {"uploadType": "media", "name": name, **conditions}
    rest.object_in(rest.call(access, "POST", rest.object_url(access, uri, upload=True), params=params, data=data))


def _get(access: Access, uri: str) -> bytes | None:
    try:
        found: bytes = rest.call(access, "GET", rest.object_url(access, uri), params={"alt": "media"}).content
    except GoogleError as error:
        if error.status != 404:
            raise
        return None
    return found

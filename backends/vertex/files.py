"""A job's files in Cloud Storage: the code by its content, the job's own order, what has come of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
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
    "download",
    "exists",
    "has_checkpoint",
    "owner",
    "put_order",
    "read_order",
    "require_bucket",
    "retract",
]

ROLE = "Storage Object User (roles/storage.objectUser) on the bucket"
PIECE_BYTES = 1 << 20


def require_bucket(access: Access, uri: str) -> None:
    """Raise ConfigError where there is no such bucket; who may not ask hears it from the upload."""
    bucket = rest.split_uri(uri)[0]
    with rest.answers(f"look at the bucket {bucket}", needs=ROLE):
        try:
            rest.get_json(access, "storage", f"/storage/v1/b/{quote(bucket, safe='')}", {"fields": "location"})
        except GoogleError as error:
            if error.status == 404:
                hint = f"gcloud storage buckets create gs://{bucket} --location {access.location}, or mend it"
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
    found = _get(access, uri)
    return None if found is None else json.loads(found)


def retract(access: Access, uri: str) -> None:
    """Remove the job's order: replicas of a request that is still under way find none, and end. Raises GoogleError."""
    try:
        rest.call(access, "DELETE", rest.object_url(access, uri))
    except GoogleError as error:
        if error.status != 404:
            raise


def account(access: Access, uri: str, nodes: int) -> dict[str, Any] | None:
    """Return how the containers say that it ended: all know, node 0's is taken first. Raises GoogleError."""
    for node in range(nodes):
        found = _get(access, f"{uri}-{node}.json")
        if found is not None:
            told: dict[str, Any] = json.loads(found)
            return told
    return None


def has_checkpoint(access: Access, uri: str) -> bool:
    """Return whether there is something to go on from, as the node itself would say. Raises GoogleError."""
    prefix = rest.split_uri(uri)[1].rstrip("/") + "/"
    names = (name.removeprefix(prefix).partition("/")[0] for name in _names(access, uri.rstrip("/") + "/"))
    return any(places.is_whole(name) for name in names)


def download(access: Access, uri: str, folder: Path) -> list[Path]:
    """Copy what is below the uri into the folder; return the files. Raises GoogleError."""
    bucket, prefix = rest.split_uri(uri.rstrip("/") + "/")
    found = []
    for name in _names(access, uri.rstrip("/") + "/"):
        parts = name.removeprefix(prefix).split("/")
        if any(part in ("", ".", "..") for part in parts):  # a folder that somebody made in the console, or worse
            continue
        path = folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        _copy(access, f"gs://{bucket}/{name}", path)
        found.append(path)
    return found


def _copy(access: Access, uri: str, path: Path) -> None:
    partial = path.with_name(f"{path.name}.part")
    answer = rest.call(access, "GET", rest.object_url(access, uri), params={"alt": "media"}, stream=True)
    wanted, got = answer.headers.get("Content-Length"), 0
    try:
        with partial.open("wb") as file:
            for piece in answer.iter_content(PIECE_BYTES):
                got += file.write(piece)
    except OSError as error:  # requests' errors are some, too
        raise GoogleError(0, "", f"{uri} broke off: {error}") from error
    finally:
        answer.close()
    if wanted is not None and not answer.headers.get("Content-Encoding") and got != int(wanted):
        raise GoogleError(0, "", f"{uri} broke off after {got} of {wanted} bytes")
    partial.replace(path)


def _names(access: Access, uri: str) -> Iterator[str]:
    bucket, prefix = rest.split_uri(uri)
    asked = {"prefix": prefix, "fields": "items(name),nextPageToken"}
    while True:
        page = rest.get_json(access, "storage", f"/storage/v1/b/{quote(bucket, safe='')}/o", asked)
        yield from (item["name"] for item in page.get("items", ()))
        if not page.get("nextPageToken"):
            return
        asked["pageToken"] = page["nextPageToken"]


def _put(access: Access, uri: str, data: bytes, conditions: dict[str, str]) -> None:
    name = rest.split_uri(uri)[1]
    params = {"uploadType": "media", "name": name, **conditions}
    rest.call(access, "POST", rest.object_url(access, uri, upload=True), params=params, data=data)


def _get(access: Access, uri: str) -> bytes | None:
    try:
        found: bytes = rest.call(access, "GET", rest.object_url(access, uri), params={"alt": "media"}).content
    except GoogleError as error:
        if error.status != 404:
            raise
        return None
    return found

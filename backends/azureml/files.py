"""Files of a job in blob storage, read without a mount: checkpoints and outputs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from cloudtrain.entrypoints.format import one_line
from cloudtrain.entrypoints.stores.azure import AzureStore, BlobLocation, client, is_broken_off
from cloudtrain.launcher.backend import Check
from cloudtrain.launcher.errors import ConfigError

from ..edge import importing
from ..http import object_in
from ..job_folder import JobFolder
from . import api
from .api import Azure, AzureAccess
from .records import AzureMLRef, AzureMLSending

WORKERS = 2  # each reads a large file in four ranges at a time
ATTEMPTS = 4  # of a request
READER, WRITER = (f"Storage Blob Data {role} on the storage account" for role in ("Reader", "Contributor"))

_DATASTORE = re.compile(r"azureml:(?://(?:[^/]+/)*?|/.*?/)datastores/([^/]+)/paths/(.*)")
_HADOOP = re.compile(r"(?:abfs|wasb)s?://([^@/]+)@([^./]+)\.(?:dfs|blob)\.([^/]+)/?(.*)")
_ASSET = re.compile(r"azureml:(?P<name>[^/:@\s]+)(?::(?P<version>[^/:@\s]+)|@latest)")

_T = TypeVar("_T")


def used(
    azure: Azure,
    handle: AzureMLRef | AzureMLSending,
    uri: str,
    doing: str,
    use: Callable[[JobFolder], _T],
    *,
    needs: str = READER,
) -> _T:
    """Return the result of `use` for the files at the URI, by the caller's permission, else by the datastore's key.

    Raises CredentialError, UnreachableError, ConfigError.
    """
    access = AzureAccess(handle.workspace, azure)
    with api.answers(f"look into {uri}", needs=needs):
        place, datastore = location(access, uri)

        def folder(credential: Any) -> JobFolder:
            return JobFolder(lambda _: _BlobJobStore(place, lambda: (_client(place, credential), "")), workers=WORKERS)

        try:
            return use(folder(access.azure.credential(access.workspace.cloud)))
        except api.AzureError as error:
            if datastore is None or error.status not in (401, 403):
                raise
            properties = object_in(api.arm(access, "POST", f"/datastores/{datastore}/listSecrets"))
            return use(folder(str(properties.get("sasToken") or properties.get("key") or "")))


def location(access: AzureAccess, uri: str) -> tuple[BlobLocation, str | None]:
    """Return the container and the prefix, and the datastore that the URI names."""
    if found := _DATASTORE.fullmatch(uri):
        url, container = datastore_of(access, found[1])
        return BlobLocation(urlsplit(url).netloc, container, found[2].strip("/")), found[1]
    if found := _HADOOP.fullmatch(uri):
        return BlobLocation(f"{found[2]}.blob.{found[3]}", found[1], found[4].strip("/")), None
    split = urlsplit(uri)
    container, _, prefix = unquote(split.path).strip("/").partition("/")
    return BlobLocation(split.netloc, container, prefix.strip("/")), None


def datastore_of(access: AzureAccess, name: str) -> tuple[str, str]:
    """Return the address of a datastore's account and its container. Raises AzureError, ConfigError."""
    try:
        properties = api.get_json(access, f"/datastores/{name}").get("properties") or {}
    except api.AbsentError as error:
        hint = "`az ml datastore list` shows those there are"
        raise ConfigError(f"there is no datastore `{name}`", key="azureml.datastore", hint=hint) from error
    container = properties.get("containerName") or properties.get("filesystem")  # blob storage, Data Lake Gen2
    if not container or not properties.get("accountName"):
        kind = properties.get("datastoreType") or "something else"
        message = f"the datastore `{name}` is {kind}, not blob storage"
        raise ConfigError(message, key="azureml.datastore", hint="name another one")
    host = f"{properties['accountName']}.blob.{properties.get('endpoint') or 'core.windows.net'}"
    return f"{properties.get('protocol') or 'https'}://{host}", str(container)


def look(access: AzureAccess, name: str, entry: Mapping[str, Any]) -> Check:
    """Return whether the input's asset has the type in the request; other addresses pass. Raises AzureError."""
    there, path, what = None, str(entry.get("path")), f"input {name}"
    if (found := _ASSET.fullmatch(path)) is None:
        return Check(what, "ok", path)
    for folder, field in (("data", "dataType"), ("models", "modelType")):
        with contextlib.suppress(api.AbsentError):
            at = f"/{folder}/{found['name']}"
            version = found["version"] or api.get_json(access, at)["properties"]["latestVersion"]
            there = there or api.get_json(access, f"{at}/versions/{version}")["properties"][field]
    if there is None:
        return Check(what, "fail", f"there is no data asset {path}", "`az ml data list` shows yours")
    if there != entry.get("type"):
        said = f"{path} is of the type {there}, and the request says {entry.get('type')}"
        return Check(what, "fail", said, f"write `azureml: {{raw: {{inputs: {{{name}: {{type: {there}}}}}}}}}`")
    return Check(what, "ok", f"{path} ({there})")


class _BlobJobStore(AzureStore):
    """A store of the launcher: the errors are of the class AzureError, for the sentences of api.answers."""

    def _failure(self, error: Exception, name: str) -> Exception:
        from azure.core import exceptions as core

        if isinstance(error, core.HttpResponseError):
            code = str(getattr(error, "error_code", "") or "")
            if name and code == "BlobNotFound":
                return FileNotFoundError(name)
            words = str(error.message).partition("\n")[0]  # request ids and the signed text follow
            return api.AzureError(error.status_code or 0, code, one_line(words, 300))
        if isinstance(error, core.AzureError) or is_broken_off(error):
            return api.AzureError(0, "", one_line(error, 300))
        return error


def _client(place: BlobLocation, credential: Any) -> Any:
    with importing(api.not_installed):
        return client(place, credential, ATTEMPTS)

"""Files of a job in blob storage, read without a mount: checkpoints and outputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from cloudtrain.backends.azureml import api
from cloudtrain.backends.azureml.api import AzureAccess
from cloudtrain.entrypoints import job_files
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, Fault, UnreachableError
from cloudtrain.launcher.text.remote import one_line

__all__ = ["datastore_of", "download", "has_checkpoint"]

WORKERS = 8
CONNECT_S, READ_S = 10, 60
READER = "Storage Blob Data Reader on the storage account"
_PART = ".cloudtrain-part"

_DATASTORE = re.compile(r"azureml:(?://(?:[^/]+/)*?|/.*?/)datastores/([^/]+)/paths/(.*)")
_HADOOP = re.compile(r"(?:abfs|wasb)s?://([^@/]+)@([^./]+)\.(?:dfs|blob)\.([^/]+)/?(.*)")

_T = TypeVar("_T")


def has_checkpoint(access: AzureAccess, uri: str) -> bool:
    """Return whether the folder has a complete checkpoint, by the rule of entrypoints/job_files.py."""

    def look(container: Any, prefix: str) -> bool:
        names = (name.removeprefix(prefix) for name in container.list_blob_names(name_starts_with=prefix))
        return any(job_files.is_whole(name.partition("/")[0]) for name in names if name)

    return _with_container(access, uri, look)


def download(access: AzureAccess, uri: str, folder: Path) -> list[Path]:
    """Copy all files below the URI to the folder, WORKERS at a time; return the files.

    Raises CloudtrainError if no output exists yet, ConfigError if the folder cannot be written.
    """

    def fetch(container: Any, prefix: str) -> list[Path]:
        sizes = {item.name: item for item in container.list_blobs(name_starts_with=prefix)}
        names = [name for name in sizes if not _is_folder(sizes[name]) and _is_inside(name.removeprefix(prefix))]
        if not names:
            raise CloudtrainError("there is no output", where=uri, hint="the job has not written any output yet")

        def one(name: str) -> Path:
            target = folder / name.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(target.name + _PART)
            try:
                with partial.open("wb") as file:
                    container.download_blob(name).readinto(file)
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)
            return target

        with ThreadPoolExecutor(WORKERS) as pool:
            return sorted(pool.map(one, names))

    try:
        return _with_container(access, uri, fetch)
    except OSError as error:
        if error.errno is None:  # the connection broke in the middle of a file
            raise UnreachableError(f"cannot download {uri}: {one_line(str(error))}") from error
        raise ConfigError(f"cannot write there: {error.strerror}", where=str(folder)) from error


def datastore_of(access: AzureAccess, name: str) -> tuple[str, str]:
    """Return the address of a datastore's account and its container. Raises AzureError, ConfigError."""
    try:
        properties = api.get_json(access, f"/datastores/{name}").get("properties") or {}
    except api.AzureError as error:
        if not api.is_absent(error):
            raise
        hint = "`az ml datastore list` shows those there are"
        raise ConfigError([Fault(f"there is no datastore `{name}`", key="azureml.datastore", hint=hint)]) from error
    container = properties.get("containerName") or properties.get("filesystem")  # blob storage, Data Lake Gen2
    if not container or not properties.get("accountName"):
        kind = properties.get("datastoreType") or "something else"
        message = f"the datastore `{name}` is {kind}, not blob storage"
        raise ConfigError([Fault(message, key="azureml.datastore", hint="name another one")])
    host = f"{properties['accountName']}.blob.{properties.get('endpoint') or 'core.windows.net'}"
    return f"{properties.get('protocol') or 'https'}://{host}", str(container)


def _is_inside(name: str) -> bool:
    """Return whether a blob's name, which may hold any text, stays below the target folder."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and not name.endswith("/")


def _is_folder(item: Any) -> bool:
    """Return whether the blob stands for a folder, as in storage with a hierarchy, or left by a mount."""
    return (item.metadata or {}).get("hdi_isfolder") == "true"


def _with_container(access: AzureAccess, uri: str, use: Callable[[Any, str], _T]) -> _T:
    """Return the result of `use(container, prefix)`, with the caller's own permission, else with the datastore's key.

    Raises CredentialError, UnreachableError, ConfigError.
    """
    try:
        from azure.core import exceptions as core
        from azure.storage.blob import ContainerClient
    except ImportError as error:
        raise api.not_installed(error) from error
    doing = f"look into {uri}"
    with api.answers(doing, needs=READER):
        url, container, prefix, datastore = _place(access, uri)
        own = access.azure.credential(access.workspace.cloud)
        limits: dict[str, Any] = {"connection_timeout": CONNECT_S, "read_timeout": READ_S}
        try:
            try:
                return use(ContainerClient(url, container, credential=own, **limits), prefix)
            except core.HttpResponseError as error:
                if datastore is None or error.status_code not in (401, 403):
                    raise
                secret = _secret(access, datastore)
                return use(ContainerClient(url, container, credential=secret, **limits), prefix)
        except core.HttpResponseError as error:
            code = str(getattr(error, "error_code", "") or "")
            words = str(error.message).partition("\n")[0]  # request ids and the signed text follow
            raise api.AzureError(error.status_code or 0, code, one_line(words, 300)) from error
        except core.AzureError as error:
            raise api.AzureError(0, "", one_line(str(error), 300)) from error


def _place(access: AzureAccess, uri: str) -> tuple[str, str, str, str | None]:
    """Return account URL, container, prefix with a trailing slash, and the datastore that the URI names."""
    if found := _DATASTORE.fullmatch(uri):
        url, container = datastore_of(access, found[1])
        return url, container, _prefix(found[2]), found[1]
    if found := _HADOOP.fullmatch(uri):
        return f"https://{found[2]}.blob.{found[3]}", found[1], _prefix(found[4]), None
    split = urlsplit(uri)
    container, _, prefix = unquote(split.path).strip("/").partition("/")
    return f"{split.scheme}://{split.netloc}", container, _prefix(prefix), None


def _prefix(path: str) -> str:
    return f"{path.strip('/')}/".lstrip("/")


def _secret(access: AzureAccess, datastore: str) -> str:
    """Return the datastore's own key or SAS. Raises AzureError."""
    properties = api.object_in(api.arm(access, "POST", f"/datastores/{datastore}/listSecrets"))
    return str(properties.get("sasToken") or properties.get("key") or "")

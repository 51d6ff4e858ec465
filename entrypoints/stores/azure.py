"""A container of Azure blob storage as a store, by the addresses that Azure itself shows.

`https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX`, `abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX`, or
`wasbs://CONTAINER@ACCOUNT.blob.core.windows.net/PREFIX`, of any of Azure's clouds. Only this module and azure_access.py
import azure-storage-blob and azure-identity, and only if a config names such an address. The job's identity is given by
AZURE_STORAGE_CONNECTION_STRING, _KEY or _SAS_TOKEN, else found by azure-identity: a service principal, a managed
identity (also Azure ML's), or the login of `az`. Every write carries an MD5, and Azure compares the MD5 before it keeps
the bytes; an MD5 comes with each range that is read, and is compared on this machine. Blob storage compares the blob's
ETag with If-Match, and its absence with If-None-Match, before a write ("Specifying conditional headers").
"""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from . import azure_access
from .store import ABSENT, StoreError, in_threads, whole_file

_BODY_ATTEMPTS = 3  # to read a range's bytes, after Azure has begun to send the bytes
# Memory holds a block or a range for each thread, so memory does not grow with the file: measured with 64, 192 and 512
# MiB, 34 MiB more for a put, and 35 MiB more for a get after the put.
_BLOCK_BYTES = 8 << 20
_MOST_BLOCKS = 50_000  # of a blob (documentation of Put Block List)
_THREADS = 4  # of one rank, and a machine may have eight ranks

_FORMS = "https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX"
_HOST = r"[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:{kind})(?:\.[a-z0-9-]+)+"
_CONTAINER = r"[a-z0-9](?:[a-z0-9]|-(?=[a-z0-9])){2,62}"
_HTTPS = re.compile(rf"(?i:https)://((?i:{_HOST.format(kind='blob')}))(?:/([^/]*))?(?:/(.*))?")
_HADOOP = re.compile(rf"(?i:abfss|wasbs)://([^@/]*)@((?i:{_HOST.format(kind='blob|dfs')}))(?:/(.*))?")


def open_at(uri: str, attempts: int | None = None) -> AzureStore:
    """Return the store; sends no request. Raises StoreError: see store.open_store."""
    place = _place(uri)
    try:
        import azure.identity
        import azure.storage.blob  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("azure", "azure.identity", "azure.storage", "azure.storage.blob"):  # present but broken
            raise
        raise StoreError(
            f"{uri!r} needs Azure's packages, which are not installed here; `pip install "
            "azure-storage-blob azure-identity` on the machines of the job, or add them to the image"
        ) from error
    for name in ("azure", "msal"):  # this module reports failures and retries in a sentence of its own
        if logging.getLogger(name).level == logging.NOTSET:  # otherwise the user's code wants the messages
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return AzureStore(place, lambda: azure_access.connect(place, attempts))


class AzureStore:
    """The blobs of a container below `prefix/`; names in this class omit the prefix. See store.Store.

    `connect` returns Azure's client of the container, and the identity it uses. The version is the blob's ETag.
    """

    def __init__(self, place: azure_access.BlobLocation, connect: Callable[[], tuple[Any, str]]) -> None:
        self._place, self._connect = place, connect
        self._above = f"{place.prefix}/" if place.prefix else ""
        self._client: Any = None
        self._who = ""

    def put(self, source: Path | bytes, name: str) -> None:
        """Upload the file or the bytes; a large file in blocks, none visible until all have arrived."""
        with self._asking() as client:
            _upload(source, client.get_blob_client(self._above + name))

    def get(self, name: str, path: Path) -> None:
        """Download the blob to a temporary file beside the path, then rename."""
        with whole_file(path) as partial, self._asking(name) as client:
            _download(client.get_blob_client(self._above + name), partial)

    def read(self, name: str) -> tuple[bytes | None, str]:
        """Return the blob's content and its ETag."""
        with contextlib.suppress(FileNotFoundError), self._asking(name) as client:
            found = _read(lambda: client.get_blob_client(self._above + name).download_blob(validate_content="md5"))
            return found.readall(), str(found.properties.etag)
        return None, ABSENT

    def head(self, name: str, size: int) -> bytes:
        """Return the first bytes of the blob."""
        with self._asking(name) as client:
            blob = client.get_blob_client(self._above + name)
            return bytes(_read(lambda: blob.download_blob(0, size, validate_content="md5").readall()))

    def put_if(self, data: bytes, name: str, version: str) -> bool:
        """Replace the blob with that ETag."""
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError

        condition: dict[str, Any] = {"overwrite": False}
        if version:
            condition = {"overwrite": True, "etag": version, "match_condition": MatchConditions.IfNotModified}
        with self._asking() as client:
            try:
                client.get_blob_client(self._above + name).upload_blob(data, validate_content="md5", **condition)
            except HttpResponseError as error:
                if error.status_code not in (409, 412) or "Container" in str(getattr(error, "error_code", "")):
                    raise
                return False
            return True

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with `prefix`, over all pages."""
        with self._asking() as client:
            blobs = list(client.list_blobs(name_starts_with=self._above + prefix, include=["metadata"]))
        # An account with a hierarchical namespace lists folders too. A slash at the end marks a folder of other tools.
        files = [blob.name for blob in blobs if (blob.metadata or {}).get("hdi_isfolder") != "true"]
        return sorted(name.removeprefix(self._above) for name in files if not name.endswith("/"))

    def delete(self, name: str) -> None:
        """Delete the blob, if present, with its snapshots from backups: Azure removes no blob without its snapshots."""
        with contextlib.suppress(FileNotFoundError), self._asking(name) as client:
            client.delete_blob(self._above + name, delete_snapshots="include")

    @contextlib.contextmanager
    def _asking(self, name: str = "") -> Iterator[Any]:
        """Yield the client, and turn every error into an OSError with a sentence. `name`: the requested blob."""
        try:
            if self._client is None:
                self._client, self._who = self._connect()
            yield self._client
        except Exception as error:  # any kind: some errors are no AzureError (azure_access.is_broken_off)
            failure = azure_access.failure(error, self._place, self._who, name)
            if not isinstance(failure, FileNotFoundError) and self._client is not None:
                self._client.close()  # the next request asks for credentials again
                self._client = None
            if failure is error:
                raise
            raise failure from error


def _place(uri: str) -> azure_access.BlobLocation:
    address, mark, _ = uri.partition("?")
    if mark:
        raise StoreError(
            f"{address!r} contains a `?`: remove the query; a SAS is a secret, which the job gets "
            "as AZURE_STORAGE_SAS_TOKEN (`secrets` in the config)"
        )
    # Not by urlsplit: a `#` would end the prefix.
    if match := _HTTPS.fullmatch(uri):
        host, container, prefix = match[1].lower(), match[2] or "", unquote(match[3] or "")
    elif match := _HADOOP.fullmatch(uri):
        host, container, prefix = match[2].lower().replace(".dfs.", ".blob.", 1), match[1], match[3] or ""
    else:
        raise StoreError(f"{uri!r} is no address of Azure's blob storage; write it as in {_FORMS}")
    if not re.fullmatch(_CONTAINER, container):
        raise StoreError(f"{uri!r} names no container; write it as in {_FORMS}")
    return azure_access.BlobLocation(host, container, prefix.strip("/"))


def _upload(source: Path | bytes, blob: Any) -> None:
    from azure.storage.blob import BlobBlock

    if isinstance(source, bytes) or source.stat().st_size <= _BLOCK_BYTES:
        data = source if isinstance(source, bytes) else source.read_bytes()
        blob.upload_blob(data, overwrite=True, validate_content="md5")
        return
    size = source.stat().st_size
    length = max(_BLOCK_BYTES, -(-size // _MOST_BLOCKS))
    # The ids are unique to this call, so that a list never mixes the blocks of two writers. All ids have one length:
    # Azure keeps the blocks of a killed process for a week, and refuses ids of another length beside them (the reason
    # not to use upload_blob, whose ids' length differs between releases).
    put = uuid.uuid4().hex
    ids = [f"{put}{index:05}" for index in range(-(-size // length))]

    def stage(index: int) -> None:
        with source.open("rb") as file:
            file.seek(index * length)
            blob.stage_block(ids[index], file.read(length), validate_content="md5")

    in_threads(stage, range(len(ids)), _THREADS)
    blob.commit_block_list([BlobBlock(one) for one in ids], validate_content="md5")


def _download(blob: Any, path: Path) -> None:
    from azure.core import MatchConditions

    length = azure_access.RANGE_BYTES
    first = _read(lambda: blob.download_blob(validate_content="md5"))  # the first range, and the size of the whole blob
    path.write_bytes(first.read(length))
    # All ranges must come from the same version of the blob.
    settings = {
        "validate_content": "md5",
        "etag": first.properties.etag,
        "match_condition": MatchConditions.IfNotModified,
    }

    def fetch(index: int) -> None:
        begin = (index + 1) * length
        found = _read(lambda: blob.download_blob(begin, min(length, first.size - begin), **settings))
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(found.readall())

    in_threads(fetch, range(-(-first.size // length) - 1), _THREADS)


def _read(ask: Callable[[], Any]) -> Any:
    """Return the result of `ask`; ask again if the bytes break off or have a wrong MD5."""
    from azure.core.exceptions import AzureError, ServiceRequestError, ServiceResponseError

    for _ in range(_BODY_ATTEMPTS - 1):
        try:
            return ask()
        except Exception as error:
            # If Azure refuses or does not answer, the retry policy has already tried again.
            is_final = getattr(error, "status_code", None) or isinstance(
                error, (ServiceRequestError, ServiceResponseError)
            )
            if is_final or not (isinstance(error, AzureError) or azure_access.is_broken_off(error)):
                raise
    return ask()

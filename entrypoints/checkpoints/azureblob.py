"""A container of Azure's blob storage as the second place for checkpoints, by the addresses that Azure itself shows.

`https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX`, `abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX`, or
`wasbs://CONTAINER@ACCOUNT.blob.core.windows.net/PREFIX`, of any of Azure's clouds. azure-storage-blob and
azure-identity are imported here and in azureaccess.py alone, and only where a config names such a place. The job is who
AZURE_STORAGE_CONNECTION_STRING, _KEY or _SAS_TOKEN says, else whom azure-identity finds: a service principal, a managed
identity (Azure ML's too), who has logged in with `az`. An MD5 goes with all that is written, and Azure compares it
before it keeps the bytes; one comes with each range that is read, and is compared here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from cloudtrain.entrypoints.checkpoints import azureaccess
from cloudtrain.entrypoints.settings import TaskError

__all__ = ["AzureMirror", "mirror"]

_BODY_ATTEMPTS = 3  # to read a range's bytes, once Azure has begun to send them
# A block or a range for each thread is in memory, so it does not grow with the file: measured with 64, 192 and 512 MiB,
# 34 MiB more for a put, and 35 MiB more for a get after it.
_BLOCK_BYTES = 8 << 20
_MOST_BLOCKS = 50_000  # of a blob, says Put Block List
_THREADS = 4  # of one rank, and there may be eight ranks on a machine

_FORMS = "https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX"
_HOST = r"[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:{kind})(?:\.[a-z0-9-]+)+"
_CONTAINER = r"[a-z0-9](?:[a-z0-9]|-(?=[a-z0-9])){2,62}"
_HTTPS = re.compile(rf"(?i:https)://((?i:{_HOST.format(kind='blob')}))(?:/([^/]*))?(?:/(.*))?")
_HADOOP = re.compile(rf"(?i:abfss|wasbs)://([^@/]*)@((?i:{_HOST.format(kind='blob|dfs')}))(?:/(.*))?")


def mirror(uri: str) -> AzureMirror:
    """Return the place; asks nobody yet. Raises TaskError at a bad uri, or without Azure's packages."""
    place = _place(uri)
    try:
        import azure.identity
        import azure.storage.blob  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("azure", "azure.identity", "azure.storage", "azure.storage.blob"):  # there, and broken
            raise
        raise TaskError(
            f"checkpoint.mirror {uri!r} needs Azure's packages, which are not installed here; `pip install "
            "azure-storage-blob azure-identity` on the machines of the job, or add them to the image"
        ) from error
    for name in ("azure", "msal"):  # what they say of failures and retries is said by this module, in a sentence
        if logging.getLogger(name).level == logging.NOTSET:  # else the user's code wants to know
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return AzureMirror(place)


class AzureMirror:
    """The blobs of a container whose names begin with `prefix/`, which is not part of ours. See mirror.Mirror."""

    def __init__(self, place: azureaccess.Place) -> None:
        self._place = place
        self._above = f"{place.prefix}/" if place.prefix else ""
        self._client: Any = None
        self._who = ""

    def put(self, path: Path, name: str) -> None:
        """Upload the file; a large one in blocks, of which nothing can be seen until all are there."""
        with self._asking() as client:
            _upload(path, client.get_blob_client(self._above + name))

    def get(self, name: str, path: Path) -> None:
        """Download the blob beside the path, then rename it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with self._asking(name) as client:
            try:
                _download(client.get_blob_client(self._above + name), partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin so, over all pages."""
        with self._asking() as client:
            blobs = list(client.list_blobs(name_starts_with=self._above + prefix, include=["metadata"]))
        # An account with a hierarchical namespace lists its folders too. A slash at the end is one made by other tools.
        files = [blob.name for blob in blobs if (blob.metadata or {}).get("hdi_isfolder") != "true"]
        return sorted(name.removeprefix(self._above) for name in files if not name.endswith("/"))

    def remove(self, name: str) -> None:
        """Remove the blob, if it is there; a backup's snapshots of it too, for it could not go without them."""
        with contextlib.suppress(FileNotFoundError), self._asking(name) as client:
            client.delete_blob(self._above + name, delete_snapshots="include")

    @contextlib.contextmanager
    def _asking(self, name: str = "") -> Iterator[Any]:
        """Give the client, and make an OSError of a sentence of what it raises. `name`: the blob asked for."""
        try:
            if self._client is None:
                self._client, self._who = azureaccess.connect(self._place)
            yield self._client
        except Exception as error:  # of whatever kind: not all are AzureErrors (azureaccess.is_broken_off)
            failure = azureaccess.failure(error, self._place, self._who, name)
            if not isinstance(failure, FileNotFoundError) and self._client is not None:
                self._client.close()  # the next one asks for credentials anew
                self._client = None
            if failure is error:
                raise
            raise failure from error


def _place(uri: str) -> azureaccess.Place:
    address, mark, _ = uri.partition("?")
    if mark:
        raise TaskError(
            f"checkpoint.mirror {address!r} goes on with a `?`: leave that out; a SAS is a secret, and comes to the "
            "job as AZURE_STORAGE_SAS_TOKEN (`secrets` in the config)"
        )
    # By hand: to urlsplit a `#` would end the prefix.
    if match := _HTTPS.fullmatch(uri):
        host, container, prefix = match[1].lower(), match[2] or "", unquote(match[3] or "")
    elif match := _HADOOP.fullmatch(uri):
        host, container, prefix = match[2].lower().replace(".dfs.", ".blob.", 1), match[1], match[3] or ""
    else:
        raise TaskError(f"checkpoint.mirror {uri!r} is no address of Azure's blob storage; write it as in {_FORMS}")
    if not re.fullmatch(_CONTAINER, container):
        raise TaskError(f"checkpoint.mirror {uri!r} names no container; write it as in {_FORMS}")
    return azureaccess.Place(host, container, prefix.strip("/"))


def _upload(path: Path, blob: Any) -> None:
    from azure.storage.blob import BlobBlock

    size = path.stat().st_size
    if size <= _BLOCK_BYTES:
        blob.upload_blob(path.read_bytes(), overwrite=True, validate_content="md5")
        return
    length = max(_BLOCK_BYTES, -(-size // _MOST_BLOCKS))
    # Of this call alone, so that a list never mixes two writers' blocks; of one length, for Azure keeps what a killed
    # process has sent for a week, and takes none of another length beside it (which is why not upload_blob, whose ids'
    # length differs between releases).
    put = uuid.uuid4().hex
    ids = [f"{put}{index:05}" for index in range(-(-size // length))]

    def stage(index: int) -> None:
        with path.open("rb") as file:
            file.seek(index * length)
            blob.stage_block(ids[index], file.read(length), validate_content="md5")

    _each(stage, len(ids))
    blob.commit_block_list([BlobBlock(one) for one in ids], validate_content="md5")


def _download(blob: Any, path: Path) -> None:
    from azure.core import MatchConditions

    length = azureaccess.RANGE_BYTES
    first = _read(lambda: blob.download_blob(validate_content="md5"))  # its first range, and the size of all of it
    path.write_bytes(first.read(length))
    # Of the same version of the blob, or not at all.
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

    _each(fetch, -(-first.size // length) - 1)


def _read(ask: Callable[[], Any]) -> Any:
    """Return what is asked for, asked again where its bytes break off or are others than Azure sent."""
    from azure.core.exceptions import AzureError, ServiceRequestError, ServiceResponseError

    for _ in range(_BODY_ATTEMPTS - 1):
        try:
            return ask()
        except Exception as error:
            # The policy of retries has done its part where Azure says no, or nothing at all.
            is_final = getattr(error, "status_code", None) or isinstance(
                error, (ServiceRequestError, ServiceResponseError)
            )
            if is_final or not (isinstance(error, AzureError) or azureaccess.is_broken_off(error)):
                raise
    return ask()


def _each(work: Callable[[int], None], count: int) -> None:
    """Call it with each number below the count, in a few threads; raise what one raises, and begin no further."""
    todo = iter(range(count))

    def run() -> None:
        try:
            for index in todo:
                work(index)
        except BaseException:
            for _ in todo:  # the other threads find nothing more to do
                pass
            raise

    with ThreadPoolExecutor(_THREADS) as pool:
        for thread in [pool.submit(run) for _ in range(min(_THREADS, count))]:
            thread.result()

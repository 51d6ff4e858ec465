"""A job's files in Cloud Storage: the code, named by its content, the container order, the output, the checkpoints."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPMessage
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from cloudtrain.entrypoints.stores.gcs import PIECE_BYTES, GcsStore
from cloudtrain.entrypoints.stores.google_http import ATTEMPTS, Lost, Reply, Service, ServiceError
from cloudtrain.entrypoints.stores.store import in_bucket
from cloudtrain.launcher.errors import ConfigError, Fault

from ..edge import cause
from ..http import TRIES
from ..job_folder import JobFolder
from . import api
from .api import Google, GoogleError, VertexAccess
from .records import VertexRef, VertexSending

_T = TypeVar("_T")
ROLE = "Storage Object User (roles/storage.objectUser) on the bucket"


def of(access: VertexAccess) -> JobFolder:
    """Return the files of jobs by their URIs. The calls raise GoogleError."""
    service = _Session(access)
    return JobFolder(lambda uri: _GoogleJobStore(*in_bucket(uri), service))


def used(google: Google, handle: VertexRef | VertexSending, uri: str, doing: str, use: Callable[[JobFolder], _T]) -> _T:
    """Return the result of `use` for the files of the handle's project. Raises Google's errors as cloudtrain's."""
    with api.answers(doing, needs=ROLE):
        return use(of(VertexAccess.of(handle, google)))


def region_of(access: VertexAccess, uri: str) -> str | None:
    """Return the bucket's region, None after a 403, which the upload reports. Raises ConfigError without a bucket."""
    bucket = in_bucket(uri)[0]
    with api.answers(f"look at the bucket {bucket}", needs=ROLE):
        try:
            answer = api.get_json(access, "storage", f"/storage/v1/b/{quote(bucket, safe='')}", {"fields": "location"})
            return str(answer.get("location", "?")).lower()
        except GoogleError as error:
            if error.status == 404:
                hint = f"gcloud storage buckets create gs://{bucket} --location {access.location}, or fix the name"
                fault = Fault(f"there is no bucket {bucket}", key="vertex.staging_bucket", hint=hint)
                raise ConfigError([fault]) from error
            if error.status != 403:
                raise
    return None


def upload(access: VertexAccess, source: Path | bytes, uri: str) -> None:
    """Upload the file or the bytes unless an object of that name exists. Raises GoogleError."""
    bucket, name = in_bucket(uri)
    store = _GoogleJobStore(bucket, "", _Session(access, ATTEMPTS))
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    try:
        with contextlib.suppress(FileNotFoundError):
            if store.stat(name).size == size:
                return
    except GoogleError as error:
        if error.status != 403:  # a role may allow writing and forbid reading
            raise
    try:
        store.put(source, name, is_new=True)
    except GoogleError as error:
        if error.status != 412:  # the object exists
            raise


class _GoogleJobStore(GcsStore):
    """A store of the launcher: the errors are of the class GoogleError, for the sentences of api.answers."""

    def _failure(self, error: Exception, name: str) -> Exception:
        found = error.__cause__
        if not isinstance(found, GoogleError):
            return GoogleError(0, "", f"{self._uri(name)}: {error}")
        if name and found.status == 404:
            return FileNotFoundError(name)
        return GoogleError(found.status, found.code, found.words, found.headers)  # raised anew: no circle of causes


class _Session(Service):
    """Requests to Cloud Storage with the credentials, the proxies and the errors of api.py."""

    def __init__(self, access: VertexAccess, attempts: int = TRIES) -> None:
        super().__init__(access.url("storage"), None, attempts)
        self._access = access

    @contextlib.contextmanager
    def once(
        self,
        method: str,
        target: str,
        headers: dict[str, str] | None = None,
        body: bytes | Iterable[bytes] = b"",
        also: tuple[int, ...] = (),
    ) -> Iterator[Reply]:
        """Yield the answer to one request."""
        data = body if isinstance(body, bytes) else b"".join(body)
        try:
            url = f"{self.endpoint}{target}"
            answer = api.call(
                self._access, method, url, data=data or None, headers=headers, stream=True, tries=1, also=also
            )
        except GoogleError as error:
            if error.status == 0 and not error.code:
                raise Lost(error.words) from error
            words = {"error": {"status": error.code, "message": error.words}}
            raise ServiceError(error.status, json.dumps(words).encode()) from error
        try:
            yield _Answer(answer)
        finally:
            answer.close()


class _Answer(Reply):
    """The answer of requests. A compressed object arrives decompressed, without a known length."""

    def __init__(self, answer: Any) -> None:
        self._answer, self._pieces = answer, answer.iter_content(PIECE_BYTES)
        self.status, self.headers = answer.status_code, HTTPMessage()
        for name, value in answer.headers.items():
            if name.lower() != "content-length" or "Content-Encoding" not in answer.headers:
                self.headers[name] = value

    def read(self, size: int | None = None) -> bytes:
        """Return a piece of the body, b"" at its end; without a size, the whole body. Raises Lost."""
        from requests.exceptions import RequestException

        try:
            found: bytes = self._answer.content if size is None else next(self._pieces, b"")
        except RequestException as error:
            raise Lost(cause(error)) from error
        return found

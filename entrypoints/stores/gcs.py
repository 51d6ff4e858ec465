"""A bucket of Google Cloud Storage as a store: `gs://BUCKET/PREFIX`, over the JSON API, with the standard library.

On Google's machines the standard library suffices, since the metadata server gives the job's identity; a credentials
file (google_access.py) is read by google-auth. Sources: the discovery document storage.v1, the guides "Resumable
uploads" (for continuing an upload) and "Request preconditions". The MD5 of every file is compared with the bucket's
MD5, in both directions. Names in this module omit the prefix, keys contain the prefix.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

from . import google_access
from .google_http import Lost, Patience, Reply, Service, ServiceError, Untrusted
from .store import ABSENT, Store, StoreError, in_bucket, whole_file

# Pieces are read from the file as they are sent, so memory does not grow with the file.
SINGLE_BYTES, CHUNK_BYTES, PIECE_BYTES = 8 << 20, 16 << 20, 1 << 20  # chunks are multiples of 256 KiB
BODY_ATTEMPTS = 3  # for uploads or downloads with damaged bytes

_FIELDS = "name,size,md5Hash,generation,updated,metadata"
_NO_BUCKET = "there is no bucket {bucket}; make it, or name another one"
_DENIED = "no access to {uri}; {who} needs the role Storage Object User (roles/storage.objectUser) on the bucket"
_SCOPES = "no access to {uri}; the machine's access scopes lack Cloud Storage: add the scope cloud-platform"
_BILLING = "Google refuses {uri}, because billing is disabled for the bucket's project"
_REFUSED = "Google rejects the token of {who} for {uri}; is the account still there and enabled?"
_QUOTA = "{host} repeatedly asks to slow down for {uri}: too many requests at once, or a quota of the project"
_SILENT = "gs://{bucket} does not answer; does this machine reach {host}?"
_CLOCK = "{host} is not trusted, because this machine's clock is wrong"
_UNTRUSTED = "{host} is not trusted: add the package ca-certificates to the image, or set SSL_CERT_FILE"
_CHANGED = "{uri}: another process has written the same object meanwhile"
_DAMAGED = "{uri} arrived damaged {count} times: the MD5 differs"


@dataclass(frozen=True)
class Item:
    """An object in the bucket. `md5` is base64, None for a composed object.

    After a download, `about`, the writer's metadata, is unknown, and so are size and MD5 if the object is stored
    compressed and arrives decompressed (size -1).
    """

    name: str
    size: int
    md5: str | None
    generation: str
    updated: str
    about: dict[str, str] = field(default_factory=dict)


class Changed(OSError):
    """The file, or the object, was changed while it was read."""


def open_at(uri: str, attempts: int | None = None) -> GcsStore:
    """Return the store for `gs://BUCKET/PREFIX`; sends no request. Raises StoreError: see store.open_store."""
    bucket, prefix = in_bucket(uri)
    if words := google_access.missing_package():
        raise StoreError(f"{uri!r}: {words}")
    endpoint = os.environ.get("CLOUDTRAIN_STORAGE_ENDPOINT") or os.environ.get("STORAGE_EMULATOR_HOST")
    identity = None if google_access.anonymous() else google_access.of_environment()
    return GcsStore(bucket, prefix, Service(endpoint or "https://storage.googleapis.com", identity, attempts))


class GcsStore(Store):
    """The objects of a bucket below `prefix/`. See store.Store. The version is the object's generation."""

    def __init__(self, bucket: str, prefix: str, service: Service) -> None:
        self._bucket, prefix = bucket, prefix.strip("/")
        self._above = f"{prefix}/" if prefix else ""
        self._service = service
        self._objects = f"/storage/v1/b/{quote(bucket, safe='')}/o"

    def put(
        self,
        source: Path | bytes,
        name: str,
        about: dict[str, str] | None = None,
        *,
        seen: os.stat_result | None = None,
        is_new: bool = False,
    ) -> Item:
        """Upload the file or the bytes: the old object stays until the upload is complete.

        `is_new`: Google refuses the upload with 412 if the object exists. Raises Changed, and leaves the object as is,
        if the file changes during the upload, or has changed since `seen`.
        """
        resource = {"name": self.key(name), **({"metadata": about} if about else {})}
        with self._asking():
            for _ in range(BODY_ATTEMPTS):
                try:
                    item, md5 = self._upload(source, resource, seen, is_new)
                except ServiceError as error:
                    if error.status != 400 or "md5" not in error.message.lower():
                        raise
                    continue
                if item.md5 in (None, md5):
                    return item
                self.delete(name, item.generation)
            raise StoreError(_DAMAGED.format(uri=self._uri(name), count=BODY_ATTEMPTS))

    def get(self, name: str, path: Path) -> Item:
        """Download the object to a temporary file, then rename the file to `path`. Raises FileNotFoundError."""
        with whole_file(path) as partial, partial.open("wb") as file, self._asking(name):
            return self._fetch(name, file)

    def read(self, name: str) -> tuple[bytes | None, str]:
        """Return the object's content and its generation."""
        with contextlib.suppress(FileNotFoundError), self._asking(name):
            item = self._fetch(name, file := io.BytesIO())
            return file.getvalue(), item.generation
        return None, ABSENT

    def head(self, name: str, size: int) -> bytes:
        """Return the first bytes of the object."""
        with self._asking(name):
            reply = self._service.ask("GET", f"{self._at(name)}?alt=media", {"Range": f"bytes=0-{size - 1}"})
            return reply.body[:size]  # a compressed object comes whole

    def put_if(self, data: bytes, name: str, version: str) -> bool:
        """Replace that generation of the object. If a write whose answer was lost had succeeded, return False."""
        query = {"uploadType": "media", "name": self.key(name), "ifGenerationMatch": version or "0"}
        target = f"/upload{self._objects}?{urlencode({**query, 'fields': 'generation'})}"
        headers = {"Content-Type": "application/json" if name.endswith(".json") else "application/octet-stream"}
        with self._asking():
            return self._service.ask("POST", target, headers, data, also=(412,)).status != 412

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of each object whose name begins with `prefix`, over all pages."""
        # A name with a slash at the end is a folder made in the console.
        return {item.name: item.size for item in self.items(prefix) if not item.name.endswith("/")}

    def items(self, prefix: str = "") -> list[Item]:
        """Return the objects whose names begin with `prefix`, sorted by name, over all pages."""
        found: list[Item] = []
        query = {"prefix": self._above + prefix, "fields": f"items({_FIELDS}),nextPageToken"}
        with self._asking():
            while True:
                page = json.loads(self._service.ask("GET", f"{self._objects}?{urlencode(query)}").body)
                found += [self._item(each) for each in page.get("items", ())]
                if not page.get("nextPageToken"):
                    return sorted(found, key=lambda item: item.name)
                query["pageToken"] = page["nextPageToken"]

    def stat(self, name: str) -> Item:
        """Return the object's size and hash. Raises FileNotFoundError."""
        with self._asking(name):
            return self._item(json.loads(self._service.ask("GET", f"{self._at(name)}?fields={_FIELDS}").body))

    def delete(self, name: str, generation: str | None = None) -> None:
        """Delete the object, if present; with `generation`, only that generation."""
        query = f"?ifGenerationMatch={generation}" if generation else ""
        with contextlib.suppress(FileNotFoundError), self._asking(name):
            self._service.ask("DELETE", f"{self._at(name)}{query}", also=(412,))

    def close(self) -> None:
        """Close the connections; the next call makes new ones."""
        self._service.close()

    def _upload(
        self, source: Path | bytes, resource: dict[str, Any], seen: os.stat_result | None, is_new: bool
    ) -> tuple[Item, str]:
        """Return the uploaded object, and the MD5 of the bytes that were read."""
        query = {"uploadType": "multipart", "fields": _FIELDS, **({"ifGenerationMatch": "0"} if is_new else {})}
        with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
            before = os.fstat(file.fileno()) if isinstance(source, Path) else None
            _check(file, seen or before)
            if before is not None and before.st_size > SINGLE_BYTES:
                target = f"/upload{self._objects}?{urlencode({**query, 'uploadType': 'resumable'})}"
                upload = _Resumable(self._service, target, resource, file, before)
                return self._item(upload.run()), upload.md5
            data = file.read()
            _check(file, before)
        md5 = _base64(_md5(data))
        about, body = _multipart({**resource, "md5Hash": md5}, data)
        answer = self._service.ask("POST", f"/upload{self._objects}?{urlencode(query)}", about, body)
        return self._item(json.loads(answer.body)), md5

    def _fetch(self, name: str, file: BinaryIO) -> Item:
        for _ in range(BODY_ATTEMPTS):
            item, md5 = self._download(name, file)
            if item.md5 in (None, md5):
                return item
        raise StoreError(_DAMAGED.format(uri=self._uri(name), count=BODY_ATTEMPTS))

    def _download(self, name: str, file: BinaryIO) -> tuple[Item, str]:
        """Return the downloaded object, and the MD5 of the received bytes."""
        offset, patience = 0, Patience(self._service)
        item = digest = None
        while True:
            target = f"{self._at(name)}?alt=media"
            headers: dict[str, str] = {}
            if item is not None:  # the same generation, or an error
                target, headers = f"{target}&generation={item.generation}", {"Range": f"bytes={offset}-"}
            try:
                with self._service.once("GET", target, headers) as reply:
                    if item is None or digest is None or reply.status != 206:
                        item, digest, offset = _of_headers(name, reply.headers), _md5(), 0
                        file.seek(0)
                        file.truncate()
                    while piece := reply.read(PIECE_BYTES):
                        file.write(piece)
                        digest.update(piece)
                        offset += len(piece)
                        patience.got_on()
                if item.size in (-1, offset):
                    return item, _base64(digest)
                raise Lost(f"{offset} of {item.size} bytes were received")
            except (ServiceError, Lost) as error:
                if isinstance(error, ServiceError) and error.status == 404 and item is not None:
                    raise Changed(_CHANGED.format(uri=self._uri(name))) from error
                patience.failed(error)
                if offset == 0 or (item is not None and item.size < 0):  # no offset into a decompressed object
                    item = None

    def key(self, name: str) -> str:
        """Return the object's key in the bucket."""
        return self._above + name

    def _item(self, resource: dict[str, Any]) -> Item:
        return Item(
            resource["name"].removeprefix(self._above),
            int(resource.get("size", 0)),
            resource.get("md5Hash"),
            str(resource.get("generation", "")),
            str(resource.get("updated", "")),
            resource.get("metadata", {}),
        )

    def _at(self, name: str) -> str:
        return f"{self._objects}/{quote(self.key(name), safe='')}"

    def _uri(self, name: str) -> str:
        return f"gs://{self._bucket}/{self._above}{name}".rstrip("/")

    @contextlib.contextmanager
    def _asking(self, name: str = "") -> Iterator[None]:
        """Convert the errors of a service to an OSError with a helpful message. `name`: the requested object."""
        try:
            yield
        except (ServiceError, Lost, Untrusted, ValueError, KeyError) as error:
            raise self._failure(error, name) from error

    def _failure(self, error: Exception, name: str) -> Exception:
        if isinstance(error, ServiceError):
            return self._refusal(error, name)
        if isinstance(error, Lost):
            return ConnectionError(f"{self._explained(_SILENT, name)} ({error})")
        if isinstance(error, Untrusted):
            is_time = "not yet valid" in str(error) or "has expired" in str(error)
            return StoreError(f"{self._explained(_CLOCK if is_time else _UNTRUSTED, name)} ({error})")
        # Invalid JSON, or JSON without a required field.
        words = f"the answer of {self._explained('{host}', name)} cannot be read"
        return StoreError(f"{self._uri(name)}: {words}", is_passing=True)

    def _refusal(self, error: ServiceError, name: str) -> OSError:
        if error.status == 404:  # a missing object, or a missing bucket; other messages prove no absence
            words = error.message.lower()
            if name and words.startswith("no such object"):
                return FileNotFoundError(f"{self._uri('')} has no {name}")
            if "bucket" in words and "exist" in words:
                return StoreError(f"{self._explained(_NO_BUCKET, name)} ({error})")
            return StoreError(f"{self._uri(name)}: {error}")
        if error.status == 401:
            return PermissionError(f"{self._explained(_REFUSED, name)} ({error})")
        if error.status == 429 or (error.status == 403 and (error.is_passing or error.reason == "quotaExceeded")):
            return StoreError(f"{self._explained(_QUOTA, name)} ({error})", is_passing=True)
        if error.status == 403:
            said = _DENIED
            if "scope" in error.message.lower() or "SCOPE" in error.reason:
                said = _SCOPES
            elif error.reason == "accountDisabled" or "billing" in error.message.lower():
                said = _BILLING
            return PermissionError(f"{self._explained(said, name)} ({error})")
        return StoreError(f"{self._uri(name)}: {error}", is_passing=error.is_passing)

    def _explained(self, text: str, name: str) -> str:
        who = "it" if self._service.identity is None else self._service.identity.who
        host = urlsplit(self._service.endpoint).netloc
        return text.format(bucket=self._bucket, uri=self._uri(name), host=host, who=who)


class _Resumable:
    """One upload in chunks; the object stays invisible until the last chunk arrives."""

    def __init__(
        self, service: Service, target: str, resource: dict[str, Any], file: BinaryIO, before: os.stat_result
    ) -> None:
        self._service, self._target, self._resource, self._file = service, target, resource, file
        self._before, self._size = before, before.st_size
        self._digest, self._hashed = _md5(), 0

    @property
    def md5(self) -> str:
        """The MD5 of the bytes that were read."""
        return _base64(self._digest)

    def run(self) -> dict[str, Any]:
        """Return the resource of the uploaded object."""
        session, offset, patience = "", 0, Patience(self._service)
        is_sure = True  # whether the offset is known
        while True:
            try:
                if not session:
                    session, offset, is_sure = self._begin(), 0, True
                found = self._send(session, offset) if is_sure else self._ask(session)
                if isinstance(found, dict):
                    return found
                if found <= offset and is_sure:
                    raise Lost("the service takes no more bytes")
                if found > offset:
                    patience.got_on()
                offset, is_sure = found, True
            except (ServiceError, Lost) as error:
                if session and isinstance(error, ServiceError) and error.status in (404, 410):
                    session, error = "", Lost("the service no longer knows the upload")  # restart the upload
                patience.failed(error)
                is_sure = False

    def _begin(self) -> str:
        headers = {"X-Upload-Content-Length": str(self._size), "X-Upload-Content-Type": "application/octet-stream"}
        headers["Content-Type"] = "application/json; charset=UTF-8"
        with self._service.once("POST", self._target, headers, json.dumps(self._resource).encode()) as reply:
            found = urlsplit(reply.headers["Location"])
        # All requests use one endpoint: a private endpoint or an emulator may not know its own address.
        path = found.path.removeprefix(urlsplit(self._service.endpoint).path.rstrip("/"))
        return f"{path}?{found.query}"

    def _send(self, session: str, offset: int) -> dict[str, Any] | int:
        """Send a chunk; return the offset up to which all bytes arrived, or the object."""
        end = min(offset + CHUNK_BYTES, self._size)
        headers = {"Content-Length": str(end - offset), "Content-Range": f"bytes {offset}-{end - 1}/{self._size}"}
        with self._service.once("PUT", session, headers, self._pieces(offset, end), also=(308,)) as reply:
            return _progress(reply)

    def _ask(self, session: str) -> dict[str, Any] | int:
        headers = {"Content-Length": "0", "Content-Range": f"bytes */{self._size}"}
        with self._service.once("PUT", session, headers, also=(308,)) as reply:
            return _progress(reply)

    def _pieces(self, offset: int, end: int) -> Iterator[bytes]:
        self._file.seek(offset)
        while offset < end:
            piece = self._file.read(min(PIECE_BYTES, end - offset))
            self._digest.update(piece[max(0, self._hashed - offset) :])  # skip the bytes that were sent before
            offset += len(piece)
            self._hashed = max(self._hashed, offset)
            if offset == self._size or not piece:  # before the last bytes, which make the object visible
                _check(self._file, self._before)
            yield piece


def _check(file: BinaryIO, before: os.stat_result | None) -> None:
    """Raise Changed if the file was changed since `before`; bytes have no `before`."""
    if before is None:
        return
    now = os.fstat(file.fileno())
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise Changed(f"{file.name} was written to while it was read")


def _progress(reply: Reply) -> dict[str, Any] | int:
    if reply.status != 308:
        return dict(json.loads(reply.read()))
    there = reply.headers["Range"]  # bytes=0-262143; absent before the first byte
    return int(there.rpartition("-")[2]) + 1 if there else 0


def _multipart(about: dict[str, str], data: bytes) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a one-request upload: the metadata and the bytes."""
    mark = uuid.uuid4().hex
    first = f"--{mark}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(about)}\r\n"
    second = f"--{mark}\r\nContent-Type: application/octet-stream\r\n\r\n"
    body = b"".join((first.encode(), second.encode(), data, f"\r\n--{mark}--\r\n".encode()))
    return {"Content-Type": f"multipart/related; boundary={mark}"}, body


def _of_headers(name: str, headers: Message) -> Item:
    generation, updated = headers["X-Goog-Generation"], headers["Last-Modified"] or ""
    length = headers["Content-Length"]
    if length is None and headers["X-Goog-Stored-Content-Encoding"] not in (None, "identity"):  # decompressed
        return Item(name, -1, None, generation, updated)
    hashes = ",".join(headers.get_all("X-Goog-Hash", ())).split(",")
    md5 = next((each.strip()[4:] for each in hashes if each.strip().startswith("md5=")), None)
    return Item(name, int(length or headers["X-Goog-Stored-Content-Length"]), md5, generation, updated)


def _md5(data: bytes = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)


def _base64(digest: hashlib._Hash) -> str:
    return base64.b64encode(digest.digest()).decode()

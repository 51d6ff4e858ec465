"""A bucket of Google Cloud Storage over its JSON API, with the standard library: transfers of whole files.

Source: the discovery document storage.v1, and the guide "Resumable uploads" for continuing an upload. The MD5 of every
file is compared with the bucket's MD5, in both directions.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

from cloudtrain.entrypoints.stores import google_access
from cloudtrain.entrypoints.stores.google_http import Lost, Patience, Reply, Service, ServiceError, Untrusted

__all__ = ["Bucket", "Changed", "Item", "endpoint", "split"]

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

    `about` is the writer's metadata (unknown after a download).
    """

    key: str
    size: int
    md5: str | None
    generation: str
    updated: str
    about: dict[str, str] = field(default_factory=dict)


class Changed(OSError):
    """The file was changed while it was read."""


def split(uri: str) -> tuple[str, str]:
    """Return bucket and key, or prefix, of `gs://BUCKET/KEY`. Raises ValueError."""
    scheme, mark, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")  # not with urlsplit: a `#` or a `?` would end the key
    if scheme.lower() != "gs" or not mark or not bucket:
        raise ValueError(f"{uri!r} is no place in Google Cloud Storage; write it as in gs://BUCKET/PREFIX")
    return bucket, key


def endpoint() -> str:
    """Return the address of the storage: a private endpoint or emulator from the environment, or Google's address."""
    endpoint = os.environ.get("CLOUDTRAIN_STORAGE_ENDPOINT") or os.environ.get("STORAGE_EMULATOR_HOST")
    return endpoint or "https://storage.googleapis.com"


class Bucket:
    """A bucket's objects. Every call raises OSError, whose message says what to do. Thread-safe."""

    def __init__(self, name: str, service: Service | None = None) -> None:
        self.name = name
        if service is None:
            service = Service(endpoint(), None if google_access.anonymous() else google_access.of_environment())
        self._service = service
        self._objects = f"/storage/v1/b/{quote(name, safe='')}/o"

    def put(
        self,
        path: Path,
        key: str,
        about: dict[str, str] | None = None,
        *,
        if_absent: bool = False,
        seen: os.stat_result | None = None,
    ) -> Item:
        """Upload the file: the old object stays until the upload is complete.

        Raises Changed, and leaves the object as is, if the file changes during the upload, or has changed since `seen`;
        with `if_absent`, raises FileExistsError if a different object exists.
        """
        resource = {"name": key, **({"metadata": about} if about else {})}
        with self._asking(key):
            for _ in range(BODY_ATTEMPTS):
                try:
                    item, md5 = self._upload(path, resource, if_absent, seen)
                except ServiceError as error:
                    if error.status != 400 or "md5" not in error.message.lower():
                        raise
                    continue
                if item.md5 in (None, md5):
                    return item
                self._delete(key, item.generation)
            raise OSError(_DAMAGED.format(uri=self._uri(key), count=BODY_ATTEMPTS))

    def get(self, key: str, path: Path) -> Item:
        """Download the object to a temporary file, then rename the file to `path`. Raises FileNotFoundError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with self._asking(key):
                for _ in range(BODY_ATTEMPTS):
                    item, md5 = self._download(key, partial)
                    if item.md5 in (None, md5):
                        partial.replace(path)
                        return item
                raise OSError(_DAMAGED.format(uri=self._uri(key), count=BODY_ATTEMPTS))
        finally:
            partial.unlink(missing_ok=True)

    def items(self, prefix: str = "") -> list[Item]:
        """Return the objects whose keys begin with `prefix`, sorted by key, over all pages."""
        found: list[Item] = []
        query = {"prefix": prefix, "fields": f"items({_FIELDS}),nextPageToken"}
        with self._asking():
            while True:
                page = json.loads(self._service.ask("GET", f"{self._objects}?{urlencode(query)}").body)
                found += [_item(each) for each in page.get("items", ())]
                if not page.get("nextPageToken"):
                    return sorted(found, key=lambda item: item.key)
                query["pageToken"] = page["nextPageToken"]

    def stat(self, key: str) -> Item:
        """Return the object's size and hash. Raises FileNotFoundError."""
        with self._asking(key):
            return _item(json.loads(self._service.ask("GET", f"{self._at(key)}?fields={_FIELDS}").body))

    def delete(self, key: str, generation: str | None = None) -> None:
        """Delete the object, if present; with `generation`, only that generation."""
        with self._asking(key):
            self._delete(key, generation)

    def close(self) -> None:
        """Close the connections; the next call makes new ones."""
        self._service.close()

    def _delete(self, key: str, generation: str | None) -> None:
        query = f"?ifGenerationMatch={generation}" if generation else ""
        with contextlib.suppress(FileNotFoundError), self._asking(key):
            self._service.ask("DELETE", f"{self._at(key)}{query}", also=(412,))

    def _upload(
        self, path: Path, resource: dict[str, Any], if_absent: bool, seen: os.stat_result | None
    ) -> tuple[Item, str]:
        """Return the uploaded object, and the MD5 of the bytes that were read."""
        query = {"uploadType": "multipart", "fields": _FIELDS, **({"ifGenerationMatch": "0"} if if_absent else {})}
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            _check(file, seen or before)
            if before.st_size > SINGLE_BYTES:
                query["uploadType"] = "resumable"
                return _Resumable(self._service, f"/upload{self._objects}?{urlencode(query)}", resource, file).run()
            data = file.read()
            _check(file, before)
        md5 = _base64(_md5(data))
        about, body = _multipart({**resource, "md5Hash": md5}, data)
        try:
            answer = self._service.ask("POST", f"/upload{self._objects}?{urlencode(query)}", about, body)
        except ServiceError as error:
            # After a lost answer the request is repeated, and the object exists already.
            if error.status == 412 and (there := self.stat(resource["name"])).md5 == md5:
                return there, md5
            raise
        return _item(json.loads(answer.body)), md5

    def _download(self, key: str, path: Path) -> tuple[Item, str]:
        """Return the downloaded object, and the MD5 of the received bytes."""
        offset, patience = 0, Patience(self._service)
        item = digest = None
        with path.open("wb") as file:
            while True:
                target = f"{self._at(key)}?alt=media"
                headers: dict[str, str] = {}
                if item is not None:  # the same generation, or an error
                    target, headers = f"{target}&generation={item.generation}", {"Range": f"bytes={offset}-"}
                try:
                    with self._service.once("GET", target, headers) as reply:
                        if item is None or digest is None or reply.status != 206:
                            item, digest, offset = _of_headers(key, reply.headers), _md5(), 0
                            file.seek(0)
                            file.truncate()
                        while piece := reply.read(PIECE_BYTES):
                            file.write(piece)
                            digest.update(piece)
                            offset += len(piece)
                            patience.got_on()
                    if offset == item.size:
                        return item, _base64(digest)
                    raise Lost(f"{offset} of {item.size} bytes were received")
                except (ServiceError, Lost) as error:
                    if isinstance(error, ServiceError) and error.status == 404 and item is not None:
                        raise OSError(_CHANGED.format(uri=self._uri(key))) from error
                    patience.failed(error)
                    if offset == 0:
                        item = None

    def _at(self, key: str) -> str:
        return f"{self._objects}/{quote(key, safe='')}"

    def _uri(self, key: str) -> str:
        return f"gs://{self.name}/{key}".rstrip("/")

    @contextlib.contextmanager
    def _asking(self, key: str = "") -> Iterator[None]:
        """Convert the errors of a service to an OSError with a helpful message. `key`: the requested object."""
        try:
            yield
        except ServiceError as error:
            raise self._refusal(error, key) from error
        except Lost as error:
            raise ConnectionError(f"{self._explained(_SILENT, key)} ({error})") from error
        except Untrusted as error:
            is_time = "not yet valid" in str(error) or "has expired" in str(error)
            raise OSError(f"{self._explained(_CLOCK if is_time else _UNTRUSTED, key)} ({error})") from error
        except (ValueError, KeyError) as error:  # invalid JSON, or JSON without a required field
            raise OSError(f"{self._uri(key)}: the answer of {self._explained('{host}', key)} cannot be read") from error

    def _refusal(self, error: ServiceError, key: str) -> OSError:
        if error.status == 404:
            return self._absence(error, key)
        if error.status == 412:
            return FileExistsError(f"{self._uri(key)} exists already")
        if error.status == 401:
            return PermissionError(f"{self._explained(_REFUSED, key)} ({error})")
        if error.status == 429 or (error.status == 403 and (error.is_passing or error.reason == "quotaExceeded")):
            return OSError(f"{self._explained(_QUOTA, key)} ({error})")
        if error.status == 403:
            said = _DENIED
            if "scope" in error.message.lower() or "SCOPE" in error.reason:
                said = _SCOPES
            elif error.reason == "accountDisabled" or "billing" in error.message.lower():
                said = _BILLING
            return PermissionError(f"{self._explained(said, key)} ({error})")
        return OSError(f"{self._uri(key)}: {error}")

    def _absence(self, error: ServiceError, key: str) -> OSError:
        """Return the error for a 404: a missing object, or a missing bucket. Other messages prove no absence."""
        words = error.message.lower()
        if key and words.startswith("no such object"):
            return FileNotFoundError(f"gs://{self.name} has no {key}")
        if "bucket" in words and "exist" in words:
            return OSError(f"{self._explained(_NO_BUCKET, key)} ({error})")
        return OSError(f"{self._uri(key)}: {error}")

    def _explained(self, text: str, key: str) -> str:
        who = "it" if self._service.identity is None else self._service.identity.who
        host = urlsplit(self._service.endpoint).netloc
        return text.format(bucket=self.name, uri=self._uri(key), host=host, who=who)


class _Resumable:
    """One upload in chunks; the object stays invisible until the last chunk arrives."""

    def __init__(self, service: Service, target: str, resource: dict[str, Any], file: BinaryIO) -> None:
        self._service, self._target, self._resource, self._file = service, target, resource, file
        self._before = os.fstat(file.fileno())
        self._size = self._before.st_size
        self._digest, self._hashed = _md5(), 0

    def run(self) -> tuple[Item, str]:
        """Return the uploaded object, and the MD5 of the bytes that were read."""
        session, offset, patience = "", 0, Patience(self._service)
        is_sure = True  # whether the offset is known
        while True:
            try:
                if not session:
                    session, offset, is_sure = self._begin(), 0, True
                found = self._send(session, offset) if is_sure else self._ask(session)
                if isinstance(found, Item):
                    return found, _base64(self._digest)
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

    def _send(self, session: str, offset: int) -> Item | int:
        """Send a chunk; return the offset up to which all bytes arrived, or the object."""
        end = min(offset + CHUNK_BYTES, self._size)
        headers = {"Content-Length": str(end - offset), "Content-Range": f"bytes {offset}-{end - 1}/{self._size}"}
        with self._service.once("PUT", session, headers, self._pieces(offset, end), also=(308,)) as reply:
            return _progress(reply)

    def _ask(self, session: str) -> Item | int:
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


def _check(file: BinaryIO, before: os.stat_result) -> None:
    """Raise Changed if the file was changed since `before`."""
    now = os.fstat(file.fileno())
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise Changed(f"{file.name} was written to while it was read")


def _progress(reply: Reply) -> Item | int:
    if reply.status != 308:
        return _item(json.loads(reply.read()))
    there = reply.headers["Range"]  # bytes=0-262143; absent before the first byte
    return int(there.rpartition("-")[2]) + 1 if there else 0


def _multipart(about: dict[str, str], data: bytes) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a one-request upload: the metadata and the bytes."""
    mark = uuid.uuid4().hex
    first = f"--{mark}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(about)}\r\n"
    second = f"--{mark}\r\nContent-Type: application/octet-stream\r\n\r\n"
    body = b"".join((first.encode(), second.encode(), data, f"\r\n--{mark}--\r\n".encode()))
    return {"Content-Type": f"multipart/related; boundary={mark}"}, body


def _item(resource: dict[str, Any]) -> Item:
    size, generation = int(resource.get("size", 0)), str(resource.get("generation", ""))
    return Item(
        resource["name"],
        size,
        resource.get("md5Hash"),
        generation,
        str(resource.get("updated", "")),
        resource.get("metadata", {}),
    )


def _of_headers(key: str, headers: Message) -> Item:
    hashes = ",".join(headers.get_all("X-Goog-Hash", ())).split(",")
    md5 = next((each.strip()[4:] for each in hashes if each.strip().startswith("md5=")), None)
    size = int(headers["Content-Length"] or headers["X-Goog-Stored-Content-Length"])
    return Item(key, size, md5, headers["X-Goog-Generation"], headers["Last-Modified"] or "")


def _md5(data: bytes = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)


def _base64(digest: hashlib._Hash) -> str:
    return base64.b64encode(digest.digest()).decode()

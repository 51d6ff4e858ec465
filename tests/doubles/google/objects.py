"""Buckets and objects: each content is a file below a folder, metadata is kept in memory; their JSON and headers."""

import base64
import contextlib
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import google_crc32c

from doubles.google.errors import GoogleError, invalid
from doubles.google.names import BUCKET, NUMBER, PROJECT, REGION, rfc3339

PIECE_BYTES = 1 << 20
NAME_BYTES = 1024  # docs storage/docs/objects#naming
_WRITABLE = {"acl", "cacheControl", "contentDisposition", "contentEncoding", "contentLanguage", "contentType", "crc32c"}
_WRITABLE |= {"customTime", "eventBasedHold", "md5Hash", "metadata", "storageClass", "temporaryHold", "retention"}
_READ_ONLY = {"bucket", "name", "size", "kind", "contexts"}


@dataclass
class Bucket:
    """A bucket."""

    name: str
    project: str = PROJECT
    location: str = REGION.upper()
    storage_class: str = "STANDARD"
    created: float = field(default_factory=time.time)
    told: dict[str, Any] = field(default_factory=dict)  # labels and similar fields, as received


@dataclass
class Object:
    """One generation of an object."""

    bucket: str
    name: str
    generation: int
    file: Path
    size: int
    crc32c: str
    md5: str
    created: float
    told: dict[str, Any] = field(default_factory=dict)  # contentType, metadata...
    metageneration: int = 1


Check = Callable[["Object | None"], None]  # raises GoogleError if a precondition does not hold for the existing object


class Contents:
    """The bytes of an object from `start` on; they stay readable even after the object is replaced."""

    def __init__(self, file: Path, start: int, size: int) -> None:
        self.size, self._start = size, start
        self._handle = os.open(file, os.O_RDONLY)

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, self.size, PIECE_BYTES):
            yield os.pread(self._handle, min(PIECE_BYTES, self.size - at), self._start + at)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._handle)


class Spool:
    """A file that grows, with its checksums; `commit` takes the file over."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._crc32c, self._md5 = google_crc32c.Checksum(), hashlib.md5()
        path.write_bytes(b"")

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        with self.path.open("ab") as file:
            for at in range(0, len(data), PIECE_BYTES):
                piece = bytes(data[at : at + PIECE_BYTES])
                file.write(piece)
                self._crc32c.update(piece)
                self._md5.update(piece)
        self.size += len(data)

    @property
    def crc32c(self) -> str:
        """Return the checksum up to now, in the format of metadata."""
        return base64.b64encode(self._crc32c.digest()).decode()

    @property
    def md5(self) -> str:
        """Return the checksum up to now, in the format of metadata."""
        return base64.b64encode(self._md5.digest()).decode()


class Objects:
    """All buckets. The checks of preconditions and the changes are one step under the lock."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.RLock()
        self._folder = folder
        self.clear()

    def clear(self) -> None:
        """Forget all buckets except the project's bucket, and empty the project's bucket."""
        with self.lock:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            self._buckets = {BUCKET: Bucket(BUCKET)}
            self._objects: dict[str, dict[str, Object]] = {BUCKET: {}}
            self._generation, self._spools = 0, 0

    def add_bucket(self, bucket: Bucket) -> None:
        """Make a bucket. Raises GoogleError if the name exists."""
        with self.lock:
            if bucket.name in self._buckets:
                message = "Your previous request to create the named bucket succeeded and you already own it."
                raise GoogleError("ALREADY_EXISTS", message)
            self._buckets[bucket.name] = bucket
            self._objects[bucket.name] = {}

    def buckets(self) -> list[Bucket]:
        """Return the project's buckets."""
        return [bucket for bucket in self._buckets.values() if bucket.project == PROJECT]

    def bucket(self, name: str) -> Bucket:
        """Return the bucket. Raises GoogleError for an unknown bucket, and for a bucket of another project."""
        found = self._buckets.get(name)
        if found is None:
            raise GoogleError("NOT_FOUND", "The specified bucket does not exist.")
        if found.project != PROJECT:
            raise missing_right("storage.buckets.get", "bucket")
        return found

    def objects(self, bucket: str) -> dict[str, Object]:
        """Return a bucket's objects by name. Raises GoogleError."""
        with self.lock:
            if self._buckets.get(bucket, Bucket("")).project != PROJECT:
                raise missing_right("storage.objects.list", "bucket")
            self.bucket(bucket)
            return self._objects[bucket]

    def find(self, bucket: str, name: str) -> Object | None:
        """Return the current object, or None. Raises GoogleError for an unknown bucket."""
        return self.objects(bucket).get(name)

    def spool(self) -> Spool:
        """Return an empty file for arriving contents."""
        with self.lock:
            self._spools += 1
            return Spool(self._folder / f"spool-{self._spools}")

    def commit(self, bucket: str, name: str, spool: Spool, told: Mapping[str, Any], check: Check) -> Object:
        """Make the spool's file the object. Raises GoogleError for a bad name, checksum or precondition."""
        for kind, real in (("crc32c", spool.crc32c), ("md5Hash", spool.md5)):
            if told.get(kind) not in (None, real):
                message = f'Provided {kind} "{told[kind]}" doesn\'t match calculated {kind} "{real}".'
                spool.path.unlink()
                raise invalid(message)
        with self.lock:
            try:
                check_name(name)
                old = self.find(bucket, name)
                check(old)
            except GoogleError:
                spool.path.unlink()
                raise
            self._generation = max(self._generation + 1, time.time_ns() // 1000)
            file = spool.path.replace(self._folder / str(self._generation))
            kept = {key: value for key, value in told.items() if key not in ("crc32c", "md5Hash", "name", "bucket")}
            made = Object(bucket, name, self._generation, file, spool.size, spool.crc32c, spool.md5, time.time(), kept)
            self._objects[bucket][name] = made
            if old is not None:
                old.file.unlink()
            return made

    def remove(self, bucket: str, name: str, check: Check) -> None:
        """Remove the object. Raises GoogleError."""
        with self.lock:
            old = self.find(bucket, name)
            check(old)
            if old is None:
                raise missing(bucket, name)
            del self._objects[bucket][name]
            old.file.unlink()


def check_name(name: str) -> None:
    """Raise GoogleError for a name that is not valid for an object."""
    if not name:
        raise invalid("Required")
    is_bad = name in (".", "..") or "\n" in name or "\r" in name or name.startswith(".well-known/acme-challenge/")
    if is_bad or len(name.encode()) > NAME_BYTES:
        raise invalid(f"Invalid object name: '{name[:100]}'")


def missing(bucket: str, name: str) -> GoogleError:
    """Return the error for a missing object."""
    return GoogleError("NOT_FOUND", f"No such object: {bucket}/{name}")


def missing_right(permission: str, what: str, who: str = "The caller") -> GoogleError:
    """Return the error for a missing right on a bucket or an object."""
    message = (
        f"{who} does not have {permission} access to the Google Cloud Storage {what}. "
        f"Permission '{permission}' denied on resource (or it may not exist)."
    )
    return GoogleError("PERMISSION_DENIED", message)


def writable(told: dict[str, Any]) -> dict[str, Any]:
    """Return the writable fields. Raises GoogleError for an unknown field."""
    unknown = set(told) - _WRITABLE - _READ_ONLY
    if unknown:
        raise invalid(f"Unknown name \"{min(unknown)}\" at 'resource': Cannot find field.")
    return {key: value for key, value in told.items() if key in _WRITABLE}


def etag_of(found: Object) -> str:
    """Return the object's etag."""
    return base64.b64encode(f"{found.generation}/{found.metageneration}".encode()).decode()


def media_headers(found: Object) -> dict[str, str]:
    """Return the headers of a download; the checksums are the whole object's, also for a range."""
    told, sums = found.told, [f"crc32c={found.crc32c}", f"md5={found.md5}"]
    encoding = told.get("contentEncoding")
    return {
        "Content-Type": told.get("contentType", "application/octet-stream"),
        "ETag": etag_of(found),
        "X-Goog-Generation": str(found.generation),
        "X-Goog-Metageneration": str(found.metageneration),
        "X-Goog-Hash": ",".join(sums),
        "X-Goog-Storage-Class": told.get("storageClass", "STANDARD"),
        "X-Goog-Stored-Content-Encoding": encoding or "identity",
        "X-Goog-Stored-Content-Length": str(found.size),
        "Cache-Control": told.get("cacheControl", "no-cache, no-store, max-age=0, must-revalidate"),
        **({"Content-Encoding": encoding} if encoding else {}),
    }


def resource(found: Object) -> dict[str, Any]:
    """Return the object's metadata."""
    place = f"b/{found.bucket}/o/{quote(found.name, safe='')}"
    times = dict.fromkeys(
        ("timeCreated", "updated", "timeStorageClassUpdated", "timeFinalized"), rfc3339(found.created)
    )
    base = "https://www.googleapis.com"
    return {
        "kind": "storage#object",
        "id": f"{found.bucket}/{found.name}/{found.generation}",
        "selfLink": f"{base}/storage/v1/{place}",
        "mediaLink": f"https://storage.googleapis.com/download/storage/v1/{place}?generation={found.generation}&alt=media",
        "name": found.name,
        "bucket": found.bucket,
        "generation": str(found.generation),
        "metageneration": str(found.metageneration),
        "storageClass": "STANDARD",
        **found.told,
        "size": str(found.size),
        "md5Hash": found.md5,
        "crc32c": found.crc32c,
        "etag": etag_of(found),
        **times,
    }


def bucket_resource(found: Bucket) -> dict[str, Any]:
    """Return the bucket's metadata."""
    uniform = {"enabled": True, "lockedTime": "2099-01-01T00:00:00.000Z"}
    created = rfc3339(found.created)
    return {
        "kind": "storage#bucket",
        "id": found.name,
        "name": found.name,
        "selfLink": f"https://www.googleapis.com/storage/v1/b/{found.name}",
        "projectNumber": NUMBER,
        "location": found.location,
        "locationType": "region" if re.search(r"\d$", found.location) else "multi-region",
        "storageClass": found.storage_class,
        "metageneration": "1",
        "etag": "CAE=",
        "timeCreated": created,
        "updated": created,
        "iamConfiguration": {"uniformBucketLevelAccess": uniform, "publicAccessPrevention": "enforced"},
        **found.told,
    }

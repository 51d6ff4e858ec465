"""Cloud Storage's description of a bucket and an object, in JSON and in headers."""

from __future__ import annotations

import base64
import re
from typing import Any
from urllib.parse import quote

from doubles.google.errors import invalid
from doubles.google.names import NUMBER, rfc3339
from doubles.google.objects import Bucket, Object

__all__ = ["bucket_resource", "etag_of", "media_headers", "resource", "writable"]

_WRITABLE = {"acl", "cacheControl", "contentDisposition", "contentEncoding", "contentLanguage", "contentType", "crc32c"}
_WRITABLE |= {"customTime", "eventBasedHold", "md5Hash", "metadata", "storageClass", "temporaryHold", "retention"}
_READ_ONLY = {"bucket", "name", "size", "kind", "contexts"}


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

"""A bucket of Google Cloud Storage as the second place for checkpoints: `gs://BUCKET/PREFIX`.

On Google's machines the standard library suffices, since the metadata server gives the job's identity; a credentials
file (google_access.py) is read by google-auth.
"""

from __future__ import annotations

import re
from pathlib import Path

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.stores import google_access, google_storage

__all__ = ["GcsMirror", "mirror"]

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


def mirror(uri: str) -> GcsMirror:
    """Return the mirror for `gs://BUCKET/PREFIX`; sends no request yet.

    Raises TaskError for a bad uri, or for a credentials file without the package that reads the file.
    """
    bucket, _, prefix = uri.partition("://")[2].partition("/")  # not by urlsplit: a `#` or a `?` would end the prefix
    if not _BUCKET.fullmatch(bucket):
        raise TaskError(f"checkpoint.mirror {uri!r} names no bucket; write it as in gs://BUCKET/PREFIX")
    if words := google_access.missing_package():
        raise TaskError(f"checkpoint.mirror {uri!r}: {words}")
    return GcsMirror(bucket, prefix.strip("/"))


class GcsMirror:
    """The objects of a bucket below `prefix/`; names in this class omit the prefix. See mirror.Mirror."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = google_storage.Bucket(bucket)
        self._above = f"{prefix}/" if prefix else ""

    def put(self, path: Path, name: str) -> None:
        """Upload the file; a large file in chunks, not visible until the last has arrived."""
        self._bucket.put(path, self._above + name)

    def get(self, name: str, path: Path) -> None:
        """Download the object to a partial file beside the path, then rename."""
        self._bucket.get(self._above + name, path)

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with `prefix`, over all pages."""
        keys = [item.key for item in self._bucket.items(self._above + prefix)]
        # A key with a slash at the end is a folder made in the console.
        return sorted(key.removeprefix(self._above) for key in keys if not key.endswith("/"))

    def remove(self, name: str) -> None:
        """Remove the object, if present."""
        self._bucket.delete(self._above + name)

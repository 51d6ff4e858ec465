"""A bucket of Google Cloud Storage as the second place for checkpoints: `gs://BUCKET/PREFIX`.

Needs the standard library alone on Google's machines, for their metadata server says who the job is; where a
credentials file does (googleaccess.py), google-auth reads it.
"""

from __future__ import annotations

import re
from pathlib import Path

from cloudtrain.entrypoints import googleaccess, googlestorage
from cloudtrain.entrypoints.settings import TaskError

__all__ = ["GcsMirror", "mirror"]

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


def mirror(uri: str) -> GcsMirror:
    """Return the place below `gs://BUCKET/PREFIX`; asks nobody yet.

    Raises TaskError at a bad uri, or at a credentials file that nothing here can read.
    """
    bucket, _, prefix = uri.partition("://")[2].partition("/")  # by hand: to urlsplit a `#` or a `?` would end it
    if not _BUCKET.fullmatch(bucket):
        raise TaskError(f"checkpoint.mirror {uri!r} names no bucket; write it as in gs://BUCKET/PREFIX")
    if words := googleaccess.missing_package():
        raise TaskError(f"checkpoint.mirror {uri!r}: {words}")
    return GcsMirror(bucket, prefix.strip("/"))


class GcsMirror:
    """The objects of a bucket whose names begin with `prefix/`, which is not part of ours. See mirror.Mirror."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = googlestorage.Bucket(bucket)
        self._above = f"{prefix}/" if prefix else ""

    def put(self, path: Path, name: str) -> None:
        """Upload the file; a large one in chunks, of which nothing can be seen until the last is there."""
        self._bucket.put(path, self._above + name)

    def get(self, name: str, path: Path) -> None:
        """Download the object beside the path, then rename it."""
        self._bucket.get(self._above + name, path)

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin so, over all pages."""
        keys = [item.key for item in self._bucket.items(self._above + prefix)]
        # A key with a slash at its end is a folder that somebody made in the console.
        return sorted(key.removeprefix(self._above) for key in keys if not key.endswith("/"))

    def remove(self, name: str) -> None:
        """Remove the object, if it is there."""
        self._bucket.delete(self._above + name)

"""S3 as the platform itself uses it: directly in moto's store, so that faults for clients have no effect."""

import contextlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends


def split(uri: str) -> tuple[str, str]:
    """Return the bucket and the key or prefix of an s3:// or https:// address."""
    bucket, _, key = uri.split("://", 1)[1].partition("/")
    return bucket, key


def has(bucket: str) -> bool:
    """Return whether the bucket exists."""
    return bucket in _backend().buckets


def keys(uri: str) -> list[str]:
    """Return, in order, the keys that begin with the address's key."""
    bucket, prefix = split(uri)
    if not has(bucket):
        return []
    return sorted(key for key in list(_backend().buckets[bucket].keys) if key.startswith(prefix))


def put(bucket: str, key: str, data: bytes) -> None:
    """Store an object; a missing bucket is ignored."""
    if has(bucket):
        _backend().put_object(bucket, key, data)


def remove(uri: str, chosen: Callable[[list[str]], Iterable[str]]) -> None:
    """Remove the chosen keys of those that begin with the address's key."""
    for key in chosen(keys(uri)):
        _backend().delete_object(split(uri)[0], key)


def download(uri: str, found: Iterable[str], folder: Path) -> None:
    """Write the objects below the folder, each at its path relative to the address."""
    bucket, prefix = split(uri)
    for key in found:
        to = folder / _relative(key, prefix)
        if key.endswith("/"):
            to.mkdir(parents=True, exist_ok=True)
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        stored = _backend().get_object(bucket, key)
        if stored is not None:
            to.write_bytes(stored.value)


def archive(folders: Iterable[Path]) -> bytes:
    """Return a .tar.gz of the folders' files; of two files with the same name, the first folder's file."""
    packed = io.BytesIO()
    names: set[str] = set()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                name = path.relative_to(folder).as_posix()
                if name not in names:
                    names.add(name)
                    tar.add(path, name, recursive=False)
    return packed.getvalue()


@dataclass
class Mirror:
    """Copies a folder to S3 repeatedly: new and changed files, never a deletion."""

    folder: Path
    uri: str
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)

    def fill(self) -> None:
        """Download the objects that S3 already has; `copy` will not copy these back."""
        download(self.uri, keys(self.uri), self.folder)  # by the text of the address, as AWS does
        self.seen = self._now()

    def copy(self) -> None:
        """Copy the files changed since the last copy, in their present state."""
        bucket, prefix = split(self.uri)
        for name, mark in self._now().items():
            if self.seen.get(name) == mark:
                continue
            with contextlib.suppress(OSError):  # renamed or removed meanwhile
                put(bucket, f"{prefix.rstrip('/')}/{name}".lstrip("/"), (self.folder / name).read_bytes())
                self.seen[name] = mark

    def _now(self) -> dict[str, tuple[int, int]]:
        found = {}
        for place, _, names in os.walk(self.folder):  # passes over folders that are removed meanwhile
            for path in (Path(place, name) for name in names):
                with contextlib.suppress(OSError):
                    known = path.stat()
                    found[path.relative_to(self.folder).as_posix()] = (known.st_mtime_ns, known.st_size)
        return found


def _relative(key: str, prefix: str) -> str:
    if key.startswith(f"{prefix.rstrip('/')}/") and prefix:
        return key[len(prefix.rstrip("/")) + 1 :]
    # The prefix ends inside a name: leave out the folder of the name.
    return key[prefix.rfind("/") + 1 :]


def _backend() -> Any:
    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]

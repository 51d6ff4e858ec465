"""Blobs as plain files below a folder for each container: a job can mount a container's folder.

Kind, metadata, creation time and MD5 of a blob are kept in memory. A file that a job has written into the mounted
folder is an ordinary block blob, with the properties of its file.
"""

import base64
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from doubles.azure.errors import AzureError

NAME_CHARACTERS = 1024


@dataclass
class Blob:
    """Properties of a blob."""

    kind: str = "BlockBlob"
    created: float = 0.0
    modified: float = 0.0
    size: int = 0
    etag: str = ""
    content_type: str = "application/octet-stream"
    md5: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    blocks: list[tuple[str, int]] = field(default_factory=list)
    stamp: tuple[int, int] = (0, 0)  # of the file at the time of these properties


class Blobs:
    """All containers of the account."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.RLock()
        self._folder, self._staged = folder, folder.parent / "staged"
        self._known: dict[tuple[str, str], Blob] = {}
        self._blocks: dict[tuple[str, str], dict[str, bytes]] = {}
        self._changes = 0
        self._staged.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Forget all containers and blobs."""
        with self.lock:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._known.clear()
            self._blocks.clear()

    def make(self, container: str) -> Path:
        """Return the container's folder; make a missing folder."""
        (self._folder / container).mkdir(parents=True, exist_ok=True)
        return self._folder / container

    def check(self, container: str) -> None:
        """Raise AzureError unless the container exists."""
        if not (self._folder / container).is_dir():
            raise AzureError(404, "ContainerNotFound", "The specified container does not exist.")

    def path(self, container: str, name: str) -> Path:
        """Return the blob's file, existing or not. Raises AzureError for a name that is not valid for a file."""
        parts = name.split("/")
        if not name or len(name) > NAME_CHARACTERS or any(one in ("", ".", "..") or "\0" in one for one in parts):
            raise AzureError(400, "InvalidUri", "The requested URI does not represent any resource on the server.")
        return self._folder.joinpath(container, *parts)

    def find(self, container: str, name: str) -> Blob | None:
        """Return the properties of the blob, or None."""
        with self.lock:
            path = self.path(container, name)
            try:
                status = path.stat()
            except OSError:
                self._known.pop((container, name), None)
                return None
            if not path.is_file():
                return None
            stamp = (status.st_mtime_ns, status.st_size)
            known = self._known.get((container, name))
            if known is None or known.stamp != stamp:  # written by a job through its mount
                known = Blob(created=status.st_mtime, modified=status.st_mtime, size=status.st_size, stamp=stamp)
                known.etag = f'"0x{status.st_mtime_ns:X}{status.st_size:X}"'
                self._known[(container, name)] = known
            return known

    def read(self, container: str, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Return bytes of the blob. Raises FileNotFoundError."""
        with self.path(container, name).open("rb") as file:
            file.seek(start)
            return file.read() if size is None else file.read(size)

    def put(self, container: str, name: str, data: bytes, blob: Blob | None = None) -> Blob:
        """Write the whole blob atomically: readers see the old or the new content."""
        with self.lock:
            self.make(container)
            path = self.path(container, name)
            blob = blob or Blob()
            if blob.md5 is None and blob.kind == "BlockBlob":
                blob.md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
            handle, temporary = tempfile.mkstemp(dir=self._staged)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(temporary).chmod(0o666)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                Path(temporary).replace(path)
            except (NotADirectoryError, FileExistsError, IsADirectoryError):
                Path(temporary).unlink(missing_ok=True)
                message = "The specified path, or an element of the path, exists and its resource type is invalid."
                raise AzureError(409, "InvalidResourceType", message) from None  # as on accounts with real folders
            return self._noted(container, name, blob, is_new=True)

    def append(self, container: str, name: str, data: bytes) -> Blob:
        """Add to an append blob. Raises FileNotFoundError."""
        with self.lock:
            blob = self.find(container, name)
            if blob is None:
                raise FileNotFoundError(name)
            with self.path(container, name).open("ab") as file:
                file.write(data)
            return self._noted(container, name, blob, is_new=False)

    def stage(self, container: str, name: str, block: str, data: bytes) -> None:
        """Store a block until its commit."""
        with self.lock:
            self._blocks.setdefault((container, name), {})[block] = data

    def commit(self, container: str, name: str, blocks: list[tuple[str, str]], blob: Blob) -> Blob:
        """Make the blob from blocks (Latest, Committed or Uncommitted; id). Raises AzureError for an unknown block."""
        with self.lock:
            old = self.find(container, name)
            committed = self._committed(container, name, old)
            staged = self._blocks.get((container, name), {})
            parts: list[tuple[str, bytes]] = []
            for kind, block in blocks:
                found = None if kind == "Committed" else staged.get(block)
                if found is None and kind != "Uncommitted":
                    found = committed.get(block)
                if found is None:
                    raise AzureError(400, "InvalidBlockList", "The specified block list is invalid.")
                parts.append((block, found))
            if old is not None:
                blob.created = old.created
            written = self.put(container, name, b"".join(data for _, data in parts), blob)
            written.blocks = [(block, len(data)) for block, data in parts]
            self._blocks.pop((container, name), None)
            return written

    def annotate(self, container: str, name: str, metadata: dict[str, str]) -> Blob:
        """Set the blob's metadata. Raises FileNotFoundError."""
        with self.lock:
            blob = self.find(container, name)
            if blob is None:
                raise FileNotFoundError(name)
            blob.metadata = metadata
            return self._noted(container, name, blob, is_new=False)

    def delete(self, container: str, name: str) -> None:
        """Remove the blob. Raises FileNotFoundError."""
        with self.lock:
            path = self.path(container, name)
            path.unlink()
            self._known.pop((container, name), None)

    def names(self, container: str, prefix: str = "") -> Iterator[str]:
        """Yield the names with the prefix, in alphabetical order."""
        root = self._folder / container
        top = root / prefix.rpartition("/")[0]
        found = []
        for folder, _, files in os.walk(top):
            base = os.path.relpath(folder, root)
            found += [name if base == "." else f"{base}/{name}" for name in files]
        yield from sorted(name for name in found if name.startswith(prefix))

    def _noted(self, container: str, name: str, blob: Blob, is_new: bool) -> Blob:
        """Store the properties of the blob with its file's present size and time."""
        self._changes += 1
        status = self.path(container, name).stat()
        blob.stamp, blob.size, blob.modified = (status.st_mtime_ns, status.st_size), status.st_size, time.time()
        blob.etag = f'"0x8D{time.time_ns():X}{self._changes:X}"'
        if is_new and not blob.created:
            blob.created = blob.modified
        self._known[(container, name)] = blob
        return blob

    def _committed(self, container: str, name: str, blob: Blob | None) -> dict[str, bytes]:
        if blob is None or not blob.blocks:
            return {}
        data, start, found = self.read(container, name), 0, {}
        for block, size in blob.blocks:
            found[block] = data[start : start + size]
            start += size
        return found

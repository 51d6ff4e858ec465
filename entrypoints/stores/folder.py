"""A folder as a store, for instance on a network share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from .. import foreign
from ..atomic_json import sync
from .store import ABSENT, StoreError, whole_file

LOCK_S = 20.0  # how long a writer waits for the lock; a holder needs the lock for a single small write


def open_at(uri: str, attempts: int | None = None) -> FolderStore:
    """Return the store for a path or `file:///PATH`."""
    rest = uri.removeprefix("file:")
    return FolderStore(Path(f"/{rest[2:].partition('/')[2]}" if rest.startswith("//") else rest).absolute())


class FolderStore:
    """The files of a folder. See store.Store. The version is the SHA-256 hash of the content."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, source: Path | bytes, name: str) -> None:
        """Copy to a temporary file, then rename: a reader sees the old file or the new file."""
        with whole_file(self._root / name) as partial:
            if isinstance(source, Path):
                shutil.copyfile(source, partial)
            else:
                partial.write_bytes(source)
            sync(partial)

    def get(self, name: str, path: Path) -> None:
        """Copy the file to the path."""
        with whole_file(path) as partial:
            shutil.copyfile(self._file(name), partial)

    def read(self, name: str) -> tuple[bytes | None, str]:
        """Return the content and its version. Raises FileNotFoundError if the folder itself is missing."""
        try:
            data = foreign.read(self._root / name, foreign.JSON_BYTES)
        except FileNotFoundError:
            if not self._root.is_dir():  # a disk that is not mounted is not an empty store
                raise
            return None, ABSENT
        return data, hashlib.sha256(data).hexdigest()

    def head(self, name: str, size: int) -> bytes:
        """Return the first bytes of the file."""
        with self._file(name).open("rb") as file:
            return file.read(size)

    def _file(self, name: str) -> Path:
        if not (path := self._root / name).is_file():  # the read of a pipe would wait, of a device never end
            raise FileNotFoundError(f"{path} is no file")
        return path

    def put_if(self, data: bytes, name: str, version: str) -> bool:
        """Replace `version` of the file, under a lock file in the same folder."""
        path = self._root / name
        with _lock(path):
            if self.read(name)[1] != version:
                return False
            self.put(data, name)
            sync(path.parent)
            return True

    def names(self, prefix: str) -> list[str]:
        """Return the files' names below the root that begin with `prefix`; other folders are not searched."""
        above, _, start = prefix.rpartition("/")
        entries = [each for each in (self._root / above).glob("*") if each.name.startswith(start)]
        found = [each for each in entries if each.is_file()]
        for entry in entries:  # a walk passes over folders that a different rank removes meanwhile
            if not entry.is_symlink():
                found += [Path(place, name) for place, _, files in os.walk(entry) for name in files]
        names = (path.relative_to(self._root).as_posix() for path in found)
        return sorted(name for name in names if not name.endswith((".tmp", ".lock")))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of each file whose name begins with `prefix`."""
        sizes = {}
        for name in self.names(prefix):
            with contextlib.suppress(FileNotFoundError):
                sizes[name] = (self._root / name).stat().st_size
        return sizes

    def delete(self, name: str) -> None:
        """Delete the file, if present."""
        (self._root / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the file's lock; the kernel releases the lock when the process ends, also after a crash."""
    end = time.monotonic() + LOCK_S
    # flock over NFS needs a file opened for writing. Mode 0o666, since another user's umask must not lock us out.
    file = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise StoreError(f"the lock is held for long: {path}.lock", is_passing=True) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(file)

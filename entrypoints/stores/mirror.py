"""A second place for finished checkpoints: a folder, or one of the stores in MODULES. uploader.py writes to it."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from cloudtrain.entrypoints.errors import TaskError

__all__ = ["MODULES", "Mirror", "open_mirror"]

# Scheme of a uri -> module with a function `mirror(uri) -> Mirror`. A new store needs a line in this table and in
# launcher/config/rules.py, which refuses unknown schemes.
MODULES = {
    "s3": "cloudtrain.entrypoints.stores.s3",
    "gs": "cloudtrain.entrypoints.stores.gcs",
    **dict.fromkeys(("https", "abfss", "wasbs"), "cloudtrain.entrypoints.stores.azure_blob"),
}


class Mirror(Protocol):
    """A flat store of named objects. Each call raises OSError if the store does not answer."""

    def put(self, path: Path, name: str) -> None:
        """Copy the file to the store, completely or not at all, as a name such as `step-00000120/manifest.json`."""

    def get(self, name: str, path: Path) -> None:
        """Copy the object to the path. Raises FileNotFoundError."""

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with `prefix`."""

    def remove(self, name: str) -> None:
        """Remove the object, if present."""


class FolderMirror:
    """A folder, for instance on a network share."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, path: Path, name: str) -> None:
        """Copy to a partial file, then rename: a reader sees the old file or the new file."""
        target = self._root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        shutil.copyfile(path, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(target)

    def get(self, name: str, path: Path) -> None:
        """Copy the file to the path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._root / name, path)

    def names(self, prefix: str) -> list[str]:
        """Return the files' names below the root that begin with `prefix`."""
        found = (path.relative_to(self._root).as_posix() for path in self._root.rglob("*") if path.is_file())
        return sorted(name for name in found if name.startswith(prefix) and not name.endswith(".tmp"))

    def remove(self, name: str) -> None:
        """Remove the file, if present."""
        (self._root / name).unlink(missing_ok=True)


def open_mirror(uri: str | None) -> Mirror | None:
    """Return the mirror for the uri, None without a uri. Raises TaskError for an unknown scheme."""
    if uri is None:
        return None
    scheme = urlsplit(uri).scheme
    if scheme in ("", "file"):
        return FolderMirror(Path(urlsplit(uri).path).absolute())
    if scheme not in MODULES:
        known = ", ".join(f"{name}://" for name in MODULES)
        raise TaskError(f"checkpoint.mirror {uri!r}: this trainer knows no {scheme}:// store, only folders and {known}")
    make: Callable[[str], Mirror] = importlib.import_module(MODULES[scheme]).mirror
    return make(uri)

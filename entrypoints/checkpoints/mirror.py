"""A second place for finished checkpoints: a folder, or one of the stores in MODULES. uploader.py writes to it."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.settings import TaskError

__all__ = ["LATEST", "MODULES", "Mirror", "fetch", "latest", "of_job", "open_mirror"]

LATEST = "latest.json"
# Scheme of a uri -> module with a function `mirror(uri) -> Mirror`. A new store needs a line in this table and in
# launcher/config/rules.py, which refuses unknown schemes.
MODULES = {
    "s3": "cloudtrain.entrypoints.checkpoints.s3",
    "gs": "cloudtrain.entrypoints.checkpoints.gcs",
    **dict.fromkeys(("https", "abfss", "wasbs"), "cloudtrain.entrypoints.checkpoints.azureblob"),
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


def of_job(uri: str | None, job: str) -> str | None:
    """Return a job's own place below the configured place: the next submit of the same file is a new job."""
    return None if uri is None else f"{uri.rstrip('/')}/{job}"


def latest(source: Mirror, folder: Path) -> int | None:
    """Return the published step, or None. `folder` is for a temporary file. Raises OSError."""
    notice = folder / f".{LATEST}"
    try:
        source.get(LATEST, notice)
    except FileNotFoundError:
        return None
    try:
        return int(json.loads(notice.read_text())["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"the mirror's {LATEST} is damaged: {error!r}") from error
    finally:
        notice.unlink()


def fetch(source: Mirror, folder: Path, *, replace: bool = False) -> Path | None:
    """Copy the published checkpoint into the folder, unless present; return its path, None if none is published.

    `replace`: a present checkpoint is damaged, and is set aside once the copy is complete. Raises OSError.
    """
    found = latest(source, folder)
    if found is None:
        return None
    name = folders.step_name(found)
    target = folder / name
    if not replace and (target / folders.MANIFEST).exists():
        return target
    partial = folder / f"{name}.tmp"
    items = source.names(f"{name}/")
    if f"{name}/{folders.MANIFEST}" not in items:
        raise FileNotFoundError(f"{LATEST} names {name}, which is not there")
    for item in items:
        source.get(item, partial / item.partition("/")[2])
    if os.path.lexists(target):
        folders.set_aside(target, "damaged")
    partial.rename(target)
    return target

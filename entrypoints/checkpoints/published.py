"""The checkpoints that a mirror has: the newest published step, and its copy into this machine's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import TaskError
from ..stores.store import Store, StoreError, open_store
from . import folder as folders

LATEST = "latest.json"


def of_job(uri: str | None, job: str) -> str | None:
    """Return a job's own place below the configured place: the next submit of the same file is a new job."""
    return None if uri is None else f"{uri.rstrip('/')}/{job}"


def open_mirror(uri: str | None) -> Store | None:
    """Return the store of the mirror's address; None without an address. Raises TaskError for a faulty address."""
    try:
        return None if uri is None else open_store(uri)
    except StoreError as error:
        raise TaskError(f"checkpoint.mirror {error}") from error


def latest(source: Store) -> int | None:
    """Return the step that the mirror has published, None without a published step. Raises OSError."""
    try:
        data, _ = source.read(LATEST)
        return None if data is None else int(json.loads(data)["step"])
    except FileNotFoundError:  # the folder is made by the first upload
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"the mirror's {LATEST} is damaged: {error!r}") from error


def fetch(source: Store, folder: Path, *, replace: bool = False) -> Path | None:
    """Copy the published checkpoint into the folder, unless present; return its path, None if none is published.

    `replace`: a present checkpoint is damaged, and is set aside once the copy is complete. Raises OSError.
    """
    found = latest(source)
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

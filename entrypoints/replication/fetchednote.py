"""Which entries of a node's checkpoint folder were fetched from another node, so that only those are ever replaced.

The note lies outside the folder, which is the job's own.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import durable
from cloudtrain.entrypoints.replication.entries import Entry

__all__ = ["has", "is_own", "keep", "put", "read"]

_writing = threading.Lock()  # the two who fetch are threads of one agent

# entry -> its fingerprint where it came from, that of the copy of it here, and that of the copy which was here before
Note = dict[str, dict[str, Any]]


def read(path: Path) -> Note:
    """Return the note; empty where there is none."""
    told = durable.read_json(path)
    return {name: each for name, each in told.items() if isinstance(each, dict)} if isinstance(told, dict) else {}


def put(path: Path, there: Entry, here: str, before: Entry | None) -> None:
    """Note, before the copy gets its name, that it is one, what it looks like `here`, and which one it replaces.

    The times that a disk keeps may be coarser than those that were told. Raises OSError.
    """
    with _writing:
        fingerprints = {"there": there.fingerprint, "here": here, "before": before and before.fingerprint}
        durable.write_json(path, {**read(path), there.name: fingerprints})


def keep(path: Path, names: Collection[str]) -> Note:
    """Forget all other entries; return what is left. Raises OSError."""
    with _writing:
        note = read(path)
        left = {name: each for name, each in note.items() if name in names}
        if left != note:
            durable.write_json(path, left)
        return left


def has(here: Entry | None, there: Entry | None, note: Note) -> bool:
    """Return whether what is here is a copy of what is there, or the very same."""
    if here is None or there is None or (here.bytes, here.files) != (there.bytes, there.files):
        return False
    noted = note.get(there.name, {})
    is_copy = (noted.get("there"), noted.get("here")) == (there.fingerprint, here.fingerprint)
    return is_copy or here.fingerprint == there.fingerprint


def is_own(here: Entry, note: Note) -> bool:
    """Return whether the entry was fetched and nobody has written to it since, or is a folder without files."""
    return not here.files or here.fingerprint in note.get(here.name, {}).values()

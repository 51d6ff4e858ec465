"""Records which entries of a node's checkpoint folder were fetched from a peer; only fetched entries are ever replaced.

The note lies outside the folder, because the folder belongs to the job.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .. import atomic_json
from .entries import StoredEntry

_writing = threading.Lock()  # both users of the note are threads of one agent

# entry -> three fingerprints: at the source, of the local copy, and of the earlier local copy
Note = dict[str, dict[str, Any]]


def read(path: Path) -> Note:
    """Return the note; empty if the file is absent."""
    notes = atomic_json.read_json(path)
    return {name: each for name, each in notes.items() if isinstance(each, dict)} if isinstance(notes, dict) else {}


def put(path: Path, there: StoredEntry, here: str, before: StoredEntry | None) -> None:
    """Record a copy before the copy gets its name: the source, the local fingerprint `here`, the replaced entry.

    `here` may differ from the source, since a disk may keep coarser times. Raises OSError.
    """
    with _writing:
        fingerprints = {"there": there.fingerprint, "here": here, "before": before and before.fingerprint}
        atomic_json.write_json(path, {**read(path), there.name: fingerprints})


def keep(path: Path, names: Collection[str]) -> Note:
    """Forget all entries but `names`; return the rest of the note. Raises OSError."""
    with _writing:
        note = read(path)
        left = {name: each for name, each in note.items() if name in names}
        if left != note:
            atomic_json.write_json(path, left)
        return left


def has(here: StoredEntry | None, there: StoredEntry | None, note: Note) -> bool:
    """Return whether the local entry is a copy of the source's entry, or identical."""
    if here is None or there is None or (here.bytes, here.files) != (there.bytes, there.files):
        return False
    noted = note.get(there.name, {})
    is_copy = (noted.get("there"), noted.get("here")) == (there.fingerprint, here.fingerprint)
    return is_copy or here.fingerprint == there.fingerprint


def is_own(here: StoredEntry, note: Note) -> bool:
    """Return whether the entry was fetched and has not changed since, or is a folder without files."""
    return not here.files or here.fingerprint in note.get(here.name, {}).values()

"""Hidden folders beside the place of a model folder: removed at the end, after a signal, or by a later export.

A folder is locked while its process lives, so that a later export to the same place knows the folders of dead exports.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_own: set[Path] = set()


@contextlib.contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside the place. Raises OSError."""
    path = Path(tempfile.mkdtemp(prefix=_prefix(place), dir=place.parent))
    _own.add(path)
    held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: no later export removes the folder
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _own.discard(path)
        os.close(held)


def remove_own() -> None:
    """Remove this process's folders, before an end by a signal."""
    for path in list(_own):
        shutil.rmtree(path, ignore_errors=True)


def remove_dead(place: Path) -> None:
    """Remove the folders of dead exports to the place; ignore a file system that refuses."""
    prefix = _prefix(place)
    with contextlib.suppress(OSError):
        for path in [entry for entry in place.parent.iterdir() if entry.name.startswith(prefix) and entry.is_dir()]:
            with contextlib.suppress(OSError):
                held = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the process of a locked folder lives
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(held)


def _prefix(place: Path) -> str:
    return f".{place.name}.exporting-"

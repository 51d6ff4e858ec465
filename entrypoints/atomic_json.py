"""JSON files that are whole or absent, even after a crash during the write, and are written on a full disk too.

A supervisor reserves disk space at its start (`reserve`). A descendant frees a piece if the disk is full, and
writes again, so the job's end and the cause are recorded.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from . import foreign

RESERVE = "CLOUDTRAIN_RESERVE"  # the environment variable with the folder's path
PIECES, PIECE_BYTES = 6, 1 << 16


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    """Write `value` by write, fsync and rename. If an OSError is raised, the old file stays unchanged."""
    text = json.dumps(value)
    try:
        write_text(path, text, mode)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _give_back():
            raise
        write_text(path, text, mode)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write the text by write, fsync and rename. If an OSError is raised, the old file stays unchanged.

    `mode`: who may use the file, within the user's umask.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Return the file's value, None if the file is missing, no regular file, or invalid JSON."""
    try:
        return json.loads(foreign.read(path, foreign.JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def reserve(folder: Path) -> None:
    """Reserve the space, for this process and all processes that inherit its environment."""
    folder.mkdir(exist_ok=True)
    for number in range(PIECES):
        (folder / str(number)).write_bytes(os.urandom(PIECE_BYTES))
    os.environ[RESERVE] = str(folder)


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut (fsync). Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _give_back() -> bool:
    """Free a piece of the reserve; return whether a piece was left."""
    folder = os.environ.get(RESERVE)
    for piece in sorted(Path(folder).glob("*")) if folder else []:
        try:
            piece.unlink()
            return True
        except FileNotFoundError:
            continue  # a concurrent process freed the piece
    return False

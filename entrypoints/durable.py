"""JSON files that are whole or absent, whatever dies while they are written, and that are written on a full disk too.

A supervisor takes some room at its start (`reserve`); whoever below it finds the disk full gives a piece back and
writes again, so that how a job ended, and why, is on record.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["RESERVE", "read_json", "reserve", "sync", "write_json"]

RESERVE = "CLOUDTRAIN_RESERVE"  # the environment variable that names the folder
PIECES, PIECE_BYTES = 6, 1 << 16


def write_json(path: Path, value: Any) -> None:
    """Write `value` by write, fsync and rename. Raises OSError, leaving what was there before."""
    try:
        _write(path, value)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _give_back():
            raise
        _write(path, value)


def read_json(path: Path) -> Any:
    """Return the file's value, or None where there is no file or it holds no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def reserve(folder: Path) -> None:
    """Take the room, for this process and those that inherit its environment."""
    folder.mkdir(exist_ok=True)
    for number in range(PIECES):
        (folder / str(number)).write_bytes(os.urandom(PIECE_BYTES))
    os.environ[RESERVE] = str(folder)


def sync(path: Path) -> None:
    """See that a file's bytes, or a folder's names, outlive a power cut. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, value: Any) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _give_back() -> bool:
    """Free one piece; return whether there was one left."""
    folder = os.environ.get(RESERVE)
    for piece in sorted(Path(folder).glob("*")) if folder else []:
        try:
            piece.unlink()
            return True
        except FileNotFoundError:
            continue  # another process took it
    return False

"""Partial files: a copy is written to `.<name>.<host>-<pid>.tmp`, beside its final name, until the copy is complete.

Readers skip such names (contract.py), and processes and hosts on a shared disk do not disturb each other. The name
also identifies the remains of an interrupted copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import atomic_json, processes
from ..checkpoints import folder as checkpoints
from ..stores.store import in_threads
from . import entries as listing
from . import wire
from .entries import StoredEntry

PROBE = re.compile(r"\.shared-[0-9a-f]{32}\.[^/\0]*\.tmp")

_SYNCS = 4  # threads; the journal commits their fsyncs together: 1000 small files took 0.2 s, 2.6 s in sequence (ext4)

_LOOK_S = 0.2  # between checks of `stop`

_under_way: set[tuple[Path, str]] = set()
_changes = threading.Condition()


class NameTaken(OSError):
    """Another entry has the copy's name, and keeps the name."""

    def __init__(self) -> None:
        super().__init__("a different entry has that name here, and stays unchanged")


@contextlib.contextmanager
def exclusive(into: Path, name: str, stop: threading.Event | None = None) -> Iterator[Path]:
    """Return the path of the partial copy, used by this call only; remains of earlier copies are removed.

    Waits while another thread copies the same entry. Raises Stopped once `stop` is set; OSError.
    """
    if not listing.is_name(name):
        raise ValueError("an entry cannot have that name")
    key = (into.absolute(), name)
    with _changes:
        while key in _under_way:
            if stop is not None and stop.is_set():
                raise wire.Stopped("stopped")
            _changes.wait(_LOOK_S)
        _sweep(into)
        _under_way.add(key)
    try:
        yield into / f".{name}.{_ours()}.tmp"
    finally:
        with _changes:
            _under_way.discard(key)
            _changes.notify_all()


def check_room(into: Path, needed: int) -> None:
    """Raise OSError (ENOSPC) if the disk has less than `needed` bytes free."""
    free = shutil.disk_usage(into).free
    if free < needed:
        room = f"{needed / 1e9:.2f} GB are needed there, and {free / 1e9:.2f} GB are free: make room"
        raise OSError(errno.ENOSPC, room)


def sync(partial: Path, paths: list[Path], stop: threading.Event | None) -> None:
    """Make the copy's files and folders durable. Raises OSError; Stopped once `stop` is set."""
    folders = {folder for path in paths for folder in path.parents if folder.is_relative_to(partial)}

    def make_durable(path: Path) -> None:
        if stop is not None and stop.is_set():
            raise wire.Stopped("stopped")
        atomic_json.sync(path)

    in_threads(make_durable, [*paths, *(folders or {partial})], _SYNCS)


def place(partial: Path, final: Path, over: StoredEntry | None = None, *, is_kept: bool = False) -> None:
    """Give the copy its name. Only the entry `over` may have the name before: removed, or set aside with `is_kept`.

    Raises NameTaken if a different entry has the name by now, for example one saved during the copy; OSError.
    """
    old = None
    if over is not None and listing.look(final.parent, final.name) == over:
        old = checkpoints.set_aside(final, "old") if is_kept else final.rename(_outgoing(final))
    try:
        _rename(partial, final)
        atomic_json.sync(final.parent)
    except OSError:
        if old is not None:
            with contextlib.suppress(OSError):
                _rename(old, final)
        raise
    finally:
        if old is not None and not is_kept:
            drop(old)


def link(partial: Path, links: Any) -> None:
    """Make the links that a server has sent (`entries.links`). Raises OSError; WireError for links of another form."""
    try:
        for name, (target, written_ns) in (links or {}).items():
            if not listing.stays_inside(name, target):
                raise wire.WireError(f"the server sends {name[:200]!r}, which is not a valid link")
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).symlink_to(target)
            os.utime(partial / name, ns=(written_ns, written_ns), follow_symlinks=False)
    except (AttributeError, TypeError, ValueError) as error:
        raise wire.WireError("the peer uses a different protocol version") from error


def drop(path: Path) -> None:
    """Remove a partial file or folder; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove an entry; the entry is renamed first, so that no reader finds a half-removed entry. Raises OSError."""
    drop(path.rename(_outgoing(path)))


def probe(folder: Path) -> Path:
    """Return the path for a test file, with a new random name."""
    return folder / f".shared-{secrets.token_hex(16)}.{_ours()}.tmp"


def _rename(path: Path, final: Path) -> None:
    """Rename the file or folder to a name that is free. Raises NameTaken, OSError."""
    if os.path.lexists(final):
        raise NameTaken
    if path.is_dir():
        try:
            # If another process creates the name at this moment, only an empty folder is replaced, and no data is lost.
            path.rename(final)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise NameTaken from error
            raise
        return
    try:
        os.link(path, final)
    except FileExistsError as error:
        raise NameTaken from error
    except OSError:  # a disk without hard links
        path.rename(final)
    else:
        path.unlink()


def _outgoing(path: Path) -> Path:
    return path.with_name(f".{path.name}.old.{_ours()}.tmp")


def _sweep(into: Path) -> None:
    """Remove the remains of this host's interrupted copies; copies of other hosts may still run."""
    into.mkdir(parents=True, exist_ok=True)
    mark = re.compile(rf"\..+\.{re.escape(socket.gethostname())}-(\d+)\.tmp")
    busy = {f".{name}.{_ours()}.tmp" for folder, name in _under_way if folder == into.absolute()}
    for found in os.listdir(into):
        match = mark.fullmatch(found)
        is_dead = match and processes.stamp(int(match[1])) is None
        is_left = match and int(match[1]) == os.getpid() and found not in busy and not PROBE.fullmatch(found)
        if is_dead or is_left:
            drop(into / found)


def _ours() -> str:
    """Return the part of a partial file's name that identifies this process, also on a shared disk."""
    return f"{socket.gethostname()}-{os.getpid()}"

"""Where a copy lies until it is whole: `.<name>.<host>-<pid>.tmp` beside the name that it will have.

So nothing takes it for whole (places.py), processes and hosts that share a disk keep out of each other's way, and what
an interrupted copy has left is known for what it is.
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

from cloudtrain.entrypoints import durable, processes
from cloudtrain.entrypoints.checkpoints import folder as checkpoints
from cloudtrain.entrypoints.replication import copywire
from cloudtrain.entrypoints.replication import entries as listing
from cloudtrain.entrypoints.replication.entries import Entry

__all__ = ["PROBE", "Taken", "alone", "check_room", "drop", "place", "probe", "remove", "sync"]

PROBE = re.compile(r"\.shared-[0-9a-f]{32}\.[^/\0]*\.tmp")

_SYNCS = 4  # at once: a journal takes them together; 1000 small files took 2.6 s one by one, and 0.2 s so (ext4)

_LOOK_S = 0.2  # between looks at whether to stop

_under_way: set[tuple[Path, str]] = set()
_changes = threading.Condition()


class Taken(OSError):
    """Something else has the name that a copy was to get, and keeps it."""

    def __init__(self) -> None:
        super().__init__("something else has that name here, and is left as it is")


@contextlib.contextmanager
def alone(into: Path, name: str, stop: threading.Event | None = None) -> Iterator[Path]:
    """Return the unfinished copy's path, which is this call's alone; what earlier ones have left is gone.

    Where another thread is copying the entry, that is waited for. Raises Stopped once `stop` is set; OSError.
    """
    if not listing.is_name(name):
        raise ValueError("an entry cannot have that name")
    key = (into.absolute(), name)
    with _changes:
        while key in _under_way:
            if stop is not None and stop.is_set():
                raise copywire.Stopped("stopped")
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
    """Raise OSError, of too little room, where the disk has less than so many bytes free."""
    free = shutil.disk_usage(into).free
    if free < needed:
        room = f"{needed / 1e9:.2f} GB are needed there, and {free / 1e9:.2f} GB are free: make room"
        raise OSError(errno.ENOSPC, room)


def sync(partial: Path, paths: list[Path], stop: threading.Event | None) -> None:
    """Make the copy's files and folders durable. Raises OSError; Stopped once `stop` is set."""
    folders = {folder for path in paths for folder in path.parents if folder.is_relative_to(partial)}
    todo = iter([*paths, *(folders or {partial})])
    lock = threading.Lock()
    faults: list[OSError] = []

    def run() -> None:
        try:
            while not faults and not (stop is not None and stop.is_set()):
                with lock:
                    path = next(todo, None)
                if path is None:
                    return
                durable.sync(path)
        except OSError as error:
            faults.append(error)

    threads = [threading.Thread(target=run, name="sync", daemon=True) for _ in range(min(_SYNCS, len(paths)) - 1)]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if stop is not None and stop.is_set():
        raise copywire.Stopped("stopped")
    if faults:
        raise faults[0]


def place(partial: Path, final: Path, over: Entry | None = None, *, is_kept: bool = False) -> None:
    """Give the copy its name. `over` is all that may have it until then: it is removed, or set aside if it `is_kept`.

    Raises Taken where something else has it by now, as what was saved while the copy was under way; OSError.
    """
    old = None
    if over is not None and listing.look(final.parent, final.name) == over:
        old = checkpoints.set_aside(final, "old") if is_kept else final.rename(_outgoing(final))
    try:
        _rename(partial, final)
        durable.sync(final.parent)
    except OSError:
        if old is not None:
            with contextlib.suppress(OSError):
                _rename(old, final)
        raise
    finally:
        if old is not None and not is_kept:
            drop(old)


def drop(path: Path) -> None:
    """Remove a file or folder that nothing takes for whole, as far as that can be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove an entry: half removed, it has no name by which anything would find it. Raises OSError."""
    drop(path.rename(_outgoing(path)))


def probe(folder: Path) -> Path:
    """Return the path of a file to be, of a name that nobody has asked for before."""
    return folder / f".shared-{secrets.token_hex(16)}.{_ours()}.tmp"


def _rename(path: Path, final: Path) -> None:
    """Give the file or folder a name that nothing has. Raises Taken, OSError."""
    if os.path.lexists(final):
        raise Taken
    if path.is_dir():
        try:
            # Of what was made in this very moment, only an empty folder gives way, and nothing is lost in that.
            path.rename(final)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise Taken from error
            raise
        return
    try:
        os.link(path, final)
    except FileExistsError as error:
        raise Taken from error
    except OSError:  # a disk without hard links
        path.rename(final)
    else:
        path.unlink()


def _outgoing(path: Path) -> Path:
    return path.with_name(f".{path.name}.old.{_ours()}.tmp")


def _sweep(into: Path) -> None:
    """Remove what this host's copies have left that were interrupted; those of other hosts may be under way."""
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
    """Return what tells this process's unfinished files from those of others, on a shared disk too."""
    return f"{socket.gethostname()}-{os.getpid()}"

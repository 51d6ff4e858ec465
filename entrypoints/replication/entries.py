"""What a folder has to offer under each of its names, and by what it is told from another of the same name.

An entry is a file, or a folder with all that is in it, whose name says that it is whole (places.py). Links, devices and
empty folders in it do not count, and no link is ever followed: what a job's own code has put there decides nothing
about what else on the machine is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.entrypoints import places
from cloudtrain.entrypoints.checkpoints import folder as checkpoints

__all__ = [
    "Entry",
    "File",
    "fingerprint_of",
    "is_name",
    "is_path",
    "list_entries",
    "look",
    "newest",
    "open_file",
    "open_root",
    "order",
    "scan",
    "step_of",
]

_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_MANIFEST_BYTES = 64 << 20  # of 100,000 shards and more


@dataclass(frozen=True)
class File:
    """A file of an entry. `path` is relative to the entry, and empty where the entry itself is the file."""

    path: str
    size: int
    written_ns: int


@dataclass(frozen=True)
class Entry:
    """What lies under a name: `bytes` in so many `files`, the last of them written at `written_ns` (unix time).

    `fingerprint`: of a checkpoint of ours its manifest's hash, else the hash of all sizes and times.
    `step`: the number of a step-N folder. `is_ours`: it has a manifest, so it was complete when it got its name.
    """

    name: str
    fingerprint: str
    bytes: int
    files: int
    written_ns: int
    step: int | None
    is_folder: bool
    is_ours: bool


def is_name(name: str) -> bool:
    """Return whether an entry may have this name: one step down, neither hidden, nor half written, nor set aside."""
    return is_path(name) and "/" not in name and places.is_whole(name)


def is_path(path: str) -> bool:
    """Return whether the path stays below where it starts, without any `.` or `..` in it."""
    return "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def step_of(name: str) -> int | None:
    """Return the step that a checkpoint of this name is of, None where it is none of the trainer's names."""
    digits = name.removeprefix("step-")
    is_step = digits != name and digits.isascii() and digits.isdecimal()
    return int(digits) if is_step and checkpoints.step_name(int(digits)) == name else None


def order(entry: Entry) -> tuple[bool, int, int]:
    """Return the key by which the newest entry is the greatest: steps by their number, and before all others."""
    return entry.step is not None, entry.step or 0, entry.written_ns


def fingerprint_of(files: Iterable[File], manifest: bytes | None) -> str:
    """Return what tells an entry from another of the same name."""
    if manifest is not None:
        return hashlib.sha256(b"manifest\n" + manifest).hexdigest()
    told = json.dumps(sorted((file.path, file.size, file.written_ns) for file in files))
    return hashlib.sha256(told.encode()).hexdigest()


def list_entries(folder: Path) -> list[Entry]:
    """Return the folder's entries, the newest first; none where there is no such folder. Raises OSError."""
    found = []
    try:
        with open_root(folder) as root:
            for name in filter(is_name, os.listdir(root)):
                with contextlib.suppress(FileNotFoundError):  # gone since, or neither a file nor a folder
                    found.append(scan(root, name)[0])
    except FileNotFoundError:
        return []
    return sorted(found, key=order, reverse=True)


def look(folder: Path, name: str) -> Entry | None:
    """Return the folder's entry of that name, None where there is none. Raises OSError."""
    try:
        with open_root(folder) as root:
            return scan(root, name)[0]
    except FileNotFoundError:
        return None


def newest(folder: Path, *, ours: bool = False) -> Entry | None:
    """Return the newest entry that has all its files, None without one; their bytes are not read. Raises OSError.

    `ours`: only checkpoints of the trainer count.
    """
    for entry in list_entries(folder):
        if ours and not entry.is_ours:
            continue
        with contextlib.suppress(checkpoints.Unreadable):  # another version's
            if entry.is_ours and checkpoints.verify(folder / entry.name, only=()) is not None:
                continue
        return entry
    return None


@contextlib.contextmanager
def open_root(folder: Path) -> Iterator[int]:
    """Open the folder, for what is asked of it by names that are relative to it. Raises OSError."""
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield root
    finally:
        os.close(root)


def scan(root: int, name: str) -> tuple[Entry, list[File]]:
    """Return the entry and its files, of an open folder. Raises OSError; FileNotFoundError where it is no entry."""
    about = os.stat(name, dir_fd=root, follow_symlinks=False)
    if stat.S_ISREG(about.st_mode):
        files = [File("", about.st_size, about.st_mtime_ns)]
    elif stat.S_ISDIR(about.st_mode):
        files = sorted(_walk(root, name, ""), key=lambda file: file.path)
    else:
        raise FileNotFoundError(f"{name} is neither a file nor a folder")
    step = step_of(name)
    manifest = _manifest(root, name, files) if step is not None else None
    written_ns = max((file.written_ns for file in files), default=about.st_mtime_ns)
    total = sum(file.size for file in files)
    fingerprint = fingerprint_of(files, manifest)
    is_folder = stat.S_ISDIR(about.st_mode)
    return Entry(name, fingerprint, total, len(files), written_ns, step, is_folder, manifest is not None), files


def open_file(root: int, name: str, path: str) -> int:
    """Open an entry's file to read and return its descriptor; no step of the way is a link. Raises OSError."""
    *folders, last = [name, *path.split("/")] if path else [name]
    opened: list[int] = []
    try:
        at = root
        for part in folders:
            at = os.open(part, _NO_LINK | os.O_DIRECTORY, dir_fd=at)
            opened.append(at)
        # Nobody writes to a pipe that took the file's place: opening it would wait for ever.
        file = os.open(last, _NO_LINK | os.O_NONBLOCK, dir_fd=at)
    finally:
        for each in opened:
            os.close(each)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(f"{name}/{path} is no file any more")
    return file


def _walk(parent: int, name: str, prefix: str) -> Iterator[File]:
    folder = os.open(name, _NO_LINK | os.O_DIRECTORY, dir_fd=parent)
    try:
        with os.scandir(folder) as items:
            for item in items:
                if item.is_file(follow_symlinks=False):
                    about = item.stat(follow_symlinks=False)
                    yield File(prefix + item.name, about.st_size, about.st_mtime_ns)
                elif item.is_dir(follow_symlinks=False):
                    yield from _walk(folder, item.name, f"{prefix}{item.name}/")
    finally:
        os.close(folder)


def _manifest(root: int, name: str, files: list[File]) -> bytes | None:
    """Return the bytes of a checkpoint's manifest, None where it has none."""
    sizes = {file.path: file.size for file in files}
    if sizes.get(checkpoints.MANIFEST, _MANIFEST_BYTES) >= _MANIFEST_BYTES:
        return None
    with os.fdopen(open_file(root, name, checkpoints.MANIFEST), "rb") as file:
        return file.read()

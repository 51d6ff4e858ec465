"""The entries of a folder that a node offers, and the fingerprint that distinguishes two entries of the same name.

An entry is a file, or a folder with its whole content, and its name marks a complete entry (contract.py). Devices and
empty folders in an entry are ignored, and no link is followed: the job's own code cannot make a server read other files
of the machine. Links that stay in the entry, such as `latest -> step-20`, are copied as links.

A note records which entries of a node's checkpoint folder were fetched from a peer; only fetched entries are ever
replaced. The note lies outside the folder, because the folder belongs to the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import atomic_json
from ..checkpoints import folder as checkpoints
from ..contract import is_whole
from ..foreign import is_inside
from ..records import Record

_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_MANIFEST_BYTES = 64 << 20  # of a manifest with 100,000 shards and more
_writing = threading.Lock()  # both users of a note are threads of one agent

# entry -> three fingerprints: at the source, of the local copy, and of the earlier local copy
Note = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class File(Record, checks=True):
    """A file of an entry."""

    path: str  # relative to the entry, and empty if the entry itself is the file
    size: int
    written_ns: int


@dataclass(frozen=True)
class StoredEntry(Record, checks=True):
    """An entry: a file, or a folder."""

    name: str
    fingerprint: str  # the hash of the trainer's manifest, else of all sizes and times
    bytes: int  # of all files
    files: int
    written_ns: int  # the newest modification time (unix time)
    step: int | None  # of a step-N folder
    is_folder: bool
    is_ours: bool  # has a manifest: the entry was complete when its name was given


def is_name(name: str) -> bool:
    """Return whether an entry may have this name: a direct child, not hidden, not partial, not set aside."""
    return is_inside(name) and "/" not in name and is_whole(name)


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's name, None if the trainer gives no such name."""
    digits = name.removeprefix("step-")
    is_step = digits != name and digits.isascii() and digits.isdecimal()
    return int(digits) if is_step and checkpoints.step_name(int(digits)) == name else None


def order(entry: StoredEntry) -> tuple[bool, int, int]:
    """Return the sort key with the newest entry as the greatest: steps by number, and above all other entries."""
    return entry.step is not None, entry.step or 0, entry.written_ns


def fingerprint_of(files: Iterable[File], manifest: bytes | None) -> str:
    """Return the hash that distinguishes two entries of the same name."""
    if manifest is not None:
        return hashlib.sha256(b"manifest\n" + manifest).hexdigest()
    text = json.dumps(sorted((file.path, file.size, file.written_ns) for file in files))
    return hashlib.sha256(text.encode()).hexdigest()


def list_entries(folder: Path) -> list[StoredEntry]:
    """Return the folder's entries, the newest first; an empty list if the folder is absent. Raises OSError."""
    found = []
    try:
        with open_root(folder) as root:
            for name in filter(is_name, os.listdir(root)):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile, or neither a file nor a folder
                    found.append(scan(root, name)[0])
    except FileNotFoundError:
        return []
    return sorted(found, key=order, reverse=True)


def look(folder: Path, name: str) -> StoredEntry | None:
    """Return the folder's entry of that name, None if absent. Raises OSError."""
    try:
        with open_root(folder) as root:
            return scan(root, name)[0]
    except FileNotFoundError:
        return None


def newest(folder: Path, *, ours: bool = False) -> StoredEntry | None:
    """Return the newest entry with all its files, or None; the bytes are not read. Raises OSError.

    `ours`: only checkpoints of the trainer count.
    """
    for entry in list_entries(folder):
        if ours and not entry.is_ours:
            continue
        with contextlib.suppress(checkpoints.Unreadable):  # of another version
            if entry.is_ours and checkpoints.verify(folder / entry.name, only=()) is not None:
                continue
        return entry
    return None


@contextlib.contextmanager
def open_root(folder: Path) -> Iterator[int]:
    """Open the folder; later calls use names relative to the descriptor. Raises OSError."""
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield root
    finally:
        os.close(root)


def scan(root: int, name: str) -> tuple[StoredEntry, list[File]]:
    """Return the entry in an open folder, and its files. Raises OSError; FileNotFoundError if the name is no entry."""
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
    return StoredEntry(name, fingerprint, total, len(files), written_ns, step, is_folder, manifest is not None), files


def links(folder: Path) -> dict[str, tuple[str, int]]:
    """Return an entry's links that lead to another place of the entry: path -> target, time in nanoseconds."""
    found = {}
    for where, folders, files in os.walk(folder):
        for path in (Path(where, name) for name in (*folders, *files)):
            with contextlib.suppress(OSError):  # no link
                target, name = str(path.readlink()), path.relative_to(folder).as_posix()
                if stays_inside(name, target):
                    found[name] = target, path.lstat().st_mtime_ns
    return found


def stays_inside(path: str, target: str) -> bool:
    """Return whether a link at a path of an entry leads to another place of the entry."""
    place = os.path.normpath(f"{path.rpartition('/')[0] or '.'}/{target}")
    is_plain = os.path.normpath(target) == target != "." and not target.startswith("/")
    return is_plain and is_inside(path) and is_inside(place)


def open_file(root: int, name: str, path: str) -> int:
    """Open an entry's file for reading, return the descriptor; no part of the path may be a link. Raises OSError."""
    *folders, last = [name, *path.split("/")] if path else [name]
    opened: list[int] = []
    try:
        at = root
        for part in folders:
            at = os.open(part, _NO_LINK | os.O_DIRECTORY, dir_fd=at)
            opened.append(at)
        # If a pipe has replaced the file, a blocking open would wait for a writer without end.
        file = os.open(last, _NO_LINK | os.O_NONBLOCK, dir_fd=at)
    finally:
        for each in opened:
            os.close(each)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(f"{name}/{path} is no longer a file")
    return file


def read_note(path: Path) -> Note:
    """Return the note; empty if the file is absent."""
    notes = atomic_json.read_json(path)
    return {name: each for name, each in notes.items() if isinstance(each, dict)} if isinstance(notes, dict) else {}


def add_to_note(path: Path, there: StoredEntry, here: str, before: StoredEntry | None) -> None:
    """Record a copy before the copy gets its name: the source, the local fingerprint `here`, the replaced entry.

    `here` may differ from the source, since a disk may keep coarser times. Raises OSError.
    """
    with _writing:
        fingerprints = {"there": there.fingerprint, "here": here, "before": before and before.fingerprint}
        atomic_json.write_json(path, {**read_note(path), there.name: fingerprints})


def keep_in_note(path: Path, names: Collection[str]) -> Note:
    """Forget all entries but `names`; return the rest of the note. Raises OSError."""
    with _writing:
        note = read_note(path)
        left = {name: each for name, each in note.items() if name in names}
        if left != note:
            atomic_json.write_json(path, left)
        return left


def is_same(here: StoredEntry | None, there: StoredEntry | None, note: Note) -> bool:
    """Return whether the local entry is a copy of the source's entry, or identical."""
    if here is None or there is None or (here.bytes, here.files) != (there.bytes, there.files):
        return False
    noted = note.get(there.name, {})
    is_copy = (noted.get("there"), noted.get("here")) == (there.fingerprint, here.fingerprint)
    return is_copy or here.fingerprint == there.fingerprint


def is_own(here: StoredEntry, note: Note) -> bool:
    """Return whether the entry was fetched and has not changed since, or is a folder without files."""
    return not here.files or here.fingerprint in note.get(here.name, {}).values()


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
    """Return the bytes of a checkpoint's manifest, None without a manifest."""
    sizes = {file.path: file.size for file in files}
    if sizes.get(checkpoints.MANIFEST, _MANIFEST_BYTES) >= _MANIFEST_BYTES:
        return None
    with os.fdopen(open_file(root, name, checkpoints.MANIFEST), "rb") as file:
        return file.read()

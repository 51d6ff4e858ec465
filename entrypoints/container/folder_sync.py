"""Syncs a folder to a bucket and back, like SageMaker itself: a replica's disk is new after each restart.

All nodes upload their folders to the same prefix: of two files with the same name, the last upload stays. Half-written
files, names that end in `.tmp`, links and empty folders are not uploaded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ..foreign import is_inside
from ..stores.gcs import Changed, Item, open_at
from ..stores.store import in_threads

EVERY_S = 20.0
QUIET_S, OPEN_QUIET_S = 2.0, 60.0  # since the last write: to a closed file; to a file open for writing, as logs are
FINISH_S = 900.0
GONE_ROUNDS = 30  # until a deleted file is deleted in the bucket, even if uploads are pending
THREADS = 4
SMALL_BYTES = 1 << 20  # small files go last, because they may refer to large files (`latest`, an index)
NAME_BYTES = 1024  # of an object's name

_BY, _WRITTEN = "cloudtrain-by", "cloudtrain-written-ns"  # metadata keys of an object


@dataclass(frozen=True)
class _Look:
    """The state of a file at a poll: size and write time."""

    size: int
    written_ns: int


@dataclass(frozen=True)
class _There:
    """A file in the bucket. `generation` is None if a different writer uploaded the file."""

    look: _Look
    generation: str | None


def bring(uri: str, folder: Path) -> int:
    """Download the files at `uri`, except files that are equal or newer on disk; return the number of files at `uri`.

    For an object's uri, only the object is downloaded. Raises OSError, with a hint in the message.
    """
    store = open_at(uri)

    def fetch(item: Item) -> None:
        path = folder / item.name
        store.get(item.name, path)
        os.utime(path, ns=(_look_of(item).written_ns,) * 2)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = store.items()
        above, _, name = uri.rpartition("/")
        if not found and name and not above.endswith("/"):
            with contextlib.suppress(FileNotFoundError):
                found = [open_at(above).stat(name)]
                store = open_at(above)
        found = [item for item in found if _is_file(item.name)]
        wanted = [item for item in found if _is_newer(item, folder / item.name)]
        need, free = sum(item.size for item in wanted), shutil.disk_usage(folder).free
        if need > free:
            sizes = f"{need / 1e9:.1f} GB are in {uri}, and the disk here has {free / 1e9:.1f} GB left"
            raise OSError(f"{sizes}: use a larger disk, or delete files in {uri}")
        in_threads(fetch, wanted, THREADS)
    finally:
        store.close()
    return len(found)


class Carrier:
    """A thread that uploads every EVERY_S, and at the end; the next round retries failed uploads.

    The thread deletes a file in the bucket if the file is gone from disk and this writer, or the writer's earlier
    container, uploaded the file. Files of different writers are never deleted.
    """

    def __init__(self, folder: Path, uri: str, by: str) -> None:
        """`by`: this writer's name among all writers to `uri`, the same after a restart."""
        self._folder, self._uri, self._by = folder, uri, by
        self._store = open_at(uri)
        self._there: dict[str, _There] | None = None
        self._first: set[str] = set()
        self._gone: dict[str, int] = {}  # name -> rounds since the file was deleted on disk
        self._reported: set[str] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="carrier", daemon=True)

    def start(self) -> None:
        """Start; files that exist both on disk and in the bucket count as downloaded from the bucket."""
        self._first = set(self._scan())
        self._thread.start()

    def finish(self) -> None:
        """Upload the rest, open files too, and return; after FINISH_S, print that files are missing."""
        self._is_over.set()
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            self._say("end", f"not all of {self._folder} is in {self._uri}: {FINISH_S:.0f} s were not enough")

    def _run(self) -> None:
        while not self._is_over.wait(EVERY_S):
            self._try(is_last=False)
        self._try(is_last=True)
        self._store.close()

    def _try(self, *, is_last: bool) -> None:
        failures: list[str] = []
        try:
            self._copy(failures, is_last=is_last)
        except Exception as error:  # any error: the next round retries
            failures.append(str(error) if isinstance(error, OSError) else repr(error))
        if failures and is_last:
            self._say("end", f"not all of {self._folder} is in {self._uri}: {failures[0]}")
        elif failures:
            self._say("fault", f"sync of {self._folder} to {self._uri} failed, retrying: {failures[0]}")

    def _copy(self, failures: list[str], *, is_last: bool) -> None:
        """Upload new files, then delete the uploads of deleted files; append to the failures."""
        there = self._there = self._known() if self._there is None else self._there
        here = self._scan()
        new = {name: look for name, look in here.items() if name not in there or there[name].look != look}
        is_open = set() if is_last or not new else _open_for_writing(self._folder)
        ready = {name: look for name, look in new.items() if is_last or _is_quiet(look, name in is_open)}
        large = {name: look for name, look in new.items() if look.size > SMALL_BYTES}
        self._put({name: look for name, look in ready.items() if name in large}, failures, is_last=is_last)
        # A small file may refer to an older large file, which must be in the bucket first.
        missing = [look.written_ns for name, look in large.items() if name not in there or there[name].look != look]
        limit_ns = min(missing, default=1 << 64)
        small = {name: look for name, look in ready.items() if name not in large and look.written_ns < limit_ns}
        self._put(small, failures, is_last=is_last)
        if not failures:
            self._sweep(here, is_last=is_last, is_waiting=not set(here) <= set(there))

    def _put(self, looks: dict[str, _Look], failures: list[str], *, is_last: bool) -> None:
        """Upload files, the oldest first; a file that changes meanwhile, or is gone, waits for the next round."""
        there = self._there
        assert there is not None

        def put(name: str) -> None:
            path = self._folder / name
            try:
                found = path.stat()
                look = _Look(found.st_size, found.st_mtime_ns)
                if look == looks[name] or is_last:
                    about = {_BY: self._by, _WRITTEN: str(look.written_ns)}
                    item = self._store.put(path, name, about, seen=found)
                    there[name] = _There(look, item.generation)
            except (FileNotFoundError, Changed):
                pass
            except ConnectionError:  # the remaining uploads would fail too
                raise
            except OSError as error:
                failures.append(str(error))

        in_threads(put, sorted(looks, key=lambda name: looks[name].written_ns), THREADS)

    def _sweep(self, here: dict[str, _Look], *, is_last: bool, is_waiting: bool) -> None:
        """Delete the uploads of deleted files, but only after all new files are in the bucket.

        A script may delete a file and write the file again: if the machine is lost in between, a version must exist.
        """
        there = self._there
        assert there is not None
        self._gone = {name: self._gone.get(name, 0) + 1 for name in there if name not in here}
        for name, rounds in self._gone.items():
            if ((rounds > 1 or is_last) and not is_waiting) or rounds > GONE_ROUNDS:
                if there[name].generation is not None:  # only if the object is unchanged
                    self._store.delete(name, there[name].generation)
                del there[name]

    def _known(self) -> dict[str, _There]:
        """Return the objects of files that were on disk at the start."""
        return {
            item.name: _There(_look_of(item), item.generation if item.about.get(_BY) == self._by else None)
            for item in self._store.items()
            if item.name in self._first
        }

    def _scan(self) -> dict[str, _Look]:
        """Return the current state of the files, by name."""
        found = {}
        for place, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.endswith(".tmp")]
            for path in (Path(place, name) for name in files if not name.endswith(".tmp")):
                name = path.relative_to(self._folder).as_posix()
                with contextlib.suppress(OSError):
                    if not stat.S_ISREG(path.lstat().st_mode):
                        continue
                    if _is_plain_name(self._store.key(name)):
                        found[name] = _look_at(path)
                    else:
                        self._say("name", f"not uploaded to {self._uri}: invalid object name: {name!a}")
        return found

    def _say(self, kind: str, words: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            with contextlib.suppress(OSError):
                print(words, flush=True)


def _is_file(name: str) -> bool:
    """Return whether to download the object: its name stays in the folder, and names no folder or partial file."""
    return is_inside(name) and not any(part.endswith(".tmp") for part in name.split("/"))


def _is_newer(item: Item, path: Path) -> bool:
    try:
        here = _look_at(path)
    except OSError:
        return True
    there = _look_of(item)
    return here != there and here.written_ns <= there.written_ns


def _is_plain_name(key: str) -> bool:
    try:
        return len(key.encode()) <= NAME_BYTES and "\n" not in key and "\r" not in key
    except UnicodeEncodeError:  # a file's name may be arbitrary bytes
        return False


def _look_at(path: Path) -> _Look:
    found = path.stat()
    return _Look(found.st_size, found.st_mtime_ns)


def _look_of(item: Item) -> _Look:
    """Return the state of a downloaded file."""
    written = item.about.get(_WRITTEN, "")
    if written.isdecimal():
        return _Look(item.size, int(written))
    when = datetime.fromisoformat(item.updated.replace("Z", "+00:00"))  # for an object from a different uploader
    return _Look(item.size, int(when.timestamp() * 1000) * 10**6)


def _is_quiet(look: _Look, is_open: bool) -> bool:
    """Return whether the file looks complete. A future write time does not mean that a process still writes."""
    age_s = (time.time_ns() - look.written_ns) / 1e9
    return not 0 <= age_s <= (OPEN_QUIET_S if is_open else QUIET_S)


def _open_for_writing(folder: Path) -> set[str]:
    """Return the names of the folder's files that a visible process holds open for writing."""
    top = f"{os.path.realpath(folder)}/"
    found = set()
    for place in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError, ValueError):
            path = str(place.readlink())
            if path.startswith(top):
                about = (place.parents[1] / "fdinfo" / place.name).read_text()
                flags = int(about.partition("flags:")[2].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    found.add(path.removeprefix(top))
    return found

"""The files of jobs in a cloud's store: claim of the name, container order, exit reports, checkpoints, downloads."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import foreign
from cloudtrain.entrypoints.contract import is_whole
from cloudtrain.entrypoints.foreign import is_inside
from cloudtrain.entrypoints.format import counted, one_line
from cloudtrain.entrypoints.stores import claims
from cloudtrain.entrypoints.stores.store import ABSENT, Store, in_threads
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UnreachableError, UsageError
from cloudtrain.launcher.planning import local_data
from cloudtrain.launcher.planning.bundle import size_words
from cloudtrain.launcher.text.terminal import meter, say, say_each

WORKERS = 4
REPLACED = 4  # downloads of an object that other processes replace meanwhile
# A bucket may hold an object `a` and an object `a/b`, and longer names than a file system allows.
_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EILSEQ)


@dataclass(frozen=True)
class JobFolder:
    """The files of a job, by their URIs.

    `open_at` returns the store at the URI of a folder; its errors are errors of the backend. `answers(doing)` is a
    context that translates the errors; without the context, the caller translates.
    """

    open_at: Callable[[str], Store]
    answers: Callable[[str], AbstractContextManager[None]] = lambda doing: nullcontext()
    workers: int = WORKERS  # simultaneous downloads

    def claim(self, uri: str, owner: str) -> None:
        """Claim the job's folder for this owner. Raises UsageError if another owner has the name.

        The first owner keeps the folder for all attempts; else two machines' jobs of one name would share checkpoints.
        """
        with self._object("write", uri) as (store, name):
            if not store.put_if(owner.encode(), name, ABSENT) and store.read(name)[0] != owner.encode():
                message = f"another machine, or another user, has a job of this name: {uri.rpartition('/')[0]}"
                raise UsageError(message, hint="choose another --name")

    def owner(self, uri: str) -> str | None:
        """Return the folder's owner, or None if no owner has claimed the folder."""
        found = self._read(uri)
        return None if found is None else found.decode(errors="replace")

    def supersede(self, uri: str, number: int, order_uri: str = "") -> int:
        """Raise the claim and remove the order: attempts below `number` end at their start; return the last started."""
        with self._object("write", uri) as (store, name):
            started = claims.take(store, name, number).started
        if order_uri:
            self.retract(order_uri)
        return started

    def put_order(self, uri: str, order: dict[str, Any]) -> None:
        """Write the container order."""
        with self._object("write", uri) as (store, name):
            store.put(json.dumps(order, sort_keys=True).encode(), name)

    def read_order(self, uri: str) -> dict[str, Any]:
        """Return the container order, or {} if the order was retracted."""
        return _object_in(self._read(uri)) or {}

    def retract(self, uri: str) -> None:
        """Remove the container order: a start still under way finds no order, and ends."""
        with self._object("remove", uri) as (store, name):
            store.delete(name)

    def sizes(self, uri: str, *, remove: bool) -> dict[str, int]:
        """Return the bytes of all objects below the URI, by name; with `remove`, delete the objects."""
        with self.answers(f"{'empty' if remove else 'list'} {uri}"):
            store = self.open_at(uri)
            sizes = store.sizes("")
            in_threads(store.delete, sizes if remove else (), self.workers)
        return sizes

    def fill(self, name: str, pinned: str, place: str, base: Path) -> None:
        """Upload the files of an input that goes along to its place, named by their content; no file that is there.

        The list of the files comes last: with the list, the place is complete, and the local files are not needed.
        Raises ConfigError if the files have changed since the submit, or change meanwhile.
        """
        digest = pinned.rpartition(":")[2]
        root, _, _ = place.partition(f"/{digest}/")
        with self.answers(f"upload the data of inputs.{name} to {place}"):
            store = self.open_at(root)
            below, listed = store.sizes(f"{digest}/"), f"{digest}.json"
            there = {each.removeprefix(f"{digest}/"): size for each, size in below.items()}
            wanted = _object_in(store.read(listed)[0]) if there else None
            if wanted and wanted.items() <= there.items():
                return
            data, hashes = local_data.as_submitted(base, name, pinned)
            missing = [each for each, size in data.sizes.items() if there.get(each) != size]
            size, kept = sum(data.sizes[each] for each in missing), len(data.sizes) - len(missing)
            already = f"; {counted(kept, 'file')} of an earlier upload stay" if kept else ""
            say(f"uploading {counted(len(missing), 'file')}, {size_words(size)}, of inputs.{name} to {place}{already}")
            with meter(f"inputs.{name}", size) as sent:

                def upload(each: str) -> None:
                    path = data.folder / each
                    try:
                        store.put(path, f"{digest}/{each}")
                        is_same = foreign.sha256_of(path) == hashes[each]  # after the upload: also a change before
                    except FileNotFoundError:
                        is_same = False
                    if not is_same:
                        store.delete(f"{digest}/{each}")
                        raise local_data.changed(name, each)
                    sent(data.sizes[each])

                in_threads(upload, missing, self.workers)
            store.put(json.dumps(data.sizes).encode(), listed)

    def report(self, uri: str, nodes: int) -> dict[str, Any] | None:
        """Return a container's exit report: the report of the lowest node that has written one."""
        with self._object("read", uri) as (store, name):
            there = set(store.names(name))
            for each in (f"{name}-{node}.json" for node in range(nodes)):
                if each in there and (found := _object_in(store.read(each)[0])) is not None:
                    return found
        return None

    def has_checkpoint(self, uri: str) -> bool:
        """Return whether the folder has a complete checkpoint, by the same rule as the node's (contract.py)."""
        with self.answers(f"list {uri}"):
            return any(is_whole(name.partition("/")[0]) for name in self.open_at(uri).names(""))

    def get(self, uri: str, path: Path) -> bool:
        """Copy the object to the path; return False if the store has no such object."""
        with self._object("download", uri) as (store, name), contextlib.suppress(FileNotFoundError):
            store.get(name, path)
            return True
        return False

    def download(self, uri: str, folder: Path, *, may_be_empty: bool = False) -> list[Path]:
        """Copy all objects below the URI to the folder, some at a time; return the files.

        Raises CloudtrainError if no output exists yet, ConfigError if the folder cannot be written.
        """
        left_out: list[str] = []
        with self.answers(f"download {uri}"):
            store = self.open_at(uri)
            names = [name for name in store.names("") if is_inside(name)]
            try:
                if names:
                    folder.mkdir(parents=True, exist_ok=True)
                with ThreadPoolExecutor(self.workers) as pool:
                    copied = list(pool.map(lambda name: _copy(store, name, folder / name, left_out), names))
            except OSError as error:
                if error.errno is None:
                    raise UnreachableError(f"cannot download {uri}: {one_line(error)}") from error
                raise ConfigError(f"cannot write there: {error.strerror}", where=str(folder)) from error
        say_each(f"left out: {words}" for words in left_out)
        found = [path for path in copied if path is not None]
        if not (found or may_be_empty):
            raise CloudtrainError("there is no output", where=uri, hint="the job has not written any output yet")
        return found

    def _read(self, uri: str) -> bytes | None:
        with self._object("read", uri) as (store, name):
            return store.read(name)[0]

    @contextlib.contextmanager
    def _object(self, doing: str, uri: str) -> Iterator[tuple[Store, str]]:
        folder, _, name = uri.rpartition("/")
        with self.answers(f"{doing} {uri}"):
            yield self.open_at(folder), name


def claim_beside(owner_uri: str) -> str:
    """Return the address of the claim of the job's newest attempt, in the folder with the owner's claim of the name."""
    return f"{owner_uri.rpartition('/')[0]}/{claims.NAME}"


def _copy(store: Store, name: str, path: Path, left_out: list[str]) -> Path | None:
    """Copy the object; return None if the object is gone (a running job may remove its own files) or cannot be a file.

    An object that another process replaces meanwhile is copied again.
    """
    for number in range(1, REPLACED + 1):
        try:
            store.get(name, path)
            return path
        except OSError as error:
            if error.errno in _NO_FILE:
                left_out.append(f"{name}, which cannot be a file here: {error.strerror}")
                return None
            if error.errno is None and isinstance(error, FileNotFoundError):
                return None
            if error.errno is not None or number == REPLACED:
                raise
    return None


def _object_in(data: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object in the data, or None if the data holds no JSON object."""
    try:
        content = json.loads(data or b"")
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None

"""Brings the checkpoints of the nodes' own disks to the nodes that need the checkpoints, before the job starts.

The trainer's rank 0 reads checkpoints for all ranks, so rank 0's node gets the newest entry from any node. The ranks of
a script each read their own disk, so every node gets the entries of the other nodes. A node's own entries are never
replaced, except the files that the config keeps: all nodes get the newest of each, and of a script's checkpoints only
the newest complete one. Copies of what their own node has removed are removed. On a shared disk nothing is copied.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from . import copies, rotation, wire
from . import entries as listing
from .entries import StoredEntry, is_own, is_same

END_S = 1.0
_MOST_FILES = 5000  # are named to a source, so that it leaves them out
_TRIES, _RETRY_S = 20, 0.1  # for an entry that changes during the copy: the other node may merge the same entry now

Source = tuple[str, int]


class Gathering:
    """The copies of one start, made by a thread until `is_done`. Entries that could not be copied are in `missing`."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Source],
        token: str,
        note: Path,
        *,
        newest_alone: bool,
        merged: Sequence[str] = (),
        saved: Callable[[Path], rotation.Saved] | None = None,
    ) -> None:
        """`sources` are the other nodes' servers (address, port); with `newest_alone` only the newest entry is copied.

        Entries whose names match a pattern of `merged` are equal on all nodes afterwards: of each file the newest.
        `note` is the file that lists the fetched entries (entries.py). `saved` returns the checkpoints of a script in a
        folder.
        """
        self._saved, self._older = saved, set[str]()
        self._merge_note = note.with_name(f"{note.stem}-merged.json")
        self._folder, self._sources, self._token, self._note = folder, sources, token, note
        self._newest_alone, self._merged = newest_alone, merged
        self._faults: dict[str, str] = {}  # entry, or a source without an answer -> reason
        self._lost: set[Source] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gather", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all available entries have arrived."""
        return not self._thread.is_alive()

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each source without an answer, and for each entry that no source could send.

        With `newest_alone`, only entries newer than the local entries count. Complete once `is_done`.
        """
        return tuple(self._faults.values())

    def cancel(self) -> None:
        """Stop, also in the middle of a copy; the copy is then absent."""
        self._stop.set()
        self._thread.join(END_S)  # the thread may wait for a connect or for a disk

    def _run(self) -> None:
        offers: list[tuple[Source, StoredEntry]] = []
        theirs: dict[Source, rotation.Saved] = {}
        for source in self._sources:
            try:
                if not copies.shares(*source, self._token, self._folder, stop=self._stop):
                    if self._saved is not None:
                        theirs[source] = copies.saved(*source, self._token, stop=self._stop)
                    offers += [(source, entry) for entry in copies.entries(*source, self._token, stop=self._stop)]
            except (copies.CopyError, OSError) as error:
                self._fail(f"{source[0]}:{source[1]}", source, error)
        if self._saved is not None and theirs:
            self._rotate(self._saved(self._folder), theirs)
        had: set[str] = set()
        for source, entry in sorted(offers, key=lambda each: listing.order(each[1]), reverse=True):
            if self._stop.is_set():
                return
            if self._newest_alone and entry.step is not None and not entry.is_ours:
                continue  # the name of a step without a manifest: the trainer cannot use the entry
            if any(fnmatchcase(entry.name, pattern) for pattern in self._merged):
                if entry.name not in self._older:
                    self._merge(source, entry)
            elif entry.name not in had and self._bring(source, entry):
                had.add(entry.name)
                self._faults.pop(entry.name, None)
                if self._newest_alone:
                    return

    def _rotate(self, own: rotation.Saved, theirs: dict[Source, rotation.Saved]) -> None:
        """Note which checkpoints no node needs, and remove copies of those that their own node no longer has."""
        self._older = rotation.older(own, *theirs.values())
        for source, there in theirs.items():
            try:
                gone = self._older - there.keys() if there else set()  # a node without any may have lost its disk
                for name in rotation.remove_copies(self._merge_note, self._folder, source[0], gone):
                    print(f"gather: the copy of {name} was removed: {source[0]} no longer has it", flush=True)
            except OSError as error:
                print(f"gather: an old copy cannot be removed: {error}", flush=True)

    def _bring(self, source: Source, entry: StoredEntry) -> bool:
        """Copy the entry if needed; return whether the entry is present now: then no further source is tried."""
        try:
            if not self._needs(entry):
                return True
            if source in self._lost:
                words = f"cannot copy {entry.name}: no connection to {source[0]}:{source[1]}"
                self._faults.setdefault(entry.name, words)
                return False
            # No process writes here before a start: an own entry of that name is damaged, or it would not be needed.
            ends = *source, self._token, entry.name, self._folder
            fetched = copies.fetch(*ends, note=self._note, sets_aside=self._newest_alone, stop=self._stop)
        except (copies.CopyError, OSError) as error:
            if isinstance(error, copies.AlreadySaved) and not self._newest_alone:
                return True  # this node has saved the entry itself
            self._fail(entry.name, source, error)
            return False
        if fetched.bytes:
            print(f"gather: {entry.name} was copied from {source[0]}", flush=True)
        return True

    def _merge(self, source: Source, entry: StoredEntry) -> None:
        """Copy the entry's files that are newer at the source, or absent on this node."""
        scratch = self._folder / ".gathered.tmp"
        try:
            here = listing.look(self._folder, entry.name)
            if here is not None and here.fingerprint == entry.fingerprint:
                return
            fetched = self._fetch_stable(source, entry.name, scratch)
            paths = scratch.rglob("*") if fetched.entry.is_folder else [scratch / entry.name]
            placed = list[Path]()
            for path in [path for path in paths if path.is_symlink() or path.is_file()]:
                target, is_link = self._folder / path.relative_to(scratch), path.is_symlink()
                if not os.path.lexists(target) or (
                    target.is_symlink() == is_link and target.lstat().st_mtime_ns < path.lstat().st_mtime_ns
                ):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(target)
                    placed += [] if is_link else [target]
            rotation.note_copies(self._merge_note, self._folder, source[0], placed)
            if placed:
                print(f"gather: {entry.name} of {source[0]} was merged", flush=True)
        except (copies.CopyError, OSError) as error:
            self._fail(entry.name, source, error)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _fetch_stable(self, source: Source, name: str, into: Path) -> copies.Fetched:
        """Copy the entry, again if the entry has changed during the copy. Raises CopyError, OSError."""
        have = list[tuple[str, int, int]]()
        with contextlib.suppress(FileNotFoundError), listing.open_root(self._folder) as root:
            have = [(file.path, file.size, file.written_ns) for file in listing.scan(root, name)[1]]
        leaves_out: dict[str, Sequence[object]] = {
            "have": have if len(have) <= _MOST_FILES else [],
            "names": sorted(self._older),
        }
        for _ in range(_TRIES - 1):
            try:
                return copies.fetch(*source, self._token, name, into, leaves_out=leaves_out, stop=self._stop)
            except copies.Gone:
                self._stop.wait(_RETRY_S)
        return copies.fetch(*source, self._token, name, into, leaves_out=leaves_out, stop=self._stop)

    def _needs(self, entry: StoredEntry) -> bool:
        """Return whether this node lacks the entry, and has no own entry of that name and no newer entry."""
        note = listing.read_note(self._note)
        best = listing.newest(self._folder, ours=True) if self._newest_alone else listing.look(self._folder, entry.name)
        if best is None:
            return True
        is_mine = best.name == entry.name and not is_own(best, note)
        return not (is_mine or is_same(best, entry, note) or listing.order(best) >= listing.order(entry))

    def _fail(self, what: str, source: Source, error: Exception) -> None:
        if isinstance(error, copies.Halted):
            return
        print(f"gather: {error}", flush=True)
        self._faults[what] = str(error)
        # Each further entry would cost as long once more.
        if isinstance(error.__cause__, (ConnectionError, TimeoutError, wire.ServerBusy)):
            self._lost.add(source)

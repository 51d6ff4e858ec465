"""What the nodes have saved on disks of their own, brought to where a start of the job needs it.

The trainer's rank 0 reads checkpoints and tells the others, so its node gets the newest, wherever that is. A script's
ranks each look for themselves, so every node gets what the others have: never in place of what it has saved itself,
but for the files that the config keeps, of which all nodes get the newest.
Where the disk is shared there is nothing to bring.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from cloudtrain.entrypoints.replication import copies, copywire, fetchednote
from cloudtrain.entrypoints.replication import entries as listing
from cloudtrain.entrypoints.replication.entries import Entry
from cloudtrain.entrypoints.replication.fetchednote import has, is_own

__all__ = ["Gathering"]

END_S = 1.0

Source = tuple[str, int]


class Gathering:
    """One start's copies, from now on until `is_done`. What cannot be had is said, and `missing`."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Source],
        token: str,
        note: Path,
        *,
        newest_alone: bool,
        merged: Sequence[str] = (),
    ) -> None:
        """`sources` are the other nodes' servers (address, port); with `newest_alone` nothing else is brought.

        Entries whose names match a pattern of `merged` are the same on all nodes afterwards: of each file the newest.
        `note` is where it is noted what was fetched (fetchednote.py).
        """
        self._folder = folder
        self._sources = sources
        self._token = token
        self._note = note
        self._newest_alone = newest_alone
        self._merged = merged
        self._faults: dict[str, str] = {}  # entry, or a source that could not be asked -> why
        self._lost: set[Source] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gather", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all is here that could be had."""
        return not self._thread.is_alive()

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each node that could not be asked, and each entry that nobody could give.

        With `newest_alone` the entries are those that are newer than what is here now. Whole once `is_done`.
        """
        return tuple(self._faults.values())

    def cancel(self) -> None:
        """End it, in the midst of a copy too, which is then absent."""
        self._stop.set()
        self._thread.join(END_S)  # it may stand in a connect, or wait for a disk

    def _run(self) -> None:
        offers: list[tuple[Source, Entry]] = []
        for source in self._sources:
            try:
                if not copies.shares(*source, self._token, self._folder, stop=self._stop):
                    offers += [(source, entry) for entry in copies.entries(*source, self._token, stop=self._stop)]
            except (copies.CopyError, OSError) as error:
                self._fail(f"{source[0]}:{source[1]}", source, error)
        had: set[str] = set()
        for source, entry in sorted(offers, key=lambda each: listing.order(each[1]), reverse=True):
            if self._stop.is_set():
                return
            if self._newest_alone and entry.step is not None and not entry.is_ours:
                continue  # a step's name without a manifest: the trainer cannot use the entry
            if any(fnmatchcase(entry.name, pattern) for pattern in self._merged):
                self._merge(source, entry)
            elif entry.name not in had and self._bring(source, entry):
                had.add(entry.name)
                self._faults.pop(entry.name, None)
                if self._newest_alone:
                    return

    def _bring(self, source: Source, entry: Entry) -> bool:
        """Copy the entry where it is needed; return whether all is well with it, so that no other need be tried."""
        try:
            if not self._needs(entry):
                return True
            if source in self._lost:
                self._faults.setdefault(entry.name, f"{entry.name} of {source[0]}:{source[1]}, which was lost")
                return False
            # Before a start nobody writes here: the trainer's own of that name is not whole, or it would do.
            fetched = copies.fetch(
                *source,
                self._token,
                entry.name,
                self._folder,
                note=self._note,
                sets_aside=self._newest_alone,
                stop=self._stop,
            )
        except (copies.CopyError, OSError) as error:
            if isinstance(error, copies.Taken) and not self._newest_alone:  # by what was saved here itself
                return True
            self._fail(entry.name, source, error)
            return False
        if fetched.bytes:
            print(f"gather: {entry.name} has come from {source[0]}", flush=True)
        return True

    def _merge(self, source: Source, entry: Entry) -> None:
        """Copy the files of the entry that are newer there, or that are not here."""
        scratch = self._folder / ".gathered.tmp"
        try:
            here = listing.look(self._folder, entry.name)
            if here is not None and here.fingerprint == entry.fingerprint:
                return
            fetched = copies.fetch(*source, self._token, entry.name, scratch, stop=self._stop)
            paths = scratch.rglob("*") if fetched.entry.is_folder else [scratch / entry.name]
            for path in [path for path in paths if path.is_file()]:
                target = self._folder / path.relative_to(scratch)
                if not target.exists() or target.stat().st_mtime_ns < path.stat().st_mtime_ns:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(target)
            print(f"gather: {entry.name} of {source[0]} is merged here", flush=True)
        except (copies.CopyError, OSError) as error:
            self._fail(entry.name, source, error)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _needs(self, entry: Entry) -> bool:
        """Return whether neither the entry is here, nor another of its name of this node's own, nor a newer one."""
        note = fetchednote.read(self._note)
        best = listing.newest(self._folder, ours=True) if self._newest_alone else listing.look(self._folder, entry.name)
        if best is None:
            return True
        is_mine = best.name == entry.name and not is_own(best, note)
        return not (is_mine or has(best, entry, note) or listing.order(best) >= listing.order(entry))

    def _fail(self, what: str, source: Source, error: Exception) -> None:
        if isinstance(error, copies.Halted):
            return
        print(f"gather: {error}", flush=True)
        self._faults[what] = str(error)
        # Each further entry would cost as long once more.
        if isinstance(error.__cause__, (ConnectionError, TimeoutError, copywire.Busy)):
            self._lost.add(source)

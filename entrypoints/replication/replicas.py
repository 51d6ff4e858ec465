"""Keeps a second copy of a job's checkpoints on another node's disk while training runs.

The node after node 0 asks node 0's server every few seconds for the list of entries, and fetches missing entries, the
newest first. A fetched entry is removed when node 0 no longer has the entry and a newer entry has arrived; entries that
were not fetched are never touched. On a shared disk nothing is copied. Faults are printed once, and tried again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from . import copies, partial_files
from . import entries as listing
from .entries import Note, StoredEntry, is_own, is_same

EVERY_S = 3.0
QUIET_S = 6.0  # an entry without a manifest must be unchanged for so long before a copy
SHARE = 10  # listing the entries may take at most a tenth of the time
PAUSE_S, LONGEST_PAUSE_S = 3.0, 120.0  # after a fault; each further fault doubles the pause
END_S = 1.0

_ROOM = "/room"  # no entry can have this name

Source = Callable[[], "tuple[str, int] | None"]


class Replicas(threading.Thread):
    """The thread that copies, from `start` to `finish`."""

    def __init__(self, folder: Path, source: Source, token: str, note: Path) -> None:
        """`source` returns address and port of the node that has the checkpoints, None while unknown.

        `note` is the file that lists the fetched entries (entries.py).
        """
        super().__init__(name="replicas", daemon=True)
        self._folder, self._source, self._token = folder, source, token
        self.note = note
        self._is_shared: dict[tuple[str, int], bool] = {}
        self._seen: dict[str, tuple[str, float]] = {}  # name -> fingerprint, and since when the fingerprint is the same
        self._looked_s = 0.0
        self._faults: dict[str, tuple[int, float]] = {}  # failing part -> faults in a row, time of the next try
        self._is_over = threading.Event()

    def finish(self) -> None:
        """Stop at once, also in the middle of a copy; the copy is then absent."""
        self._is_over.set()
        if self.is_alive():
            self.join(END_S)

    def run(self) -> None:
        """Copy until `finish`, or until the copies are halted."""
        last = None
        while not self._is_over.is_set():
            wait_s = EVERY_S
            try:
                source = self._source()
                if source != last:
                    last = source
                    self._faults.clear()
                if source is not None and self._may_try(""):
                    wait_s = 0.0 if self._round(source) else max(wait_s, min(SHARE * self._looked_s, LONGEST_PAUSE_S))
            except copies.Halted:
                return
            except Exception as error:  # any kind of error: training continues, and a later round tries again
                self._fail("", str(error) if isinstance(error, (copies.CopyError, OSError)) else repr(error))
            self._is_over.wait(wait_s)

    def _round(self, source: tuple[str, int]) -> bool:
        """Remove superseded entries, and fetch one missing entry; return whether to list the entries again at once."""
        begin_s = time.monotonic()
        if source not in self._is_shared:
            self._is_shared[source] = copies.shares(*source, self._token, self._folder, stop=self._is_over)
        if self._is_shared[source]:
            return False
        there = copies.entries(*source, self._token, stop=self._is_over)
        here = {entry.name: entry for entry in listing.list_entries(self._folder)}
        self._recover("")
        self._looked_s = time.monotonic() - begin_s
        note = self._retire(there, here, listing.read_note(self.note))
        lacking = [entry for entry in there if not is_same(here.get(entry.name), entry, note)]
        seen = {entry.name: (entry.fingerprint, begin_s) for entry in there}
        same = {name: each for name, each in self._seen.items() if name in seen and each[0] == seen[name][0]}
        self._seen = {**seen, **same}
        return any(
            self._fetch(source, entry, here.get(entry.name), note)
            for entry in lacking
            # A file that the job's own code is still writing must not replace the last good copy.
            if entry.is_ours or begin_s - self._seen[entry.name][1] >= QUIET_S
        )

    def _fetch(self, source: tuple[str, int], entry: StoredEntry, here: StoredEntry | None, note: Note) -> bool:
        """Return whether a copy was tried: time has passed, so a newer entry may exist, or the server may be gone."""
        name = entry.name
        if not (self._may_try(name) and self._may_try(_ROOM)):
            return False
        if here is not None and not is_own(here, note):
            self._fail(name, f"{self._folder / name} differs from node 0's, and was not copied: it stays unchanged")
            return False
        try:
            copies.fetch(*source, self._token, name, self._folder, note=self.note, stop=self._is_over)
        except copies.Gone:
            return False
        except copies.Halted:
            raise
        except copies.CopyError as error:
            self._fail(_ROOM if isinstance(error, copies.NoRoom) else name, str(error))
        else:
            self._recover(name)
            self._recover(_ROOM)
        return True

    def _retire(self, there: list[StoredEntry], here: dict[str, StoredEntry], note: Note) -> Note:
        """Remove fetched entries that the source no longer has, if a newer entry of the source has arrived.

        Return the rest of the note. Called before a copy, so that the disk holds at most as many entries as the source.
        """
        kept = {entry.name: entry for entry in there}
        safe = [listing.order(each) for each in here.values() if is_same(each, kept.get(each.name), note)]
        gone = [each for each in here.values() if each.name not in kept and is_own(each, note)]
        for entry in gone:
            if any(listing.order(entry) < each for each in safe):
                partial_files.remove(self._folder / entry.name)
                del here[entry.name]
        return listing.keep_in_note(self.note, kept.keys() | here.keys())

    def _may_try(self, what: str) -> bool:
        return time.monotonic() >= self._faults.get(what, (0, 0.0))[1]

    def _fail(self, what: str, words: str) -> None:
        """Print a new fault; set the time of the next try, later after each fault."""
        count = self._faults.get(what, (0, 0.0))[0] + 1
        pause_s = min(PAUSE_S * 2 ** min(count - 1, 10), LONGEST_PAUSE_S)
        self._faults[what] = count, time.monotonic() + pause_s
        if count == 1:
            print(f"replicas: {words}; will retry", flush=True)

    def _recover(self, what: str) -> None:
        if self._faults.pop(what, None):
            print(f"replicas: {what.strip('/') or 'source'}: recovered", flush=True)

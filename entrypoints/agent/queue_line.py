"""The tickets of waiting jobs on a host: files in the folder `queue` of the locks' folder.

A ticket is a lock as in gpulocks.py: an flock on `queue/NAME.lock`, held by the waiting agent, with a note. A
ticket without a holder is dead, and does not count. NAME sorts in the order of the tickets. The door is a lock held
for milliseconds: tickets change, and locks of machines are taken through the line, only behind the door.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import gpulocks
from .queue_turns import Holding, HostLine, QueueTicket, decide

KILL_S = 20.0  # from a job's cap to the end of the last process: as TERMS.tail_s of the ssh backend
DOOR = "door"
LAST = -1  # the priority of a job outside the line: all tickets are before the job
_SUFFIX = ".lock"


class PlacedTicket:
    """A ticket on the host, held by this process until `close`."""

    def __init__(self, locks: Path, ticket: QueueTicket, host: str, units: tuple[str, ...]) -> None:
        """`units` are the names of the locks that the job may take. Raises gpulocks.Unusable."""
        self.locks, self.host, self.units = locks, host, units
        self.ticket = replace(ticket, user=gpulocks.login(os.getuid()))
        self._folder = gpulocks.inner(locks, "queue")
        with _door(self._folder):
            _remove_dead(self._folder)
            self._taken = gpulocks.take(self._folder, [ticket.name], self._note())

    def line(self) -> HostLine:
        """Return the host's line up to the own ticket."""
        found = tickets(self.locks)
        earlier = (each for each in found if each.key < self.ticket.key)
        ahead = tuple(replace(each, needs={self.host: each.needs[""]}) for each in earlier)
        return HostLine(self.host, self.units, held_by(self.locks), ahead, max(1, len(found)))

    def promise(self, start_s: float | None, seen: HostLine) -> None:
        """Write the job's expected start, and the locks held in `seen`, into the ticket's note.

        Later jobs leave room for the job from the start on, until the first release of a lock.
        """
        if (start_s, seen.holders) != (self.ticket.start_s, self.ticket.held):
            self.ticket = replace(self.ticket, start_s=start_s, held=seen.holders)
            with _door(self._folder):
                self._taken.about = self._note()
                self._taken.write_notes()

    def take(self, seen: HostLine, about: dict[str, Any]) -> gpulocks.HeldLocks | None:
        """Take the locks on which `seen` was decided, None if the line or the locks have changed since."""
        with _door(self._folder):
            now = self.line()
            if (now.tickets, now.held) != (seen.tickets, seen.held):
                return None
            held = {each.name for each in now.held}
            chosen = [unit for unit in self.units if unit not in held][: self.ticket.needs[self.host]]
            with contextlib.suppress(gpulocks.GpuBusy):
                return gpulocks.take(self.locks, chosen, about)
        return None

    def _note(self) -> dict[str, Any]:
        return {**self.ticket.dump(), "here": self.ticket.needs[self.host], "units": self.units}

    def touch(self) -> None:
        """Update the file's time, against cleaners of /tmp."""
        self._taken.touch()

    def close(self) -> None:
        """Give up the place in line."""
        for name in self._taken.files:
            with contextlib.suppress(OSError):
                (self._folder / f"{name}{_SUFFIX}").unlink()  # the name belongs to this job alone
        self._taken.release()


def tickets(locks: Path) -> list[QueueTicket]:
    """Return the host's living tickets in order; the key of `needs` is "", as submitters name hosts differently."""
    folder, found = locks / "queue", []
    for name, notes in _files(folder):
        if not gpulocks.is_free(folder / name):
            for each in notes:
                with contextlib.suppress(LookupError, TypeError, ValueError, OverflowError):  # notes of different users
                    note = gpulocks.read_note(folder / each) or {}
                    names = {"job": _plain(note["job"]), "user": _plain(note["owner"])}
                    found.append(QueueTicket.load({**note, **names, "needs": {"": note["here"]}}))
    return sorted(found, key=lambda each: each.key)


def held_by(locks: Path) -> tuple[Holding, ...]:
    """Return the host's held locks."""
    found = []
    for each in gpulocks.holders(locks):
        if each["name"].startswith(gpulocks.SPARE):
            continue
        root, until_s = each.get("root"), _number(each.get("until_s"))
        job, user = _plain(each.get("job", "?")), _plain(each.get("owner", "somebody"))
        priority, spared_s = int(_number(each.get("priority")) or 0), _number(each.get("spared_until_s")) or 0.0
        kept = root if isinstance(root, str) else None
        found.append(Holding(each["name"], job, user, until_s, priority, kept, spared_s))
    return tuple(found)


def why_not(locks: Path, names: list[str], job: str, cap_s: float) -> str:
    """Return the waiting job for which a job outside the line must leave the locks free; empty if there is room."""
    line = tickets(locks)
    if not line:
        return ""
    ticket = QueueTicket(job, "", LAST, time.time(), cap_s, {"": len(names)})
    held = tuple(each for each in held_by(locks) if each.name in names)
    if decide(ticket, [HostLine("", tuple(names), held, tuple(line))], time.time()).starts:
        return ""
    return f"{line[0].user}'s job {line[0].job} waits in line for it"


def _plain(text: object) -> str:
    """Return the text without control characters: the notes of different users are untrusted input."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:100])


def _number(value: object) -> float | None:
    """Return a finite number, None for any other value."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e12 else None


def _files(folder: Path) -> list[tuple[str, list[str]]]:
    """Return the tickets' lock files, each with its notes."""
    notes: dict[str, list[str]] = {}
    names = os.listdir(folder) if folder.is_dir() else []
    for name in names:
        if name.endswith(".json") and not name.startswith("."):
            notes.setdefault(name.partition(".")[0], []).append(name)
    locks = [name for name in names if name.endswith(_SUFFIX) and name != f"{DOOR}{_SUFFIX}"]
    return [(name, notes.get(name.removesuffix(_SUFFIX), [])) for name in locks]


def _remove_dead(folder: Path) -> None:
    """Remove the files of dead tickets, behind the door: a new ticket's file is free for a moment."""
    for name, notes in _files(folder):
        if gpulocks.is_free(folder / name):
            for each in (name, *notes):
                with contextlib.suppress(OSError):  # a different user's file in a sticky folder
                    (folder / each).unlink()


@contextlib.contextmanager
def _door(folder: Path) -> Iterator[None]:
    """Hold the folder's door alone: no ticket changes, and no lock is taken through the line."""
    door = gpulocks.open_lock(folder / f"{DOOR}{_SUFFIX}")
    try:
        fcntl.flock(door, fcntl.LOCK_EX)
        yield
    finally:
        os.close(door)

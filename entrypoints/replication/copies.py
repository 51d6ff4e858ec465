"""Copies of files from node to node over the training network, with a token that lives as long as the server.

A server offers what is in one folder, read-only; a client fetches an entry (entries.py): every file's SHA-256 is
verified, and the whole once more, files and folders are fsynced, and only then the entry gets its name: it is complete
or absent.
Both ends know that the other has the token, and notice altered bytes; **nothing is encrypted** (copywire.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from cloudtrain.entrypoints.checkpoints import folder as checkpoints
from cloudtrain.entrypoints.replication import copywire, fetchednote, landing
from cloudtrain.entrypoints.replication import entries as listing
from cloudtrain.entrypoints.replication.copywire import Sums, Wire, WireError
from cloudtrain.entrypoints.replication.entries import Entry, File

__all__ = ["CopyError", "Fetched", "Gone", "Halted", "NoRoom", "Server", "Taken", "entries", "fetch", "serve", "shares"]

CONNECTIONS = 64  # of one server; further clients are told to come again
HELLO_S, CONNECT_S = 5.0, 10.0
BUSY_S = 60.0  # of coming again
MARGIN_BYTES = 256 << 20  # what a copy leaves free, for logs and for how the job ended
FILE_BYTES = 4096  # what a file may take on a disk beside its bytes

# So often the disk is told to begin: a GiB was durable in 2.0 s and not in 2.4 s, most of the fsync being done by then.
_EARLY_BYTES = 8 << 20
_T = TypeVar("_T", Entry, File)


class CopyError(Exception):
    """Something could not be copied; the message says from which host, what and why."""


class Gone(CopyError):
    """The server has no such entry any more, or it changed meanwhile: ask again what there is."""


class Halted(CopyError):
    """This end is to stop."""


class NoRoom(CopyError):
    """The disk here is too full."""


class Taken(CopyError):
    """This end has saved something of that name itself, or was saving it meanwhile: that is left as it is."""


class _GoneThere(WireError):
    """The server says that the entry is not there as it was."""


class _Cut(Exception):
    """The server cannot keep what it announced, in the midst of a file: only the end of the line can say so."""


@dataclass(frozen=True)
class Fetched:
    """An entry that is here now. `bytes` came over the network: 0 where the very same was here before."""

    entry: Entry
    bytes: int
    seconds: float


class Server:
    """A folder that is offered until `close` or the end of the process, which it does not hold up."""

    def __init__(self, folder: Path, listening: socket.socket, token: str, connections: int, stall_s: float) -> None:
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._folder = folder
        self._listening = listening
        self._token = token
        self._stall_s = stall_s
        self._slots = threading.BoundedSemaphore(connections)
        self._is_over = threading.Event()
        threading.Thread(target=self._accept, name="copies", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that there are end within a moment."""
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # which wakes accept
        self._listening.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                sock, _ = self._listening.accept()
            except OSError:  # too many open files, for one
                self._is_over.wait(0.1)
                continue
            if not self._slots.acquire(blocking=False):
                with sock:
                    copywire.turn_away(Wire(sock, stall_s=1.0))
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), name="copy", daemon=True).start()
            except RuntimeError:  # no thread to be had
                sock.close()
                self._slots.release()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(Exception):  # the other end learns of it, by a message or the line's end
                wire = Wire(sock, HELLO_S, self._is_over)
                copywire.greet(wire, self._token)
                wire.stall_s = self._stall_s
                _answer(wire, self._folder)
        finally:
            self._slots.release()


def serve(
    folder: Path,
    address: str,
    port: int,
    token: str,
    *,
    connections: int = CONNECTIONS,
    stall_s: float = copywire.STALL_S,
) -> Server:
    """Offer the folder's entries there, to whoever has the token; the server's `address` has the port that 0 became.

    The folder may come into being later. Raises OSError where nothing can listen there, ValueError without a token.
    """
    if not token:
        raise ValueError("a server of copies needs a token")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return Server(folder, socket.create_server((address, port), family=family), token, connections, stall_s)


def entries(
    address: str, port: int, token: str, *, stall_s: float = copywire.STALL_S, stop: threading.Event | None = None
) -> list[Entry]:
    """Return what the server there offers, the newest first. Raises CopyError; Halted once `stop` is set."""
    found = []
    with _words(f"cannot learn what {address}:{port} has"), _session(address, port, token, stall_s, stop) as wire:
        wire.send({"want": "list"})
        while (told := _next(wire, "entry", "end")).get("end") is None:
            found.append(_entry(told["entry"]))
    return sorted(found, key=listing.order, reverse=True)


def shares(
    address: str,
    port: int,
    token: str,
    folder: Path,
    *,
    stall_s: float = copywire.STALL_S,
    stop: threading.Event | None = None,
) -> bool:
    """Return whether the server's folder and this one are the same, as on a shared disk. Raises CopyError.

    A file of a name that nobody has asked for before is laid here and asked for there: caches know nothing of it.
    """
    probe = landing.probe(folder)
    with _words(f"cannot learn whether {address}:{port} has the same disk"):
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        try:
            with _session(address, port, token, stall_s, stop) as wire:
                wire.send({"want": "sees", "name": probe.name})
                return _next(wire, "sees")["sees"] is True
        finally:
            probe.unlink(missing_ok=True)


def fetch(
    address: str,
    port: int,
    token: str,
    name: str,
    into: Path,
    *,
    note: Path | None = None,
    sets_aside: bool = False,
    margin_bytes: int = MARGIN_BYTES,
    stall_s: float = copywire.STALL_S,
    stop: threading.Event | None = None,
) -> Fetched:
    """Copy the server's entry into the folder, unless the very same is there. Raises CopyError, and all below it.

    Of the same name, only what the `note` (fetchednote.py) has as fetched is replaced, and if nobody has written to it
    since. Whatever else there is stays, and Taken is raised; or, if it is there beforehand, the copy `sets_aside` it.
    `margin_bytes` stay free on the disk. What an interrupted copy has left is removed by the next one of any name.
    `stall_s`: the longest that a quarter of a mebibyte may take.
    """
    begin_s = time.monotonic()
    with (
        _words(f"cannot copy {name} from {address}:{port} to {into} on {socket.gethostname()}"),
        landing.alone(into, name, stop) as partial,
        _session(address, port, token, stall_s, stop) as wire,
    ):
        wire.send({"want": "get", "name": name})
        entry = _entry(_next(wire, "entry")["entry"])
        if entry.name != name:
            raise WireError(f"it offers {entry.name!r}, which was not asked for")
        here, noted = listing.look(into, name), fetchednote.read(note) if note else {}
        if fetchednote.has(here, entry, noted):
            return Fetched(entry, 0, time.monotonic() - begin_s)
        is_copy = here is not None and fetchednote.is_own(here, noted)
        over = here if is_copy or sets_aside else None
        if over is None and os.path.lexists(into / name):
            raise landing.Taken
        landing.check_room(into, entry.bytes + entry.files * FILE_BYTES + margin_bytes)
        try:
            paths = _receive(wire, entry, partial)
            landing.sync(partial, paths, stop)
            if note is not None:
                # Noted first: what is here and not in the note is taken for somebody else's.
                fetchednote.put(note, entry, _fingerprint(partial, entry), over if is_copy else None)
            landing.place(partial, into / name, over, is_kept=not is_copy)
        finally:
            landing.drop(partial)
    return Fetched(entry, entry.bytes, time.monotonic() - begin_s)


def _answer(wire: Wire, folder: Path) -> None:
    """Do what the client asks for, once."""
    ask = wire.receive()
    name = ask.get("name")
    try:
        if ask.get("want") == "list":
            for entry in listing.list_entries(folder):
                wire.send({"entry": asdict(entry)})
            wire.send({"end": True})
        elif ask.get("want") == "get" and isinstance(name, str) and listing.is_name(name):
            _send(wire, folder, name)
        elif ask.get("want") == "sees" and isinstance(name, str) and landing.PROBE.fullmatch(name):
            wire.send({"sees": (folder / name).exists()})
        else:
            wire.send({"fault": "it offers nothing of that name"})
    except FileNotFoundError:
        wire.send({"gone": "it is not there any more"})
    except OSError as error:
        wire.send({"fault": f"it cannot read it: {error.strerror or error}"})


def _send(wire: Wire, folder: Path, name: str) -> None:
    with listing.open_root(folder) as root, contextlib.closing(Sums(with_crc=False)) as sums:
        entry, files = listing.scan(root, name)
        wire.send({"entry": asdict(entry)})
        for file in files:
            with FileIO(listing.open_file(root, name, file.path)) as source:
                about = os.fstat(source.fileno())
                if (about.st_size, about.st_mtime_ns) != (file.size, file.written_ns):
                    wire.send({"gone": "it is being written to"})
                    return
                wire.send({"file": asdict(file)})
                _send_bytes(wire, source, file.size, sums)
            wire.send({"sha256": sums.take()[0]})
        if listing.scan(root, name)[0].fingerprint != entry.fingerprint:
            wire.send({"gone": "it was written to meanwhile"})
            return
    wire.send({"end": entry.fingerprint})


def _send_bytes(wire: Wire, source: FileIO, size: int, sums: Sums) -> None:
    left = size
    while left:
        block = sums.block()[:left]
        try:
            count = source.readinto(block)
            if not count:
                raise _Cut
            sums.add(block[:count], is_all=count == size)
            wire.write(block[:count])
        except OSError as error:
            raise _Cut from error
        left -= count


def _fingerprint(partial: Path, entry: Entry) -> str:
    """Return the fingerprint that the copy has here: the times that this disk keeps may be coarser than those told."""
    if entry.is_ours:
        return entry.fingerprint
    with listing.open_root(partial.parent) as root:
        return listing.scan(root, partial.name)[0].fingerprint


def _receive(wire: Wire, entry: Entry, partial: Path) -> list[Path]:
    """Write the entry's files, and verify each and the whole; return their paths. Raises OSError."""
    files: dict[str, File] = {}
    crcs: dict[str, str] = {}
    if entry.is_folder:
        partial.mkdir()
    with contextlib.closing(Sums(with_crc=entry.is_ours)) as sums:
        left = entry.bytes
        for _ in range(entry.files):
            file = _file(_next(wire, "file")["file"])
            left -= file.size
            if left < 0 or file.path in files or not (listing.is_path(file.path) if entry.is_folder else not file.path):
                raise WireError(f"it sends {file.path[:200]!r}, which has no place in {entry.name}")
            path = partial / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileIO(path, "x") as target:
                _receive_bytes(wire, target, file.size, sums)
                os.utime(target.fileno(), ns=(file.written_ns, file.written_ns))
            sha256, crcs[file.path] = sums.take()
            if _next(wire, "sha256")["sha256"] != sha256:
                raise WireError(f"{file.path or entry.name} was altered on the way: its SHA-256 is another")
            files[file.path] = file
    manifest = (partial / checkpoints.MANIFEST).read_bytes() if entry.is_ours else None
    made = listing.fingerprint_of(files.values(), manifest)
    if left or not made == entry.fingerprint == _next(wire, "end")["end"]:
        raise WireError("what it sent is not what it announced")
    if manifest is not None:
        _check_sums(partial, entry.name, files, crcs)
    return [partial / path for path in files]


def _receive_bytes(wire: Wire, target: FileIO, size: int, sums: Sums) -> None:
    left = size
    while left:
        block = sums.block()[:left]
        wire.read(block)
        sums.add(block, is_all=len(block) == size)
        left -= len(block)
        while block:
            block = block[target.write(block) :]
        done = size - left
        if done % _EARLY_BYTES == 0 and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # advice, which not every file system takes
                os.posix_fadvise(target.fileno(), done - _EARLY_BYTES, _EARLY_BYTES, os.POSIX_FADV_DONTNEED)


def _check_sums(partial: Path, name: str, files: dict[str, File], crcs: dict[str, str]) -> None:
    """Raise WireError where a checkpoint is not as its manifest says: it is damaged there, and an older one may do."""
    with contextlib.suppress(checkpoints.Unreadable):  # another version's: whoever reads it will know
        try:
            told = checkpoints.read_manifest(partial)
            checkpoints.read_trainer(partial, name)
            whole = {path: (file.size, crcs[path]) for path, file in files.items()}
            damaged = [path for path, each in told.items() if whole.get(path) != (each["size"], each["crc32"])]
        except (OSError, ValueError) as error:
            raise WireError(f"it is damaged there: {error}") from error
        if damaged:
            raise WireError(f"it is damaged there: {damaged[0]} is not as it was when it was saved")


@contextlib.contextmanager
def _words(what: str) -> Iterator[None]:
    """Turn whatever goes wrong into a sentence that begins with `what`."""
    try:
        yield
    except _GoneThere as error:
        raise Gone(f"{what}: {error}") from error
    except copywire.Stopped as error:
        raise Halted(f"{what}: this node was asked to stop") from error
    except landing.Taken as error:
        raise Taken(f"{what}: {error}") from error
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        kind = NoRoom if error.errno in (errno.ENOSPC, errno.EDQUOT) else CopyError
        raise kind(f"{what}: {error.strerror or error}{place}") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CopyError(f"{what}: {error}") from error


@contextlib.contextmanager
def _session(address: str, port: int, token: str, stall_s: float, stop: threading.Event | None) -> Iterator[Wire]:
    """Return a line to the server, once both ends have shown that they know the token. Raises OSError."""
    end_s = time.monotonic() + BUSY_S
    while True:
        with socket.create_connection((address, port), timeout=min(CONNECT_S, stall_s)) as sock:
            wire = Wire(sock, stall_s, stop)
            try:
                copywire.introduce(wire, token)
            except copywire.Busy:
                if time.monotonic() > end_s:
                    raise
            else:
                yield wire
                return
        (stop or threading.Event()).wait(0.1 + secrets.randbelow(400) / 1000)


def _next(wire: Wire, *keys: str) -> dict[str, Any]:
    """Return the next message, which must have one of the keys. Raises OSError."""
    told = wire.receive()
    if "gone" in told:
        raise _GoneThere(str(told["gone"])[:300])
    if "fault" in told:
        raise WireError(str(told["fault"])[:300])
    if not any(key in told for key in keys):
        raise WireError("it speaks another version's language")
    return told


def _entry(told: Any) -> Entry:
    made = _made(Entry, told)
    if not listing.is_name(made.name) or made.bytes < 0 or made.files < 0 or made.step != listing.step_of(made.name):
        raise WireError(f"it offers {made.name[:200]!r}, which no entry can be")
    return made


def _file(told: Any) -> File:
    made = _made(File, told)
    if made.size < 0:
        raise WireError("it speaks another version's language")
    return made


def _made(kind: type[_T], told: Any) -> _T:
    """Return the object that a message tells of. Raises WireError where a field is missing, or of another type."""
    types: dict[str, Any] = {"str": str, "int": int, "bool": bool, "int | None": (int, type(None))}
    named = {field.name: types[str(field.type)] for field in fields(kind)}
    if not isinstance(told, dict) or told.keys() != named.keys():
        raise WireError("it speaks another version's language")
    if not all(isinstance(told[name], each) for name, each in named.items()):
        raise WireError("it speaks another version's language")
    return kind(**told)

"""Copies files from node to node over the training network; a token is valid for as long as the server runs.

A server offers the content of one folder, read-only; a client fetches an entry (entries.py). The client verifies the
SHA-256 of every file and then the fingerprint of the whole entry, and fsyncs files and folders. Only then the entry
gets its name: an entry is complete or absent.
Each end proves that it has the token, and notices altered bytes; **nothing is encrypted** (wire.py).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoints import folder as checkpoints
from ..foreign import is_inside
from ..records import RecordError
from . import entries as listing
from . import partial_files, rotation
from . import wire as copywire
from .entries import File, StoredEntry
from .wire import Seal, Wire, WireError

PURPOSE = "copies"  # of the connections
CONNECTIONS = 64  # of one server; further clients are asked to come again
HELLO_S, CONNECT_S = 5.0, 10.0
BUSY_S = 60.0  # for how long a client that was sent away comes again
MARGIN_BYTES = 256 << 20  # free after a copy, for logs and for the exit report of the job
FILE_BYTES = 4096  # the space of a file on the disk beside its bytes

BLOCK = 1 << 18  # bytes; 1.5 times the rate of 4 MiB blocks: a block is hashed and written while still in a CPU cache

# After so many bytes the disk is asked to write: a GiB was durable in 2.0 s in place of 2.4 s, since most of the fsync
# is then done.
_EARLY_BYTES = 8 << 20
_T = TypeVar("_T", StoredEntry, File)


class CopyError(Exception):
    """A copy failed; the message has the host, the entry and the reason."""


class Gone(CopyError):
    """The server no longer has the entry, or the entry changed during the copy: list the entries again."""


class Halted(CopyError):
    """This end was asked to stop."""


class NoRoom(CopyError):
    """The disk of this node is too full."""


class AlreadySaved(CopyError):
    """This node has saved an entry of the same name itself, before or during the copy; the own entry stays as it is."""


class _GoneThere(WireError):
    """The server reports that the entry is gone or has changed."""


class _Cut(Exception):
    """The server lacks announced bytes, in the middle of a file: only a closed connection can report the fault."""


@dataclass(frozen=True)
class Fetched:
    """An entry that is now on this node. `bytes` came over the network: 0 if the same entry was already present."""

    entry: StoredEntry
    bytes: int


class Sums:
    """Computes the SHA-256 of one file after another, and the CRC-32 if requested, in parallel with the transfer.

    `block()` lends the next of three buffers, `add` takes the filled buffer; the last buffer but one is free again by
    then. A file of a single block is hashed in the caller's thread, because small files are many.
    """

    def __init__(self, *, with_crc: bool) -> None:
        self._with_crc = with_crc
        self._blocks = [memoryview(bytearray(BLOCK)) for _ in range(3)]
        self._next = 0
        self._todo: queue.Queue[memoryview | None] = queue.Queue(1)
        self._thread: threading.Thread | None = None
        self._begin()

    def block(self) -> memoryview:
        """Return the buffer for the next bytes."""
        self._next = (self._next + 1) % len(self._blocks)
        return self._blocks[self._next]

    def add(self, block: memoryview, *, is_all: bool = False) -> None:
        """Add a file's next bytes. `is_all`: the bytes are the whole file."""
        if is_all:
            self._update(block)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
            self._thread.start()
        self._todo.put(block)

    def take(self) -> tuple[str, str]:
        """Return the file's SHA-256 and CRC-32 in hexadecimal digits, and start the next file."""
        self._todo.join()
        found = self._sha256.hexdigest(), f"{self._crc32:08x}"
        self._begin()
        return found

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._todo.put(None)

    def _begin(self) -> None:
        self._sha256 = hashlib.sha256()
        self._crc32 = 0

    def _run(self) -> None:
        while (block := self._todo.get()) is not None:
            self._update(block)
            self._todo.task_done()

    def _update(self, block: memoryview) -> None:
        self._sha256.update(block)
        if self._with_crc:
            self._crc32 = zlib.crc32(block, self._crc32)


class Server:
    """Offers a folder until `close` or the end of the process; does not delay the end of the process."""

    def __init__(
        self, folder: Path, address: str, port: int, token: str, saved: Callable[[Path], rotation.Saved] | None = None
    ) -> None:
        """Offer the folder's entries to clients with the token; `self.address` has the real port in place of 0.

        `saved` returns the checkpoints that a script has saved in a folder.
        """
        if not token:
            raise ValueError("a server of copies needs a token")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._folder, self._token, self._saved = folder, token, saved
        self._listening = socket.create_server((address, port), family=family)
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self._is_over = threading.Event()
        threading.Thread(target=self._accept, name="copies", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; open connections end within a moment."""
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listening.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                sock, _ = self._listening.accept()
            except OSError:  # for example too many open files
                self._is_over.wait(0.1)
                continue
            if not self._slots.acquire(blocking=False):
                with sock:
                    copywire.turn_away(sock)
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), name="copy", daemon=True).start()
            except RuntimeError:  # no further thread is possible
                sock.close()
                self._slots.release()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(Exception):  # the client gets a message, or notices the closed connection
                wire = Wire(sock, HELLO_S, self._is_over)
                wire.meet(Seal(self._token, PURPOSE, is_server=True))
                wire.stall_s = copywire.STALL_S
                _answer(wire, self._folder, self._saved)
        finally:
            self._slots.release()


def entries(address: str, port: int, token: str, *, stop: threading.Event | None = None) -> list[StoredEntry]:
    """Return the entries that the server offers, the newest first. Raises CopyError; Halted once `stop` is set."""
    found = []
    with _words(f"cannot learn what {address}:{port} has"), _session(address, port, token, stop) as wire:
        wire.send({"want": "list"})
        while (message := _next(wire, "entry", "end")).get("end") is None:
            found.append(_entry(message["entry"]))
    return sorted(found, key=listing.order, reverse=True)


def saved(address: str, port: int, token: str, *, stop: threading.Event | None = None) -> rotation.Saved:
    """Return the checkpoints that a script has saved at the server. Raises CopyError; Halted once `stop` is set."""
    with _words(f"cannot learn what {address}:{port} has"), _session(address, port, token, stop) as wire:
        wire.send({"want": "saved"})
        return {str(name): frozenset(map(str, kinds)) for name, kinds in _next(wire, "saved")["saved"].items()}


def shares(address: str, port: int, token: str, folder: Path, *, stop: threading.Event | None = None) -> bool:
    """Return whether the server's folder and this folder are the same, as on a shared disk. Raises CopyError.

    Creates a file with a new random name in this folder, and asks the server for the file: no cache knows the name.
    """
    probe = partial_files.probe(folder)
    with _words(f"cannot learn whether {address}:{port} has the same disk"):
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        try:
            with _session(address, port, token, stop) as wire:
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
    leaves_out: Mapping[str, Sequence[Any]] | None = None,
    stop: threading.Event | None = None,
) -> Fetched:
    """Copy the server's entry into the folder, unless the same entry is present. Raises CopyError and its subclasses.

    A local entry of the same name is replaced only if the `note` has the entry as fetched, and the
    entry has not changed since. A different local entry stays, and AlreadySaved is raised; with `sets_aside`, an entry
    that was present before the copy is set aside. `leaves_out`: the checkpoints (`names`) and the files (`have`: path,
    size and time) of the entry that the server should not send. MARGIN_BYTES stay free on the disk. The next copy of
    any name removes the partial files of an interrupted copy.
    """
    with (
        _words(f"cannot copy {name} from {address}:{port} to {into} on {socket.gethostname()}"),
        partial_files.exclusive(into, name, stop) as partial,
        _session(address, port, token, stop) as wire,
    ):
        wire.send({"want": "get", "name": name, **(leaves_out or {})})
        answer = _next(wire, "entry")
        entry = _entry(answer["entry"])
        if entry.name != name:
            raise WireError(f"the server offers {entry.name!r}, which was not requested")
        here, noted = listing.look(into, name), listing.read_note(note) if note else {}
        if listing.is_same(here, entry, noted):
            return Fetched(entry, 0)
        is_copy = here is not None and listing.is_own(here, noted)
        over = here if is_copy or sets_aside else None
        if over is None and os.path.lexists(into / name):
            raise partial_files.NameTaken
        partial_files.check_room(into, entry.bytes + entry.files * FILE_BYTES + MARGIN_BYTES)
        try:
            paths = _receive(wire, entry, partial)
            partial_files.link(partial, answer.get("links"))
            partial_files.sync(partial, paths, stop)
            if note is not None:
                # The note is written first: an entry without a note counts as saved by this node.
                listing.add_to_note(note, entry, _fingerprint(partial, entry), over if is_copy else None)
            partial_files.place(partial, into / name, over, is_kept=not is_copy)
        finally:
            partial_files.drop(partial)
    return Fetched(entry, entry.bytes)


def _answer(wire: Wire, folder: Path, saved_in: Callable[[Path], rotation.Saved] | None) -> None:
    ask = wire.receive()
    name = ask.get("name")
    try:
        if ask.get("want") == "list":
            for entry in listing.list_entries(folder):
                wire.send({"entry": entry.dump()})
            wire.send({"end": True})
        elif ask.get("want") == "get" and isinstance(name, str) and listing.is_name(name):
            _send(wire, folder, name, ask)
        elif ask.get("want") == "saved":
            wire.send(
                {"saved": {} if saved_in is None else {n: sorted(kinds) for n, kinds in saved_in(folder).items()}}
            )
        elif ask.get("want") == "sees" and isinstance(name, str) and partial_files.PROBE.fullmatch(name):
            wire.send({"sees": (folder / name).exists()})
        else:
            wire.send({"fault": "it offers nothing of that name"})
    except FileNotFoundError:
        wire.send({"gone": "it is not there any more"})
    except OSError as error:
        wire.send({"fault": f"it cannot read it: {error.strerror or error}"})


def _wanted(root: int, name: str, ask: Mapping[str, Any]) -> tuple[StoredEntry, list[File]]:
    """Return the entry without the checkpoints and files that the client leaves out, and its files. Raises OSError."""
    entry, files = listing.scan(root, name)
    have = {tuple(each) for each in ask.get("have", ())}
    left = [
        file
        for file in files
        if (file.path, file.size, file.written_ns) not in have
        and not rotation.is_in(f"{name}/{file.path}", ask.get("names", ()))
    ]
    if len(left) == len(files):
        return entry, files
    size, mark = sum(file.size for file in left), listing.fingerprint_of(left, None)
    return replace(entry, fingerprint=mark, bytes=size, files=len(left)), left


def _send(wire: Wire, folder: Path, name: str, ask: Mapping[str, Any]) -> None:
    with listing.open_root(folder) as root, contextlib.closing(Sums(with_crc=False)) as sums:
        entry, files = _wanted(root, name, ask)
        wire.send({"entry": entry.dump(), "links": listing.links(folder / name)})
        for file in files:
            with FileIO(listing.open_file(root, name, file.path)) as source:
                about = os.fstat(source.fileno())
                if (about.st_size, about.st_mtime_ns) != (file.size, file.written_ns):
                    wire.send({"gone": "it is being written to"})
                    return
                wire.send({"file": file.dump()})
                _send_bytes(wire, source, file.size, sums)
            wire.send({"sha256": sums.take()[0]})
        if _wanted(root, name, ask)[0].fingerprint != entry.fingerprint:
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


def _fingerprint(partial: Path, entry: StoredEntry) -> str:
    """Return the fingerprint of the copy on this disk: the disk may keep coarser times than the server reported."""
    if entry.is_ours:
        return entry.fingerprint
    with listing.open_root(partial.parent) as root:
        return listing.scan(root, partial.name)[0].fingerprint


def _receive(wire: Wire, entry: StoredEntry, partial: Path) -> list[Path]:
    """Write the entry's files, verify each file and the whole entry; return the paths. Raises OSError."""
    files: dict[str, File] = {}
    crcs: dict[str, str] = {}
    if entry.is_folder:
        partial.mkdir()
    with contextlib.closing(Sums(with_crc=entry.is_ours)) as sums:
        left = entry.bytes
        for _ in range(entry.files):
            file = _record(File, _next(wire, "file")["file"])
            if file.size < 0:
                raise WireError("the peer uses a different protocol version")
            left -= file.size
            if left < 0 or file.path in files or not (is_inside(file.path) if entry.is_folder else not file.path):
                raise WireError(f"the server sends {file.path[:200]!r}, which is not a valid file of {entry.name}")
            path = partial / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileIO(path, "x") as target:
                _receive_bytes(wire, target, file.size, sums)
                os.utime(target.fileno(), ns=(file.written_ns, file.written_ns))
            sha256, crcs[file.path] = sums.take()
            if _next(wire, "sha256")["sha256"] != sha256:
                raise WireError(f"{file.path or entry.name} was altered in transit: its SHA-256 differs")
            files[file.path] = file
    manifest = (partial / checkpoints.MANIFEST).read_bytes() if entry.is_ours else None
    made = listing.fingerprint_of(files.values(), manifest)
    if left or not made == entry.fingerprint == _next(wire, "end")["end"]:
        raise WireError("the data differs from the announcement")
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
            with contextlib.suppress(OSError):  # only advice, and some file systems refuse the call
                os.posix_fadvise(target.fileno(), done - _EARLY_BYTES, _EARLY_BYTES, os.POSIX_FADV_DONTNEED)


def _check_sums(partial: Path, name: str, files: dict[str, File], crcs: dict[str, str]) -> None:
    """Raise WireError if a checkpoint contradicts its manifest: damaged at the source; an older entry may be intact."""
    with contextlib.suppress(checkpoints.Unreadable):  # another version's manifest: its reader reports the version
        try:
            manifest = checkpoints.read_manifest(partial)
            checkpoints.read_trainer(partial, name)
            whole = {path: (file.size, crcs[path]) for path, file in files.items()}
            damaged = [path for path, each in manifest.items() if whole.get(path) != (each["size"], each["crc32"])]
        except (OSError, ValueError) as error:
            raise WireError(f"the source's copy is damaged: {error}") from error
        if damaged:
            raise WireError(f"the source's copy is damaged: {damaged[0]} differs from its manifest")


@contextlib.contextmanager
def _words(what: str) -> Iterator[None]:
    """Turn any error into a sentence that begins with `what`."""
    try:
        yield
    except _GoneThere as error:
        raise Gone(f"{what}: {error}") from error
    except copywire.Stopped as error:
        raise Halted(f"{what}: this node was asked to stop") from error
    except partial_files.NameTaken as error:
        raise AlreadySaved(f"{what}: {error}") from error
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        kind = NoRoom if error.errno in (errno.ENOSPC, errno.EDQUOT) else CopyError
        raise kind(f"{what}: {error.strerror or error}{place}") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CopyError(f"{what}: {error}") from error


@contextlib.contextmanager
def _session(address: str, port: int, token: str, stop: threading.Event | None) -> Iterator[Wire]:
    """Return a connection to the server, after both ends have proved that they know the token. Raises OSError."""
    end_s = time.monotonic() + BUSY_S
    while True:
        with socket.create_connection((address, port), timeout=CONNECT_S) as sock:
            wire = Wire(sock, copywire.STALL_S, stop)
            try:
                wire.meet(Seal(token, PURPOSE, is_server=False))
            except copywire.ServerBusy:
                if time.monotonic() > end_s:
                    raise
            else:
                yield wire
                return
        (stop or threading.Event()).wait(0.1 + secrets.randbelow(400) / 1000)


def _next(wire: Wire, *keys: str) -> dict[str, Any]:
    """Return the next message, which must have one of the keys. Raises OSError."""
    message = wire.receive()
    if "gone" in message:
        raise _GoneThere(str(message["gone"])[:300])
    if "fault" in message:
        raise WireError(str(message["fault"])[:300])
    if not any(key in message for key in keys):
        raise WireError("the peer uses a different protocol version")
    return message


def _entry(data: Any) -> StoredEntry:
    entry = _record(StoredEntry, data)
    is_valid = listing.is_name(entry.name) and entry.step == listing.step_of(entry.name)
    if not is_valid or entry.bytes < 0 or entry.files < 0:
        raise WireError(f"the server offers {entry.name[:200]!r}, which is not a valid entry")
    return entry


def _record(kind: type[_T], data: Any) -> _T:
    """Return the record in a message. Raises WireError for a missing, an unknown, or a wrong field."""
    with contextlib.suppress(RecordError):
        record = kind.load(data)
        if record.dump().keys() == data.keys():
            return record
    raise WireError("the peer uses a different protocol version")

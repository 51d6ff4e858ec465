"""The archive of the shipped code: named by its content, the same bytes for the same files.

    code/...                          the user's folder, ignore files honoured
    runtime/cloudtrain/entrypoints/   what runs on the nodes

Names are sorted; times, owners and permissions are fixed; gzip's header is empty. Only a changed file changes the hash.
gzip restarts at each large file, at each MiB of a large file and at some small files, so that unchanged parts are
packed to the same bytes: rsync sends only the changes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gzip
import hashlib
import io
import os
import re
import stat
import tarfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, NamedTuple

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.format import counted

from ..backend import Bundle
from ..errors import ConfigError
from . import git, shipped
from .request_rules import notes_of
from .secret_files import Secrets
from .shipped import MB, collect

# gzip restarts at a file of PIECE bytes, after each PIECE bytes of a file, and at 1 of ONE_IN smaller files. The
# restarts cost 0.3 % in size, 1 % for small files; at every small file the cost would be 4 to 20 %.
PIECE, ONE_IN = 1 << 20, 64
_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")  # of UTF-8 and UTF-16
_SHELL = re.compile(rb"(\xef\xbb\xbf)?#!.*sh\b")
_POINTER = "a pointer of Git LFS, not the file itself: git lfs pull"
_CRLF = "a shell script with Windows line ends (CRLF), which fails on a node: sed -i 's/\\r$//' FILE"
_BOM = "a shell script with the mark of a Windows editor (BOM), which fails on a node: save it as UTF-8"
LEVEL = 4  # of gzip: half the processor time of level 6, for 5 % more bytes


def summary(bundle: Bundle) -> str:
    """Return one line: size and number of the user's files, their commit, the archive's size."""
    commit = f", commit {bundle.git['commit'][:10]}" if bundle.git.get("commit") else ""
    dirty = " with uncommitted changes" if bundle.git.get("dirty") else ""
    files = f"{counted(bundle.files, 'file')}, {size_words(bundle.code_bytes)}{commit}{dirty}"
    return f"{files}; {size_words(bundle.bytes)} packed, with cloudtrain's own files"


def size_words(size_bytes: int) -> str:
    """Return `2.0 MB`, `12.3 kB`."""
    return f"{size_bytes / MB:.1f} MB" if size_bytes >= MB / 10 else f"{size_bytes / 1000:.1f} kB"


def pack(
    folder: Path,
    exclude: Iterable[str],
    max_bytes: int,
    into: Path,
    *,
    scratch: bool = False,
    config_file: Path | None = None,
    needed: Iterable[tuple[str, str]] = (),
) -> Bundle:
    """Write the archive to `into`/SHA256.tar.gz and return the bundle; `scratch` writes no file.

    Raises ConfigError for files that look like secrets, for a folder over `max_bytes` (with the names of the largest
    files), for unreadable files, links that leave the folder, a folder without files to ship, and files that the config
    names (`needed`: with their keys) and that are left out.
    """
    needed = tuple(needed)
    sizes, secrets = shipped.look(folder, exclude, max_bytes, needed)
    folder = folder.resolve()
    code = _Code(folder, list(sizes), None if config_file is None else _relative(config_file, folder), secrets, {})
    try:
        sha256, code_sha256, packed = _write(code, None) if scratch else _store(code, into)
    except OSError as error:
        what = f"the code could not be packed: {error.strerror or error}"
        raise ConfigError(what, where=error.filename or into) from error
    path = into / f"{sha256}.tar.gz"
    largest = tuple(sorted(sizes.items(), key=lambda item: -item[1])[:5])
    size, about = sum(sizes.values()), git.state(folder)
    notes = (
        *(note for fault in shipped.left_out(folder, sizes, needed) for note in notes_of(fault)),
        *_notes(code.doubtful),
        *shipped.without_effect(exclude, sizes),
        *([] if about else _unasked(folder)),
    )
    return Bundle(sha256, path, packed, len(sizes), size, largest, about, code_sha256, notes)


def changed(bundle: Bundle, folder: Path, exclude: Iterable[str], config_file: Path) -> list[str]:
    """Return the changed, new and removed files of the folder since the archive was packed; without the config file.

    An unreadable folder or archive counts as unchanged: the send reports the fault.
    """
    unreadable = (ConfigError, OSError, EOFError, zlib.error, tarfile.TarError)
    with contextlib.suppress(*unreadable), tarfile.open(bundle.path) as tar:
        now, sent = digests(folder, exclude, config_file), dict[str, str]()
        for member in tar:  # in the order of the archive, which gzip reads only forwards
            file = tar.extractfile(member) if member.isfile() else None
            data = os.fsencode(member.linkname) if file is None else file.read()
            sent[member.name] = _digest(data, member.mode)
        names = {name.removeprefix("code/") for name in sent if name.startswith("code/")}
        differ = {name for name in {*now, *names} if now.get(name) != sent.get(f"code/{name}")}
        return sorted(differ - {_relative(config_file, folder.resolve())})
    return []


def digests(folder: Path, exclude: Iterable[str], config_file: Path) -> dict[str, str]:
    """Return a short hash of each file that a job ships, without the config file and unreadable files."""
    folder, found = folder.resolve(), dict[str, str]()
    apart = _relative(config_file, folder)
    for name in (each for each in collect(folder, exclude) if each != apart):
        path = folder / name
        with contextlib.suppress(OSError):
            target = os.path.relpath(path.resolve(), path.parent) if path.is_symlink() else None
            data = path.read_bytes() if target is None else os.fsencode(target)
            found[name] = _digest(data, path.stat().st_mode if target is None else 0)
    return found


def _digest(data: bytes, mode: int) -> str:
    return hashlib.sha256(data).hexdigest()[:16] + ("x" if mode & stat.S_IXUSR else "")


class _Code(NamedTuple):
    """The files of a folder; the file `apart` counts in no hash of the code; `secrets` looks at what is read.

    `doubtful`: the names of files that are no use on a node as they are, by the reason.
    """

    folder: Path
    names: list[str]
    apart: str | None
    secrets: Secrets
    doubtful: dict[str, list[str]]

    def look(self, name: str, beginning: bytes) -> None:
        """Look at the beginning of a file."""
        self.secrets.look(name, beginning)
        is_shell = name.endswith((".sh", ".bash")) or _SHELL.match(beginning) is not None
        for is_found, why in (
            (beginning.startswith(b"version https://git-lfs"), _POINTER),
            (is_shell and b"\r\n" in beginning, _CRLF),
            (is_shell and beginning.startswith(_MARKS), _BOM),
        ):
            if is_found:
                self.doubtful.setdefault(why, []).append(name)


def _notes(doubtful: Mapping[str, list[str]]) -> Iterator[str]:
    for why, names in doubtful.items():
        others = f" and {counted(len(names) - 1, 'other file')}" if len(names) > 1 else ""
        yield f"code: {names[0]}{others}: {why}"


def _unasked(folder: Path) -> Iterator[str]:
    """Yield a note for a work tree of which git tells nothing: git is missing, or cannot read the repository."""
    if any((each / ".git").exists() for each in (folder, *folder.parents)) and not git.tracked_and_ignored(folder):
        yield "code: git does not answer here, so .gitignore files leave out tracked files too"


def _relative(file: Path, folder: Path) -> str | None:
    file = file.parent.resolve() / file.name
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else None


def _store(code: _Code, into: Path) -> tuple[str, str, int]:
    """Write the archive under its hash; return the result of `_write`."""
    import tempfile  # the import takes 5 ms, which a dry run does not need

    processes.make_private(into)
    for partial in into.glob("partial-*"):  # left by a killed submit; no submit takes a day
        with contextlib.suppress(FileNotFoundError):  # a concurrent submit has just renamed its file
            if time.time() - partial.stat().st_mtime > 86_400:
                partial.unlink()
    with tempfile.NamedTemporaryFile(dir=into, prefix="partial-", delete=False) as file:
        try:
            sha256, code_sha256, packed = _write(code, file)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(into / f"{sha256}.tar.gz")
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return sha256, code_sha256, packed


def _write(code: _Code, out: IO[bytes] | None) -> tuple[str, str, int]:
    """Write the archive to `out`; return its hash, the hash of all files but `apart`, its bytes. Raises as `pack`."""
    counted, hashed = _Hashing(out), hashlib.sha256()
    with gzip.GzipFile(filename="", mode="wb", fileobj=counted, mtime=0, compresslevel=LEVEL) as packed:
        tar = _Tar(packed)
        for name in code.names:
            beginning = tar.add(f"code/{name}", f"{code.folder}/{name}", None if name == code.apart else hashed)
            code.look(name, beginning)
        shipped.refuse_files(code.secrets.faults())
        runtime = Path(str(files("cloudtrain.entrypoints")))
        for path in sorted(runtime.rglob("*.py")):
            tar.add(f"runtime/cloudtrain/entrypoints/{path.relative_to(runtime).as_posix()}", str(path), hashed)
        tar.end()
    return counted.hash.hexdigest(), hashed.hexdigest(), counted.bytes


class _Tar:
    """Writes the members of a tar as tarfile does, at a fifth of its cost: a code folder may have 100,000 files."""

    def __init__(self, packed: gzip.GzipFile) -> None:
        self._packed = packed
        self._waiting: list[bytes] = []
        self._bytes = 0  # of all members so far

    def add(self, name: str, path: str, code: hashlib._Hash | None) -> bytes:
        """Add a file or a link, and the parts that a node sees to the hash `code`; return a file's first piece.

        Raises OSError, also for a file that is no regular file, or becomes shorter meanwhile.
        """
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            self._add_link(name, Path(path), code)
            return b""
        try:
            return self._add_file(name, path, file, code)
        finally:
            os.close(file)

    def _add_file(self, name: str, path: str, file: int, code: hashlib._Hash | None) -> bytes:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        mode, size = 0o755 if about.st_mode & stat.S_IXUSR else 0o644, about.st_size
        is_large, first = size >= PIECE, b""
        if is_large:
            self._restart()
        self._put(_header(name, mode, size))
        _hash(code, name, "", mode, size)
        for at in range(0, size, PIECE):
            if at:
                self._restart()
            data, wanted = b"", min(PIECE, size - at)
            while len(data) < wanted and (read := os.read(file, wanted - len(data))):
                data += read
            if len(data) < wanted:
                raise OSError(errno.EIO, "it became shorter meanwhile", path)
            self._put(data)
            if code is not None:
                code.update(data)
            first = first or data
        self._put(bytes(-size % tarfile.BLOCKSIZE))
        if is_large or zlib.crc32(name.encode(errors="surrogateescape")) % ONE_IN == 0:
            self._restart()
        return first

    def end(self) -> None:
        """Write the end of a tar: at least two empty blocks, up to a whole record."""
        self._put(bytes(2 * tarfile.BLOCKSIZE))
        self._put(bytes(-self._bytes % tarfile.RECORDSIZE))
        self._flush()

    def _add_link(self, name: str, path: Path, code: hashlib._Hash | None) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, os.path.relpath(path.resolve(), path.parent)
        self._put(member.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape"))
        _hash(code, name, member.linkname, member.mode, 0)

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._bytes += len(data)
        if len(self._waiting) >= 100 or len(data) > 1 << 16:
            self._flush()

    def _restart(self) -> None:
        self._flush()
        self._packed.flush(zlib.Z_FULL_FLUSH)

    def _flush(self) -> None:
        self._packed.write(b"".join(self._waiting))
        self._waiting.clear()


def _header(name: str, mode: int, size: int) -> bytes:
    """Return a file's header in the tar."""
    member = tarfile.TarInfo(name)
    member.mode, member.size = mode, size
    if len(name) > tarfile.LENGTH_NAME or not name.isascii() or size >= 8**11:
        return member.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
    empty, rest = _parts_of_header()
    fields = b"%b%07o\0%b%011o\0" % (name.encode().ljust(tarfile.LENGTH_NAME, b"\0"), mode, empty, size)
    total = sum(fields) + sum(rest)
    return fields + rest[:12] + b"%06o\0 " % total + rest[20:]


@functools.cache
def _parts_of_header() -> tuple[bytes, bytes]:
    """Return a header's owners, and what follows the size, with blanks in the place of the sum of all bytes."""
    made = tarfile.TarInfo("").tobuf(tarfile.PAX_FORMAT)
    return made[108:124], made[136:148] + b" " * 8 + made[156:]


def _hash(code: hashlib._Hash | None, *fields: object) -> None:
    if code is not None:
        code.update("".join(f"{each}\0" for each in fields).encode(errors="surrogateescape"))


class _Hashing(io.RawIOBase):
    """A file that hashes all written bytes."""

    def __init__(self, out: IO[bytes] | None) -> None:
        self.out = out
        self.hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.bytes += len(data)
        if self.out is not None:
            self.out.write(data)
        return len(data)

"""The archive of the shipped code: named by its content, the same bytes for the same files.

    code/...                          the user's folder, ignore files honoured
    runtime/cloudtrain/entrypoints/   what runs on the nodes

Names are sorted; times, owners and permissions are fixed; gzip's header is empty. Only a changed file changes the hash.
gzip restarts at each large file, at each MiB of a large file and at some small files, so that unchanged parts are
packed to the same bytes: rsync sends only the changes.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import stat
import tarfile
import time
import zlib
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import counted
from cloudtrain.entrypoints.models.folder import CHECK, SUMS

from ..backend import Bundle
from ..errors import ConfigError, Fault, refuse
from . import git, secret_files

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILES = (".gitignore", ".cloudtrainignore")
# Never code, often large: left out before any ignore file is read. Names, then endings.
ALWAYS_IGNORED = (
    *(".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".DS_Store", "node_modules", ".ipynb_checkpoints"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache"),
)
ALWAYS_IGNORED_ENDINGS = (".pyc", ".egg-info")
GENERATOR = "cloudtrain report"  # as in the head of a report's HTML
_BEGINNING = 4000  # bytes in which a report identifies itself
MB = 1_000_000
MOST_FAULTS = 10  # files that cannot be shipped, named in the errors
# gzip restarts at a file of PIECE bytes, after each PIECE bytes of a file, and at 1 of ONE_IN smaller files. The
# restarts cost 0.3 % in size, 1 % for small files; at every small file the cost would be 4 to 20 %.
PIECE, ONE_IN = 1 << 20, 64
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


def collect(folder: Path, exclude: Iterable[str] = ()) -> list[PurePosixPath]:
    """Return the files to ship, sorted, relative to `folder`.

    .gitignore and .cloudtrainignore count in the folder, below it, and above it up to the git root; a later, deeper
    line wins, and .cloudtrainignore wins over .gitignore (`!name` brings a file back).
    """
    return sorted(_walk(PurePosixPath(), _Rules(folder, exclude)))


def pack(
    folder: Path,
    exclude: Iterable[str],
    max_bytes: int,
    into: Path,
    *,
    scratch: bool = False,
    config_file: Path | None = None,
) -> Bundle:
    """Write the archive to `into`/SHA256.tar.gz and return the bundle; `scratch` writes no file.

    Raises ConfigError for files that look like secrets, for a folder over `max_bytes` (with the names of the largest
    files), for unreadable files, links that leave the folder, and a folder without files to ship.
    """
    folder = folder.resolve()
    sizes = check(folder, exclude, max_bytes)
    names = [PurePosixPath(name) for name in sizes]
    own = None if config_file is None else config_file.parent.resolve() / config_file.name
    apart = next((name for name in names if folder / name == own), None)
    try:
        sha256, code, packed = _write(folder, names, apart, None) if scratch else _store(folder, names, apart, into)
    except OSError as error:
        what = f"the code could not be packed: {error.strerror or error}"
        raise ConfigError(what, where=error.filename or into) from error
    path = into / f"{sha256}.tar.gz"
    largest = tuple(sorted(sizes.items(), key=lambda item: -item[1])[:5])
    return Bundle(sha256, path, packed, len(names), sum(sizes.values()), largest, git.state(folder), code)


def changed(bundle: Bundle, folder: Path, exclude: Iterable[str], config_file: Path) -> list[str]:
    """Return the changed, new and removed files of the folder since the archive was packed; without the config file.

    An unreadable folder or archive counts as unchanged: the send reports the fault.
    """
    folder, own, found = folder.resolve(), config_file.parent.resolve() / config_file.name, set[str]()
    with contextlib.suppress(OSError, EOFError, zlib.error, tarfile.TarError), tarfile.open(bundle.path) as tar:
        now = {str(name) for name in collect(folder, exclude)}
        for member in tar:  # in the order of the archive, which gzip reads only forwards
            name = member.name.removeprefix("code/")
            if member.name != name and name in now and _is_same(tar, member, folder / name):
                now.remove(name)
            elif member.name != name:
                now.add(name)
        found = now
    return sorted(name for name in found if folder / name != own)


def digests(folder: Path, exclude: Iterable[str], config_file: Path) -> dict[str, str]:
    """Return a short hash of each file that a job ships, without the config file and unreadable files."""
    folder, own, found = folder.resolve(), config_file.parent.resolve() / config_file.name, dict[str, str]()
    for path in (folder / name for name in collect(folder, exclude)):
        with contextlib.suppress(OSError):
            target = os.path.relpath(path.resolve(), path.parent) if path.is_symlink() else None
            data = path.read_bytes() if target is None else os.fsencode(target)
            mode = "x" if path.lstat().st_mode & stat.S_IXUSR else ""
            found[path.relative_to(folder).as_posix()] = hashlib.sha256(data).hexdigest()[:16] + mode
    return {name: value for name, value in found.items() if folder / name != own}


def _is_same(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bool:
    file = tar.extractfile(member) if member.isfile() else None
    if file is None or path.is_symlink():
        return path.is_symlink() and member.linkname == os.path.relpath(path.resolve(), path.parent)
    return path.stat().st_size == member.size and path.read_bytes() == file.read()


class _Rules:
    """The ignore files that apply, each read once."""

    def __init__(self, root: Path, exclude: Iterable[str]) -> None:
        self.root = root
        self.exclude = _matcher(list(exclude))
        self._cache: dict[Path, list[GitIgnoreSpec]] = {}
        self.above = self._above(root)

    def ignores(self, path: PurePosixPath, is_dir: bool) -> bool:
        """Return whether the path below the root is left out."""
        if path.name in ALWAYS_IGNORED or path.name.endswith(ALWAYS_IGNORED_ENDINGS):
            return True
        name = f"{path}/" if is_dir else str(path)
        if self.exclude is not None and self.exclude.match_file(name):
            return True
        verdict = False
        absolute = self.root / path
        for base in [*self.above, *(self.root / p for p in reversed(path.parents))]:
            for spec in self._specs(base):
                relative = absolute.relative_to(base).as_posix() + ("/" if is_dir else "")
                answer = spec.check_file(relative).include
                verdict = verdict if answer is None else answer
        return verdict

    def _specs(self, base: Path) -> list[GitIgnoreSpec]:
        if base not in self._cache:
            found = [base / name for name in IGNORE_FILES]
            read = [_matcher(path.read_text(errors="replace").splitlines()) for path in found if path.is_file()]
            self._cache[base] = [spec for spec in read if spec is not None]
        return self._cache[base]

    @staticmethod
    def _above(root: Path) -> list[Path]:
        """Return the folders above the root, from the git root inwards; empty if there is no git root above."""
        above: list[Path] = []
        for folder in root.parents:
            if (root / ".git").exists():
                return []
            above.insert(0, folder)
            if (folder / ".git").exists():
                return above
        return []


def _matcher(lines: list[str]) -> GitIgnoreSpec | None:
    if not lines:
        return None
    from pathspec import GitIgnoreSpec  # 20 ms of processor time, only if there are rules to follow

    return GitIgnoreSpec.from_lines(lines)


def _walk(below: PurePosixPath, rules: _Rules) -> Iterator[PurePosixPath]:
    with os.scandir(rules.root / below) as entries:
        for entry in entries:
            path = below / entry.name
            is_dir = entry.is_dir(follow_symlinks=False)
            if rules.ignores(path, is_dir):
                continue
            if is_dir:
                # Without an exported model beside the code.
                if not all((rules.root / path / name).exists() for name in (SUMS, CHECK)):
                    yield from _walk(path, rules)
            elif entry.is_symlink() or (entry.is_file() and not _is_report(entry)):
                yield path


def is_report(path: Path) -> bool:
    """Return whether the file is a report or comparison, which a newer report may replace. Raises OSError."""
    with path.open("rb") as file:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(_BEGINNING)


def _is_report(entry: os.DirEntry[str]) -> bool:
    """Return whether the file is a cloudtrain report beside the code, which would change the hash of the code."""
    if not entry.name.endswith(".html"):
        return False
    try:
        return is_report(Path(entry.path))
    except OSError:  # the packing step reports the error
        return False


def check(folder: Path, exclude: Iterable[str], max_bytes: int) -> dict[str, int]:
    """Return the files to ship, sorted, with their sizes. Raises ConfigError with every fault found."""
    folder = folder.resolve()
    try:
        names = collect(folder, exclude)
    except OSError as error:
        message = f"`{error.filename}` in the code folder cannot be read: {error.strerror}"
        raise ConfigError([Fault(message, key="code.dir", hint="change its mode, or exclude it")]) from error
    if not names:
        message = f"there is nothing to ship: every file of {folder} is ignored"
        raise ConfigError([Fault(message, key="code.dir")])
    faults: list[Fault] = []
    sizes: dict[str, int] = {}
    shipped = {parent for name in names for parent in (name, *name.parents)}
    for name in names:
        path = folder / name
        if path.is_symlink() and (why := _why_not_shipped(path, folder, shipped)):
            hint = "copy what it points to, or exclude it"
            faults.append(Fault(f"the link `{name}` {why}", key="code.dir", hint=hint))
            continue
        sizes[str(name)] = path.lstat().st_size
        if not os.access(path, os.R_OK, follow_symlinks=not path.is_symlink()):
            faults.append(Fault(f"`{name}` cannot be read", key="code.dir", hint="change its mode, or exclude it"))
    faults += secret_files.faults_of(folder, {PurePosixPath(name): size for name, size in sizes.items()}, exclude)
    if len(faults) > MOST_FAULTS:
        message = f"{len(faults) - MOST_FAULTS} more files cannot be shipped"
        hint = "name a folder that holds only the code: code.dir, or the place of the config"
        faults[MOST_FAULTS:] = [Fault(message, key="code.dir", hint=hint)]
    total = sum(sizes.values())
    if total > max_bytes:
        top = sorted(sizes.items(), key=lambda item: -item[1])[:5]
        listed = ", ".join(f"{name} {size / MB:.1f} MB" for name, size in top)
        message = f"the code folder holds {total / MB:.1f} MB, over the cap of {max_bytes / MB:.0f} MB: {listed}"
        hint = "put data under `inputs:`, exclude the files, or raise code.max_size_mb"
        faults.append(Fault(message, key="code.max_size_mb", hint=hint))
    refuse(faults)
    return sizes


def _why_not_shipped(link: Path, folder: Path, shipped: set[PurePosixPath]) -> str | None:
    """Return why the target of a link would be missing on a node, or None."""
    try:
        target = link.resolve()
    except (OSError, RuntimeError):  # RuntimeError before Python 3.13
        return "leads to itself"
    if target.is_symlink():
        return "leads to itself"
    if not target.is_relative_to(folder):
        return "points outside the code folder"
    if target.exists() and PurePosixPath(target.relative_to(folder)) not in shipped:
        return "points to what is not shipped"
    return None


def _store(folder: Path, names: list[PurePosixPath], apart: PurePosixPath | None, into: Path) -> tuple[str, str, int]:
    """Write the archive under its hash; return the result of `_write`."""
    import tempfile  # the import takes 5 ms, which a dry run does not need

    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    for partial in into.glob("partial-*"):  # left by a killed submit; no submit takes a day
        with contextlib.suppress(FileNotFoundError):  # a concurrent submit has just renamed its file
            if time.time() - partial.stat().st_mtime > 86_400:
                partial.unlink()
    with tempfile.NamedTemporaryFile(dir=into, prefix="partial-", delete=False) as file:
        try:
            sha256, code, packed = _write(folder, names, apart, file)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(into / f"{sha256}.tar.gz")
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return sha256, code, packed


def _write(
    folder: Path, names: list[PurePosixPath], apart: PurePosixPath | None, out: IO[bytes] | None
) -> tuple[str, str, int]:
    """Write the archive to `out`, if given; return its sha256, the sha256 of all files but `apart`, and its bytes."""
    counted, code = _Hashing(out), hashlib.sha256()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=counted, mtime=0, compresslevel=LEVEL) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in names:
            _add(tar, packed, f"code/{name}", folder / name, None if name == apart else code)
        runtime = Path(str(files("cloudtrain.entrypoints")))
        for path in sorted(runtime.rglob("*.py")):
            _add(tar, packed, f"runtime/cloudtrain/entrypoints/{path.relative_to(runtime).as_posix()}", path, code)
    return counted.hash.hexdigest(), code.hexdigest(), counted.bytes


def _add(tar: tarfile.TarFile, packed: gzip.GzipFile, name: str, path: Path, code: hashlib._Hash | None) -> None:
    """Add the file to the archive, and the parts that a node sees to the hash `code`."""
    member = tarfile.TarInfo(name)
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.path.relpath(path.resolve(), path.parent)
        tar.addfile(member)
        _hash(code, member)
        return
    member.mode = 0o755 if info.st_mode & stat.S_IXUSR else 0o644
    with path.open("rb") as file:
        member.size = os.fstat(file.fileno()).st_size
        _hash(code, member)
        is_large = member.size >= PIECE
        if is_large:
            packed.flush(zlib.Z_FULL_FLUSH)
        tar.addfile(member, _PiecewiseGzip(file, packed, code))
        if is_large or zlib.crc32(name.encode(errors="surrogateescape")) % ONE_IN == 0:
            packed.flush(zlib.Z_FULL_FLUSH)


def _hash(code: hashlib._Hash | None, member: tarfile.TarInfo) -> None:
    if code is not None:
        fields = (member.name, member.linkname, str(member.mode), str(member.size))
        code.update("\0".join((*fields, "")).encode(errors="surrogateescape"))


class _PiecewiseGzip(io.RawIOBase):
    """A file that restarts gzip after each PIECE bytes; at the next read, the bytes read before are written."""

    def __init__(self, file: IO[bytes], packed: gzip.GzipFile, code: hashlib._Hash | None) -> None:
        self.file, self.packed, self.code = file, packed, code
        self.left = PIECE

    def read(self, size: int = -1) -> bytes:
        if self.left <= 0:
            self.packed.flush(zlib.Z_FULL_FLUSH)
            self.left = PIECE
        data = self.file.read(size)
        if self.code is not None:
            self.code.update(data)
        self.left -= len(data)
        return data


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

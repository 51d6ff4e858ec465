"""Files of other people, such as a repository's or a host's: read up to a bound, and unpacked below one folder.

A pipe or a device may have no end, and is refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import tarfile

TEXT_BYTES = 2_000_000  # of a file that people write
JSON_BYTES = 64 << 20  # of a file that programs write
_NO_NAME = re.compile(r"[\0\ud800-\udc7f\udd00-\udfff]")  # NUL, and what stands for no byte


class BundleError(Exception):
    """The archive has a different hash than announced, or a member outside its folder."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file. Raises OSError, with the path, also for a pipe, a device or a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "not a regular file", str(path))
    with os.fdopen(handle, "rb") as file:
        yield file


def read(path: Path, most: int = TEXT_BYTES) -> bytes:
    """Return the bytes of a regular file, at most `most`. Raises OSError, with the path, also for a larger file."""
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        limit = f"{most / 1e6:.0f} MB" if most >= 1_000_000 else f"{most / 1000:.0f} kB"
        raise OSError(errno.EFBIG, f"larger than {limit}", str(path))
    return data


def read_text(path: Path, most: int = TEXT_BYTES) -> str:
    """Return the text of a regular file; bytes that are not UTF-8 are replaced. Raises OSError as `read` does."""
    return read(path, most).decode(errors="replace")


def text_of(path: Path) -> str:
    """Return as `read_text`; an empty text for a file that cannot be read, and for a name that is no path."""
    with suppress(OSError, ValueError):
        return read_text(path)
    return ""


def sha256_of(path: Path) -> str:
    """Return the hash of a regular file's content. Raises OSError."""
    found = hashlib.sha256()
    with opened(path) as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def sha256_of_names(hashes: Mapping[str, str]) -> str:
    """Return the hash of a folder's files, by their names and the hashes of their contents."""
    return hashlib.sha256("".join(f"{name}\0{hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()


def is_inside(name: str) -> bool:
    """Return whether the relative name, which may be any text, is the name of a file below its folder."""
    return not _NO_NAME.search(name) and all(part not in ("", ".", "..") for part in name.split("/"))


def unpack(archive: Path, sha256: str, folder: Path) -> None:
    """Unpack a gzipped tar below `folder`.

    Raises BundleError if the hash differs, or a member is absolute, leaves the folder, or is neither a file, a folder
    nor a link within the folder. (Python 3.11.2 and older lack tarfile's data filter.)
    """
    import tarfile  # most readers unpack nothing

    found = sha256_of(archive)
    if found != sha256:
        raise BundleError(f"{archive.name} arrived damaged: its sha256 is {found[:12]}, not {sha256[:12]}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        extract(archive, folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise BundleError(f"{archive.name} cannot be unpacked: {error}") from error


def extract(archive: Path, folder: Path, left_out: list[str] | None = None) -> list[Path]:
    """Unpack an archive below the folder; return its files. Raises BundleError, TarError, EOFError, OSError.

    With `left_out`, an unsafe member adds a message to the list, and the remaining members are unpacked.
    """
    import tarfile

    links: set[PurePosixPath] = set()
    files: list[Path] = []
    with tarfile.open(archive, "r:gz") as tar:
        tar.extraction_filter = lambda member, _: member  # _check filters: Python 3.11.3 and older have no filters
        for member in tar:
            try:
                _check(member, links)
            except BundleError as error:
                if left_out is None:
                    raise
                left_out.append(str(error))
                continue
            if (folder / member.name).is_symlink():  # an existing link must not redirect the write
                (folder / member.name).unlink()
            member.mode &= 0o755
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            tar.extract(member, folder, set_attrs=not member.issym())
            if not member.isdir():
                files.append(folder / member.name)
    return files


def _check(member: tarfile.TarInfo, links: set[PurePosixPath]) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or links & set(path.parents):
        raise BundleError(f"{member.name!r} reaches outside the bundle")
    if member.issym():
        links.add(path)
        target = PurePosixPath(member.linkname)
        ups = [part == ".." for part in target.parts]
        # Upward steps at the start only, and no more than the link's depth.
        if target.is_absolute() or any(ups[sum(ups) :]) or sum(ups) > len(path.parts) - 1:
            raise BundleError(f"the link {member.name!r} points outside the bundle")
    elif not (member.isreg() or member.isdir()):
        raise BundleError(f"{member.name!r} is neither a file, a folder nor a link")

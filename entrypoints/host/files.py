"""Files between the launcher and a host: archives kept by their hash, and files that a job has written.

Each verb returns JSON; bytes travel as the `payload`. The channel that sends an archive locks the partial file: of two
submits of the same code, the second waits for the first. `sender` is the id of the sending machine.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .. import foreign, processes
from ..agent import node_folder, node_logs
from ..contract import EXIT, STATE
from ..errors import HELD, Refused
from .calls import Here

ANSWER_BYTES = 32 << 20  # of log lines, before the last node of an answer
MARGIN_BYTES = 8 << 20  # free after an archive, for logs and for the exit report of the job
DAY_S = 86_400.0
UNUSED_S = 30 * DAY_S
ALIVE_S = DAY_S  # an agent writes its state every minute
PRUNED = ".pruned"  # in the cache: the time of the last prune

# The archives that this channel receives, by the path of the partial file. The lock ends with the channel.
_arriving: dict[Path, BinaryIO] = {}


def has(here: Here, *, sha256: str, bytes: int, sender: str) -> dict[str, Any]:
    """Return whether the archive `sha256` is `kept`, its `path`, and else how many of its `bytes` have `arrived`.

    `busy`: another channel is receiving the archive. Raises Refused if the disk has no room for the archive.
    """
    path, partial = _kept(here, sha256), _partial(here, sha256, sender)
    answer = {"kept": False, "path": str(path), "busy": False, "arrived": 0}
    if _sha256(path) == sha256:
        os.utime(path)
        _drop(partial)
        return {**answer, "kept": True}
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if partial not in _arriving and not _lock(partial):
        return {**answer, "busy": True}
    arrived = partial.stat().st_size
    if arrived > bytes:
        os.truncate(partial, arrived := 0)
    _check_room(path.parent, bytes - arrived)
    return {**answer, "arrived": arrived}


def basis(here: Here, *, sha256: str, sender: str) -> dict[str, Any]:
    """Return the `path` of a copy of the newest archive, or of an earlier rsync, to change by rsync; else ""."""
    path = _partial(here, sha256, sender).with_suffix(".rsync")
    if shutil.which("rsync") is None:
        return {"path": ""}
    if not path.exists():
        kept = [(found.stat().st_mtime, found) for found in path.parent.glob("*.tar.gz")]
        if not kept:
            return {"path": ""}
        _check_room(path.parent, max(kept)[1].stat().st_size)
        shutil.copyfile(max(kept)[1], path)
    return {"path": str(path)}


def put(here: Here, *, sha256: str, sender: str, offset: int, payload: bytes) -> dict[str, Any]:
    """Write the archive's bytes from `offset` on; return `taken`: False if this channel has not called `has`."""
    partial = _partial(here, sha256, sender)
    file = _arriving.get(partial)
    if file is None:
        return {"taken": False}
    try:
        file.seek(offset)
        file.write(payload)
        file.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop(partial)  # other archives need the room, too
        raise _no_room(partial.parent, len(payload)) from error
    return {"taken": True}


def keep(here: Here, *, sha256: str, sender: str, changed: str = "") -> dict[str, Any]:
    """Verify the archive that has arrived (or lies at `changed`, by rsync), and keep the archive; return {"kept"}.

    False: the archive has arrived damaged, and must be sent again.
    """
    path, partial = _kept(here, sha256), _partial(here, sha256, sender)
    found = Path(changed) if changed else partial
    if is_whole := not path.exists() and _sha256(found) == sha256:
        with found.open("rb") as file:
            os.fsync(file.fileno())
        found.replace(path)
    if changed:
        found.unlink(missing_ok=True)
    if is_whole or path.exists():
        _drop(partial)
        return {"kept": True}
    if not changed and partial in _arriving:
        _arriving[partial].truncate(0)
    return {"kept": False}


def has_data(here: Here, *, digests: list[str]) -> dict[str, Any]:
    """Return the hashes of the data of `inputs` that this host has `kept`, and note that they are in use.

    The data lie in `data/HASH/` below the work folder, complete or absent, read-only; jobs share the data.
    """
    kept = [each for each in digests if (here.workdir / "data" / each).is_dir()]
    for each in kept:
        os.utime(here.workdir / "data" / each)
    return {"kept": kept}


def unfold_data(here: Here, *, sha256: str, digest: str) -> None:
    """Unpack the archive that has arrived as the data `digest`, and remove the archive. Raises Refused."""
    archive, place = _kept(here, sha256), here.workdir / "data" / digest
    scratch = place.with_name(f".{digest}.{secrets.token_hex(4)}")
    try:
        foreign.unpack(archive, sha256, scratch)
        for file in scratch.rglob("*"):
            if file.is_file():
                file.chmod(0o444)
        os.utime(scratch)
        scratch.rename(place)
    except (OSError, foreign.BundleError) as error:  # a host with the same disk may have been faster
        shutil.rmtree(scratch, ignore_errors=True)
        if not place.is_dir():
            raise Refused(f"the data cannot be unpacked in {place.parent}: {error}") from error
    archive.unlink(missing_ok=True)


def prune(workdir: Path) -> None:
    """Remove archives, packages of ours and data of `inputs` that were unused for 30 days. Runs once a day.

    Keeps the files that a running job was started with, also for jobs of other hosts on a shared disk.
    """
    now_s, mark = time.time(), workdir / "cache" / PRUNED
    if mark.exists() and now_s - mark.stat().st_mtime < DAY_S:
        return
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    before_s = min([now_s - UNUSED_S, *(started_s - DAY_S for started_s in _running(workdir, now_s))])
    for path in (*(workdir / "cache").iterdir(), *(workdir / "runtime").glob("*"), *(workdir / "data").glob("*")):
        with contextlib.suppress(OSError):  # another submit may prune at the same time
            if path != mark and path.lstat().st_mtime < before_s:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def left(here: Here, *, folders: list[str], remove: bool) -> dict[str, Any]:
    """Return the `sizes` of the folders that exist, before a removal; without folders, of each job and each cache.

    `kept`: folders that were not removed, with the reason.
    """
    sizes, kept = dict[str, int](), dict[str, str]()
    held = sorted([*here.workdir.glob("jobs/*/"), *(each for each in here.workdir.glob("*/") if each.name != "jobs")])
    for folder in map(Path, folders) if folders else held:
        if not folder.is_dir():
            continue
        inside = (path.lstat() for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
        with contextlib.suppress(FileNotFoundError):  # a running job removes its own files
            sizes[str(folder)] = sum(about.st_size for about in inside)
        if remove and any(node_folder.agent_pid(root) for root in folder.glob("attempt-*/node-*")):
            kept[str(folder)] = "a job runs there"
        elif remove and Path.home().resolve().is_relative_to(folder.resolve()):  # of an older job with the user's name
            kept[str(folder)] = "the home folder is there"
        elif remove:
            try:
                folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
            except OSError as error:
                kept[str(folder)] = f"{error.filename or folder}: {error.strerror}"
    return {"sizes": sizes, "kept": kept}


def held(*folders: str) -> str | None:
    """Return the refusal of a new job for the first folder with files, None without such a folder; "" is no folder."""
    for each in map(Path, filter(None, folders)):
        with contextlib.suppress(PermissionError):
            if each.is_dir() and any(each.iterdir()):
                return HELD.format(each)
    return None


def tree(*, folder: str, sums: list[str] | None = None) -> dict[str, Any]:
    """Return the files below `folder`, with path and size, or the hashes of `sums`; links are followed once."""
    root = Path(folder)
    if sums:
        return {"sums": {name: _sha256(root / name) for name in sums}}
    files = []
    been: set[tuple[int, int]] = set()
    places = [root]
    for start in places:  # links to folders last: of `latest -> step-10` the files are those of step-10
        for where, folders, names in os.walk(start):
            try:
                about = Path(where).stat()
            except FileNotFoundError:  # removed by a running job, as the files below
                continue
            if (about.st_dev, about.st_ino) in been:  # a link that leads back
                folders.clear()
                continue
            been.add((about.st_dev, about.st_ino))
            places += [path for name in sorted(folders) if (path := Path(where, name)).is_symlink()]
            for name in sorted(names):
                path = Path(where, name)
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file():
                        files.append([path.relative_to(root).as_posix(), path.stat().st_size])
    return {"files": sorted(files)}


def get(*, path: str, offset: int, bytes: int) -> dict[str, Any]:
    """Return `bytes` bytes of the file `path` from `offset` on; fewer at the file's end."""
    with Path(path).open("rb") as file:
        file.seek(offset)
        return {"payload": file.read(bytes)}


def logs(
    *,
    offsets: dict[str, dict[str, int]],
    ranks: list[int] | None,
    page_bytes: int,
    pattern: str,
    is_shared: bool = False,
) -> dict[str, Any]:
    """Return the bytes after the offsets in the log files of several nodes: `nodes`, each with its `chunks`.

    `offsets` are by node's folder and file. The bytes of all chunks follow one another. Nodes beyond ANSWER_BYTES wait
    for the next call, as if they had written nothing yet. `ended`: the agent was gone before the read, so no more bytes
    will come. `is_shared`: the agents run on other machines, so their exit report alone shows their end.
    """
    found, data = dict[str, Any](), list[bytes]()
    for root, each in offsets.items():
        if sum(map(len, data)) > ANSWER_BYTES:
            found[root] = {"chunks": [], "ended": False}
            continue
        node = Path(root)
        has_ended = (node / EXIT).exists() if is_shared else node_folder.agent_pid(node) is None
        seen = has_ended if is_shared else None
        chunks = node_logs.read(node, each, ranks, page_bytes, has_ended=seen, pattern=pattern)
        found[root] = {"chunks": [chunk.dump() for chunk in chunks], "ended": has_ended}
        data += [chunk.data for chunk in chunks]
    return {"nodes": found, "payload": b"".join(data)}


def log_ends(*, roots: list[str], ranks: list[int] | None, lines: int | None, since_s: float | None) -> dict[str, Any]:
    """Return `offsets`, by node's folder, near the ends of the nodes' log files (node_logs.near_end)."""
    return {"offsets": {root: node_logs.near_end(Path(root), ranks, lines=lines, since_s=since_s) for root in roots}}


def _kept(here: Here, sha256: str) -> Path:
    return here.workdir / "cache" / f"{sha256}.tar.gz"


def _partial(here: Here, sha256: str, sender: str) -> Path:
    """Return the path of the partial file: unique for host and sender, because a disk may be shared."""
    return _kept(here, sha256).with_name(f".{sha256}.{here.name}-{sender}.part")


def _sha256(path: Path) -> str | None:
    """Return the file's hash, None if the file is absent; a power cut may have left a hole in the file."""
    with contextlib.suppress(FileNotFoundError):
        return foreign.sha256_of(path)
    return None


def _lock(partial: Path) -> bool:
    """Return whether this channel now holds the lock of the partial file."""
    try:
        held = processes.try_lock(partial)
    except processes.NoLocks:
        held = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if held is not None:
        _arriving[partial] = os.fdopen(held, "r+b")
    return held is not None


def _drop(partial: Path) -> None:
    """Remove the partial file locked by this channel."""
    if file := _arriving.pop(partial, None):
        partial.unlink(missing_ok=True)
        file.close()


def _check_room(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed + MARGIN_BYTES:
        raise _no_room(folder, needed)


def _no_room(folder: Path, needed: int) -> Refused:
    where = f"{folder} has {shutil.disk_usage(folder).free / 1e6:.0f} MB left"
    wanted = f"{needed / 1e6:.0f} MB are needed; make room, or set ssh.workdir"
    return Refused(f"the archive of code or data does not fit: {where}, {wanted}")


def _running(workdir: Path, now_s: float) -> Iterator[float]:
    """Yield the start time of each job whose agent still writes its state."""
    for path in workdir.glob(f"jobs/*/attempt-*/node-*/{STATE}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if now_s - path.stat().st_mtime < ALIVE_S and not (path.parent / EXIT).exists():
                yield float(json.loads(path.read_text())["started_s"])

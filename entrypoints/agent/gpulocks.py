"""Locks on this machine's GPUs, shared by all users of the machine and all their jobs.

A lock is an flock on `FOLDER/NAME.lock`, held by a job's agent; the kernel frees the lock when the agent dies for any
reason. NAME is a GPU's UUID, or `machine` on a host without GPUs. The holder describes itself in a note,
`NAME.UID.json`, with the user's number, because in a sticky folder a user cannot replace a file of a different user. A
note counts only while the lock is held, and only for the process that wrote the note. Lock files are never removed:
else two processes could hold two files of the same name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .. import processes

TYPE_CHECKING = False  # in place of typing's, whose import adds 4 ms to each poll of a host
if TYPE_CHECKING:
    from typing import Any

MACHINE = "machine"  # the lock's name on a host without GPUs
SPARE = "spare-"  # before a number: the lock of an agent that waits as a spare, for `cloudtrain hosts` alone
PLACES = ("/run/lock/cloudtrain", "/var/lock/cloudtrain", "/tmp/cloudtrain-locks")
OPEN_TO_ALL = 0o1777

# `holders` takes each lock for microseconds; a new folder or file gets its mode a moment after its name: so retry.
TRIES, PAUSE_S = 10, 0.02
MAX_NOTE = 1 << 16
TRY_S = 2.0  # between two tries to take the locks of a node that waits
_ODD_NOTE = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)  # notes of different users

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,95}")
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # follow no link, wait for no named pipe


class Unusable(RuntimeError):
    """The folder or a file in the folder is unsafe or unusable; the message describes the fix."""


class GpuBusy(RuntimeError):
    """Another process holds `name`: `holder`, of `holders`, or None without a note; `why`: kept for a job in line."""

    def __init__(self, name: str, holder: dict[str, Any] | None, label: str | None = None, why: str = "") -> None:
        self.name, self.holder = name, holder
        self.label = label or (holder or {}).get("label") or _label(name)
        super().__init__(f"{self.label}: {why or _who(holder)}")


class HeldLocks:
    """Locks held by this process. Forked children hold the locks too; programs started with exec do not."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder = folder
        self.about = about
        self.files: dict[str, int] = {}  # name -> descriptor

    def write_notes(self) -> None:
        """Write notes that name this process as the holder; a forked child that replaces its parent does so again."""
        me = {"pid": os.getpid(), "stamp": processes.stamp(os.getpid()), "host": os.uname().nodename}
        labels = self.about.get("labels") or {}
        note = {"user": login(os.getuid()), "since_s": time.time(), **self.about, **me}
        note.pop("labels", None)
        for name in self.files:
            # The lock is held even without a note: the disk may be full, or a different user's file may have the name.
            with contextlib.suppress(OSError):
                _write(self.folder, name, {**note, "name": name, "label": labels.get(name) or _label(name)})

    def touch(self) -> None:
        """Update the files' times: cleaners of /tmp remove files that are unchanged for ten days."""
        for name, lock in self.files.items():
            with contextlib.suppress(OSError):
                os.utime(lock)
            with contextlib.suppress(OSError):
                os.utime(_note(self.folder, name, os.getuid()), follow_symlinks=False)

    def hand_over(self) -> None:
        """Close this process's descriptors without unlocking: a forked child holds the locks from now on."""
        while self.files:
            os.close(self.files.popitem()[1])

    def release(self) -> None:
        """Free the locks, even if a child still has the descriptors."""
        for name, lock in self.files.items():
            with contextlib.suppress(OSError):
                _note(self.folder, name, os.getuid()).unlink()
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
        self.hand_over()


class Seat:
    """The locks of a node, `taken` until its process ends; `take` takes the locks of a spare or a node that is back.

    A local job may run without locks: then `take` returns None.
    """

    def __init__(self, taken: HeldLocks | None = None, take: Callable[[], HeldLocks | None] | None = None) -> None:
        self.taken, self.take = taken, take
        self.is_held = taken is not None
        self._tried_s = -TRY_S

    def hold(self) -> bool:
        """Take the locks if they are free, at most once in TRY_S; return whether the node may use its GPUs."""
        if not self.is_held and self.take is not None and time.monotonic() - self._tried_s >= TRY_S:
            self._tried_s = time.monotonic()
            try:
                self.taken, self.is_held = self.take(), True
            except (GpuBusy, Unusable) as error:
                print(f"this node is not free: {error}", flush=True)
        return self.is_held

    def leave(self) -> None:
        """Release the locks of a spare that the job does not need."""
        if self.taken is not None:
            self.taken.release()
        self.taken, self.is_held, self._tried_s = None, False, -TRY_S


def folder(wanted: str | None = None, *, make: bool = True) -> Path:
    """Return the folder of the locks, the same for all users of this machine; create a missing folder.

    The result is the first usual place whose parent all users may write to. The rule is the same for root, who may
    write anywhere: root must not choose a different folder than an earlier user. Raises Unusable.
    """
    if wanted is not None:
        place = Path(wanted).expanduser()
        return _checked(place, is_shared=False) if make or place.exists() else place
    for name in PLACES:
        place = Path(name)
        if _is_open_to_all(place.parent) or place.is_dir():
            place = place.parent.resolve() / place.name
            return _checked(place, is_shared=True) if make or place.exists() else place
    raise Unusable(f"all users need write access to a folder for GPU locks: sudo install -d -m 1777 {PLACES[0]}")


def inner(folder: Path, name: str) -> Path:
    """Return the folder `name` inside a folder of locks, open to the same users; create it. Raises Unusable."""
    return _checked(folder / name, is_shared=stat.S_IMODE(folder.stat().st_mode) & OPEN_TO_ALL == OPEN_TO_ALL)


def take(folder: Path, names: Iterable[str], about: dict[str, Any]) -> HeldLocks:
    """Lock all names, or no name, without waiting.

    `about` goes into the notes: `job`, `user` (default: this process's user), and any further keys; `labels` maps names
    to text for users: "GPU 3 (NVIDIA A100, GPU-1234)". Raises GpuBusy for the first name that is held, and Unusable.
    """
    taken = HeldLocks(folder, {"since_s": time.time(), **about})
    try:
        for name in sorted(set(names)):
            taken.files[name] = _lock(folder, name, (about.get("labels") or {}).get(name))
    except BaseException:
        taken.hand_over()  # no note is written yet
        raise
    taken.write_notes()
    return taken


def holders(folder: Path) -> list[dict[str, Any]]:
    """Return the holders of locks: `name`, `label`, `user`, `owner`, `job`, `pid`, `since_s` (unix seconds), and more.

    `owner` is the login according to the machine: the owner of the note's file. A holder without a note has `name` and
    `label` only.
    """
    held = [path.stem for path in sorted(folder.glob("*.lock")) if not is_free(path)]
    return [_holder(folder, name) or {"name": name, "label": _label(name)} for name in held]


def _lock(folder: Path, name: str, label: str | None) -> int:
    """Return the descriptor that holds the lock."""
    if not _NAME.fullmatch(name):
        raise Unusable(f"`{name}` is not a valid lock name: use letters, digits and dashes")
    for _ in range(TRIES):
        lock = open_lock(folder / f"{name}.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(folder / f"{name}.lock", lock):
                return lock
        except BlockingIOError:
            if holder := _holder(folder, name):
                os.close(lock)
                raise GpuBusy(name, holder, label) from None
        except OSError as error:
            os.close(lock)
            raise Unusable(f"{folder} cannot hold locks: {error.strerror}; choose a folder on a local disk") from error
        os.close(lock)
        time.sleep(PAUSE_S)
    raise GpuBusy(name, _holder(folder, name), label)


def open_lock(path: Path) -> int:
    """Return a descriptor of the lock's file; create a missing file."""
    for _ in range(TRIES):
        # Open without O_CREAT first: fs.protected_regular refuses O_CREAT on different users' files in sticky folders.
        with contextlib.suppress(OSError):
            return _regular(path, os.open(path, os.O_RDWR | _SAFELY))
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666)
        except FileExistsError:
            time.sleep(PAUSE_S)  # a concurrent process creates the file
        except OSError as error:
            raise Unusable(f"cannot make the lock {path}: {error.strerror}; is the folder mode 1777?") from error
        else:
            os.fchmod(lock, 0o666)  # regardless of the umask
            return lock
    if path.is_symlink():
        raise Unusable(f"{path} is a link of {_owner(path)}; a lock must be a regular file: sudo rm {path}")
    raise Unusable(f"{path} of {_owner(path)} cannot be opened by all: sudo chmod 666 {path}")


def _regular(path: Path, lock: int) -> int:
    found = os.fstat(lock)
    if stat.S_ISREG(found.st_mode):
        return lock
    os.close(lock)
    raise Unusable(f"{path} of {login(found.st_uid)} is not a regular file: sudo rm {path}")


def _is_still(path: Path, lock: int) -> bool:
    """Return whether the path still is the opened file: a cleaner may have removed the file meanwhile."""
    with contextlib.suppress(OSError):
        return os.path.samestat(path.lstat(), os.fstat(lock))
    return False


def is_free(path: Path) -> bool:
    """Return whether the lock is free. The test takes a shared lock, so that two concurrent tests do not collide."""
    try:
        lock = os.open(path, os.O_RDONLY | _SAFELY)
    except OSError:
        return True  # the file is gone, or is no lock
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _holder(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the note of the living process that holds the lock, None without a valid note."""
    notes = [note for path in folder.glob(f"{name}.*.json") if (note := read_note(path)) is not None]
    here = [note for note in notes if processes.alive(note["pid"], note.get("stamp"))]
    if not here:
        # If /proc hides processes of different users, the kernel's list of locks still names their pids.
        pids = _lock_pids(folder / f"{name}.lock")
        here = [note for note in notes if note["pid"] in pids and processes.is_of_this_boot(note.get("stamp"))]
    return max(here, key=lambda note: float(note["since_s"]), default=None)


def _lock_pids(path: Path) -> set[int]:
    """Return the pids that /proc/locks names for the file; a line is `1: FLOCK ADVISORY WRITE 123 fe:00:456 0 EOF`."""
    with contextlib.suppress(OSError, ValueError):
        inode = str(path.lstat().st_ino)
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return {int(words[4]) for words in lines if words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode}
    return set()


def _write(folder: Path, name: str, note: dict[str, Any]) -> None:
    path = _note(folder, name, os.getuid())
    partial = folder / f".{path.name}.{os.getpid()}.tmp"
    partial.unlink(missing_ok=True)  # left by a dead process with the same pid
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o644)
    try:
        with os.fdopen(file, "w") as stream:
            os.fchmod(file, 0o644)
            json.dump(note, stream)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_note(path: Path) -> dict[str, Any] | None:
    """Return the note, None if the note is invalid or its file belongs to a user with a different number."""
    try:
        file = os.open(path, os.O_RDONLY | _SAFELY)
    except OSError:
        return None
    with os.fdopen(file, "rb") as stream, contextlib.suppress(OSError, *_ODD_NOTE):
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and path.name.endswith(f".{found.st_uid}.json"):
            note = json.loads(stream.read(MAX_NOTE))
            if any(not isinstance(note.get(name, ""), str) for name in ("job", "user")):
                return None
            return {**note, "owner": login(found.st_uid), "pid": int(note["pid"]), "since_s": float(note["since_s"])}
    return None


def _note(folder: Path, name: str, uid: int) -> Path:
    return folder / f"{name}.{uid}.json"


def _checked(place: Path, *, is_shared: bool) -> Path:
    """Return the folder after its creation and a check of its owner and mode. Raises Unusable."""
    fault = ""
    for _ in range(TRIES):
        try:
            with contextlib.suppress(FileExistsError):
                place.mkdir(OPEN_TO_ALL)
            opened = os.open(place, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
        except OSError as error:
            if place.is_symlink():
                error.strerror = f"it is a link of {_owner(place)}, and should be a real folder: sudo rm {place}"
            raise Unusable(f"cannot use the folder for locks {place}: {error.strerror}") from error
        try:
            fault = _fault(place, opened, is_shared=is_shared)
        finally:
            os.close(opened)
        if not fault:
            return place
        time.sleep(PAUSE_S)  # the creator may not have set the mode yet
    raise Unusable(fault)


def _fault(place: Path, opened: int, *, is_shared: bool) -> str:
    """Return the fault of the folder, or an empty string; fix the mode of the user's own shared folder."""
    found = os.fstat(opened)
    mode = stat.S_IMODE(found.st_mode)
    is_ours = found.st_uid == os.getuid()
    if is_shared and is_ours and mode != OPEN_TO_ALL:
        os.fchmod(opened, OPEN_TO_ALL)
        mode = OPEN_TO_ALL
    who = login(found.st_uid)
    if mode & 0o1002 == 0o1002:
        return ""
    if is_shared:
        return f"{place} of {who} is mode {mode:o}: not all users can lock there; sudo chmod 1777 {place}"
    if mode & stat.S_IWOTH:
        return f"{place} is mode {mode:o}: any user can remove other users' locks there; chmod 1777 {place}"
    if not is_ours and found.st_uid != 0:
        return f"{place} belongs to {who}, and is not open to all: chmod 1777 {place}, or choose another folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} of {who} cannot be written by {login(os.getuid())}: sudo chmod 1777 {place}"
    return ""


def _is_open_to_all(parent: Path) -> bool:
    """Return whether all users may create files but not remove a different user's: a sticky folder of root."""
    with contextlib.suppress(OSError):
        found = parent.stat()
        return stat.S_ISDIR(found.st_mode) and found.st_mode & 0o1002 == 0o1002 and found.st_uid == 0
    return False


def _label(name: str) -> str:
    return "this machine" if name == MACHINE else name


def _who(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "held by an unidentified process"
    user, owner = str(holder.get("user") or holder["owner"]), holder["owner"]
    login = "" if user == owner else f" (login {owner})"
    return f"{user}'s job {holder.get('job', '?')}{login} holds it, since {whole_span(time.time() - holder['since_s'])}"


def whole_span(seconds: float) -> str:
    """Return the time in the unit that fits: 50 s, 12 min, 2 h, 3 d."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _owner(path: Path) -> str:
    with contextlib.suppress(OSError):
        return login(path.lstat().st_uid)
    return "nobody"


def login(uid: int) -> str:
    """Return the name of the user with the number, else the number."""
    name = processes.user_name(uid)
    return name if name != str(uid) else f"user {uid}"

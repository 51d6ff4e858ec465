"""Process trees on Linux: find descendants, and leave no process behind; locks between processes.

torchrun starts each worker in its own session, so a job is neither a process group nor a session, but a tree of
parents and children. A subreaper keeps the tree whole when a process in the middle dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FORK_S = 0.02  # a fork blocks all signals for less
TYPE_CHECKING = False  # as in typing: see entrypoints/agent/gpus.py
if TYPE_CHECKING:
    import subprocess
    from typing import Any

# Of users, sites and closed terminals: these may ask a script to save, and end nothing.
SAVE_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
DEVICES = Path("/dev")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def cores() -> int:
    """Return how many processor cores this process may use, possibly fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def gpus() -> list[str]:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES if the variable is set, else all GPUs.

    GPUs have CUDA's ordinals, which count from 0 whatever a container calls the device files; as in CUDA, the
    variable's list ends at the first -1.
    """
    count = sum(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir(DEVICES))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not count:
        return [str(ordinal) for ordinal in range(count)]
    named = itertools.takewhile(lambda gpu: gpu != "-1", map(str.strip, chosen.split(",")))
    return [gpu for gpu in named if gpu]


def completed(argv: list[str], timeout_s: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without input; return its code and outputs as text. Raises OSError, subprocess.TimeoutExpired."""
    import subprocess

    usual = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": timeout_s, "errors": "replace"}
    return subprocess.run(argv, text=True, check=False, **{**usual, **options})


def user_name(uid: int) -> str:
    """Return the login name of the user, the number if the user has no name."""
    import pwd

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def stamp(pid: int) -> str | None:
    """Return a stamp that identifies the process even after its pid is reused, None if the process is gone.

    Boot id and start time: a process after a reboot or with a reused pid has a different stamp. Without /proc (macOS)
    the stamp is the pid.
    """
    boot = boot_id()
    if boot is None:
        with contextlib.suppress(PermissionError):  # the process is a different user's
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return None
        return f"{pid}"
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else f"{boot}:{fields[19]}"


def alive(pid: int, known_stamp: str | None) -> bool:
    """Return whether the process with the stamp still runs."""
    return known_stamp is not None and stamp(pid) == known_stamp


def is_of_this_boot(known_stamp: str | None) -> bool:
    """Return whether the stamp's process started after the machine's last boot; True if unknown."""
    boot = boot_id()
    return known_stamp is None or boot is None or known_stamp.startswith(f"{boot}:")


def become_subreaper() -> None:
    """Have orphaned descendants become children of this process instead of init's (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies (Linux); survives exec."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # the parent died before the call: the kernel sends no signal
        os.kill(os.getpid(), signum)


def outlive_save_signals() -> None:
    """Ignore the signals; so do the programs that this process starts, until they set handlers."""
    for signum in SAVE_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def children(root: int) -> list[int]:
    """Return the pids of the living children of `root`."""
    return [pid for pid in _pids() if (fields := _stat(pid)) and int(fields[1]) == root and fields[0] != "Z"]


def descendants(root: int) -> list[int]:
    """Return the pids of all living descendants of `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields is not None and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(pid)
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_descendants(patience_s: float = 10.0) -> list[int]:
    """SIGKILL all descendants until no process is left; return the pids that could not be killed (D state)."""
    end = time.monotonic() + patience_s
    while left := descendants(os.getpid()):
        for pid in left:
            kill(pid, signal.SIGKILL)
        _reap()
        if time.monotonic() > end:
            return left
        time.sleep(0.01)
    _reap()
    return []


def killed_for_memory() -> int:
    """Return how many processes the kernel has killed on this machine, in any container, for lack of memory.

    Counted since the machine's start; 0 if the kernel has no counter (before Linux 4.13, macOS).
    """
    return int(_listed("/proc/vmstat", "oom_kill") or 0)


def _listed(file: str, name: str) -> str | None:
    """Return the last word of the line that begins with the name; None without such a line or file (Linux)."""
    with contextlib.suppress(OSError):
        lines = map(str.split, Path(file).read_text().splitlines())
        return next((words[-1] for words in lines if words[:1] == [name]), None)
    return None


def environments(name: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield pid and environment of this user's other processes with the variable (Linux)."""
    for pid in _pids():
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/environ").read_bytes()
            if f"{name}=".encode() in text and pid != os.getpid():
                pairs = os.fsdecode(text).split("\0")
                found = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                if name in found:
                    yield pid, found


def with_environment(**variables: str) -> list[int]:
    """Return the pids of this user's processes with all the variables; used to find a dead agent's processes."""
    return [pid for pid, found in environments(next(iter(variables))) if variables.items() <= found.items()]


def pid_inside(pid: int) -> int:
    """Return the process's pid in its own namespace (a container; Linux), or `pid` if the process is gone."""
    return int(_listed(f"/proc/{pid}/status", "NSpid:") or pid)


def kill(pid: int, signum: int) -> None:
    """Send a signal; do not raise if the process is gone or belongs to a different user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def catches(pid: int, signum: int) -> bool:
    """Return whether the process handles the signal, or waits for it in a thread (Linux): then it does not kill."""

    def has(name: str) -> bool:
        return bool(int(_listed(f"/proc/{pid}/status", name) or "0", 16) >> (signum - 1) & 1)

    if has("SigCgt:") or not has("SigBlk:"):
        return has("SigCgt:")
    time.sleep(FORK_S)
    return has("SigBlk:")


def state(pid: int) -> str:
    """Return the letter of the process's state in /proc: T if a signal (SIGSTOP) has stopped the process.

    D is an uninterruptible wait, for example for a lost disk or network share; empty if the process is gone.
    """
    return (_stat(pid) or [""])[0]


def announce(pipe: int | None) -> None:
    """Write this process's pid to the pipe, and close the pipe; None: do nothing."""
    if pipe is not None:
        os.write(pipe, b"%d\n" % os.getpid())
        os.close(pipe)


def write_into(log: Path) -> None:
    """Direct this process's standard output and error to the end of the file. Raises OSError."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def make_private(folder: Path) -> None:
    """Create the folder, and each missing folder above it, with access for its owner only. Raises OSError."""
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)


class NoLocks(OSError):
    """The file's disk has no locks; `filename` and `strerror` tell the place, the cause and the host's cure."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the file's lock alone, at most until this process dies; yield its descriptor. Raises OSError: NoLocks."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as lock:
        _flock(lock.fileno(), fcntl.LOCK_EX, path)
        yield lock.fileno()


def _flock(held: int, how: int, path: Path) -> None:
    try:
        fcntl.flock(held, how)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise
        words = f"no file locks there ({error.strerror}): Lustre has them with `-o flock`, NFS with its lock service"
        raise NoLocks(error.errno, words, str(path)) from error


def try_lock(path: Path, how: int = fcntl.LOCK_EX) -> int | None:
    """Return a descriptor that holds the file's lock; None if another process holds the lock, or removes the file.

    `how`: LOCK_EX, or LOCK_SH for a lock that may be shared. Raises OSError: NoLocks on a disk without locks.
    """
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            _flock(held, how | fcntl.LOCK_NB, path)
            if os.path.samestat(os.fstat(held), path.stat()):
                return held
    except OSError:
        os.close(held)
        raise
    os.close(held)
    return None


@contextlib.contextmanager
def byte_locked(path: Path, byte: int) -> Iterator[bool]:
    """Lock a byte of the file, and yield whether the lock was free; the kernel frees the lock with the process.

    Raises OSError, for example on a file system without locks.
    """
    if sys.platform != "linux":  # locks of bytes are the process's there: a file for each byte, locked as an open file
        held = try_lock(path := path.with_name(f"{path.name}-{byte}"))
        try:
            yield held is not None
        finally:
            if held is not None:
                path.unlink(missing_ok=True)
                os.close(held)
        return
    with path.open("a") as file:
        try:
            _lock_byte(file.fileno(), byte)
        except BlockingIOError:
            yield False
            return
        yield True


def _lock_byte(file: int, byte: int) -> None:
    """Lock the byte for the open file. Raises BlockingIOError.

    A lock of the process would not exclude its threads, and the first closed file would release all locks.
    """
    if (of_file := getattr(fcntl, "F_OFD_SETLK", None)) is not None:
        try:
            fcntl.fcntl(file, of_file, struct.pack("hhqqi", fcntl.F_WRLCK, 0, byte, 1, 0))  # struct flock
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the kernel has no locks of open files
                raise
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)


def boot_id() -> str | None:
    """Return an id that is new with each boot of the machine; containers of one machine share the id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if Path("/proc/self").exists() else []


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on: [0] state, [1] parent, [19] start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # 2 ms, which the launcher saves: the launcher only checks whether processes live

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)

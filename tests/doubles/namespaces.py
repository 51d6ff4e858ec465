"""Thin wrappers of the system calls by which a process makes namespaces and mounts; errors are raised as OSError."""

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1000, 0x4000, 0x40000, 2, 4, 8
MS_RDONLY, MS_REMOUNT, MS_MOVE, MS_UNBINDABLE = 1, 0x20, 0x2000, 0x20000
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Give the calling thread new namespaces; a new process-number namespace holds for the thread's children only."""
    _check(_LIBC.unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    """Join the namespace that is open as fd."""
    _check(_LIBC.setns(fd, kind), f"setns {kind:#x}")


def prctl(option: int, value: int) -> None:
    """Set an option of the calling process."""
    _check(_LIBC.prctl(option, value, 0, 0, 0), f"prctl {option}")


def sethostname(name: str) -> None:
    """Name the machine, as this UTS namespace sees it."""
    _check(_LIBC.sethostname(name.encode(), len(name.encode())), "sethostname")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call mount(2)."""
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _check(_LIBC.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {source} at {target}")


def unmount(target: str) -> None:
    """Detach the mount, even if the mount is in use."""
    _check(_LIBC.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def bind(source: str, target: str, *, is_read_only: bool = False) -> None:
    """Mount `source`, with all mounts below, at `target` too."""
    mount(source, target, None, MS_BIND | MS_REC)
    if is_read_only:
        mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY)


def move_to_root(folder: str) -> None:
    """Make the folder, a mount, the root of this mount namespace; earlier mounts disappear."""
    os.chdir(folder)
    _check(_LIBC.pivot_root(b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")

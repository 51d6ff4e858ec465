"""Run a command in its own namespaces, as on a separate machine: `python -I -m ...rehearsal.cell`, order on stdin.

The process forks once. The outer half stays with the caller, forwards SIGTERM and exits with the command's exit code.
The inner half has its own mounts, host name and processes, and becomes the command as process 1, as in a container.
Both die with the caller, and with process 1 its whole namespace dies. `sandbox.py` writes the order.

The tests' stand-ins (tests/doubles) have a separate sandbox: if the tests' stand-in for a cloud and this stand-in
shared code, each would agree with the mistakes of the shared code.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cloudtrain.entrypoints import processes

NOT_STARTED = 127  # the shell's exit code for a missing command

# linux/sched.h, linux/mount.h
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV, _NOEXEC = 0x1000, 0x4000, 0x40000, 2, 4, 8
_MOVE, _UNBINDABLE = 0x2000, 0x20000

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class SandboxOrder:
    """The order for one sandbox, as JSON on standard input."""

    parent: int  # the caller's pid
    mode: str  # root, user or none
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    hostname: str
    binds: Sequence[tuple[str, str]] = ()  # paths, each with the path where the sandbox sees it
    rebuilt: Sequence[str] = ()  # folders that get a layer for new entries
    new_root: str = ""  # a folder for a rebuilt root
    stdin: str | None = None
    detaches: bool = False  # the command ends before its descendants


def main() -> int:
    """Run the order on standard input; return the exit code, 128 + the signal if the command was killed."""
    order = SandboxOrder(**json.load(sys.stdin))
    if order.mode == "none":
        return _run_without_namespaces(order)
    _die_with(order.parent, signal.SIGKILL)
    ids = os.getuid(), os.getgid()
    is_user = order.mode == "user"
    _call("unshare", _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | (_NEWUSER if is_user else 0))
    if is_user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {ids[0]} 1")
        Path("/proc/self/gid_map").write_text(f"0 {ids[1]} 1")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # blocked until the command can receive the signal
    alive, started = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(alive[1])
        os.close(started[0])
        _become(order, alive[0])
    os.close(started[1])
    os.read(started[0], 1)  # returns when the command's exec closes the pipe
    _pass_on_sigterm(child)
    return _code(os.waitpid(child, 0)[1])


def _become(order: SandboxOrder, alive: int) -> NoReturn:
    """Set up the namespaces and become the command."""
    try:
        processes.die_with_parent()
        if select.select([alive], [], [], 0)[0]:  # the outer half died before
            os._exit(NOT_STARTED)
        _mount_all(order)
        name = order.hostname.encode()
        _call("sethostname", name, len(name))
        if not order.detaches:
            _exec(order)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os._exit(_last_code(_fork(order)))
    except BaseException as error:
        _fail(order, error)


def _last_code(command: int) -> int:
    """Wait until no child is left; return the exit code of the child `command`."""
    code = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.wait()
            code = _code(status) if pid == command else code
    return code


def _fork(order: SandboxOrder) -> int:
    """Start the command as a child; return its pid."""
    child = os.fork()
    if child == 0:
        try:
            _exec(order)
        except BaseException as error:
            _fail(order, error)
    return child


def _fail(order: SandboxOrder, error: BaseException) -> NoReturn:
    print(f"cannot start {order.argv[:1]}: {error!r}", file=sys.stderr, flush=True)
    os._exit(NOT_STARTED)


def _exec(order: SandboxOrder) -> NoReturn:
    os.setsid()
    for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # changed by Python
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.dup2(_input(order.stdin), 0)
    os.chdir(order.cwd)
    os.execvpe(order.argv[0], list(order.argv), order.env)


def _input(text: str | None) -> int:
    """Return the command's standard input: a file in memory, since a pipe would need a writer."""
    if text is None:
        return os.open(os.devnull, os.O_RDONLY)
    found = os.memfd_create("stdin")
    os.write(found, text.encode())
    os.lseek(found, 0, os.SEEK_SET)
    return found


def _mount_all(order: SandboxOrder) -> None:
    """Mount the places of the order, /dev/shm, and a new /proc for the new process ids."""
    _mount(None, "/", None, _REC | _PRIVATE)
    opened = [(os.open(source, os.O_PATH), target) for source, target in order.binds]  # before mounts cover them
    for folder in order.rebuilt:
        _rebuild(folder, order.new_root if folder == "/" else folder)
    for fd, target in opened:
        _bind(fd, target)
    _mount("tmpfs", "/dev/shm", "tmpfs", _NOSUID | _NODEV)
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)


def _rebuild(folder: str, place: str) -> None:
    """Mount a tmpfs with the folder's entries at the place, so that entries can be added only in this namespace.

    The place is the folder itself; of the root another folder, which becomes the new root.
    """
    entries = [(entry.name, os.open(entry.path, os.O_PATH | os.O_NOFOLLOW)) for entry in os.scandir(folder)]
    links = {entry.name: Path(entry.path).readlink() for entry in os.scandir(folder) if entry.is_symlink()}
    _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, "mode=755")
    _mount(None, place, None, _UNBINDABLE)  # the bind of / must not contain the new root again
    for name, fd in entries:
        if name in links:
            Path(place, name).symlink_to(links[name])
        else:
            _bind(fd, f"{place}/{name}")
        os.close(fd)
    if place != folder:
        os.chdir(place)
        _mount(place, "/", None, _MOVE)
        os.chroot(".")
        os.chdir("/")


def _bind(fd: int, target: str) -> None:
    """Bind-mount the open fd at the target, which is created if missing."""
    path = Path(target)
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        path.mkdir(parents=True, exist_ok=True)
    elif not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    _mount(f"/proc/self/fd/{fd}", target, None, _BIND | _REC)


def _run_without_namespaces(order: SandboxOrder) -> int:
    """Run the command as a plain child; at its end, or if the caller dies, kill all its descendants."""
    _die_with(order.parent, signal.SIGUSR1)
    processes.become_subreaper()

    def die(signum: int, frame: FrameType | None) -> None:
        processes.kill_descendants()
        os._exit(128 + signal.SIGKILL)

    signal.signal(signal.SIGUSR1, die)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = _fork(order)
    _pass_on_sigterm(child)
    code = _code(os.waitpid(child, 0)[1])
    if order.detaches:
        _last_code(child)
    processes.kill_descendants()
    return code


def _pass_on_sigterm(child: int) -> None:
    signal.signal(signal.SIGTERM, lambda signum, frame: processes.kill(child, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _die_with(parent: int, signum: int) -> None:
    processes.die_with_parent(signum)
    if os.getppid() != parent:
        sys.exit("the caller is gone")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _call("mount", *words[:3], ctypes.c_ulong(flags), words[3])


def _call(name: str, *arguments: Any) -> None:
    """Make the system call; raise OSError with the call's name on failure."""
    if getattr(_LIBC, name)(*arguments) != 0:
        error, texts = ctypes.get_errno(), [each.decode() for each in arguments if isinstance(each, bytes)]
        raise OSError(error, f"{name} {' '.join(texts)}: {os.strerror(error)}")


if __name__ == "__main__":
    sys.exit(main())

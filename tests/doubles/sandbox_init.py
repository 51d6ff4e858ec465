"""Runs one command as the first process in new namespaces: `python -I -S sandbox_init.py SPEC.json`.

Forks once. The outer process stays with the caller, passes SIGTERM on and ends with the command's exit code. The inner
process sees its own mounts, host name and processes, and becomes the command as process 1, as in a container without
init. Both die with their parent, and process 1 takes its namespace down. `doubles/sandbox.py` writes the spec.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script file belongs to no package
from doubles import namespaces as ns

NOT_STARTED = 127  # a shell's exit code for a missing command


def main() -> int:
    """Run the spec's command; return its exit code, or 128 + the signal if a signal killed the command."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec["mode"] == "none":
        return _run_without_namespaces(spec)
    _die_with(spec["parent"], signal.SIGKILL)
    user = spec["mode"] == "user"
    ids = os.getuid(), os.getgid()
    if spec["network"]:  # first: the first child after CLONE_NEWPID is process 1
        ns.unshare(ns.CLONE_NEWNET)
        _join_network(spec["network"])
    ns.unshare(ns.CLONE_NEWNS | ns.CLONE_NEWUTS | ns.CLONE_NEWIPC | ns.CLONE_NEWPID | (ns.CLONE_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {ids[0]} 1")
        Path("/proc/self/gid_map").write_text(f"0 {ids[1]} 1")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the command can receive SIGTERM
    alive, started = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(alive[1])
        os.close(started[0])
        _become(spec, alive[0])
    os.close(started[1])
    os.read(started[0], 1)  # returns when the command's exec closes the pipe
    signal.signal(signal.SIGTERM, lambda signum, frame: _signal(child, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return _code(os.waitpid(child, 0)[1])


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _join_network(network: dict[str, str]) -> None:
    """Wait until the caller has put `eth0` into this namespace, then give `eth0` its address."""
    os.write(int(network["ready"]), b"1")
    if os.read(int(network["go"]), 1) != b"1":
        sys.exit("the caller put no interface here")
    orders = f"link set lo up\naddr add {network['address']} dev eth0\nlink set eth0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=orders.encode(), check=True)


def _become(spec: dict[str, Any], alive: int) -> None:
    """Set the namespaces up and become the command; never returns."""
    try:
        ns.prctl(ns.PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([alive], [], [], 0)[0]:  # the outer process ended before PR_SET_PDEATHSIG was set
            os._exit(NOT_STARTED)
        _mount_all(spec)
        ns.sethostname(spec["hostname"])
        os.setsid()
        _exec(spec["argv"], spec["env"], spec["cwd"])
    except BaseException as error:
        print(f"cannot start {spec['argv'][:1]}: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(NOT_STARTED)


def _mount_all(spec: dict[str, Any]) -> None:
    """Mount the private folders of the spec, /dev/shm, and a fresh /proc for the new process numbers."""
    ns.mount(None, "/", None, ns.MS_REC | ns.MS_PRIVATE)
    opened = [(os.open(source, os.O_PATH), target) for source, target in spec["binds"]]  # before mounts hide them
    for folder in spec["rebuilt"]:
        if folder == "/":
            _rebuild_root(spec["new_root"])
        else:
            _rebuild(folder)
    for fd, target in opened:
        _bind(fd, target)
    for target in spec["read_only"]:
        ns.mount(None, target, None, ns.MS_BIND | ns.MS_REMOUNT | ns.MS_RDONLY)
    ns.mount("tmpfs", "/dev/shm", "tmpfs", ns.MS_NOSUID | ns.MS_NODEV)
    ns.mount("proc", "/proc", "proc", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC)


def _rebuild_root(place: str) -> None:
    """Do the same as `_rebuild` for the root itself, in a folder that becomes the root."""
    ns.mount("tmpfs", place, "tmpfs", ns.MS_NOSUID, "mode=755")
    ns.mount(None, place, None, ns.MS_UNBINDABLE)  # the mount must not appear again below itself
    for entry in os.scandir("/"):
        if entry.is_symlink():
            Path(place, entry.name).symlink_to(Path(entry.path).readlink())
            continue
        fd = os.open(entry.path, os.O_PATH)
        _bind(fd, f"{place}/{entry.name}")
        os.close(fd)
    os.chdir(place)
    ns.mount(place, "/", None, ns.MS_MOVE)
    os.chroot(".")
    os.chdir("/")


def _rebuild(folder: str) -> None:
    """Mount a folder in memory over `folder` with the same entries, so that this namespace can add more entries."""
    entries = [(entry.name, os.open(entry.path, os.O_PATH | os.O_NOFOLLOW)) for entry in os.scandir(folder)]
    links = {entry.name: Path(entry.path).readlink() for entry in os.scandir(folder) if entry.is_symlink()}
    ns.mount("tmpfs", folder, "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=755")
    for name, fd in entries:
        if name in links:
            Path(folder, name).symlink_to(links[name])
        else:
            _bind(fd, f"{folder}/{name}")
        os.close(fd)


def _bind(fd: int, target: str) -> None:
    """Mount the file or folder open as `fd` at `target`; make a missing target."""
    path = Path(target)
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        path.mkdir(parents=True, exist_ok=True)
    elif not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    ns.mount(f"/proc/self/fd/{fd}", target, None, ns.MS_BIND | ns.MS_REC)


def _run_without_namespaces(spec: dict[str, Any]) -> int:
    """Run the command as a plain child; on SIGUSR1, and at the command's end, kill all processes of the command."""
    _die_with(spec["parent"], signal.SIGUSR1)
    ns.prctl(ns.PR_SET_CHILD_SUBREAPER, 1)

    def die(signum: int, frame: FrameType | None) -> None:
        _kill_descendants()
        os._exit(128 + signal.SIGKILL)

    signal.signal(signal.SIGUSR1, die)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    started = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        try:
            os.setsid()
            _exec(spec["argv"], spec["env"], spec["cwd"])
        except BaseException as error:
            print(f"cannot start {spec['argv'][:1]}: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(NOT_STARTED)
    os.close(started[1])
    os.read(started[0], 1)
    signal.signal(signal.SIGTERM, lambda signum, frame: _signal(child, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    code = _code(os.waitpid(child, 0)[1])
    _kill_descendants()
    return code


def _kill_descendants() -> None:
    """Kill every descendant of this process. Orphans count too, because this process is their subreaper."""
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for pid in children:
            _signal(int(pid), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.005)


def _exec(argv: list[str], env: dict[str, str], cwd: str) -> None:
    for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):  # handled by Python
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.chdir(cwd)
    os.execvpe(argv[0], argv, env)


def _die_with(parent: int, signum: int) -> None:
    ns.prctl(ns.PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        sys.exit("the caller is gone")


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


if __name__ == "__main__":
    sys.exit(main())

"""The first process of a host, in a child of the keeper, from the fork to `init`; builds the host's mounts.

The root is new: the machine's /usr and /etc, read-only, and the host's own folders. All files that the host writes stay
below the host's folder (home, /tmp, /var, /opt), which holds the host's disks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import time
import traceback
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from doubles import namespaces
from doubles.namespaces import bind, mount

BIN = "/opt/bin"  # first in the PATH of every session
SSHD = ("/usr/sbin/sshd", "-f", "/etc/ssh/sshd_config", "-E", "/var/log/sshd.log")
SSHD_PID = "/run/sshd.pid"
SSHD_S = 30.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DISKS = ("home", "tmp", "var", "opt")


@dataclass(frozen=True)
class Layout:
    """The properties that all hosts of a cluster share."""

    etc: str  # a folder for /etc
    prefixes: tuple[str, ...]  # Python's folders, at the same paths as on the machine
    hidden: tuple[str, ...]  # files of the prefixes that are empty on the hosts
    shm_mib: int
    data_mib: int


@dataclass(frozen=True)
class Spec:
    """One host; its folder holds its disks, and the keeper has mounted /data below the folder."""

    name: str
    address: str  # with the network's width
    folder: str
    layout: Layout


def become(spec: Spec, ready: int, go: int) -> None:
    """Become the host: report a new network namespace, wait for its `eth0`, report that sshd answers.

    Never returns: the process becomes an init that only reaps orphans. `console.log` of the folder has the errors.
    """
    try:
        begin((ready, go), f"{spec.folder}/console.log")
        kinds = namespaces.CLONE_NEWNET | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWIPC | namespaces.CLONE_NEWNS
        namespaces.unshare(kinds)
        os.setsid()
        os.write(ready, b"1")
        if os.read(go, 1) != b"1":  # the keeper is gone, maybe before PR_SET_PDEATHSIG was set
            os._exit(1)
        orders = f"link set lo up\naddr add {spec.address} dev eth0\nlink set eth0 up\n"
        subprocess.run(["ip", "-batch", "-"], input=orders.encode(), check=True, env={"PATH": SYSTEM_PATH})
        namespaces.sethostname(spec.name)
        _build(spec)
        _start_sshd()
        os.write(ready, b"2")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # stays ignored after exec: the kernel then reaps the children
        os.execv("/bin/sleep", ["init", "infinity"])
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _build(spec: Spec) -> None:
    """Mount the host's own root and change to it."""
    root, layout = f"{spec.folder}/root", spec.layout
    mount("tmpfs", root, "tmpfs", 0, "mode=755,size=16m")
    for entry in os.scandir("/"):
        if entry.name == "usr" or entry.name.startswith(("bin", "sbin", "lib")):
            if entry.is_symlink():
                Path(root, entry.name).symlink_to(Path(entry.path).readlink())
            elif entry.is_dir():
                _place(entry.path, root + entry.path, is_read_only=True)
    _place("/etc", f"{root}/.etc", is_read_only=True)
    _place(layout.etc, f"{root}/etc", is_read_only=True)
    for name in os.listdir(f"{spec.folder}/etc"):
        _place(f"{spec.folder}/etc/{name}", f"{root}/etc/{name}")
    for name in DISKS:
        _place(f"{spec.folder}/{name}", f"{root}/{name}")
    _place(f"{spec.folder}/data", f"{root}/data")
    for prefix in layout.prefixes:
        _place(prefix, root + prefix, is_read_only=True)
    for path in layout.hidden:
        bind(f"{layout.etc}/nothing", root + path)
    _mount_kernels(spec, root)
    mount("tmpfs", _made(f"{root}/run"), "tmpfs", namespaces.MS_NOSUID | namespaces.MS_NODEV, "mode=755")
    for name, mode in (("sshd", 0o755), ("lock", 0o1777)):
        Path(root, "run", name).mkdir()
        Path(root, "run", name).chmod(mode)
    _made(f"{root}/root")
    namespaces.move_to_root(root)


def _mount_kernels(spec: Spec, root: str) -> None:
    """Mount the kernel's view of the host: its processes, devices and network, and the id of its boot."""
    safe = namespaces.MS_NOSUID | namespaces.MS_NODEV | namespaces.MS_NOEXEC
    mount("proc", _made(f"{root}/proc"), "proc", safe)
    boot = Path(spec.folder, "boot_id")  # the kernel's file has the machine's id, which a host's boot does not change
    boot.write_text(f"{uuid.uuid4()}\n")
    bind(str(boot), f"{root}/proc/sys/kernel/random/boot_id", is_read_only=True)
    load = Path(spec.folder, "loadavg")  # of this host alone, not of the machine that runs the tests
    load.write_text("0.00 0.00 0.00 1/100 100\n")
    bind(str(load), f"{root}/proc/loadavg", is_read_only=True)
    mount("sysfs", _made(f"{root}/sys"), "sysfs", safe)
    if Path("/sys/fs/cgroup").is_dir():
        bind("/sys/fs/cgroup", f"{root}/sys/fs/cgroup")
    _place("/dev", f"{root}/dev")
    mount("devpts", f"{root}/dev/pts", "devpts", namespaces.MS_NOSUID | namespaces.MS_NOEXEC, "mode=620,ptmxmode=666")
    size = f"mode=1777,size={spec.layout.shm_mib}m"
    mount("tmpfs", _made(f"{root}/dev/shm"), "tmpfs", namespaces.MS_NOSUID | namespaces.MS_NODEV, size)


def _place(source: str, target: str, *, is_read_only: bool = False) -> None:
    """Bind source at target; make a missing target."""
    if stat.S_ISDIR(Path(source).stat().st_mode):
        _made(target)
    bind(source, target, is_read_only=is_read_only)


def _made(folder: str) -> str:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder


def _start_sshd() -> None:
    """Start the server and wait for its process-number file: the server listens when the file exists."""
    subprocess.run(SSHD, check=True, env={"PATH": SYSTEM_PATH})
    end = time.monotonic() + SSHD_S
    while not Path(SSHD_PID).exists():
        if time.monotonic() > end:
            raise TimeoutError("sshd does not listen; see var/log/sshd.log of the host")
        time.sleep(0.002)


def begin(kept: Collection[int], console: str) -> None:
    """Die with the keeper, close all open files but `kept`, read /dev/null, and write to the end of `console`."""
    namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, standard in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(fd, standard)
    os.close(nothing)
    os.close(written)

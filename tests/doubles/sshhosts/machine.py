"""What a host sees and runs: the first process of one, from its birth to `init`. Runs in a child of the keeper.

Its root is built anew: the machine's /usr and /etc, read-only, and beside them only what is the host's own. Nothing
that it writes reaches the machine, except below its folder (home, /tmp, /var, /opt), which are its disks.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path

from doubles import namespaces
from doubles.namespaces import bind, mount
from doubles.sshhosts import birth

__all__ = ["BIN", "Layout", "SSHD", "SSHD_PID", "Spec", "become"]

BIN = "/opt/bin"  # first in the PATH of every session
SSHD = ("/usr/sbin/sshd", "-f", "/etc/ssh/sshd_config", "-E", "/var/log/sshd.log")
SSHD_PID = "/run/sshd.pid"
SSHD_S = 30.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DISKS = ("home", "tmp", "var", "opt")


@dataclass(frozen=True)
class Layout:
    """What all hosts of a cluster have in common."""

    etc: str  # a folder for /etc
    prefixes: tuple[str, ...]  # folders of Python's, which are where they are on the machine
    hidden: tuple[str, ...]  # files of the prefixes that are empty on the hosts
    shm_mib: int
    data_mib: int


@dataclass(frozen=True)
class Spec:
    """One host; its folder holds its disks and is where the keeper has mounted /data."""

    name: str
    address: str  # with the network's width
    folder: str
    layout: Layout


def become(spec: Spec, ready: int, go: int) -> None:
    """Be the host: say when there is a network namespace, go on when it has `eth0`, say when sshd answers.

    Never returns: the process becomes one that only reaps orphans. What went wrong is in `console.log` of the folder.
    """
    try:
        birth.begin((ready, go), f"{spec.folder}/console.log")
        kinds = namespaces.CLONE_NEWNET | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWIPC | namespaces.CLONE_NEWNS
        namespaces.unshare(kinds)
        os.setsid()
        os.write(ready, b"1")
        if os.read(go, 1) != b"1":  # the keeper is gone, maybe before its death could be noticed
            os._exit(1)
        orders = f"link set lo up\naddr add {spec.address} dev eth0\nlink set eth0 up\n"
        subprocess.run(["ip", "-batch", "-"], input=orders.encode(), check=True, env={"PATH": SYSTEM_PATH})
        namespaces.sethostname(spec.name)
        _build(spec)
        _start_sshd()
        os.write(ready, b"2")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # survives the exec, and lets the kernel reap our children
        os.execv("/bin/sleep", ["init", "infinity"])
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _build(spec: Spec) -> None:
    """Mount the host's own root and go there."""
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
    """Mount what the kernel says of this host: its processes, devices and network, and the id of its boot."""
    safe = namespaces.MS_NOSUID | namespaces.MS_NODEV | namespaces.MS_NOEXEC
    mount("proc", _made(f"{root}/proc"), "proc", safe)
    boot = Path(spec.folder, "boot_id")  # the kernel's is the machine's, the same after each boot of ours
    boot.write_text(f"{uuid.uuid4()}\n")
    bind(str(boot), f"{root}/proc/sys/kernel/random/boot_id", is_read_only=True)
    mount("sysfs", _made(f"{root}/sys"), "sysfs", safe)
    if Path("/sys/fs/cgroup").is_dir():
        bind("/sys/fs/cgroup", f"{root}/sys/fs/cgroup")
    _place("/dev", f"{root}/dev")
    mount("devpts", f"{root}/dev/pts", "devpts", namespaces.MS_NOSUID | namespaces.MS_NOEXEC, "mode=620,ptmxmode=666")
    size = f"mode=1777,size={spec.layout.shm_mib}m"
    mount("tmpfs", _made(f"{root}/dev/shm"), "tmpfs", namespaces.MS_NOSUID | namespaces.MS_NODEV, size)


def _place(source: str, target: str, *, is_read_only: bool = False) -> None:
    """Bind source at target, which is made where it is missing."""
    if stat.S_ISDIR(Path(source).stat().st_mode):
        _made(target)
    bind(source, target, is_read_only=is_read_only)


def _made(folder: str) -> str:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder


def _start_sshd() -> None:
    """Start the server; it has written its process number when it listens."""
    subprocess.run(SSHD, check=True, env={"PATH": SYSTEM_PATH})
    end = time.monotonic() + SSHD_S
    while not Path(SSHD_PID).exists():
        if time.monotonic() > end:
            raise TimeoutError("sshd does not listen; see var/log/sshd.log of the host")
        time.sleep(0.002)

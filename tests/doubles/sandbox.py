"""Containers for stand-ins: a command in mount, host-name, process and network namespaces of its own.

Needs root, or a kernel that lets users make namespaces; where neither works (`mode()` says which), the command runs as
a plain process with the private places written into its arguments, and hosts are loopback addresses. With root every
container has its own network with one interface `eth0` on a switch that only this process's containers share, so all
may listen on the same ports; else they share the machine's loopback.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Container", "Running", "Switch", "installed_by_us", "loopback_block", "mode", "start"]

INIT = Path(__file__).with_name("sandbox_init.py")
GATEWAY_HARDWARE = "02:00:00:00:00:01"
LOCK_PORT = 46_999  # of UDP, on a block's last address: held while the block is in use
NETWORK = "10.213"  # of the switch: 10.213.0.1 is the outer world, the others are containers
CLONE_NEWNET = 0x40000000
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Container:
    """What to run, and what it may see."""

    argv: Sequence[str]
    env: Mapping[str, str]
    root: Path  # of our own files about it: spec, hosts, its /tmp
    hostname: str
    private: Mapping[str, Path]  # absolute place in the container -> folder that is there
    read_only: Mapping[str, Path] = field(default_factory=dict)  # the same, of what cannot be written there
    hosts: Mapping[str, str] = field(default_factory=dict)  # name -> address
    address: str | None = None  # on the switch
    cwd: str = "/"


@dataclass(frozen=True)
class Running:
    """A started container; its output is in `process.stdout` (and `stderr`, if split), its exit code the process's."""

    process: subprocess.Popen[bytes]

    def terminate(self) -> None:
        """Send SIGTERM to its first process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        """Kill everything in it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1 if mode() == "none" else signal.SIGKILL)


@functools.lru_cache(maxsize=1)
def mode() -> str:
    """Return the best that works here: `root`, `user` (a user namespace) or `none`."""
    for name in ("root", "user"):
        if os.environ.get("DOUBLES_SANDBOX") in (None, name) and _works(name):
            return name
    return "none"


def start(container: Container, switch: Switch | None = None, *, is_split: bool = False) -> Running:
    """Start it, with one stream for all that it writes or `is_split`; it dies with the calling thread."""
    container.root.mkdir(parents=True, exist_ok=True)
    new_root = container.root / "root"
    new_root.mkdir(exist_ok=True)
    spec = {
        "parent": os.getpid(),
        "mode": mode(),
        "argv": list(container.argv),
        "env": dict(container.env),
        "cwd": container.cwd,
        "hostname": container.hostname,
        "binds": _binds(container),
        "rebuilt": sorted({str(Path(place).parent) for place in (*container.private, *container.read_only)}),
        "new_root": str(new_root),
        "read_only": list(container.read_only),
        "network": None,
    }
    if mode() == "none":
        spec = _with_private_places(spec, container)
    if switch is None or container.address is None:
        return Running(_spawn(spec, container.root, (), is_split))
    return _start_on(switch, spec, container, is_split)


class Switch:
    """A network of this process's own, which its containers join; it ends with the process, or when closed.

    Namespaces belong to threads: one thread stays in the network and does what must be done from there.
    """

    def __init__(self) -> None:
        self._inside = ThreadPoolExecutor(1, thread_name_prefix="switch")
        self._numbers, self._plugs = itertools.count(2), itertools.count(1)
        self.gateway = f"{NETWORK}.0.1"
        self._inside.submit(self._make).result()

    @staticmethod
    def open() -> Switch | None:
        """Return one, or None where that needs rights or tools which are not here."""
        if mode() != "root" or shutil.which("ip", path=SYSTEM_PATH) is None:
            return None
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return Switch()
        return None

    def address(self) -> str:
        """Return an address that no container has had."""
        number = next(self._numbers)
        return f"{NETWORK}.{number // 250}.{number % 250 + 2}"

    def listen(self, port: int) -> socket.socket:
        """Return a socket listening on the gateway's address, where containers reach the outer world."""
        return self._inside.submit(_listening, self.gateway, port).result()

    def plug(self, pid: int, address: str) -> None:
        """Give the network namespace of the process an interface `eth0`.

        The same address has the same hardware address always: who has talked to an earlier holder finds the next one.
        """
        name = f"v{next(self._plugs)}"  # the last holder's may still be there for a moment
        numbers = [int(number) for number in address.split(".")]
        hardware = "02:00:" + ":".join(f"{number:02x}" for number in numbers)
        orders = f"link add {name} type veth peer name eth0 address {hardware} netns {pid}\n"
        orders += f"link set {name} master br0 up\n"
        self._inside.submit(_ip, orders).result()

    def close(self) -> None:
        """Leave the network; it is gone with the last container."""
        self._inside.shutdown()

    def _make(self) -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        # An address of its own: else a bridge takes its least port's, and another with each container that ends: who
        # has learned the old one reaches nobody for most of a minute.
        made = f"link add br0 address {GATEWAY_HARDWARE} type bridge\naddr add {self.gateway}/16 dev br0"
        _ip(f"link set lo up\n{made}\nlink set br0 up\n")


def loopback_block() -> tuple[str, socket.socket]:
    """Return the first three numbers of loopback addresses that nobody else on this machine uses, and their lock."""
    while True:
        block = f"127.{random.randint(64, 250)}.{random.randint(1, 250)}"
        lock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            lock.bind((f"{block}.254", LOCK_PORT))
        except OSError:
            lock.close()
            continue
        return block, lock


@functools.lru_cache(maxsize=1)
def installed_by_us() -> tuple[str, ...]:
    """Return the files by which the development environment finds cloudtrain: no image has them."""
    return tuple(map(str, Path(sys.prefix).glob("lib/python*/site-packages/__editable__*cloudtrain*.pth")))


def _works(name: str) -> bool:
    spec = {"parent": os.getpid(), "mode": name, "argv": ["true"], "env": {"PATH": os.defpath}, "cwd": "/"}
    spec |= {"hostname": "probe", "binds": [], "rebuilt": ["/opt"], "read_only": [], "network": None}
    argv = [sys.executable, "-I", "-S", str(INIT), "/dev/stdin"]
    done = subprocess.run(argv, input=json.dumps(spec).encode(), capture_output=True, check=False)
    return done.returncode == 0 and not done.stderr


def _spawn(spec: dict[str, object], root: Path, fds: Sequence[int], is_split: bool) -> subprocess.Popen[bytes]:
    path = root / "container.json"
    path.write_text(json.dumps(spec))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(INIT), str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if is_split else subprocess.STDOUT,
        env={"PATH": SYSTEM_PATH},
        pass_fds=fds,
        cwd="/",
    )


def _start_on(switch: Switch, spec: dict[str, object], container: Container, is_split: bool) -> Running:
    assert container.address is not None
    ready, go = os.pipe(), os.pipe()
    network = {"address": f"{container.address}/16", "ready": ready[1], "go": go[0]}
    try:
        process = _spawn({**spec, "network": network}, container.root, (ready[1], go[0]), is_split)
        os.close(ready[1])
        if os.read(ready[0], 1):  # else it has died, and its output says why
            switch.plug(process.pid, container.address)
            os.write(go[1], b"1")
    finally:
        for fd in (ready[0], go[0], go[1]):
            os.close(fd)
    return Running(process)


def _binds(container: Container) -> list[tuple[str, str]]:
    """Return what is mounted where, in order: a later place may lie inside an earlier one."""
    tmp, hosts, nothing = (container.root / name for name in ("tmp", "hosts", "nothing"))
    tmp.mkdir(exist_ok=True)
    tmp.chmod(0o1777)
    names = {"localhost": "127.0.0.1", **container.hosts}
    hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    nothing.touch()
    kept = {prefix for prefix in (sys.prefix, sys.base_prefix) if prefix.startswith("/tmp/")}
    return [
        (str(tmp), "/tmp"),
        *((prefix, prefix) for prefix in sorted(kept)),
        *((str(folder), place) for place, folder in (*container.private.items(), *container.read_only.items())),
        (str(hosts), "/etc/hosts"),
        *((str(nothing), hidden) for hidden in installed_by_us()),
    ]


def _with_private_places(spec: dict[str, object], container: Container) -> dict[str, object]:
    def moved(text: str) -> str:
        for place, folder in (*container.private.items(), *container.read_only.items()):
            text = text.replace(place, str(folder))
        return text

    env = {key: moved(value) for key, value in container.env.items()}
    return {**spec, "argv": [moved(word) for word in container.argv], "env": env, "cwd": moved(container.cwd)}


def _listening(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), backlog=128)


def _ip(orders: str) -> None:
    env = {"PATH": SYSTEM_PATH}
    subprocess.run(["ip", "-batch", "-"], input=orders.encode(), capture_output=True, check=True, env=env)

"""Containers for stand-ins: a command in its own mount, host-name, process and network namespaces.

Needs root, or a kernel that lets users make namespaces. If neither works (see `mode()`), the command runs as a plain
process, its arguments name the private folders, and hosts are loopback addresses. With root each container has its own
network with an interface `eth0`, on a switch that connects only the containers of the calling process, and all
containers may listen on the same ports. Without root the containers share the machine's loopback.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from doubles import process

INIT = Path(__file__).with_name("sandbox_init.py")
GATEWAY_HARDWARE = "02:00:00:00:00:01"
LAST_NUMBER = 254
LOCK_PORT = 46_999  # UDP port on a block's last address, bound while the block is in use
NETWORK = "10.213"  # of the switch: 10.213.0.1 is the outer world, all other addresses are containers
CLONE_NEWNET = 0x40000000
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Container:
    """The command to run, and the files and names that the command sees."""

    argv: Sequence[str]
    env: Mapping[str, str]
    root: Path  # for the sandbox's own files: spec, hosts, the container's /tmp
    hostname: str
    private: Mapping[str, Path]  # absolute path in the container -> folder mounted at the path
    read_only: Mapping[str, Path] = field(default_factory=dict)  # the same, mounted read-only
    hosts: Mapping[str, str] = field(default_factory=dict)  # name -> address
    address: str | None = None  # on the switch
    cwd: str = "/"


@dataclass(frozen=True)
class Running:
    """A started container: `process.stdout` (and `stderr`, if split) has its output, the process its exit code."""

    process: subprocess.Popen[bytes]

    def terminate(self) -> None:
        """Send SIGTERM to the container's first process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        """Kill all processes of the container."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1 if mode() == "none" else signal.SIGKILL)


@functools.lru_cache(maxsize=1)
def mode() -> str:
    """Return the best mode that works on this machine: `root`, `user` (a user namespace) or `none`."""
    for name in ("root", "user"):
        if os.environ.get("DOUBLES_SANDBOX") in (None, name) and _works(name):
            return name
    return "none"


def start(container: Container, switch: Switch | None = None, *, is_split: bool = False) -> Running:
    """Start the container, with one output stream or two (`is_split`); the container dies with the calling thread."""
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
    """A network of the calling process, joined by the containers; ends with the process or on `close`.

    Namespaces belong to threads, therefore one thread stays in the network and does all work inside.
    """

    def __init__(self) -> None:
        self._inside = ThreadPoolExecutor(1, thread_name_prefix="switch")
        self._numbers, self._plugs = itertools.count(2), itertools.count(1)
        self.gateway = f"{NETWORK}.0.1"
        self._inside.submit(self._make).result()

    @staticmethod
    def open() -> Switch | None:
        """Return a new switch, or None if the machine lacks the rights or the tools."""
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
        return self._inside.submit(process.bind, port, self.gateway).result()

    def plug(self, pid: int, address: str) -> None:
        """Give the network namespace of the process an interface `eth0`.

        The same address always gets the same hardware address: a peer of an earlier holder then finds the next one.
        """
        name = f"v{next(self._plugs)}"  # a new name: the interface of the last holder may still exist for a moment
        numbers = [int(number) for number in address.split(".")]
        hardware = "02:00:" + ":".join(f"{number:02x}" for number in numbers)
        orders = f"link add {name} type veth peer name eth0 address {hardware} netns {pid}\n"
        orders += f"link set {name} master br0 up\n"
        self._inside.submit(_ip, orders).result()

    def close(self) -> None:
        """Leave the network; the network ends with the last container."""
        self._inside.shutdown()

    def _make(self) -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        # A fixed hardware address: a bridge's default is the least of its ports' addresses, and changes with the
        # containers. Peers with the old address in their ARP cache then reach no host for most of a minute.
        made = f"link add br0 address {GATEWAY_HARDWARE} type bridge\naddr add {self.gateway}/16 dev br0"
        _ip(f"link set lo up\n{made}\nlink set br0 up\n")


@contextlib.contextmanager
def addresses(switch: Switch | None) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the address of one more container, on the switch or in a block of loopback."""
    if switch is not None:
        yield switch.address
        return
    block, lock = _loopback_block()
    with lock:
        yield (f"{block}.{number}" for number in range(1, LAST_NUMBER)).__next__


@functools.lru_cache(maxsize=1)
def installed_by_us() -> tuple[str, ...]:
    """Return the files by which the development environment finds cloudtrain; no image has these files."""
    return tuple(map(str, Path(sys.prefix).glob("lib/python*/site-packages/__editable__*cloudtrain*.pth")))


def _loopback_block() -> tuple[str, socket.socket]:
    """Return the first three numbers of a block of loopback addresses free on this machine, and the block's lock."""
    while True:
        block = f"127.{random.randint(64, 250)}.{random.randint(1, 250)}"
        lock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            lock.bind((f"{block}.{LAST_NUMBER}", LOCK_PORT))
        except OSError:
            lock.close()
            continue
        return block, lock


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
        if os.read(ready[0], 1):  # no byte: the process has died, and its output has the reason
            switch.plug(process.pid, container.address)
            os.write(go[1], b"1")
    finally:
        for fd in (ready[0], go[0], go[1]):
            os.close(fd)
    return Running(process)


def _binds(container: Container) -> list[tuple[str, str]]:
    """Return the mounts (source, target) in order: a later target may lie inside an earlier target."""
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


def _ip(orders: str) -> None:
    env = {"PATH": SYSTEM_PATH}
    subprocess.run(["ip", "-batch", "-"], input=orders.encode(), capture_output=True, check=True, env=env)

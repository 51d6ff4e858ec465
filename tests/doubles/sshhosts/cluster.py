"""A cluster of real OpenSSH hosts on this machine, from a test's side: start, reach, reset and remove hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import doubles.process
from doubles import sandbox
from doubles.sshhosts import client, disks
from doubles.sshhosts.host import Host, Port
from doubles.sshhosts.machine import SYSTEM_PATH, Layout

if TYPE_CHECKING:
    import pytest

NETWORK = "10.214.0"  # each cluster has its own network: all clusters may use the same addresses
FIRST_HOST, HOSTS_MAX = 10, 200
# An address keeps its hardware address at every boot: peers from before the boot find the host again.
HARDWARE = "02:00:0a:d6:00"
STOP_S = 30.0
NEEDS = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "nsenter": "util-linux"}


class Cluster:
    """Hosts on a private network, below a process that dies with the thread that started the hosts."""

    def __init__(self, root: Path, process: subprocess.Popen[str], names: Mapping[str, str]) -> None:
        self.root = root
        self.hosts = [Host(self.ask, number, root / name, to) for number, (name, to) in enumerate(names.items())]
        self.client = Port(self.ask, "vc")  # the network line of the machine that runs `ssh`
        self.client_folder = root / "client"
        self.inside = ["nsenter", f"--net=/proc/{process.pid}/ns/net", "--"]  # begins a command in the client's network
        self.ssh_config = client.write_config(self.client_folder, "ssh_config", names)
        self._names, self._process, self._lock = names, process, threading.Lock()
        self._path = client.make_wrappers(self.client_folder / "bin", self.inside)

    @staticmethod
    def start(
        count: int,
        root: Path,
        *,
        called: Sequence[str] = (),
        shm_mib: int = 2048,
        data_mib: int = 64,
        is_home_shared: bool = False,
    ) -> Cluster:
        """Start hosts h0, h1 and onward, or with the names `called`, and return when all sshd listen.

        The folder `root` is made here and removed by `stop`.

        Raises RuntimeError with a host's output if the host does not start. See `missing` for the requirements.
        """
        assert 0 < count <= HOSTS_MAX
        assert len(called) in (0, count)
        called = called or [f"h{number}" for number in range(count)]
        names = {name: f"{NETWORK}.{FIRST_HOST + number}" for number, name in enumerate(called)}
        _write_disks(root, names, is_home_shared)
        layout = Layout(str(root / "etc"), disks.prefixes(), sandbox.installed_by_us(), shm_mib, data_mib)
        cluster = Cluster(root, _start_keeper(root, names, layout), names)
        try:
            cluster._answer("start")
            cluster.boot()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables of a client's process: its PATH begins with the programs that reach the hosts.

        Further variables are for a config: `ssh_config: ${SSH_CONFIG}`, `python: ${SSH_PYTHON}`.
        """
        return {"PATH": self._path, "SSH_CONFIG": str(self.ssh_config), "SSH_PYTHON": sys.executable}

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the calling process reach the hosts, by the `ssh` in its PATH."""
        for name, value in self.environ.items():
            monkeypatch.setenv(name, value)

    def jump_config(self, bastion: str = "h0") -> Path:
        """Return a configuration for `ssh` that reaches all other hosts only through the bastion."""
        return client.write_config(self.client_folder, "ssh_config_jump", self._names, bastion=bastion)

    def ssh(self, host: str, command: str, *more: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command over real ssh, as a user would by hand; `more` options come before the host."""
        argv = ["ssh", "-F", str(self.ssh_config), *more, "--", host, command]
        env = {**os.environ, **self.environ}
        return subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )

    def boot(self) -> None:
        """Start, at once, all hosts that are off."""
        pids = self.ask("boot", hosts=[host.number for host in self.hosts])["pids"]
        for host in self.hosts:
            host.pid = pids[str(host.number)]

    def power_off(self) -> None:
        """Cut the power of all hosts at once."""
        self.ask("power_off", hosts=[host.number for host in self.hosts])
        for host in self.hosts:
            host.pid = None

    def reset(self) -> None:
        """Make all hosts new: no processes, empty disks, good network lines; keys and names stay."""
        self.power_off()
        self.client.join()
        self.ask("renew")
        for host in self.hosts:
            disks.empty(host.folder)
            disks.write_etc(host.folder, self._names, (self.client_folder / "key.pub").read_text())
        self.boot()

    def stop(self) -> None:
        """Remove the cluster, unless it is removed already."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self.root)

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Send the keeper a command and return the answer. Raises RuntimeError with the keeper's error."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
            self._process.stdin.flush()
            return self._answer(what)

    def _answer(self, what: str) -> dict[str, Any]:
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line or '{"error": "it has died"}')
        if "error" in answer:
            raise RuntimeError(f"the hosts' keeper cannot {what}: {answer['error']}")
        return answer


def missing() -> str | None:
    """Return the reason why this machine cannot have hosts, or None if it can."""
    if os.geteuid() != 0:
        return "hosts in namespaces need root"
    lacking = [package for tool, package in NEEDS.items() if shutil.which(tool, path=SYSTEM_PATH) is None]
    if lacking:
        return f"hosts in namespaces need the packages {' '.join(lacking)}"
    made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return f"hosts in namespaces need the right to make them: {made.stderr.strip()}" if made.returncode else None


def _write_disks(root: Path, names: dict[str, str], is_home_shared: bool) -> None:
    (root / "client").mkdir(parents=True)
    keys = [client.make_key(root / "client/key")]
    assert keys[0].wait() == 0
    authorized = (root / "client/key.pub").read_text()
    disks.make_etc(root / "etc")
    for name in names:
        disks.lay_out(root / name, root / "home" if is_home_shared else None)
        disks.write_etc(root / name, names, authorized)
        keys.append(client.make_key(root / name / "etc/ssh/host_key"))
    assert not any(key.wait() for key in keys)
    public = {(name, to): (root / name / "etc/ssh/host_key.pub").read_text() for name, to in names.items()}
    client.write_known_hosts(root / "client", public)


def _start_keeper(root: Path, names: dict[str, str], layout: Layout) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-m", "doubles.sshhosts.keeper"],
        env={"PATH": SYSTEM_PATH, "PYTHONPATH": str(doubles.process.TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,  # a terminal's ctrl-C is for the test
    )
    spec = {
        "parent": os.getpid(),
        "layout": asdict(layout),
        "hosts": [{"name": name, "address": f"{to}/16", "folder": str(root / name)} for name, to in names.items()],
        "relay_log": str(root / "relay.log"),
        "hardware": [f"{HARDWARE}:{FIRST_HOST + number:02x}" for number in range(len(names))],
        "bridge_hardware": f"{HARDWARE}:ff",
        "client_hardware": f"{HARDWARE}:01",
        "client_address": f"{NETWORK}.1/16",
    }
    process.stdin.write(json.dumps(spec) + "\n")
    process.stdin.flush()
    return process

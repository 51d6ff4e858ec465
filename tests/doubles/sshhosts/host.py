"""One host from a test's side: its files and processes, and faults of its power and its network line."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from doubles.sshhosts.disks import USERS
from doubles.sshhosts.machine import BIN, SSHD, SSHD_PID, SYSTEM_PATH

Ask = Callable[..., dict[str, Any]]  # asks the keeper: a command and its arguments
END_S = 10.0
SSHD_LINES = ("sshd:", "sshd-session:", "sshd-auth:", "/usr/sbin/sshd", "/usr/lib/openssh/sshd")  # the last: from 9.8


class Port:
    """A port of the bridge, for a host or for the client."""

    def __init__(self, ask: Ask, port: str) -> None:
        self._ask, self._port = ask, port

    def cut(self) -> None:
        """Pull the cable: no frame passes, and the interface has no carrier."""
        self._ip(f"link set {self._port} down\n")

    def blackhole(self) -> None:
        """Lose every frame while the interface looks well: connections are half open."""
        self._ask("straighten", port=self._port)
        self._ip(f"link set {self._port} up nomaster\n")

    def isolate(self) -> None:
        """Lose every frame to and from other isolated ports; the client is not isolated and stays reachable."""
        self._ip(f"link set {self._port} type bridge_slave isolated on\n")

    def slow(self, delay_ms: float = 0.0, loss: float = 0.0, rate_mbit_s: float | None = None) -> None:
        """Make the line bad, each way: a delay, a share of frames lost (0 to 1), a rate in megabits per second."""
        rate = None if rate_mbit_s is None else rate_mbit_s * 1e6
        self._ask("slow", port=self._port, quality={"delay_s": delay_ms / 1e3, "loss": loss, "rate_bit_s": rate})

    def join(self) -> None:
        """Restore a good line after any earlier fault."""
        self._ask("straighten", port=self._port)
        self._ip(f"link set {self._port} up master br0\nlink set {self._port} type bridge_slave isolated off\n")

    def _ip(self, orders: str) -> None:
        self._ask("ip", orders=orders)


class Host(Port):
    """A host of a cluster. `folder` has the host's disks and its part of /etc."""

    def __init__(self, ask: Ask, number: int, folder: Path, address: str) -> None:
        super().__init__(ask, f"v{number}")
        self.number, self.name, self.address, self.folder = number, folder.name, address, folder
        self.home = self.home_of("root")
        self.bin = folder / "opt/bin"  # first in the PATH of every session: for stand-ins of programs
        self.pid: int | None = None  # of the first process, None while the host is off

    def __repr__(self) -> str:
        return f"Host({self.name})"

    def home_of(self, user: str) -> Path:
        """Return the home folder of root, alice or bob, as a path on this machine."""
        return self.folder / USERS[user][1].lstrip("/")

    def path(self, inside: str) -> Path:
        """Return a path of the running host as a path on this machine; valid until the host's next boot."""
        return Path(f"/proc/{self._first()}/root", inside.lstrip("/"))

    def run(self, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60) -> str:
        """Return the output of a command, run by root on the host without sshd; raise CalledProcessError on failure."""
        done = subprocess.run(
            [*self._inside(), "sh", "-c", 'cd && exec "$@"', "sh", *argv],
            env={"PATH": f"{BIN}:{SYSTEM_PATH}", "HOME": USERS["root"][1]},
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, [*argv], done.stdout, done.stderr)
        return done.stdout

    def processes(self) -> list[tuple[int, str]]:
        """Return the host's processes, without init and sshd: process number on the host, and command line."""
        return [(pid, line) for pid, line, is_sshd in self._all() if not is_sshd]

    def kill(self, pid: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a process, by the process number on the host."""
        self.run(["/bin/kill", f"-{int(signum)}", str(pid)])

    def power_off(self) -> None:
        """Take the link away, then kill all processes; the disks stay."""
        self._ask("power_off", hosts=[self.number])
        self.pid = None

    def boot(self) -> None:
        """Start the host, with a good line; return when sshd listens."""
        self.pid = self._ask("boot", hosts=[self.number])["pids"][str(self.number)]

    def kill_sshd(self, *, with_sessions: bool = False) -> None:
        """Kill the server, so that connections are refused; the sessions keep running unless `with_sessions`."""
        listener = int(self.path(SSHD_PID).read_text())
        pids = [pid for pid, _, is_sshd in self._all() if is_sshd] if with_sessions else [listener]
        self.run(["sh", "-c", 'kill -9 "$@" || true', "sh", *map(str, pids)])  # a session may be ending by itself
        end = time.monotonic() + END_S
        while self._runs(listener):  # until its end, the kernel accepts connections for the server
            assert time.monotonic() < end, f"{self.name}: the killed sshd does not end"
            time.sleep(0.005)
        self.path(SSHD_PID).unlink()

    def start_sshd(self) -> None:
        """Start the server if it does not run; return when it listens. The configuration is in folder/etc/ssh."""
        if self.path(SSHD_PID).exists():
            return
        self.run(SSHD)
        end = time.monotonic() + END_S
        while not self.path(SSHD_PID).exists():
            assert time.monotonic() < end, (self.folder / "var/log/sshd.log").read_text()
            time.sleep(0.005)

    def resize(self, place: str, mib: int) -> None:
        """Change the size of /dev/shm (until the next boot) or of /data (permanently)."""
        self.run(["mount", "-o", f"remount,size={mib}m", place])

    def _first(self) -> int:
        assert self.pid is not None, f"{self.name} is off"
        return self.pid

    def _inside(self) -> list[str]:
        return ["nsenter", "-t", str(self._first()), "-m", "-u", "-i", "-n", "-p", "--"]

    def _runs(self, pid: int) -> bool:
        """Return whether the host's process still runs; a zombie has closed its sockets."""
        try:
            state = (self.path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state not in "ZX"

    def _all(self) -> list[tuple[int, str, bool]]:
        """Return the host's processes: number, command line, and whether the process belongs to sshd."""
        proc, found = self.path("/proc"), []
        for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
            try:
                line = (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if line and pid != 1:  # an empty line: a zombie
                found.append((pid, line, line.startswith(SSHD_LINES)))
        return found

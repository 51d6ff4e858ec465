"""The parent process of all hosts of a cluster: `python -S -m doubles.sshhosts.keeper`, driven by cluster.py.

The keeper holds the network (a bridge, a port for each host and for the client) and the small disks, boots hosts and
cuts their power. It reads a line of JSON from its input and answers with a line. The end of its input, or its parent's
death, ends the keeper and all processes below.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from doubles import namespaces
from doubles.sshhosts import machine, relay

BRIDGE = "br0"
CLIENT_PORT = "vc"
SAID_MAX = 2000


class Keeper:
    """The running hosts, and the relays between the hosts and the bridge."""

    def __init__(self, ask: dict[str, Any]) -> None:
        layout = machine.Layout(**ask["layout"])
        self.specs = [machine.Spec(**spec, layout=layout) for spec in ask["hosts"]]
        self.relay_log: str = ask["relay_log"]
        self.hardware: list[str] = ask["hardware"]
        self.pids: dict[int, int] = {}
        self.relays: dict[str, int] = {}
        self._own_processes = os.open("/proc/self/ns/pid", os.O_RDONLY)
        namespaces.unshare(namespaces.CLONE_NEWNET | namespaces.CLONE_NEWNS)
        namespaces.mount(None, "/", None, namespaces.MS_REC | namespaces.MS_PRIVATE)
        self._mount_data()
        # The client's address is on a separate port, which tests can cut; no other interface may answer for it.
        Path("/proc/sys/net/ipv4/conf/all/arp_ignore").write_text("1")
        for name in ("all", "default"):
            off = Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6")
            if off.exists():
                off.write_text("1")
        # A fixed hardware address: a bridge's default is the least of its ports' addresses, and changes with the hosts.
        orders = f"link set lo up\nlink add {BRIDGE} address {ask['bridge_hardware']} type bridge\n"
        orders += f"link set {BRIDGE} up\n"
        orders += f"link add {CLIENT_PORT} type veth peer name eth0 address {ask['client_hardware']}\n"
        orders += f"addr add {ask['client_address']} dev eth0\nlink set eth0 up\n"
        orders += f"link set {CLIENT_PORT} master {BRIDGE} up\n"
        self.ip({"orders": orders})

    def ip(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Run orders in the form of `ip -batch`."""
        env = {"PATH": machine.SYSTEM_PATH}
        done = subprocess.run(["ip", "-batch", "-"], input=ask["orders"], capture_output=True, text=True, env=env)
        if done.returncode:
            raise RuntimeError(f"ip: {done.stderr.strip()} in {ask['orders']!r}")
        return {}

    def boot(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Start hosts, all at once; return their first processes when every sshd listens."""
        numbers: list[int] = [number for number in ask["hosts"] if number not in self.pids]
        pipes = {number: self._fork(number) for number in numbers}
        self._heard(pipes, b"1")
        orders = ""
        for number in numbers:
            pid = self.pids[number]
            orders += f"link add v{number} type veth peer name eth0 address {self.hardware[number]} netns {pid}\n"
            orders += f"link set v{number} master {BRIDGE} up\n"
        self.ip({"orders": orders})
        for _, go in pipes.values():
            os.write(go, b"1")
            os.close(go)
        self._heard(pipes, b"2")
        for ready, _ in pipes.values():
            os.close(ready)
        return {"pids": self.pids}

    def power_off(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Take the links away, then kill every process of the hosts."""
        numbers: list[int] = [number for number in ask["hosts"] if number in self.pids]
        for number in numbers:
            self.straighten({"port": f"v{number}"})
        self.ip({"orders": "".join(f"link del v{number}\n" for number in numbers)})
        self.kill(numbers)
        return {}

    def kill(self, numbers: list[int]) -> None:
        """Kill every process of the hosts."""
        for number in numbers:
            os.kill(self.pids[number], signal.SIGKILL)
        for number in numbers:
            os.waitpid(self.pids.pop(number), 0)  # returns when all processes of the host have ended

    def slow(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Put a relay between a port and the bridge."""
        port = ask["port"]
        self.straighten({"port": port})
        ends = f"r{port}", f"s{port}"
        orders = f"link add {ends[0]} type veth peer name {ends[1]}\nlink set {ends[0]} up\n"
        self.ip({"orders": f"{orders}link set {ends[1]} master {BRIDGE} up\nlink set {port} nomaster\n"})
        wires = relay.plug(port), relay.plug(ends[0])
        pid = os.fork()
        if pid == 0:
            relay.become(wires, relay.Quality(**ask["quality"]), self.relay_log)
        for wire in wires:
            wire.close()
        self.relays[port] = pid
        return {}

    def straighten(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Remove the relay of a port, if present; afterwards the port is not on the bridge."""
        port = ask["port"]
        pid = self.relays.pop(port, None)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.ip({"orders": f"link del r{port}\n"})
        return {}

    def renew(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Empty the small disks; all hosts are off."""
        for spec in self.specs:
            namespaces.unmount(f"{spec.folder}/data")
        self._mount_data()
        return {}

    def _mount_data(self) -> None:
        for spec in self.specs:  # mounted by the keeper, so that the disk outlives the host's boots
            size = f"mode=1777,size={spec.layout.data_mib}m"
            namespaces.mount("tmpfs", f"{spec.folder}/data", "tmpfs", 0, size)

    def _fork(self, number: int) -> tuple[int, int]:
        """Start the first process of a host; return the pipe that reports its state and the pipe that sends it on."""
        ready, go = os.pipe(), os.pipe()
        namespaces.unshare(namespaces.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            machine.become(self.specs[number], ready[1], go[0])
        namespaces.setns(self._own_processes, namespaces.CLONE_NEWPID)  # leave this host's namespace
        os.close(ready[1])
        os.close(go[0])
        self.pids[number] = pid
        return ready[0], go[1]

    def _heard(self, pipes: dict[int, tuple[int, int]], word: bytes) -> None:
        for number, (ready, _) in pipes.items():
            if os.read(ready, 1) != word:
                spec = self.specs[number]
                said = Path(spec.folder, "console.log").read_text()[-SAID_MAX:]
                for one in pipes:
                    with contextlib.suppress(RuntimeError):  # the host may have no link yet
                        self.ip({"orders": f"link del v{one}\n"})
                self.kill(list(pipes))
                raise RuntimeError(f"{spec.name} did not start: {said}")


def main() -> None:
    """Serve until the input ends."""
    namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
    first = json.loads(sys.stdin.readline() or "null")
    if first is None or os.getppid() != first["parent"]:
        sys.exit("the parent is gone")
    keeper: Keeper | None = None
    ask: dict[str, Any] = {"do": "start"}
    while True:
        try:
            if keeper is None:
                keeper, answer = Keeper(first), {}
            else:
                answer = getattr(keeper, ask["do"])(ask)
        except Exception as error:
            answer = {"error": f"{ask['do']}: {error!r}"}
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line or keeper is None:
            break
        ask = json.loads(line)
    if keeper is not None:
        keeper.kill(list(keeper.pids))  # the network ends with this process


if __name__ == "__main__":
    main()

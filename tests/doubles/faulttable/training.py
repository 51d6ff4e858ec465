"""A job that trains over ssh on the hosts of a cluster, observed through the hosts' disks and /proc.

Therefore every fault leaves the job observable: even a host without a network line can be read.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.entrypoints import processes
from doubles.process import TESTS
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.host import Host

COMMAND = str(Path(sys.executable).with_name("cloudtrain"))
CHANNEL = "i = sys.stdin.buffer"  # in the command line of the remote end of a channel, which ssh holds
CALL_S = 120.0

# Counts ten steps a second, each with a collective, and saves every twentieth; a later start continues from rank 0's
# newest save. The script ends when a file `end` is in the home folder of a rank.
TRAIN = """
import os, sys, time
from pathlib import Path

def age_s(pid):
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK")

import torch, torch.distributed as dist
from cloudtrain.entrypoints.rank import heartbeat

torch_s, restart = age_s(os.getppid()), os.environ["CLOUDTRAIN_RESTART"]  # torchrun's import of torch, then its own
print(f"imported {torch_s:.2f} restart {restart} ", flush=True)
dist.init_process_group("gloo")
rank, size_mb = dist.get_rank(), int(os.environ.get("SAVE_MB", "0"))
folder = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])

def save(step):
    partial = folder / "step.tmp"
    try:
        with partial.open("wb") as file:
            torch.save({"step": step, "blob": torch.zeros(size_mb << 18)}, file)
        partial.rename(folder / f"step-{step:06d}.pt")
    except Exception:
        print(f"cannot save at {time.time():.3f} ", flush=True)
        raise
    for old in sorted(folder.glob("step-*.pt"))[:-10]:
        old.unlink()

saved = sorted(folder.glob("step-*.pt")) if rank == 0 else []
step = torch.tensor([torch.load(saved[-1])["step"] if saved else 0])
dist.broadcast(step, 0)
step = int(step)
print(f"begins at {step} restart {restart} ", flush=True)
end = torch.zeros(1)
while not end.item():
    end[0] = (Path.home() / "end").exists()
    dist.all_reduce(end)
    step += 1
    heartbeat.beat()
    print(f"step {step} restart {restart} ranks {dist.get_world_size()} at {time.time():.3f} ", flush=True)
    if rank == 0 and step % 20 == 0:
        save(step)
    time.sleep(0.1)
dist.barrier()
os._exit(0)
"""


class Step(NamedTuple):
    """A step of rank 0: its number, its start of the job (0: the first), the number of ranks, the unix time."""

    number: int
    restart: int
    ranks: int
    time_s: float


class Process(NamedTuple):
    """A process on a host: its number on the host and its start, in ticks since the machine's boot."""

    pid: int
    started: int
    line: str = ""


class Look(NamedTuple):
    """A poll of the job's state: its times, and the state, None if no host answered."""

    asked_s: float
    time_s: float
    state: dict[str, Any] | None
    error: str | None


@dataclass
class Training:
    """A submitted job. `root` holds the client's files: home, project, sockets."""

    cluster: Cluster
    root: Path
    ref: dict[str, Any] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    follower: subprocess.Popen[str] | None = None  # `logs -f`, if the fault is about it

    @property
    def hosts(self) -> list[Host]:
        """Return the hosts in node order."""
        by_name = {host.name: host for host in self.cluster.hosts}
        return [by_name[node["host"]["name"]] for node in self.ref["nodes"]]

    def call(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end."""
        return subprocess.run(
            [COMMAND, *args],
            cwd=self.root / "project",
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CALL_S,
        )

    def start(self, *args: str, stdout: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Start a command line."""
        return subprocess.Popen(
            [COMMAND, *args],
            cwd=self.root / "project",
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    def environment(self) -> dict[str, str]:
        """Return the environment of a user who reaches the hosts, with a home folder for this job only."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("CLOUDTRAIN_", "PYTEST_"))}
        mine = {"CLOUDTRAIN_HOME": str(self.root / "home"), "XDG_RUNTIME_DIR": str(self.root)}
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        return {**clean, **self.cluster.environ, **mine, "PYTHONPATH": path}

    def status(self) -> dict[str, Any]:
        """Return the output of a new `status --json`."""
        done = self.call("status", "last", "--json")
        return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr}

    def folder(self, node: int) -> Path | None:
        """Return the node's folder as a path of this machine, None if unreadable: in the memory of a dead host."""
        root, host = self.ref["nodes"][node]["root"], self.hosts[node]
        path = host.path(root) if host.pid is not None else Path(host.folder, root.lstrip("/"))
        return path if path.is_dir() else None

    def log(self, node: int, name: str) -> str:
        """Return the text of a log file of the node, without an incomplete last line."""
        folder = self.folder(node)
        try:
            text = (folder / "log" / name).read_text(errors="replace") if folder else ""
        except OSError:
            return ""
        return text[: text.rfind("\n") + 1]

    def said(self, pattern: str) -> list[re.Match[str]]:
        """Return all matches of the pattern in rank 0's logs, in the order of the nodes."""
        logs = (self.log(node, "rank-0.log") for node in range(len(self.hosts)))
        return [found for text in logs for found in re.finditer(pattern, text)]

    def steps(self) -> list[Step]:
        """Return rank 0's steps up to now, in the order of time."""
        found = self.said(r"step (\d+) restart (\d+) ranks (\d+) at ([\d.]+) ")
        return sorted((Step(int(m[1]), int(m[2]), int(m[3]), float(m[4])) for m in found), key=lambda s: s.time_s)

    def imported_s(self, restart: int) -> float:
        """Return the seconds from torchrun's start until rank 0 has imported torch; torchrun imports torch, too."""
        found = self.said(rf"imported ([\d.]+) restart {restart} ")
        return float(found[-1][1]) if found else 0.0

    def causes(self) -> list[str]:
        """Return the causes of all restarts, as written by the node that knows of the most."""
        told = []
        for node in range(len(self.hosts)):
            folder = self.folder(node)
            if folder is not None and (folder / "exit.json").exists():
                ended = json.loads((folder / "exit.json").read_text())
                told.append([cause["message"] for cause in ended["restarted_after"]])
        return max(told, key=len, default=[])

    def agent(self, node: int) -> int:
        """Return the process number of the agent on its host."""
        folder = self.folder(node)
        assert folder is not None
        return int(json.loads((folder / "state.json").read_text())["pid"])

    def keeper(self, node: int) -> int:
        """Return the process that starts the node's agent again, 1 without such a process."""
        stat = self.hosts[node].path(f"/proc/{self.agent(node)}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    def one(self, node: int, what: str) -> int:
        """Return the process number of the node's `boot`, `elastic` (torchrun) or `worker` (a rank)."""
        begin = re.compile(
            rf"\S+( -u)? -m cloudtrain\.entrypoints\.agent\.{what}\b"
        )  # torchrun's line ends with its worker's
        return next(process.pid for process in ours(self.hosts[node]) if begin.match(process.line))

    def end(self) -> None:
        """Let the ranks end after the current step."""
        for host in self.hosts:
            (host.home / "end").touch()


def ours(host: Host) -> list[Process]:
    """Return the host's processes, without init, sshd and the ends of ssh channels; empty if the host is off."""
    if host.pid is None:
        return []
    found = []
    for pid, line in host.processes():
        try:
            fields = host.path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if CHANNEL not in line and fields[0] != "Z":
            found.append(Process(pid, int(fields[19]), line))
    return found


def until(condition: Callable[[], Any], timeout_s: float, what: str, every_s: float = 0.1) -> Any:
    """Return the condition's first true value. Raises TimeoutError with `what`."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(every_s)
    return value


@contextmanager
def training(cluster: Cluster, config: str) -> Iterator[Training]:
    """Submit the job and yield it after its first step; at the end remove its processes and files from this machine."""
    root = Path(tempfile.mkdtemp(prefix="ct-", dir="/tmp"))  # a short path, for the sockets
    one = Training(cluster, root)
    try:
        (root / "project").mkdir()
        (root / "project" / "train.py").write_text(TRAIN)
        (root / "project" / "cloudtrain.yaml").write_text(f"name: faults\nbackend: ssh\nscript: train.py\n{config}")
        done = one.call("submit", "-d", "-y")
        if done.returncode != 0:
            raise RuntimeError(f"submit: exit code {done.returncode}\n{done.stderr}")
        one.ref = json.loads(next((root / "home" / "ssh").glob("*/attempt-1.json")).read_text())
        until(one.steps, CALL_S, "the first step")
        with _looks(one):
            yield one
    finally:
        for pid in processes.with_environment(CLOUDTRAIN_HOME=str(root / "home")):
            processes.kill(pid, signal.SIGKILL)
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _looks(one: Training) -> Iterator[None]:
    """Run a process that polls all the time, and append its answers to `one.looks`."""
    with (one.root / "poller.txt").open("w") as complaint:
        process = subprocess.Popen(
            [sys.executable, "-m", "doubles.faulttable.poller"],
            env=one.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaint,
            text=True,
        )
    assert process.stdout is not None
    process.stdin.write(json.dumps(one.ref))
    process.stdin.close()

    def read(lines: Iterator[str]) -> None:
        for line in lines:
            told: Mapping[str, Any] = json.loads(line)
            one.looks.append(Look(told["asked_s"], told["time_s"], told.get("state"), told.get("error")))

    reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()

"""From the command to the first training step: `cloudtrain submit` against plain torchrun, the same script.

python benchmarks/first_step.py          here
python benchmarks/first_step.py ssh      on two hosts with sshd in namespaces, torchrun started by hand over ssh
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from report import Report
from sandbox import COMMAND, Sandbox, sandbox

from doubles.sshhosts.cluster import Cluster, missing

ROUNDS = 5
TARGET = 1.15
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

SCRIPT = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(4, 8)).square().mean()
loss.backward()
optimizer.step()
if dist.get_rank() == 0:
    print("first step of", dist.get_world_size(), "ranks", flush=True)
dist.barrier()
os._exit(0)
"""


def run(rounds: int = ROUNDS) -> Report:
    """Measure the three ways on this machine."""
    report = Report("From the command to the first step: a script of 2 ranks, seconds of wall clock")
    with sandbox() as box:
        box.write("name: first\nscript: train.py\nresources: {instances: 2}\n", train=SCRIPT)
        ways: dict[str, Callable[[], list[list[str]]]] = {
            "cloudtrain submit, 2 instances": lambda: [[COMMAND, "submit"]],
            "torchrun, 2 nodes": _two_torchruns,
            "torchrun, 1 node x 2": lambda: [[TORCHRUN, "--standalone", "--nproc-per-node=2", "train.py"]],
        }
        _measure(report, box, ways, rounds)
        report.count("processes left", box.processes_left(), 0)
    return report


def run_on_hosts(rounds: int = ROUNDS) -> Report:
    """Measure a submit to two hosts, and two torchruns over ssh beside a script that is there already."""
    if reason := missing():
        raise SystemExit(reason)
    report = Report("From the command to the first step on two hosts over ssh, seconds of wall clock")
    with tempfile.TemporaryDirectory(prefix="cloudtrain-bench-") as folder:
        cluster = Cluster.start(2, Path(folder) / "hosts")
        try:
            config = (
                "name: first\nenv: {OMP_NUM_THREADS: '1'}\nbackend: ssh\nscript: train.py\nresources: {instances: 2}\n"
            )
            config += f"ssh: {{hosts: [h0, h1], ssh_config: {cluster.ssh_config}, python: {sys.executable}}}\n"
            for host in cluster.hosts:
                host.run(["sh", "-c", "cat > /root/train.py"], stdin=SCRIPT)
            with sandbox(cluster.environ) as box:
                box.write(config, train=SCRIPT)
                ways: dict[str, Callable[[], list[list[str]]]] = {
                    "cloudtrain submit, 2 hosts": lambda: [[COMMAND, "submit", "-y"]],
                    "torchrun over ssh, 2 hosts": lambda: _over_ssh(cluster),
                }
                _measure(report, box, ways, rounds)
        finally:
            cluster.stop()
    report.notes.append("submit finds ssh's connections open, as of the round before; by hand each login is new")
    return report


def _measure(report: Report, box: Sandbox, ways: Mapping[str, Callable[[], list[list[str]]]], rounds: int) -> None:
    """Measure all ways in turn, so that a slow moment of the machine meets them all."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, commands in ways.items():
            seconds = _first_step_s(box, commands())
            if round_:  # the first one fills the page cache
                took[name].append(seconds)
    for name, seconds in took.items():
        report.timing(name, f"{statistics.median(seconds):.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})")
    ours, *others = took
    for name in others:
        ratio = statistics.median(a / b for a, b in zip(took[ours], took[name], strict=True))
        shortest = min(took[ours]) / min(took[name])
        words = f"{ratio:.2f}x  (shortest to shortest {shortest:.2f}x)"
        report.timing(f"ratio to {name}", words, f"<= {TARGET}x", ok=ratio <= TARGET)
    report.notes.append("a torchrun that begins before node 0's store listens sleeps half a second: not in all rounds")
    report.notes.append(f"medians of {rounds} rounds, all in turn; ratios are medians of each round's ratio")


def _over_ssh(cluster: Cluster) -> list[list[str]]:
    """Return the commands that a user types in two terminals."""
    head, port = cluster.hosts[0].address, 29500
    meet = f"--nnodes=2 --nproc-per-node=1 --master-addr={head} --master-port={port}"
    ssh = ["ssh", "-F", str(cluster.ssh_config), "--"]
    here = "cd /root && OMP_NUM_THREADS=1"
    return [
        [*ssh, host.name, f"{here} {TORCHRUN} {meet} --node-rank={rank} train.py"]
        for rank, host in enumerate(cluster.hosts)
    ]


def _two_torchruns() -> list[list[str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meet = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [[TORCHRUN, *meet, f"--node-rank={rank}", "train.py"] for rank in range(2)]


def _first_step_s(box: Sandbox, commands: list[list[str]]) -> float:
    """Return the seconds from the start to the line on the first process' output; wait for the end of all."""
    begin = time.perf_counter()
    running: list[subprocess.Popen[str]] = [box.start_program(command) for command in commands]
    out = running[0].stdout
    assert out is not None
    line = next((line for line in out if "first step of 2 ranks" in line), None)
    seconds = time.perf_counter() - begin
    complaints = [process.communicate(timeout=120)[1] for process in running]
    if line is None or any(process.returncode for process in running):
        raise RuntimeError(f"{commands[0]} did not train:\n" + "\n".join(complaints))
    return seconds


if __name__ == "__main__":
    (run_on_hosts() if "ssh" in sys.argv[1:] else run()).show()

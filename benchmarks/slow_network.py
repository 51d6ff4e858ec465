"""Methods that send less on a slow network: four hosts with 100 Mbit/s each, a killed worker, a resume, and a table.

    python benchmarks/slow_network.py [--rate MBIT] [--steps N] [--only WORDS] [--page FILE]

Needs root, Debian's openssh-server, and the kernel's token bucket (tc tbf): real sshd and torchrun in namespaces of
this machine, each host's line limited in both directions. Every job trains examples/digits; a worker of the second
host gets SIGKILL at half of the steps, and the job continues by itself. The seconds of a step are the median of the
step events, and include the 2 cores that four ranks share. `compare` writes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from report import Report
from sandbox import Sandbox, sandbox, wait_until

from doubles.sshhosts.cluster import Cluster, missing
from doubles.sshhosts.host import Host

HOSTS, RATE_MBIT, STEPS = 4, 100, 320
TASK = Path(__file__).parents[1] / "examples" / "digits" / "task.py"
METHODS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "local 16": {"strategy": "local", "local": {"period": 16}},
    "local 16, outer": {"strategy": "local", "local": {"period": 16, "outer": {"lr": 0.7, "momentum": 0.6}}},
    "threshold 1 %": {"compression": "threshold"},
    "top-k 1 %": {"compression": "topk"},
    "powersgd": {"compression": "powersgd"},
    "async": {"strategy": "async", "server": {"lease_s": 10}},
}
HEAD = ("method", "step", "of ddp's", "bytes a step", "accuracy", "job", "after the kill")


@dataclass(frozen=True)
class Trained:
    """A job that has ended: seconds of a step and of the job, bytes a step, accuracy, and the events after the kill."""

    job: str
    step_s: float
    job_s: float
    bytes_sent: float
    accuracy: float
    after: str


def run(methods: dict[str, dict[str, Any]], rate_mbit: int, steps: int, page: Path | None) -> Report:
    """Train with each method; return the table."""
    report = Report(f"Four hosts, {rate_mbit} Mbit/s each, digits, {steps} steps, a worker killed", HEAD)
    if reason := missing():
        report.notes.append(f"left out: {reason}")
        return report
    folder = Path(tempfile.mkdtemp(prefix="ct-hosts-"))
    cluster = Cluster.start(HOSTS, folder / "hosts")
    try:
        for host in cluster.hosts:
            _limit(host, rate_mbit)
        with sandbox(cluster.environ) as box:
            shutil.copy(TASK, box.folder / "task.py")
            found: dict[str, Trained] = {}
            for name, settings in methods.items():
                found[name] = _train(box, cluster, settings, steps)
                print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
            base = found.get("ddp")
            for name, one in found.items():
                ratio = f"{one.step_s / base.step_s:.2f}x" if base else ""
                cells = (f"{1e3 * one.step_s:.0f} ms", ratio, f"{one.bytes_sent:,.0f}", f"{one.accuracy:.4f}")
                report.rows.append((name, *cells, f"{one.job_s:.0f} s", one.after))
            if page is not None:
                shutil.copy(_page(box, [one.job for one in found.values()]), page)
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return report


def _limit(host: Host, rate_mbit: int) -> None:
    """Limit what the host sends: with all hosts limited, each line is limited in both directions."""
    inside = ["nsenter", f"--net=/proc/{host.pid}/ns/net", "--", "tc", "qdisc", "add", "dev", "eth0", "root"]
    subprocess.run([*inside, "tbf", "rate", f"{rate_mbit}mbit", "burst", "64kb", "latency", "50ms"], check=True)


def _train(box: Sandbox, cluster: Cluster, settings: dict[str, Any], steps: int) -> Trained:
    """Submit the job, kill a worker of the second host at half of the steps, and return the job's end."""
    every = steps // 10 // 16 * 16
    training = {
        "global_batch_size": 64,
        "max_steps": steps,
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "seed": 1,
        "log_every": 16,
        "eval_every": 10 * every,
        **settings,
    }
    config = {
        "name": "digits",
        "backend": "ssh",
        "task": "task.py",
        "params": {"shift": False, "dropout": 0.0},
        "resources": {"instances": HOSTS},
        "training": training,
        "checkpoint": {"every_steps": every},
        "ssh": {
            "hosts": [host.name for host in cluster.hosts],
            "ssh_config": "${SSH_CONFIG}",
            "python": "${SSH_PYTHON}",
        },
    }
    (box.folder / "cloudtrain.yaml").write_text(json.dumps(config))
    begin_s = time.monotonic()
    submitted = json.loads(box.call("submit", "-y", "-d", "--json"))
    job = submitted["job"]
    wait_until(lambda: (_progress(box, job).get("step") or 0) >= steps // 2, 300, 0.5)
    killed = _kill_worker(cluster.hosts[1], is_async=settings.get("strategy") == "async")
    box.call("wait", job)
    job_s = time.monotonic() - begin_s
    events = [fields for line in box.call("logs", job, "--raw").splitlines() if (fields := _event(line))]
    after = [event["e"] for event in events if event["e"] == "restart"]
    resumed = next((event["step"] for event in events if event["e"] == "restart"), None)
    return Trained(
        job=job,
        step_s=statistics.median(event["step_s"] for event in events if event["e"] == "step"),
        job_s=job_s,
        bytes_sent=statistics.median(event["bytes_sent"] for event in events if "bytes_sent" in event),
        accuracy=next(event["metrics"]["accuracy"] for event in reversed(events) if event["e"] == "eval"),
        after=f"killed {killed}; " + (f"resumed from step {resumed}" if after else "training went on"),
    )


def _progress(box: Sandbox, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box.call("status", job, "--json"))
    assert found["state"] in ("pending", "running"), found
    return found.get("progress") or found


def _kill_worker(host: Host, *, is_async: bool) -> str:
    """Send SIGKILL to the process that computes on the host; return its kind."""
    wanted = b"parameter_server.worker" if is_async else b"agent.worker"
    kind = "the worker" if is_async else "the rank"
    space = Path(f"/proc/{host.pid}/ns/net").readlink()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            if wanted in words and (folder / "ns" / "net").readlink() == space:
                os.kill(int(folder.name), signal.SIGKILL)
                return kind
        except OSError:
            continue
    raise RuntimeError(f"{host.name} has no process of {wanted.decode()}")


def _event(line: str) -> dict[str, Any] | None:
    _, mark, tail = line.partition("  ::ct ")
    return json.loads(tail) if mark else None


def _page(box: Sandbox, jobs: list[str]) -> Path:
    """Return the page of `compare`."""
    path = box.folder / "compare.html"
    box.call("compare", *jobs, "-o", str(path))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rate", type=int, default=RATE_MBIT, help="of each host's line, in Mbit/s")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="", help="methods whose name has one of these words")
    parser.add_argument("--page", type=Path, help="write the comparison of all jobs to this file")
    asked = parser.parse_args()
    chosen = {k: v for k, v in METHODS.items() if any(word in k for word in asked.only.split(",")) or not asked.only}
    run(chosen, asked.rate, asked.steps, asked.page).show()

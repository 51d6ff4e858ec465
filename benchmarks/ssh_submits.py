"""Submits to one's own machines, against real sshd in namespaces, that are killed, interrupted, or lose a host.

What tests/backends/test_ssh_crash.py holds some times is held here a hundred: one job or none, known to the next
command, and no host held by nobody.
"""

from __future__ import annotations

import random
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from report import Report
from sandbox import Sandbox, sandbox

from cloudtrain.entrypoints import processes
from doubles.sshhosts.cluster import Cluster, missing

TESTS = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "backends" / "test_ssh_crash.py"))
SUBMIT = ("submit", "-d", "-y", "-f")
INTERRUPTED_SHARE = 0.3
GONE_S = 20.0
ACTIVE = ("pending", "running", "stopping")


@contextmanager
def bed() -> Iterator[tuple[Sandbox, Any]]:
    """Give a project whose jobs run nothing, and two hosts of its own."""
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="cloudtrain-bench-") as folder:
        cluster = Cluster.start(2, Path(folder) / "hosts")
        try:
            with sandbox(cluster.environ) as box:
                yield box, TESTS["Bed"](cluster, box.folder)
                box.stop_all()
                for pid in box.processes():  # masters
                    processes.kill(pid, signal.SIGKILL)
        finally:
            cluster.stop()


def killed(count: int = 100) -> Report:
    """Kill or interrupt submits at any moment; look what the next command makes of each."""
    report, seen = Report(f"ssh: {count} submits killed or interrupted at any moment"), Counter[str]()
    seed = random.Random(1)
    with bed() as (box, hosts):
        config = str(hosts.project() / "cloudtrain.yaml")
        begin_s = time.monotonic()
        box.call(*SUBMIT, config)
        whole_s = time.monotonic() - begin_s
        box.stop_all()
        known = {job["job"] for job in box.jobs()}
        for _ in range(count):
            process = box.start(*SUBMIT, config)
            time.sleep(seed.uniform(0.1, 1.1) * whole_s)
            process.send_signal(signal.SIGINT if seed.random() < INTERRUPTED_SHARE else signal.SIGKILL)
            _, said = process.communicate(timeout=120)
            seen.update({f"code {process.returncode}": 1, "tracebacks": int("Traceback" in said)})
            seen.update(_settled(box, hosts, known))
    report.count("more than one job", seen["several"], 0)
    report.count("jobs that have not begun on both hosts", seen["parts"], 0)
    report.count("processes left on a host", seen["left"], 0)
    report.count("hosts held by nobody", seen["held"], 0)
    report.count("tracebacks", seen["tracebacks"], 0)
    report.count("settled", seen["nothing"] + seen["never sent"] + seen["runs"], count)
    report.notes.append(", ".join(f"{kind} {number}" for kind, number in sorted(seen.items()) if number))
    return report


def _settled(box: Sandbox, hosts: Any, known: set[str]) -> Counter[str]:
    jobs = box.jobs()
    new = [job for job in jobs if job["job"] not in known]
    known.update(job["job"] for job in jobs)
    active = [job for job in new if job["state"] in ACTIVE]
    seen = Counter(several=int(len(new) > 1))
    seen.update({"runs" if active else "never sent" if new else "nothing": 1})
    if active:
        seen["parts"] += not _becomes(lambda: hosts.agents() == [2, 2], 60.0)
    box.stop_all()
    seen["left"] += not _becomes(lambda: hosts.agents() == [0, 0], GONE_S)
    seen["held"] += len(hosts.held())
    return seen


def races(count: int = 20) -> Report:
    """Let two submits want the same two hosts at once, named in opposite orders."""
    report, codes = Report(f"ssh: {count} times two submits at once for the same hosts"), Counter[tuple[int, ...]]()
    with bed() as (box, hosts):
        for _ in range(count):
            folders = hosts.project("h0", "h1", name="one"), hosts.project("h1", "h0", name="two")
            both = [box.start(*SUBMIT, str(folder / "cloudtrain.yaml")) for folder in folders]
            for each in both:
                each.communicate(timeout=180)
            codes[tuple(sorted(each.returncode for each in both))] += 1
            box.stop_all()
            _becomes(lambda: hosts.agents() == [0, 0], GONE_S)
    report.count("one got them, the other was told who has them", codes[0, 5], count)
    report.notes.append(", ".join(f"codes {told}: {number}" for told, number in codes.items()))
    return report


def away(count: int = 20) -> Report:
    """Cut a host's line, or its power, at any moment of a submit."""
    report, seen, seed = Report(f"ssh: {count} submits that lose a host on the way"), Counter[str](), random.Random(2)
    with bed() as (box, hosts):
        config = str(hosts.project() / "cloudtrain.yaml")
        for number in range(count):
            process = box.start(*SUBMIT, config)
            time.sleep(seed.uniform(0.3, 3.0))
            hosts.hosts[1].power_off() if number % 2 else hosts.hosts[1].cut()
            _, said = process.communicate(timeout=240)
            seen.update({f"code {process.returncode}": 1, "tracebacks": int("Traceback" in said)})
            if process.returncode == 7:
                seen["left on the other"] += not _becomes(lambda: hosts.agents()[0] == 0, GONE_S)
            hosts.hosts[1].boot() if number % 2 else hosts.hosts[1].join()
            box.stop_all()
            seen["left"] += not _becomes(lambda: hosts.agents() == [0, 0], 150.0)
    report.count("ended with 0 or 7", seen["code 0"] + seen["code 7"], count)
    report.count("left something on the other host", seen["left on the other"], 0)
    report.count("left something once the host was back", seen["left"], 0)
    report.count("tracebacks", seen["tracebacks"], 0)
    report.notes.append(", ".join(f"{kind} {number}" for kind, number in sorted(seen.items()) if number))
    return report


def _becomes(condition: Any, patience_s: float) -> bool:
    end_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    results = [killed(most), races(most // 5), away(most // 5)]
    for result in results:
        result.show()
    sys.exit(any(result.failed for result in results))

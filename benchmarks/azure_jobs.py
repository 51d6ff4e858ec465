"""Azure ML's side, against the stand-in that executes: what commands cost, that no job is lost, that no line is.

The stand-in (tests/doubles) serves the unmodified SDK under Azure's real host names, and misbehaves as services do: it
throttles, answers 500, drops and cuts connections, loses answers, lets tokens and addresses expire. It is no Azure: it
proves our side.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clouds import add_times, follow, portions, submit
from report import Report
from sandbox import Sandbox, sandbox

from doubles.azure.handle import Azure
from doubles.azure.names import GROUP, REGION, SUBSCRIPTION, WORKSPACE

WHERE = f"subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}, region: {REGION}"
CONFIG = f"""\
name: bench
backend: azureml
script: train.py
resources: {{instances: INSTANCES, instance_type: Standard_D4s_v5}}
limits: {{max_duration: 1h}}
azureml: {{{WHERE}, price_per_hour: 0.20 USD}}
"""


@contextmanager
def workspace(instances: int = 2) -> Iterator[tuple[Sandbox, Azure]]:
    """Give a project whose commands reach a stand-in of their own; its jobs run nothing."""
    azure = Azure.start()
    try:
        azure.settings(execute=False)
        with sandbox(azure.environ) as box:
            box.write(CONFIG.replace("INSTANCES", str(instances)), train="print('x')\n")
            yield box, azure
    finally:
        azure.stop()


def cost() -> Report:
    """Processor time of whole commands; and the calls that a submit makes."""
    report = Report("Azure ML: processor time of whole commands, medians of 7")
    with workspace() as (box, azure):
        box.call("submit", "-d", "-y", "--name", "told")
        azure.begin("told-1")
        azure.write_logs("told-1", 0, *(f"[0] line {n}" for n in range(1000)))
        lines = {
            "submit --dry-run": (0.25, ["submit", "--dry-run"]),
            "logs": (0.35, ["logs", "told"]),
            "status": (None, ["status", "told"]),
            "submit -d": (None, ["submit", "-d", "-y"]),
        }
        add_times(report, box, lines)
        before = len(azure.journal())
        box.call("submit", "-d", "-y")
        calls = [call["operation"] for call in azure.journal()[before:]]
        report.notes.append(f"a submit whose code is there already makes {len(calls)} calls: {', '.join(calls)}")
    return report


def submits(count: int = 20) -> Report:
    """Submit until each key has its job, while answers are lost, calls refused, and processes killed."""
    report = Report(f"Azure ML: {count} submits with lost answers, throttling and kill -9")
    tries: Counter[str] = Counter()
    with workspace() as (box, azure):
        for kind, every in (("lost", 3), ("drop", 5), ("throttle", 4), ("500", 6)):
            azure.fault("jobs.put", kind, every=every)
        azure.fault("codes.*", "lost", every=9)
        azure.fault("jobs.get", "500", every=5)
        jobs = [submit(box, number, (0.3, 3.0), tries) for number in range(count)]
        azure.clear_faults()
        listed = [job["job"] for job in box.jobs(active=True)]
        report.count("jobs at Azure", len(azure.jobs()), count)
        report.count("jobs in the list that are active", len(set(listed)), count)
        report.count("keys with a job of their own", len(set(jobs)), count)
        puts = len(azure.journal("jobs.put"))
        report.notes.append(f"{tries['all']} tries, {tries['killed']} killed, {puts} calls to start one")
    return report


def lines(total: int = 20_000, nodes: int = 16) -> Report:
    """Follow a job whose nodes write while Azure stumbles; count what came, and what was fetched for it."""
    report = Report(f"Azure ML: {total:,} lines of {nodes} nodes under all faults")
    each = total // nodes
    with workspace(nodes) as (box, azure):
        box.call("submit", "-d", "-y", "--name", "lines")
        azure.begin("lines-1")
        faults = (("throttle", 17), ("500", 11), ("drop", 13), ("sas_expired", 29), ("cut", 37))
        for kind, every in faults:
            azure.fault("blob.get", kind, every=every)
        for kind, every in (("throttle", 3), ("500", 4), ("drop", 5)):
            azure.fault("run.details", kind, every=every)
        sizes: list[int] = []
        took_s, peak_mb = follow(report, box, nodes, each, lambda look: _write(azure, nodes, each, look, sizes))
        reads = azure.journal("blob.get")
        whole = sum(call["sent"] for call in reads if call["status"] == 206 and call["outcome"] == "ok")
        ratio = whole / sum(sizes)
        report.timing("bytes fetched, of the files' own", f"{ratio:.2f}x", "<= 1.10x", ok=ratio <= 1.1)
        wrong = sum(call["outcome"] != "ok" and call["status"] != 416 for call in reads)
        report.notes.append(f"{took_s:.0f} s, {len(reads)} reads, {wrong} of them went wrong, peak {peak_mb} MB")
    return report


def _write(azure: Azure, nodes: int, each: int, look: Callable[[], None], sizes: list[int]) -> None:
    """Write each node's lines, and end the job; note the bytes."""
    for _, node, numbers in portions(nodes, each, look):
        now_s = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s * 1000) % 1000:03d}Z"
        texts = [f"{stamp} [{node}] line {n}" for n in numbers]
        azure.write_logs("lines-1", node, *texts)
        sizes.append(sum(len(text) + 1 for text in texts))
    look()
    azure.end("lines-1")


if __name__ == "__main__":
    results = [cost(), submits(), lines()]
    for result in results:
        result.show()
    sys.exit(any(result.failed for result in results))

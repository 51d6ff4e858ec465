"""Azure ML's side, against the stand-in that executes: what commands cost, that no job is lost, that no line is.

The stand-in (tests/doubles) serves the unmodified SDK under Azure's real host names, and misbehaves as services do: it
throttles, answers 500, drops and cuts connections, loses answers, lets tokens and addresses expire. It is no Azure: it
proves our side.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from report import Report
from sandbox import COMMAND, Sandbox, sandbox
from startup import measure

from doubles.azure.handle import GROUP, REGION, SUBSCRIPTION, WORKSPACE, Azure

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
        runs: dict[str, list[float]] = {name: [] for name in lines}
        for number in range(8):
            for name, (_, line) in lines.items():
                cpu_s, _ = measure(box, [COMMAND, *line])
                runs[name] += [cpu_s] if number else []
        for name, (most_s, _) in lines.items():
            median_s = statistics.median(runs[name])
            target, ok = ("", None) if most_s is None else (f"<= {most_s:.2f} s", median_s <= most_s)
            report.timing(f"cloudtrain {name}", f"{median_s:.2f} s", target, ok=ok)
        before = len(azure.journal())
        box.call("submit", "-d", "-y")
        calls = [call["operation"] for call in azure.journal()[before:]]
        report.notes.append(f"a submit whose code is there already makes {len(calls)} calls: {', '.join(calls)}")
    return report


def submits(count: int = 20) -> Report:
    """Submit until each key has its job, while answers are lost, calls refused, and processes killed."""
    report = Report(f"Azure ML: {count} submits with lost answers, throttling and kill -9")
    seed = random.Random(1)
    killed = tries = 0
    with workspace() as (box, azure):
        for kind, every in (("lost", 3), ("drop", 5), ("throttle", 4), ("500", 6)):
            azure.fault("jobs.put", kind, every=every)
        azure.fault("codes.*", "lost", every=9)
        azure.fault("jobs.get", "500", every=5)
        jobs = []
        for number in range(count):
            while True:
                tries += 1
                process = box.start("submit", "-d", "-y", "--json", "--idempotency-key", f"k{number}")
                if seed.random() < 0.4:
                    threading.Timer(seed.uniform(0.3, 3.0), process.kill).start()
                out, _ = process.communicate(timeout=300)
                killed += process.returncode == -9
                if process.returncode == 0:
                    jobs.append(json.loads(out)["job"])
                    break
        azure.clear_faults()
        listed = [job["job"] for job in box.jobs(active=True)]
        report.count("jobs at Azure", len(azure.jobs()), count)
        report.count("jobs in the list that are active", len(set(listed)), count)
        report.count("keys with a job of their own", len(set(jobs)), count)
        puts = len(azure.journal("jobs.put"))
        report.notes.append(f"{tries} tries, {killed} killed, {puts} calls to start one")
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
        begin = time.monotonic()
        with (box.home / "followed").open("w+") as out:
            process = box.start_program([COMMAND, "logs", "-f", "lines", "--raw", "--json"], stdout=out)
            peaks: list[int] = []
            size = _write(azure, nodes, each, lambda: peaks.append(_peak_mb(process.pid)))
            peaks.append(_peak_mb(process.pid))
            azure.end("lines-1")
            process.communicate(timeout=600)
            took_s = time.monotonic() - begin
            out.seek(0)
            came = [json.loads(line) for line in out]
        numbers: dict[int, list[int]] = {}
        for line in came:
            numbers.setdefault(line["node"], []).append(int(line["text"].split()[-1]))
        lost = sum(each - len(set(found)) for found in numbers.values()) + each * (nodes - len(numbers))
        report.count("lost", lost, 0)
        report.count("repeated", sum(len(found) - len(set(found)) for found in numbers.values()), 0)
        report.count("nodes out of their own order", sum(found != sorted(found) for found in numbers.values()), 0)
        reads = azure.journal("blob.get")
        whole = sum(call["sent"] for call in reads if call["status"] == 206 and call["outcome"] == "ok")
        ratio = whole / size
        report.timing("bytes fetched, of the files' own", f"{ratio:.2f}x", "<= 1.10x", ok=ratio <= 1.1)
        growth = peaks[-1] / peaks[len(peaks) // 2]
        report.timing("peak memory at the end, of that at half-way", f"{growth:.2f}x", "<= 1.10x", ok=growth <= 1.1)
        early = sum(b["time_s"] < a["time_s"] for a, b in pairwise(came))
        wrong = sum(call["outcome"] != "ok" and call["status"] != 416 for call in reads)
        report.notes.append(f"{early} lines came after a later one of another node")
        report.notes.append(f"{took_s:.0f} s, {len(reads)} reads, {wrong} of them went wrong, peak {peaks[-1]} MB")
    return report


def _write(azure: Azure, nodes: int, each: int, look: Callable[[], None], rounds: int = 60) -> int:
    """Write each node's lines over half a minute, the last node beginning late; return the bytes."""
    done, size = dict.fromkeys(range(nodes), 0), 0
    for number in range(rounds):
        now_s = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s * 1000) % 1000:03d}Z"
        for node in range(nodes):
            if node == nodes - 1 and number < rounds // 3:
                continue
            upto = each if number == rounds - 1 else each * (number + 1) // rounds
            texts = [f"{stamp} [{node}] line {n}" for n in range(done[node], upto)]
            azure.write_logs("lines-1", node, *texts)
            size += sum(len(text) + 1 for text in texts)
            done[node] = upto
        look()
        time.sleep(0.3)
    return size


def _peak_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    return int(found[1]) // 1024 if found else 0


if __name__ == "__main__":
    results = [cost(), submits(), lines()]
    for result in results:
        result.show()
    sys.exit(any(result.failed for result in results))

"""SageMaker's side, against the stand-in that executes: what a submit costs, that none is lost, that no line is.

The stand-in (tests/doubles) misbehaves as AWS is known to: it throttles, answers 500, drops connections, loses answers,
lets credentials expire, gives empty pages, and shows lines seconds late. It is no AWS: it proves our side.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from report import Report
from sandbox import COMMAND, Sandbox, sandbox
from startup import measure

from doubles.aws.handle import ROLE, Aws

GROUP = "/aws/sagemaker/TrainingJobs"
CONFIG = f"""\
name: bench
backend: sagemaker
script: train.py
resources: {{instances: INSTANCES, instance_type: ml.g5.xlarge}}
distributed: {{nproc_per_node: 1}}
limits: {{max_duration: 1h}}
sagemaker: {{role: "{ROLE}", bucket: bench-bucket}}
"""


@contextmanager
def account(instances: int = 2) -> Iterator[tuple[Sandbox, Aws]]:
    """Give a project whose commands reach a stand-in of their own; its jobs run nothing."""
    aws = Aws.start()
    try:
        aws.bucket("bench-bucket")
        aws.role()
        aws.settings(execute=False)
        with sandbox(aws.environ) as box:
            box.write(CONFIG.replace("INSTANCES", str(instances)), train="print('x')\n")
            yield box, aws
    finally:
        aws.stop()


def cost() -> Report:
    """Processor time of a dry run and of a submit, whole commands; and the calls that a submit makes."""
    report = Report("SageMaker: processor time of whole commands, medians of 7")
    with account() as (box, aws):
        lines = {"submit --dry-run": (0.25, ["submit", "--dry-run"]), "submit -d": (1.0, ["submit", "-d", "-y"])}
        runs: dict[str, list[float]] = {name: [] for name in lines}
        for number in range(8):
            for name, (_, line) in lines.items():
                cpu_s, _ = measure(box, [COMMAND, *line])
                runs[name] += [cpu_s] if number else []
        for name, (most_s, _) in lines.items():
            median_s = statistics.median(runs[name])
            report.timing(f"cloudtrain {name}", f"{median_s:.2f} s", f"<= {most_s:.2f} s", ok=median_s <= most_s)
        before = len(aws.journal())
        box.call("submit", "-d", "-y")
        calls = [call["operation"] for call in aws.journal()[before:]]
        report.notes.append(f"a submit whose code is in S3 already makes {len(calls)} calls: {', '.join(calls)}")
    return report


def causes(jobs: int = 3) -> Report:
    """Fail on one rank of real two-instance jobs; count whose exception SageMaker's reason, and `status`, tell."""
    report = Report(f"SageMaker: {jobs} jobs of two instances that fail on one rank")
    script = "import os\nif int(os.environ['RANK']) == {}:\n    raise ValueError('cause')\n"
    script += "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
    right = 0
    with account() as (box, aws):
        aws.settings(execute=True)
        for number in range(jobs):
            box.write(CONFIG.replace("INSTANCES", "2"), train=script.format(number % 2))
            box.start("submit", "-y", "--name", f"cause-{number}").communicate(timeout=300)
            error = json.loads(box.call("status", f"cause-{number}", "--json"))["error"]
            reason = aws.describe(f"cause-{number}-1").get("FailureReason", "")
            right += (error["rank"], error["type"]) == (number % 2, "ValueError") and "ValueError: cause" in reason
    report.count("told of the rank that failed first", right, jobs)
    return report


def submits(count: int = 20) -> Report:
    """Submit until each key has its job, while answers are lost, calls refused, and processes killed."""
    report = Report(f"SageMaker: {count} submits with lost answers, throttling and kill -9")
    seed = random.Random(1)
    killed = tries = 0
    with account() as (box, aws):
        faults = (("lost", 3), ("drop", 5), ("throttle", 4), ("500", 6))
        for kind, every in faults:
            aws.fault("CreateTrainingJob", kind, every=every)
        aws.fault("PutObject", "lost", every=7)
        aws.fault("DescribeTrainingJob", "500", every=5)
        jobs = []
        for number in range(count):
            while True:
                tries += 1
                process = box.start("submit", "-d", "-y", "--json", "--idempotency-key", f"k{number}")
                if seed.random() < 0.4:
                    threading.Timer(seed.uniform(0.2, 1.6), process.kill).start()
                out, _ = process.communicate(timeout=300)
                killed += process.returncode == -9
                if process.returncode == 0:
                    jobs.append(json.loads(out)["job"])
                    break
        aws.clear_faults()
        listed = [job["job"] for job in box.jobs(active=True)]
        pages = aws.client("sagemaker").get_paginator("list_training_jobs").paginate()
        there = [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]]
        report.count("jobs at SageMaker", len(there), count)
        report.count("jobs in the list that are active", len(set(listed)), count)
        report.count("keys with a job of their own", len(set(jobs)), count)
        report.notes.append(
            f"{tries} tries, {killed} killed, {len(aws.journal('CreateTrainingJob'))} calls to start one"
        )
    return report


def lines(total: int = 20_000, hosts: int = 16) -> Report:
    """Follow a job whose hosts write while CloudWatch stumbles; count what came."""
    report = Report(f"SageMaker: {total:,} lines of {hosts} hosts under all faults, shown up to 3 s late")
    each = total // hosts
    with account(hosts) as (box, aws):
        aws.settings(log_lag_s=3.0)
        box.call("submit", "-d", "-y", "--name", "lines")
        faults = (("throttle", 7), ("500", 11), ("drop", 13), ("expired", 29), ("empty", 5))
        for kind, every in faults:
            aws.fault(["GetLogEvents", "DescribeLogStreams"], kind, every=every, **_once(kind))
        begin = time.monotonic()
        with (box.home / "followed").open("w+") as out:
            process = box.start_program([COMMAND, "logs", "-f", "lines", "--raw", "--json"], stdout=out)
            peaks: list[int] = []
            _write(aws, hosts, each, lambda: peaks.append(_peak_mb(process.pid)))
            peaks.append(_peak_mb(process.pid))
            aws.end("lines-1")
            process.communicate(timeout=600)
            took_s = time.monotonic() - begin
            out.seek(0)
            came = [json.loads(line) for line in out]
        numbers: dict[int, list[int]] = {}
        for line in came:
            numbers.setdefault(line["node"], []).append(int(re.split(r"\s", line["text"])[-1]))
        lost = sum(each - len(set(found)) for found in numbers.values()) + each * (hosts - len(numbers))
        repeated = sum(len(found) - len(set(found)) for found in numbers.values())
        report.count("lost", lost, 0)
        report.count("repeated", repeated, 0)
        report.count("hosts out of their own order", sum(found != sorted(found) for found in numbers.values()), 0)
        early = sum(b["time_s"] < a["time_s"] for a, b in pairwise(came))
        faulty = sum(call["outcome"] not in ("ok",) for call in aws.journal("GetLogEvents"))
        growth = peaks[-1] / peaks[len(peaks) // 2]
        report.timing("peak memory at the end, of that at half-way", f"{growth:.2f}x", "<= 1.10x", ok=growth <= 1.1)
        calls = len(aws.journal("GetLogEvents"))
        report.notes.append(f"{early} lines came after a later one of another host, whose stream could be read sooner")
        report.notes.append(f"{took_s:.0f} s, {calls} reads, {faulty} of them went wrong, peak {peaks[-1]} MB")
    return report


def _once(kind: str) -> dict[str, Any]:
    """Expired credentials stay expired until others come, which a test's never do: so a few answers only."""
    return {"count": 6} if kind == "expired" else {}


def _write(aws: Aws, hosts: int, each: int, look: Any, rounds: int = 60) -> None:
    """Write each host's lines over half a minute; the last host begins late, and one machine is replaced half-way."""
    done = dict.fromkeys(range(hosts), 0)
    for number in range(rounds):
        stamp = int(time.time() * 1000)
        for host in range(hosts):
            if host == hosts - 1 and number < rounds // 3:
                continue
            upto = each if number == rounds - 1 else each * (number + 1) // rounds
            epoch = 2 if host == 1 and number >= rounds // 2 else 1
            texts = [f"[{host}] line {n}" for n in range(done[host], upto)]
            aws.write_logs(GROUP, f"lines-1/algo-{host + 1}-{epoch}", messages=texts, timestamp=stamp)
            done[host] = upto
        look()
        time.sleep(0.3)


def _peak_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    return int(found[1]) // 1024 if found else 0


if __name__ == "__main__":
    results = [cost(), submits(), lines(), causes()]
    for result in results:
        result.show()
    sys.exit(any(result.failed for result in results))

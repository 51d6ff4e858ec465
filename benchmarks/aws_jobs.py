"""SageMaker's side, against the stand-in that executes: what a submit costs, that none is lost, that no line is.

The stand-in (tests/doubles) misbehaves as AWS is known to: it throttles, answers 500, drops connections, loses answers,
lets credentials expire, gives empty pages, and shows lines seconds late. It is no AWS: it proves our side.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clouds import PORTIONS, add_times, follow, portions, submit
from report import Report
from sandbox import Sandbox, sandbox

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
        add_times(report, box, lines)
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
    tries: Counter[str] = Counter()
    with account() as (box, aws):
        faults = (("lost", 3), ("drop", 5), ("throttle", 4), ("500", 6))
        for kind, every in faults:
            aws.fault("CreateTrainingJob", kind, every=every)
        aws.fault("PutObject", "lost", every=7)
        aws.fault("DescribeTrainingJob", "500", every=5)
        jobs = [submit(box, number, (0.2, 1.6), tries) for number in range(count)]
        aws.clear_faults()
        listed = [job["job"] for job in box.jobs(active=True)]
        pages = aws.client("sagemaker").get_paginator("list_training_jobs").paginate()
        there = [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]]
        report.count("jobs at SageMaker", len(there), count)
        report.count("jobs in the list that are active", len(set(listed)), count)
        report.count("keys with a job of their own", len(set(jobs)), count)
        calls = len(aws.journal("CreateTrainingJob"))
        report.notes.append(f"{tries['all']} tries, {tries['killed']} killed, {calls} calls to start one")
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
        took_s, peak_mb = follow(report, box, hosts, each, lambda look: _write(aws, hosts, each, look))
        faulty = sum(call["outcome"] not in ("ok",) for call in aws.journal("GetLogEvents"))
        calls = len(aws.journal("GetLogEvents"))
        report.notes.append(f"{took_s:.0f} s, {calls} reads, {faulty} of them went wrong, peak {peak_mb} MB")
    return report


def _once(kind: str) -> dict[str, Any]:
    """Expired credentials stay expired until others come, which a test's never do: so a few answers only."""
    return {"count": 6} if kind == "expired" else {}


def _write(aws: Aws, hosts: int, each: int, look: Callable[[], None]) -> None:
    """Write each host's lines, and end the job; one machine is replaced half-way."""
    for round_, host, numbers in portions(hosts, each, look):
        epoch = 2 if host == 1 and round_ >= PORTIONS // 2 else 1
        texts = [f"[{host}] line {n}" for n in numbers]
        stamp = int(time.time() * 1000)
        aws.write_logs(GROUP, f"lines-1/algo-{host + 1}-{epoch}", messages=texts, timestamp=stamp)
    look()
    aws.end("lines-1")


if __name__ == "__main__":
    results = [cost(), submits(), lines(), causes()]
    for result in results:
        result.show()
    sys.exit(any(result.failed for result in results))

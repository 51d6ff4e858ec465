"""Vertex AI's submits, against the stand-in that executes: N are asked for, and N jobs there are, none of them twice.

CreateCustomJob takes no name and no request id, and the stand-in loses answers, drops requests, lets them arrive
seconds later, and answers with errors, while submits are killed at any moment and begun again.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clouds import submit
from report import Report
from sandbox import Sandbox, sandbox

from doubles.google.handle import BUCKET, PROJECT, REGION, Google

CONFIG = f"""\
name: bench
backend: vertex
script: train.py
resources: {{instances: INSTANCES, instance_type: n1-standard-4}}
limits: {{max_duration: 1h}}
vertex: {{project: {PROJECT}, location: {REGION}, staging_bucket: {BUCKET}}}
"""
FAULTS = (("lost", 3), ("late", 5), ("drop", 7), ("UNAVAILABLE", 11), ("INTERNAL", 13), ("RESOURCE_EXHAUSTED", 17))
LATE_S = 4.0
WORKERS = 2
OVER = ("JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_CANCELLING")


@contextmanager
def project(instances: int = 2) -> Iterator[tuple[Sandbox, Google]]:
    """Give a project whose commands reach a stand-in of their own; its jobs run nothing."""
    google = Google.start()
    try:
        google.settings(execute=False)
        with sandbox(google.environ) as box:
            box.write(CONFIG.replace("INSTANCES", str(instances)), train="print('x')\n")
            yield box, google
    finally:
        google.stop()


# Runs the command again and again in one process, so that Google's clients are imported once; before each a create's
# next call is told to fail: done and not answered, refused on the way, done a moment after the connection has broken.
MANY = """
import json, sys, urllib.request
from cloudtrain.launcher import cli
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
kinds = ("lost", "drop", "late", "UNAVAILABLE", "INTERNAL")
for number in range(int(sys.argv[1])):
    fault = {"operations": ["jobs.create"], "kind": kinds[number % len(kinds)], "count": 1, "delay_s": 0.7}
    opener.open(f"{sys.argv[2]}/_control/faults", json.dumps(fault).encode()).read()
    cli._run(["submit", "-d", "-y", "--name", f"n{number}"], debug=False)
"""


def ambiguous(count: int = 200) -> Report:
    """Let each submit's first create fail so that nobody can tell what has become of it; look what is there."""
    report = Report(f"Vertex AI: {count} submits, the first create of each failing ambiguously")
    with project() as (box, google):
        process = box.start_program([sys.executable, "-c", MANY, str(count), google.url])
        process.communicate(timeout=1800)
        google.clear_faults()
        time.sleep(1)
        listed = {job["job"] for job in box.jobs(active=True)}
        creates = google.journal("jobs.create")
        report.count("jobs in the list that are active", len(listed), count)
        report.count("jobs that would run", sum(_would_run(google).values()), count)
        report.count("jobs in the list that would run not once", _not_once(google, listed), 0)
        failed, made = sum(call["outcome"] != "ok" for call in creates), len(google.jobs())
        report.notes.append(f"{len(creates)} calls to make one, of which {failed} failed; {made} jobs were made")
    return report


def submits(count: int = 200) -> Report:
    """Submit until each key has its job; then look what there is at Google, and what of it would run."""
    report = Report(f"Vertex AI: {count} submits with lost, late and refused answers, and kill -9")
    tries: Counter[str] = Counter()
    with project() as (box, google):
        for kind, every in FAULTS:
            google.fault("jobs.create", kind, every=every, delay_s=LATE_S)
        google.fault("storage.*", "lost", every=23)
        google.fault("jobs.list", "503", every=7)
        with ThreadPoolExecutor(WORKERS) as pool:
            jobs = list(pool.map(lambda number: submit(box, number, (0.3, 4.0), tries), range(count)))
        google.clear_faults()
        before = len(google.jobs())
        time.sleep(LATE_S + 1)  # what is under way arrives, and the list's look cancels what came twice
        listed = Counter(job["job"] for job in box.jobs(active=True))
        active = Counter(job["display_name"] for job in google.jobs() if job["state"] not in OVER)
        report.count("keys with a job of their own", len(set(jobs)), count)
        report.count("jobs in the list that are active", len(listed), count)
        report.count("jobs at Google that are active", sum(active.values()), count)
        report.count("of them, names that are there twice", sum(number > 1 for number in active.values()), 0)
        report.count("jobs that are not in the list, and would run", _strays(google, set(listed)), 0)
        report.count("jobs in the list that would run not once", _not_once(google, set(listed)), 0)
        made = len(google.jobs())
        report.notes.append(
            f"{tries['all']} tries, {tries['killed']} killed; {made} jobs made, {made - before} at last"
        )
        report.notes.append(f"{len(google.journal('jobs.create'))} calls to make one, {made - count} jobs too many")
    return report


def _would_run(google: Google) -> Counter[str]:
    """Return how many jobs there are of each name that hold the mark of their order, as replicas look for it."""
    found: Counter[str] = Counter()
    for job in google.jobs():
        pool = google.job(job["id"])["body"]["jobSpec"]["workerPoolSpecs"][0]
        order = google.object(pool["containerSpec"]["args"][1].partition(f"{BUCKET}/")[2])
        if order is not None and json.loads(order)["fence"] == pool["containerSpec"]["args"][2]:
            found[job["display_name"].rpartition("-")[0]] += 1
    return found


def _strays(google: Google, listed: set[str]) -> int:
    return sum(number for name, number in _would_run(google).items() if name not in listed)


def _not_once(google: Google, listed: set[str]) -> int:
    found = _would_run(google)
    return sum(found[name] != 1 for name in listed)


if __name__ == "__main__":
    result = submits(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    result.show()
    sys.exit(result.failed)

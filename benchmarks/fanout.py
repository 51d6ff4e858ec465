"""Many submits at once from as many processes: none lost, none doubled.

The jobs are real agents that start an interpreter which sleeps: 50 torchruns would measure 50 imports of torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

from report import Report
from sandbox import sandbox

JOBS = 50


def run(jobs: int = JOBS) -> Report:
    """Submit from `jobs` processes at once, count, stop all, count again."""
    report = Report(f"{jobs} submits at once from {jobs} processes")
    with sandbox() as box:
        box.write(f"name: many\nscript: train.py\nlocal: {{python: {box.idle_python()}}}\n", train="print('x')\n")
        begin = time.perf_counter()
        submits = [box.start("submit", "-d", "--json") for _ in range(jobs)]
        answers = [submit.communicate(timeout=300) for submit in submits]
        took_s = time.perf_counter() - begin
        for _, complaint in [a for s, a in zip(submits, answers, strict=True) if s.returncode][:3]:
            report.notes.append(f"a submit failed: {complaint.strip().splitlines()[-1]}")
        accepted = [json.loads(out)["job"] for out, _ in answers if out]
        listed = [job["job"] for job in box.jobs(active=True)]
        on_disk = Counter(path.parent.name for path in box.home.glob("local/*/attempt-*"))
        report.count("accepted", len(accepted), jobs)
        report.count("distinct", len(set(accepted)), jobs)
        report.count("lost (accepted, not active in the list)", len(set(accepted) - set(listed)), 0)
        report.count("doubled (attempts on disk over jobs)", on_disk.total() - len(set(accepted)), 0)
        report.count("bundles on disk", len(list((box.home / "bundles").iterdir())), 1)
        box.stop_all()
        report.count("stopped", Counter(job["state"] for job in box.jobs())["stopped"], jobs)
        report.count("processes left", box.processes_left(), 0)
    report.timing("time until all were accepted", f"{took_s:.1f} s, {took_s / jobs * 1000:.0f} ms each")
    return report


if __name__ == "__main__":
    result = run()
    result.show()
    sys.exit(result.failed)

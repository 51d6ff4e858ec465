"""What `requirements` cost at a start: a cached environment, beside the same job without requirements."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from report import Report
from sandbox import sandbox

RUNS = 7
MOST_S = 1.5
JOB = "cloudtrain.entrypoints.environments.job"
CASES = {"requirements": ("requirements.txt", []), "requirements and setup": ("requirements.txt", ["true"])}


def run() -> Report:
    """Prepare a node again and again from the cache, as its agent does, and time the whole process."""
    report = Report("Dependencies: a cached environment at a start", ("config", "s", "CPU s", "target", ""))
    with sandbox() as box:
        node = Path(box.home) / "node-0"
        for folder in (node / "code", node / "log"):
            folder.mkdir(parents=True)
        (node / "log" / "boot.log").touch()
        (node / "code" / "requirements.txt").write_text("pip\n")  # which is there: nothing is downloaded
        for name, (requirements, commands) in CASES.items():
            (node / "spec.json").write_text(json.dumps({"setup": {"requirements": requirements, "commands": commands}}))
            _prepare(node)
            runs = [_prepare(node) for _ in range(RUNS)]
            wall_s, cpu_s = (statistics.median(column) for column in zip(*runs, strict=True))
            verdict = "PASS" if cpu_s <= MOST_S else "below target"
            report.rows.append((name, f"{wall_s:.2f}", f"{cpu_s:.2f}", f"<= {MOST_S} CPU s", verdict))
    report.notes.append(f"medians of {RUNS}; a job without either key starts no such process")
    return report


def _prepare(node: Path) -> tuple[float, float]:
    """Return the seconds and the processor seconds that one preparation took."""
    begun_s, before = time.monotonic(), os.times()
    command = [sys.executable, "-u", "-m", JOB, str(node), str(node.parent)]
    subprocess.run(command, cwd=node, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - begun_s, used_s


if __name__ == "__main__":
    run().show()

"""`kill -9` of the command line at every step of submit: at most one job, found again by the next command.

The steps are those of tests/launcher/test_submit_crash.py, which holds each of them once.
"""

from __future__ import annotations

import runpy
import signal
import sys
from collections import Counter
from pathlib import Path

from report import Report
from sandbox import Sandbox, sandbox

ROUNDS = 3
TESTS = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "launcher" / "test_submit_crash.py"))


def run(rounds: int = ROUNDS) -> Report:
    """Kill a submit at each step, `rounds` times; count what the next `list` and `stop` make of it."""
    report = Report(f"kill -9 of submit at {len(TESTS['STEPS'])} steps, {rounds} times each")
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        for step in TESTS["STEPS"]:
            with sandbox() as box:
                seen.update(_crash(box, step))
    report.count("killed", seen["killed"], rounds * len(TESTS["STEPS"]))
    report.count("more than one job", seen["several"], 0)
    report.count("lost (processes run, no job in the list)", seen["lost"], 0)
    report.count("jobs that cannot be stopped", seen["unstoppable"], 0)
    report.count("ended otherwise than the step allows", seen["unexpected"], 0)
    report.count("processes left", seen["left"], 0)
    outcomes = ", ".join(f"{kind} {seen[kind]}" for kind in ("nothing", "never sent", "runs"))
    report.notes.append(f"found by the next command: {outcomes}")
    return report


def _crash(box: Sandbox, step: str) -> Counter[str]:
    target, when, expected = TESTS["STEPS"][step]
    python = box.idle_python()
    box.write(f"name: crash\nscript: train.py\nlocal: {{python: {python}}}\n", train="print('x')\n")
    process = box.start_program([sys.executable, "-c", TESTS["DRIVER"], target, when, "submit", "-d"])
    process.communicate(timeout=120)
    seen = Counter(killed=int(process.returncode == -signal.SIGKILL))
    jobs = box.jobs()
    found = "nothing" if not jobs else "never sent" if jobs[0]["state"] == "failed" else "runs"
    seen.update({found: 1})
    seen["several"] += len(jobs) > 1
    seen["unexpected"] += found != expected and not (expected == "either" and found != "nothing")
    seen["lost"] += found != "runs" and box.processes_left(2.0) > 0
    box.stop_all()
    seen["unstoppable"] += len(box.jobs(active=True))
    seen["left"] += box.processes_left()
    return seen


if __name__ == "__main__":
    result = run()
    result.show()
    sys.exit(result.failed)

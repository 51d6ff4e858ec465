"""What `list` costs with ten thousand jobs: processor seconds of the whole command, beside a bare `import click`.

One real job is submitted and stopped; the rest are copies of it, each an end of its own, a tenth with a traceback, and
progress as a long run leaves it. The first list of all makes what is kept of each job that has ended; it is shown too.
"""

from __future__ import annotations

import json
import random
import sys

from report import Report
from sandbox import COMMAND, Sandbox, sandbox
from startup import RUNS, measure, medians

from cloudtrain.launcher.store.database import Database

JOBS, MOST_S = 10_000, 0.2
COMMANDS = [
    "list --all",
    "list",
    "list --active",
    "list --json",
    "list --all --state failed --tag team=vision --since 30d",
    "list -n 100 --backend local",
    "status last",
]
BASE = "python -c 'import click'"
TRACE = "".join(f'  File "/code/part{i}.py", line {i}, in call\n    return inner(batch, {i})\n' for i in range(12))


def _ends(number: int, chance: random.Random) -> tuple[str, dict[str, object]]:
    """Return the state and the outcome of the job of that number."""
    times = {"started_s": 1.79e9 + 60 * number, "ended_s": 1.79e9 + 60 * number + chance.randint(30, 9000)}
    kind = number % 10
    if kind == 0:
        error = {"rank": 1, "kind": "exception", "type": "ValueError", "message": "no batch", "traceback": TRACE}
        return "failed", {"state": "failed", "reason": "error", "error": error, **times}
    if kind == 1:
        return "stopped", {"state": "stopped", "reason": "user", "resumable": True, **times}
    return "succeeded", {"state": "succeeded", **times}


def fill(box: Sandbox, jobs: int) -> None:
    """Copy the one job of the home until there are so many."""
    database, chance = Database(box.home), random.Random(1)
    job = dict(database.execute("SELECT * FROM jobs")[0])
    attempt = dict(database.execute("SELECT * FROM attempts")[0])
    curve = ";".join(f"{i / 7:.6g},{i * 20},{2 / (i + 1):.6g},1" for i in range(60))
    with database.transaction():
        for number in range(2, jobs + 1):
            state, outcome = _ends(number, chance)
            job_id = f"bench-{number:06d}"
            copy = {**job, "id": job_id, "seq": number, "created_s": job["created_s"] - 60 * (jobs - number)}
            progress = {"cursor": {"0/rank-0.log": number}, "step": number, "max_steps": 20_000, "loss": 1 / number}
            progress |= {"samples_per_s": 812.5, "curve": f"0.25,1795361369.76;{curve}", "checkpoint_step": number}
            end = {**attempt, "job_id": job_id, "state": state, "outcome": json.dumps(outcome), "phase": "sent"}
            for table, row in (("jobs", copy), ("attempts", {**end, "progress": json.dumps(progress)})):
                places = ", ".join("?" * len(row))
                database.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", list(row.values()))
    database.close()


def run(jobs: int = JOBS) -> Report:
    """Measure every command."""
    report = Report(f"list with {jobs:,} jobs: processor time", ("command", "CPU s", "MB", "target", ""))
    with sandbox() as box:
        config = f"name: bench\nscript: train.py\ntags: {{team: vision}}\nlocal: {{python: {box.idle_python()}}}\n"
        box.write(config, train="print('x')\n")
        box.call("submit", "-d")
        box.call("stop", "last", "--now", "-y")
        fill(box, jobs)
        measure(box, [COMMAND, "list"])  # compiles the modules
        first_s = measure(box, [COMMAND, "list", "--all"])[0]
        found = len(box.jobs())
        lines = {f"cloudtrain {line}": [COMMAND, *line.split()] for line in COMMANDS}
        lines[BASE] = [sys.executable, "-c", "import click"]
        median = medians(box, lines)
    for name, (cpu_s, peak_mb) in median.items():
        target, verdict = ("", "") if name == BASE else (f"< {MOST_S} s", "PASS" if cpu_s < MOST_S else "below target")
        report.rows.append((name, f"{cpu_s:.3f}", f"{peak_mb:.0f}", target, verdict))
    report.rows.append(("the first `list --all` of all", f"{first_s:.3f}", "", "", ""))
    report.rows.append(("jobs in `list --json`", str(found), "", str(jobs), "PASS" if found == jobs else "FAIL"))
    report.failed = found != jobs
    report.notes.append(f"medians of {RUNS}; python benchmarks/listing.py [JOBS]")
    return report


if __name__ == "__main__":
    result = run(*map(int, sys.argv[1:]))
    result.show()
    sys.exit(result.failed)

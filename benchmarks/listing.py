"""What `list` costs with ten thousand jobs: processor seconds of the whole command, beside a bare `import click`.

One real job is submitted and stopped; the rest are copies of it, each an end of its own, a tenth with a traceback, and
progress as a long run leaves it.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict

from report import Report
from sandbox import COMMAND, Sandbox, sandbox
from startup import RUNS, measure, medians

from cloudtrain.launcher.job import State
from cloudtrain.launcher.jobs.listing import keep
from cloudtrain.launcher.store.registry import Registry

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


def _ends(number: int, chance: random.Random) -> State:
    """Return the end of the job of that number."""
    began_s = 1.79e9 + 60 * number
    times = {"started_s": began_s, "ended_s": began_s + chance.randint(30, 9000)}
    kind = number % 10
    if kind == 0:
        error = {"rank": 1, "kind": "exception", "type": "ValueError", "message": "no batch", "traceback": TRACE}
        return State("failed", "error", error=error, **times)
    return State("stopped", "user", resumable=True, **times) if kind == 1 else State("succeeded", **times)


def fill(box: Sandbox, jobs: int) -> None:
    """Copy the one job of the home until there are so many, each with an id and an argument of its own.

    The line of each is stored, as with a real job's end.
    """
    registry, chance = Registry(box.home), random.Random(1)
    database = registry.database
    job = dict(database.execute("SELECT * FROM jobs")[0])
    attempt = dict(database.execute("SELECT * FROM attempts")[0])
    config, first, created_s = json.loads(job["config"]), job["id"], job["created_s"]
    curve = ";".join(f"{i / 7:.6g},{i * 20},{2 / (i + 1):.6g},1" for i in range(60))
    with database.transaction():
        for number in range(2, jobs + 1):
            job |= {"id": f"bench-{number:06d}", "seq": number, "created_s": created_s - 60 * (jobs - number)}
            job["config"] = json.dumps(config | {"args": ["--seed", str(number)]})
            progress = {"cursor": {"0/rank-0.log": number}, "step": number, "max_steps": 20_000, "loss": 1 / number}
            progress |= {"samples_per_s": 812.5, "curve": f"0.25,1795361369.76;{curve}", "checkpoint_step": number}
            end = _ends(number, chance)
            own = {name: attempt[name].replace(first, job["id"]) for name in ("request", "ref")}
            own |= {"job_id": job["id"], "state": end.state, "outcome": json.dumps(asdict(end)), "phase": "sent"}
            for table, row in (("jobs", job), ("attempts", {**attempt, **own, "progress": json.dumps(progress)})):
                places = ", ".join("?" * len(row))
                database.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", list(row.values()))
            keep(registry, job["id"])
    registry.close()


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
        found = len(box.jobs())
        lines = {f"cloudtrain {line}": [COMMAND, *line.split()] for line in COMMANDS}
        lines[BASE] = [sys.executable, "-c", "import click"]
        median = medians(box, lines)
    for name, (cpu_s, peak_mb) in median.items():
        target, verdict = ("", "") if name == BASE else (f"< {MOST_S} s", "PASS" if cpu_s < MOST_S else "below target")
        report.rows.append((name, f"{cpu_s:.3f}", f"{peak_mb:.0f}", target, verdict))
    report.rows.append(("jobs in `list --json`", str(found), "", str(jobs), "PASS" if found == jobs else "FAIL"))
    report.failed = found != jobs
    report.notes.append(f"medians of {RUNS}; python benchmarks/listing.py [JOBS]")
    return report


if __name__ == "__main__":
    result = run(*map(int, sys.argv[1:]))
    result.show()
    sys.exit(result.failed)

"""How cost grows with size: processor seconds and memory at three sizes or more, and the exponent of the growth.

The exponent is the slope of the logarithm of the cost over the logarithm of the size, without the cost of the same
command at next to nothing: 1 is linear, 2 quadratic, 0 flat. `ssh`, which takes minutes, only runs if it is named.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import ssh_fleet
from listing import fill
from logs import BEGAN_S, RARE, seeded
from report import Report
from sandbox import COMMAND, sandbox
from startup import measure

from cloudtrain.entrypoints.agent.node_logs import TimeIndex
from cloudtrain.launcher.store.database import Database

TRIALS, JOBS, LOG_MB, GREP_MB, HOSTS = (
    (250, 1000, 4000),
    (1000, 3000, 10_000),
    (20, 60, 185),
    (100, 300, 1000),
    (4, 16, 64),
)
HEAD = ("what", "size", "CPU s", "MB", "target", "", "exponent")
UPGRADED = "list --all, the first after an upgrade"
Cost = tuple[float, float]


def grown(
    report: Report, what: str, sizes: Sequence[int], cost: Callable[[int], Cost], least: int, target: Cost | None
) -> None:
    """Add a row for each size, and the exponent to the last; `target`: seconds and MB at the last size."""
    base_s, _ = cost(least)
    costs = [cost(size) for size in sizes]
    points = [(math.log(size), math.log(max(1e-3, each[0] - base_s))) for size, each in zip(sizes, costs, strict=True)]
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope
    for size, (cpu_s, peak_mb) in zip(sizes, costs, strict=True):
        is_last = size == sizes[-1]
        most = f"<= {target[0]:g} s" + f", {target[1]:g} MB" * (target[1] < math.inf) if is_last and target else ""
        is_met = not most or (target is not None and cpu_s <= target[0] and peak_mb <= target[1])
        verdict = "" if not most else "PASS" if is_met else "below target"
        exponent = f"{slope:.2f}" if is_last else ""
        report.rows.append((what, f"{size:,}", f"{cpu_s:.2f}", f"{peak_mb:.0f}", most, verdict, exponent))


def plans(report: Report) -> None:
    """Plan grids."""
    with sandbox() as box:

        def cost(trials: int) -> Cost:
            values = ", ".join(f"{number / 1e5:.5f}" for number in range(1, trials + 1))
            sweep = f"{{metric: loss, space: {{args.lr: [{values}]}}, algorithm: grid}}"
            box.write(f"name: grid\nscript: train.py\nsweep: {sweep}\n", train="print('x')\n")
            return measure(box, [COMMAND, "plan"])

        cost(2)  # compiles the modules
        grown(report, "plan of a grid, trials", TRIALS, cost, 2, (1.0, math.inf))


def jobs(report: Report) -> None:
    """List ended jobs, and make the values of the page's list and of the page of costs.

    An end stores the job's line. An upgrade whose lines have other words makes all lines again.
    """
    for name, target in (
        ("list --all, the first after the ends", (1.0, 100.0)),
        (UPGRADED, (1.0, 100.0)),
        ("/ of the page", (0.5, 100.0)),
        ("/spend", (0.5, 100.0)),
    ):
        grown(report, f"{name}, jobs", JOBS, lambda count, name=name: _of_jobs(count, name), 10, target)  # type: ignore[misc]


def _of_jobs(count: int, name: str) -> Cost:
    with sandbox() as box:
        config = f"name: bench\nscript: train.py\nbudget: {{limit: 50 USD}}\nlocal: {{python: {box.idle_python()}, "
        box.write(config + "price_per_hour: 1.20 USD}\n", train="print('x')\n")
        box.call("submit", "-d", "-y")
        box.call("stop", "last", "--now", "-y")
        program = (
            "from pathlib import Path; from cloudtrain.launcher.store.registry import Registry;"
            f" from cloudtrain.launcher.ui import pages; registry = Registry(Path({str(box.home)!r}));"
        )
        call = "pages.listed(registry, pages.JobListQuery()); pages.choices(registry)"
        call = call if name.startswith("/ ") else "pages.spend_values(registry.database, '', '')"
        page, bare = ([sys.executable, "-c", text] for text in (program + call, program))
        for command in (page, [COMMAND, "list", "--all"]):  # compiles the modules
            measure(box, command)
        fill(box, count)
        if name == UPGRADED:
            database = Database(box.home)
            database.execute("DELETE FROM listed")
            database.close()
        if not name.startswith("/"):
            return measure(box, [COMMAND, "list", "--all"])
        bare_s = measure(box, bare)[0]
        cpu_s, peak_mb = measure(box, page)
        return max(0.0, cpu_s - bare_s), peak_mb


def logs(report: Report) -> None:
    """Look at a job, wait for a job, and search in a job, beside its log."""
    for line, sizes, target in (
        ("status job", LOG_MB, (3.0, 100.0)),
        ("wait job", LOG_MB, (3.0, 100.0)),
        ("logs job --follow --tail 10", LOG_MB, (3.0, 100.0)),
        ("logs job --grep 'a rare word'", GREP_MB, (10.0, 100.0)),
    ):
        grown(report, f"{line}, MB of log", sizes, lambda size, line=line: _of_log(size, line), 1, target)  # type: ignore[misc]


def _of_log(size_mb: int, line: str) -> Cost:
    words = [word.replace("+", " ") for word in line.replace("'a rare word'", "a+rare+word").split()]
    with sandbox() as box:
        seeded(box, "job", 1, 1)
        node = box.home / "local/job/attempt-1/node-0"
        (node / "exit.json").write_text(json.dumps({"state": "succeeded", "ended_s": BEGAN_S + 1000.0}))
        cost = 0.0, 0.0
        for size in (1, size_mb):  # the first look compiles the modules
            _write_log(node / "log/rank-0.log", size)
            database = Database(box.home)
            if "--grep" not in words:  # the end of the job, and its log, are not known yet
                unknown = "UPDATE attempts SET state = 'running', outcome = ?, progress = '{}'"
                database.execute(unknown, ('{"state": "running"}',))
                database.execute("DELETE FROM listed")
            database.close()
            cost = measure(box, [COMMAND, *words])
        return cost


def _write_log(path: Path, size_mb: int) -> None:
    """Write lines, each tenth with an event of a step, and the rare word once in some MB; the steps repeat."""
    lines = []
    for step in range(1, 100_001):
        told = {"e": "step", "step": step, "max_steps": 10**8, "loss": 9 / step, "samples_per_s": 812.5}
        event = f"  ::ct {json.dumps(told)}" if step % 10 == 0 else ""
        lines.append(f"line {step}: loss {9 / step:.4f}, {RARE if step % 90_000 == 77 else 'all is well'}{event}\n")
    block = "".join(lines)
    with path.open("w") as log:
        while log.tell() < size_mb * 1_000_000:
            log.write(block[: size_mb * 1_000_000 - log.tell()])
    for suffix in (".times", ".events"):
        path.with_suffix(suffix).unlink(missing_ok=True)
    agent = TimeIndex(path.parent)
    for _ in range(1 + size_mb // 4):  # at most a block of events each time
        agent.note(BEGAN_S + 1000.0)


def hosts(report: Report) -> None:
    """Ask for the state of a job on many hosts over ssh."""

    def cost(count: int) -> Cost:
        with ssh_fleet._bench(count) as bench:
            bench.write(count, bench.cluster.ssh_config)
            bench.run("submit", "-d", "-y")
            bench.run("status", "last")
            used = [bench.run("status", "last") for _ in range(3)]
            bench.run("stop", "last", "--now", "-y")
            return statistics.median(each.cpu_s for each in used), 0.0

    grown(report, "status of a job over ssh, warm, hosts", HOSTS, cost, 1, (1.0, math.inf))


PARTS = {"plan": plans, "jobs": jobs, "logs": logs, "ssh": hosts}


def run(names: Sequence[str] = ("plan", "jobs", "logs")) -> Report:
    """Measure the named parts."""
    report = Report("growth of cost", HEAD)
    for name in names:
        PARTS[name](report)
    report.notes.append(f"python benchmarks/growth.py [{' '.join(PARTS)}]")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--divide", type=int, default=1, help="make all sizes smaller by this factor")
    asked = parser.parse_args()
    for sizes in ("TRIALS", "JOBS", "LOG_MB", "GREP_MB", "HOSTS"):
        globals()[sizes] = tuple(max(2, size // asked.divide) for size in globals()[sizes])
    (run(asked.parts) if asked.parts else run()).show()

"""Processor seconds of the commands for an ended sweep of 2,000 trials, less the start of Python.

The store's functions write 2,000 trials by asha: 2,888 segments. `status` of a running sweep also asks the backend.
"""

from __future__ import annotations

import sys
from pathlib import Path

from report import Report
from sandbox import COMMAND, sandbox
from startup import RUNS, medians

from cloudtrain.launcher.store.registry import Registry

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from doubles import swept

TRIALS, MOST_S = 2000, 0.2
COMMANDS = ("status last", "status last --json", "cost last", "best last", "list")
PYTHON = "python -c pass"


def run() -> Report:
    """Measure every command."""
    report = Report(f"a sweep of {TRIALS:,} trials: processor time, less the start of Python, medians of {RUNS}")
    with sandbox() as box:
        box.home.mkdir(parents=True, exist_ok=True)
        registry = Registry(box.home)
        swept.put(registry, TRIALS)
        registry.close()
        lines = {f"cloudtrain {line}": [COMMAND, *line.split()] for line in COMMANDS}
        lines[PYTHON] = [sys.executable, "-c", "pass"]
        median = medians(box, lines)
    base_s, _ = median.pop(PYTHON)
    for name, (cpu_s, _) in median.items():
        ok = cpu_s - base_s < MOST_S if " status" in name else None
        report.timing(name, f"{cpu_s - base_s:.3f} s", "" if ok is None else f"{MOST_S} s", ok=ok)
    return report


if __name__ == "__main__":
    run().show()

"""Processor seconds of `status SWEEP` with 1,000 trials, beside the start of Python.

The store's functions write 1,000 trials by asha: some 1,440 segments with attempts, reservations and points. Of the
running sweep, this process is sending four trials, so no backend's time counts. `between`: the rarer look at which the
driver decides about the next segments.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from report import Report
from sandbox import COMMAND, sandbox
from startup import measure

from cloudtrain.launcher.store import sweeps
from cloudtrain.launcher.store.registry import Registry

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from doubles import swept

TRIALS, RUNS, MOST_S = 1000, 7, 0.2
COMMANDS = ("status", "status --json", "cost", "best")
PYTHON = "python -c pass"


def fill(home: Path, state: str) -> tuple[str, int]:
    """Write the sweep; return its id and the number of its segments."""
    home.mkdir(parents=True, exist_ok=True)
    registry = Registry(home)
    sweep = swept.put(registry, TRIALS, state="ended" if state == "ended" else "running", limit_micro=1_000_000_000)
    if state == "running":
        for trial in range(TRIALS, TRIALS + 4):
            swept.begin(registry, sweep, trial)
    count = len(sweeps.segments(registry.database, sweep.id))
    registry.close()
    return sweep.id, count


def run() -> Report:
    """Measure the commands in rounds: a slow moment of the machine meets all commands."""
    report = Report(
        f"a sweep of {TRIALS:,} trials: processor time", ("command", "CPU s", "beside Python", "target", "")
    )
    for state in ("ended", "running", "between"):
        with sandbox() as box:
            sweep, count = fill(box.home, state)
            lines = {f"cloudtrain {line} ({state})": [COMMAND, *line.split(), sweep] for line in COMMANDS}
            lines[PYTHON] = [sys.executable, "-c", "pass"]
            runs: dict[str, list[float]] = {name: [] for name in lines}
            for command in lines.values():
                measure(box, command)
            for _ in range(RUNS):
                for name, command in lines.items():
                    if state == "between":
                        set_running(box.home, sweep)
                    runs[name].append(measure(box, command)[0])
        base_s = statistics.median(runs.pop(PYTHON))
        for name, figures in runs.items():
            cpu_s = statistics.median(figures)
            is_status = " status" in name and state != "between"
            verdict = ("PASS" if cpu_s - base_s < MOST_S else "below target") if is_status else ""
            target = f"< {MOST_S} s" if is_status else ""
            report.rows.append((name, f"{cpu_s:.3f}", f"{cpu_s - base_s:.3f}", target, verdict))
        report.rows.append((f"segments ({state})", str(count), "", "", ""))
    report.notes.append(f"medians of {RUNS}; python benchmarks/sweep_status.py")
    return report


def set_running(home: Path, sweep: str) -> None:
    """Take back the end of the sweep, which a command has found."""
    registry = Registry(home)
    sweeps.set_state(registry.database, sweep, "running")
    registry.close()


if __name__ == "__main__":
    run().show()

"""The processor time of a sweep's decision at a thousand trials: `python benchmarks/sweep_decisions.py [TRIALS]`.

A result has come, and a seventeenth segment may start beside sixteen that run.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import replace

from report import Report

from cloudtrain.entrypoints.sweep.search import Allowance, Search, decide, rungs
from cloudtrain.entrypoints.sweep.space import dimensions

MOST_MS = 2.0
REPEATS = 50
SPACE = dimensions({"lr": {"log": [1e-5, 1e-1]}, "width": {"int": [16, 256], "log": True}, "name": ["adamw", "lamb"]})


def run(trials: int = 1000) -> Report:
    """Measure a decision of each algorithm after the results of all trials on the first rung."""
    report = Report(f"sweeps: a decision at {trials} trials")
    draw = random.Random(1)
    results: dict[tuple[int, int], float | None] = {(trial, 0): draw.random() for trial in range(trials)}
    for algorithm in ("random", "halving", "asha", "pbt"):
        ends_at_once = algorithm == "random"
        search = Search(algorithm, SPACE, trials + 20 * ends_at_once, 16, (81,) if ends_at_once else rungs(1, 3, 81))
        allowance = Allowance(1e9, 0.3, 1.0)
        running = [each.key for each in decide(search, results, (), allowance)]
        times = []
        for _ in range(REPEATS):
            began_s = time.process_time()
            found = decide(replace(search, parallel=17), results, running, allowance)
            times.append((time.process_time() - began_s) * 1000)
            assert len(found) == 1
        median_ms = statistics.median(times)
        report.timing(algorithm, f"{median_ms:.2f} ms", f"{MOST_MS:.0f} ms", ok=median_ms <= MOST_MS)
    return report


if __name__ == "__main__":
    run(*map(int, sys.argv[1:])).show()

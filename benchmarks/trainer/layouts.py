"""What a layout costs where it is not needed: steps of examples/charlm on two ranks beside those of ddp.

All layouts train the same 16 samples a step, in micro-batches of 2, one run after the other in each round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Report
from sandbox import fresh_folder

from trainer import contest

ROUNDS, STEPS = 3, 41
PARAMS = {"context": 64, "layers": 6, "heads": 4, "width": 256, "dropout": 0.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "ddp, shard: optimizer": {"shard": "optimizer"},
    "pipeline 2": {"parallel": {"pipeline": 2}},
    "pipeline 2, interleaved": {"parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 3}},
    "tensor 2": {"parallel": {"tensor": 2}},
}


def run(rounds: int, repo: Path | None, say: Callable[[str], None]) -> Report:
    """Measure; return the table."""
    table = Report("A step of charlm (5 M parameters) on two ranks, in each layout")
    found: dict[str, list[float]] = {}
    for round_ in range(rounds):
        for name, training in LAYOUTS.items():
            found.setdefault(name, []).append(_step_s(training, repo))
            say(f"round {round_ + 1} of {rounds}: {name}")
    for name, times in found.items():
        ratio = statistics.median(own / ddp for own, ddp in zip(times, found["ddp"], strict=True))
        table.timing(name, f"{ratio:.2f}x of ddp, {1e3 * statistics.median(times):.0f} ms")
    table.notes.append(f"medians of {rounds} rounds of {STEPS - 1} steps")
    return table


def _step_s(training: dict[str, Any], repo: Path | None) -> float:
    """Return the mean seconds of a run's steps after the first."""
    with fresh_folder() as folder:
        example = Path(__file__).parents[2] / "examples" / "charlm" / "task.py"
        more = {"global_batch_size": 16, "log_every": STEPS, "eval_batches": 1, **training}
        spec = contest.spec_of(contest.Model("charlm", 2, STEPS), **more)
        spec |= {"params": PARAMS, "run": {"kind": "task", "target": str(example)}}
        contest.launch(contest.OURS, spec, folder, repo=repo)
        steps = [event for event in contest.events_of(folder / "output.txt") if event["e"] == "step"]
        return float(steps[-1]["step_s"])

"""What a resume on another layout costs: tensor 2 x pipeline 2 loaded by fsdp over four ranks, beside fsdp's own.

A transformer of 10 M parameters with AdamW (120 MB). The seconds are those of the trainer's `restart` event.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Report
from sandbox import fresh_folder

from trainer import contest

ROUNDS, RANKS, STEPS, MORE, TARGET = 5, 4, 2, 2, 1.2
MODEL = contest.Model("layouts", 2, STEPS, {"gpt": {**contest.TRANSFORMER, "heads": 4, "split": True}})
BATCH = {"global_batch_size": 8}
FSDP: dict[str, Any] = {"strategy": "fsdp", **BATCH}
LAYOUTS: dict[str, dict[str, Any]] = {"fsdp": FSDP, "tensor 2 x pipeline 2": {"parallel": {"tensor": 2, "pipeline": 2}}}


def run(rounds: int, repo: Path | None, say: Callable[[str], None]) -> Report:
    """Measure the layouts in turn; return the table."""
    table = Report("A resume on another layout")
    with fresh_folder() as root:
        for name, layout in LAYOUTS.items():
            _run(root / name, STEPS, {**BATCH, **layout}, repo)
        taken: dict[str, list[float]] = {name: [] for name in LAYOUTS}
        for round_ in range(rounds):
            for name in LAYOUTS if round_ % 2 == 0 else reversed(LAYOUTS):
                taken[name].append(_load_s(root / name, root / "again", repo))
                say(f"round {round_ + 1} of {rounds}: from {name}: {1e3 * taken[name][-1]:.0f} ms")
    like, other = (statistics.median(found) for found in taken.values())
    measured = f"{other / like:.2f}x of its own, {1e3 * other:.0f} ms"
    table.timing("fsdp loads tensor 2 x pipeline 2", measured, f"<= {TARGET}x", ok=other <= TARGET * like)
    return table


def _load_s(folder: Path, again: Path, repo: Path | None) -> float:
    """Return the seconds in which four ranks of fsdp load a copy of the folder's checkpoint."""
    shutil.copytree(folder / "checkpoints", again / "checkpoints")
    done = _run(again, STEPS + MORE, FSDP, repo)
    shutil.rmtree(again)
    return float(next(event["load_s"] for event in done.events if event["e"] == "restart"))


def _run(folder: Path, max_steps: int, training: dict[str, Any], repo: Path | None) -> contest.Run:
    checkpoint = {"every_steps": STEPS, "resume": "auto"}
    spec = contest.spec_of(MODEL, checkpoint, max_steps=max_steps, **training)
    return contest.run(contest.OURS, spec, folder, ranks=RANKS, repo=repo, BENCH_STEPS=str(MORE))

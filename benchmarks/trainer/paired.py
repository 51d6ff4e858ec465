"""What a step of the trainer costs beside a bare loop's, block by block in the same two processes.

On a machine that others use too, two runs of the same program differ by a fifth: ratios of whole runs say little. Here
both loops live in the same ranks and take turns, some dozens of steps each (paired_ranks.py). What disturbs one block
disturbs its neighbour, and the median ratio of neighbours is steady. A second bare loop in the trainer's place shows
how far 1 is from 1. `tensor` is a transformer whose layers the two ranks share; its bare loop has parallelize_module.
`pipeline` is a transformer in two stages; its bare loop is bare_pipeline.py, and the trainer's ddp is measured beside
it. Processor times are those of both ranks together.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from report import BELOW, PASS, Report
from sandbox import fresh_folder

from trainer import contest
from trainer.paired_ranks import BESIDE_DDP, BLOCK_S, BLOCKS, ITSELF, OURS, OWN_PACE

ROUNDS = 3
TARGETS = {"mlp": 1.05, "cnn": 1.02, "transformer": 1.02, "tensor": 1.02, "pipeline": 1.02}
DDP_TARGET = 1.05  # processor time of a pipeline's step to that of ddp with the same global batch


def run(rounds: int, models: Sequence[str], repo: Path | None, say: Callable[[str], None]) -> Report:
    """Measure; return what cloudtrain promises of a step, as ratios."""
    table = Report("Steps beside a bare loop's: two ranks, one thread each, blocks in turn")
    for model in (model for model in (*contest.MODELS, *contest.PARALLEL) if model.name in models):
        found: dict[str, list[float]] = {}
        for round_ in range(rounds):
            for name in (OURS, OWN_PACE, ITSELF, *([BESIDE_DDP] if "pipeline" in model.name else [])):
                for clock, ratios in _one(name, model, repo).items():
                    found.setdefault(f"{name} {clock}", []).extend(ratios)
                say(f"round {round_ + 1} of {rounds}: {model.name}, {name}, in turns with the bare loop")
        for clock, what in (("wall", "time of a step"), ("cpu", "processor time of a step")):
            itself, target = statistics.median(found[f"{ITSELF} {clock}"]), TARGETS[model.name]
            for name in (OURS, OWN_PACE):
                ours = statistics.median(found[f"{name} {clock}"])
                measured = f"{ours:.3f}x of the bare loop, which is {itself:.3f}x of itself"
                verdict = PASS if ours <= target else BELOW
                table.rows.append((f"{model.name}, {name}: {what}", measured, f"<= {target}x", verdict))
            if f"{BESIDE_DDP} {clock}" in found:
                ours = statistics.median(found[f"{BESIDE_DDP} {clock}"])
                target_ok = (f"<= {DDP_TARGET}x", ours <= DDP_TARGET) if clock == "cpu" else ("", None)
                table.timing(
                    f"{model.name}: {what}", f"{ours:.3f}x of the trainer's ddp", target_ok[0], ok=target_ok[1]
                )
    table.notes.append(f"medians over {rounds} runs of at most {BLOCKS} pairs of blocks of {BLOCK_S} s or so")
    return table


def _one(name: str, model: contest.Model, repo: Path | None) -> dict[str, list[float]]:
    with fresh_folder() as folder:
        script = Path(__file__).with_name("paired_ranks.py")
        contest.launch("bare", contest.spec_of(model), folder, repo=repo, script=script, BENCH_PAIRED=name)
        told: dict[str, list[float]] = json.loads((folder / "paired.json").read_text())
        return told

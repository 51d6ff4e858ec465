"""What a step of the trainer costs beside a bare loop's, block by block in the same two processes.

    cd benchmarks && ../.venv-bench/bin/python -m trainer.paired --models mlp --rounds 3

On a machine that others use too, two runs of the same program differ by a fifth: ratios of whole runs say little. Here
both loops live in the same ranks and take turns, some dozens of steps each. What disturbs one block disturbs its
neighbour, and the median ratio of neighbours is steady. A second bare loop in the trainer's place shows how far 1 is
from 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCKS, BLOCK_S = 60, 0.15  # of each contestant in a run, after the first, which warm up; long enough to time
TARGETS = {"mlp": 1.05, "cnn": 1.02, "transformer": 1.02}
OURS, OWN_PACE, ITSELF = "cloudtrain", "cloudtrain, log_every unset", "itself"


def main() -> int:
    """Run each model with both contestants; print the ratios."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from report import BELOW, PASS, Report

    from trainer import contest

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(TARGETS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repo", type=Path)
    asked = parser.parse_args()
    table = Report("Steps beside a bare loop's: two ranks, one thread each, blocks in turn")
    for model in (model for model in contest.MODELS if model.name in asked.models.split(",")):
        found: dict[str, list[float]] = {}
        for _ in range(asked.rounds):
            for name in (OURS, OWN_PACE, ITSELF):
                folder = Path(tempfile.mkdtemp(prefix="cloudtrain-bench-"))
                try:
                    spec = contest.spec_of(model)
                    contest.launch("bare", spec, folder, repo=asked.repo, script=Path(__file__), BENCH_PAIRED=name)
                    told = json.loads((folder / "paired.json").read_text())
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                for clock, ratios in told.items():
                    found.setdefault(f"{name} {clock}", []).extend(ratios)
        for clock, what in (("wall", "time of a step"), ("cpu", "processor time of a step")):
            itself = statistics.median(found[f"{ITSELF} {clock}"])
            for name in (OURS, OWN_PACE):
                ours, target = statistics.median(found[f"{name} {clock}"]), TARGETS[model.name]
                measured = f"{ours:.3f}x of the bare loop, which is {itself:.3f}x of itself"
                row = (f"{model.name}, {name}: {what}", measured, f"<= {target}x", PASS if ours <= target else BELOW)
                table.rows.append(row)
    table.notes.append(f"medians over {asked.rounds} runs of {BLOCKS} pairs of blocks of {BLOCK_S} s or so")
    table.show()
    return 0


def rank_main() -> None:
    """Take blocks of steps in turn, as one rank; rank 0 writes the ratios of neighbours."""
    import bare
    import torch.distributed as dist

    spec = json.loads(Path(os.environ["CLOUDTRAIN_SPEC"]).read_text())
    spec["training"]["max_steps"] = 10**9
    ours = _trainer_steps(spec)
    next(ours)  # connects the ranks
    steps: dict[str, Iterator[Any]] = {name: bare.steps(spec, *bare.build(spec)) for name in ("bare", ITSELF)}
    steps |= {OURS: ours, OWN_PACE: ours}
    first, second = "bare", os.environ["BENCH_PAIRED"]  # what is not asked for takes no step
    begin_s = time.perf_counter()
    for name in (first, second) * 30:
        next(steps[name])
    size = _agreed(dist, max(10, round(BLOCK_S * 60 / (time.perf_counter() - begin_s))))
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    for pair in range(BLOCKS):
        taken = {}
        for name in (first, second) if pair % 2 else (second, first):
            taken[name] = _time(steps[name], size, dist)
        for clock, index in (("wall", 0), ("cpu", 1)):
            ratios[clock].append(taken[second][index] / taken[first][index])
    if dist.get_rank() == 0:
        Path("paired.json").write_text(json.dumps(ratios))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _time(steps: Iterator[None], size: int, dist: Any) -> tuple[float, float]:
    """Return the seconds and processor seconds of a block, all ranks beginning together."""
    dist.barrier()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(size):
        next(steps)
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


def _agreed(dist: Any, value: int) -> int:
    import torch

    shared = torch.tensor([value])
    dist.broadcast(shared, 0)
    return int(shared)


def _trainer_steps(spec: dict[str, Any]) -> Iterator[None]:
    """Yield once the job is built, then after each step that the trainer's own loop takes."""
    from cloudtrain.entrypoints import job as jobs
    from cloudtrain.entrypoints import resume, settings, task, train
    from cloudtrain.entrypoints.agree import Agreement

    if os.environ["BENCH_PAIRED"] == OWN_PACE:
        spec = {**spec, "training": {**spec["training"], "log_every": None}}
    path = Path(f"endless-{os.environ['RANK']}.json")
    path.write_text(json.dumps(spec))
    read = settings.read_spec(path)
    job = jobs.build(read, task.load_task(read.target), jobs.connect(read.timeout_s), Agreement(None))
    progress = resume.resume(job)
    yield
    job.meter.restart()
    with train._batches(job, progress) as batches:
        while True:
            train._step(job, progress, batches)
            train.saving.collect(job, progress)
            yield


if __name__ == "__main__":
    if "BENCH_PAIRED" in os.environ:
        rank_main()
    else:
        sys.exit(main())

"""One rank of paired.py: takes blocks of steps in turn, a bare loop's and another's. Started by torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCKS, BLOCK_S = 60, 0.15  # of each contestant in a run, after the first, which warm up; long enough to time
LEAST_BLOCKS, MOST_S = 12, 45  # fewer blocks of a slow step
OURS, OWN_PACE, ITSELF = "cloudtrain", "cloudtrain, log_every unset", "itself"
BESIDE_DDP = "cloudtrain beside its ddp"


def main() -> None:
    """Take blocks of steps in turn, as one rank; rank 0 writes the ratios of neighbours."""
    import bare
    import bare_pipeline
    import torch
    import torch.distributed as dist

    spec = json.loads(Path(os.environ["CLOUDTRAIN_SPEC"]).read_text())
    spec["training"]["max_steps"] = 10**9
    ours = _trainer_steps(spec)
    next(ours)  # connects the ranks
    loop: Any = bare_pipeline if "pipeline" in spec["training"].get("parallel", {}) else bare
    steps: dict[str, Iterator[Any]] = {name: loop.steps(spec, *loop.build(spec)) for name in ("bare", ITSELF)}
    steps |= {OURS: ours, OWN_PACE: ours, BESIDE_DDP: ours}
    first, second = "bare", os.environ["BENCH_PAIRED"]  # what is not asked for takes no step
    if second == BESIDE_DDP:
        first = "ddp"
        steps[first] = _trainer_steps(_without_stages(spec), is_connected=True)
        next(steps[first])
    begin_s = time.perf_counter()
    for name in (first, second) * 30:
        next(steps[name])
    step_s = (time.perf_counter() - begin_s) / 60
    size = _agreed(dist, max(10, round(BLOCK_S / step_s)))
    pairs = _agreed(dist, min(BLOCKS, max(LEAST_BLOCKS, round(MOST_S / (2 * size * step_s)))))
    taken = torch.empty(pairs, 2, 2, dtype=torch.float64)
    for pair in range(pairs):
        for index in (0, 1) if pair % 2 else (1, 0):
            taken[pair, index] = torch.tensor(_time(steps[(first, second)[index]], size, dist))
    dist.all_reduce(taken)
    ratios = dict(zip(("wall", "cpu"), (taken[:, 1] / taken[:, 0]).T.tolist(), strict=True))
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


def _without_stages(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec with a copy of the model on each rank."""
    return {**spec, "training": {key: value for key, value in spec["training"].items() if key != "parallel"}}


def _trainer_steps(spec: dict[str, Any], is_connected: bool = False) -> Iterator[None]:
    """Yield once the job is built, then after each step that the trainer's own loop takes."""
    import torch

    from cloudtrain.entrypoints.rank.agree import Agreement
    from cloudtrain.entrypoints.trainer import job as jobs
    from cloudtrain.entrypoints.trainer import resume, settings, task, train

    if os.environ["BENCH_PAIRED"] == OWN_PACE:
        spec = {**spec, "training": {**spec["training"], "log_every": None}}
    path = Path(f"endless-{os.environ['RANK']}.json")
    path.write_text(json.dumps(spec))
    read = settings.read_spec(path)
    if is_connected:
        place = jobs.RankContext(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu"))
    else:  # older versions have no `parallel`
        parallel = {"parallel": read.training.parallel} if "parallel" in spec["training"] else {}
        place = jobs.connect(read.timeout_s, **parallel)
    job = jobs.build(read, task.load_task(read.target), place, Agreement(None))
    progress = resume.resume(job)
    yield
    job.meter.restart()
    with train._steps(job, progress) as take_step:
        while True:
            take_step()
            train.saving.collect(job, progress)
            yield


if __name__ == "__main__":
    main()

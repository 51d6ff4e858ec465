"""Runs one contestant: two ranks of a script or of cloudtrain's trainer under torchrun, and what was noted of it."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OURS = "cloudtrain"
SCRIPTS = {"bare": "bare.py", "accelerate": "with_accelerate.py", "lightning": "with_lightning.py"}
SKIP = 50  # steps before the ones that are timed: allocators, caches, the kernels' choice
MARK = "  ::ct "  # as in entrypoints/events.py


@dataclass(frozen=True)
class Model:
    """What is trained: its name, parameters of workload.py, samples of a micro-batch, and steps in a run.

    `training` has more settings; without any, a step has a micro-batch on each rank.
    """

    name: str
    batch: int
    steps: int
    params: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


TRANSFORMER = {"layers": 8, "width": 320, "heads": 5, "vocab": 256, "tokens": 32}
MODELS = [
    Model("mlp", 16, 1000),
    Model("cnn", 8, 250),
    Model("transformer", 2, 110, {"gpt": TRANSFORMER}),
]
PARALLEL = [
    Model(
        *("tensor", 4, 110, {"gpt": {**TRANSFORMER, "layers": 2, "heads": 4, "split": True}}),
        {"global_batch_size": 4, "parallel": {"tensor": 2}},
    ),
    Model(
        *("pipeline", 2, 110, {"gpt": {**TRANSFORMER, "layers": 4, "tied": False}}),
        {"global_batch_size": 16, "parallel": {"pipeline": 2}},
    ),
]


@dataclass(frozen=True)
class Run:
    """What one run showed; `wall_s` and `cpu_s` are rank 0's clocks at the start of each forward pass."""

    first_step_s: float
    wall_s: list[float]
    cpu_s: list[float]
    rss_mb: float
    bytes_per_400: float
    events: list[dict[str, Any]]
    notes: list[dict[str, Any]]  # of every rank

    @property
    def step_ms(self) -> float:
        """The median step."""
        times = self.wall_s[SKIP:]
        return 1e3 * statistics.median(b - a for a, b in pairwise(times))

    @property
    def cpu_ms(self) -> float:
        """The processor's milliseconds a step."""
        times = self.cpu_s[SKIP:]
        return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def spec_of(model: Model, checkpoint: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    """Return the spec that every contestant reads."""
    return {
        "job": "bench",
        "run": {"kind": "task", "target": "workload.py"},
        "params": {"model": model.name, **model.params},
        "training": {
            "strategy": "ddp",
            "precision": "fp32",
            "global_batch_size": 2 * model.batch,
            "micro_batch_size": model.batch,
            "max_steps": model.steps,
            "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
            "seed": 1,
            "log_every": 10,
            **model.training,
            **training,
        },
        "checkpoint": checkpoint or {},
        "timeout_s": 60,
    }


def run(contestant: str, spec: dict[str, Any], folder: Path, *, ranks: int = 2, **how: Any) -> Run:
    """Run the contestant as `launch` does and return what it noted. Raises RuntimeError where it fails."""
    begin_s = launch(contestant, spec, folder, ranks=ranks, **how)
    notes = [json.loads((folder / f"notes.{rank}").read_text()) for rank in range(ranks)]
    head = notes[0]
    return Run(
        first_step_s=head["wall_s"][1] - begin_s,
        wall_s=head["wall_s"],
        cpu_s=head["cpu_s"],
        rss_mb=head["rss"] / 1024,
        bytes_per_400=head["bytes_out"][0] * 400 / head["counted_at"],
        events=events_of(folder / "output.txt"),
        notes=notes,
    )


def launch(
    contestant: str,
    spec: dict[str, Any],
    folder: Path,
    *,
    ranks: int = 2,
    repo: Path | None = None,
    script: Path | None = None,
    **env: str,
) -> float:
    """Run the contestant in the folder to its end; return when it began. Raises RuntimeError where it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "workload.py", folder / "workload.py")
    (folder / "spec.json").write_text(json.dumps(spec))
    program = (
        ["-m", "cloudtrain.entrypoints.trainer.train"]
        if contestant == OURS
        else [str(script or HERE / SCRIPTS[contestant])]
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program]
    output, errors = folder / "output.txt", folder / "errors.txt"
    for old in folder.glob("notes.*"):
        old.unlink()
    with output.open("wb") as out, errors.open("wb") as err:
        begin_s = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            env={**_environment(folder, repo), "BENCH_STEPS": str(spec["training"]["max_steps"]), **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            timeout=570,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{contestant} ended with {done.returncode}:\n{errors.read_text()[-3000:]}")
    return begin_s


def _environment(folder: Path, repo: Path | None) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("CLOUDTRAIN_", "BENCH_"))}
    more = {"PYTHONPATH": str(repo / "typings")} if repo else {}  # its symlinks make the packages importable
    return {
        **clean,
        **more,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "CLOUDTRAIN_SPEC": "spec.json",
        "CLOUDTRAIN_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "BENCH_NOTES": str(folder / "notes"),
    }


def events_of(output: Path) -> list[dict[str, Any]]:
    """Return the fields of the lines that have any."""
    tails = (line.rpartition(MARK) for line in output.read_text(errors="replace").splitlines())
    return [json.loads(tail) for _, mark, tail in tails if mark]

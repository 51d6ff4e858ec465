"""The task of `cloudtrain selftest`: each rank prints a line for each step, and rank 1 kills itself once."""

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cloudtrain.entrypoints import events

RANK, KILL_AT, PACE_S = int(os.environ["RANK"]), int(os.environ["KILL_AT"]), float(os.environ["PACE_S"])
LIFE = f"{os.getpid()}-{time.time_ns()}"
_steps = itertools.count()  # of this process: the step's own number if the process began at step 0


def model(params: dict[str, Any]) -> nn.Module:
    """Return a new model, and leave a file of this rank among the job's output files."""
    (Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"]) / f"rank-{RANK}.txt").write_text("selftest\n")
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))


def dataset(params: dict[str, Any], split: str) -> TensorDataset | None:
    """Return points of four kinds; the only split is "train"."""
    points = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0)) if split == "train" else None


def loss(model: nn.Module, batch: list[Tensor], *, progress: Any = None) -> Tensor:
    """Return the mean loss of a batch, after a line with its bits."""
    found, step = nn.functional.cross_entropy(model(batch[0]), batch[1]), progress.step
    events.emit("selftest", f"step {step}", of=RANK, life=LIFE, step=step, at=time.time(), loss=found.item())
    if RANK == 1 and next(_steps) == step == KILL_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PACE_S)
    return found

"""The task of `cloudtrain selftest`: each rank prints a line for each step, and one rank kills itself once."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cloudtrain.entrypoints import events

RANK = int(os.environ["RANK"])
_settings: dict[str, Any] = {}
_first: list[int] = []  # the step at which this process began


def model(params: dict[str, Any]) -> nn.Module:
    """Return a new model, and leave a file of this rank among the job's output files."""
    _settings.update(params)
    (Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"]) / f"rank-{RANK}.txt").write_text("selftest\n")
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))


def dataset(params: dict[str, Any], split: str) -> TensorDataset | None:
    """Return points of four kinds; there is no split but "train"."""
    points = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0)) if split == "train" else None


def loss(model: nn.Module, batch: list[Tensor], *, progress: Any = None) -> Tensor:
    """Return the mean loss of a batch, after a line with its bits; `kill_at` ends a process that began at step 0."""
    found, step = nn.functional.cross_entropy(model(batch[0]), batch[1]), progress.step
    _first.append(step)
    life = f"{os.getpid()}-{_first[0]}"
    events.emit("selftest", f"step {step}", life=life, step=step, at=time.time(), loss=found.item())
    if RANK == 1 and step == _settings["kill_at"] and _first[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_settings["pace_s"])
    return found

"""A preempted task: saves, leaves the machine to a job of higher priority, waits again, and continues bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wholejobs import losses

from doubles.waiting import until

pytestmark = pytest.mark.slow

# The task is slow after its first steps until the file FAST exists: it cannot end before its preemption.
TASK = """\
import os, time
import torch

read = 0

class Points:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        global read
        read += 1
        time.sleep(0.02 if read < 40 or os.path.exists(os.environ["FAST"]) else 0.5)
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1)

def model(params):
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

def dataset(params, split):
    return Points() if split == "train" else None

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()
"""
CONFIG = """\
name: task
task: task.py
env: {FAST: %s}
training:
  {max_steps: %d, log_every: 1, global_batch_size: 4, optimizer: {name: adamw, lr: 0.01}, schedule: {name: cosine}}
"""


def test_preempted_task_continues_with_the_same_losses(
    cli: Any, project: Callable[..., Path], warm_nodes: None, tmp_path: Path
) -> None:
    """The lower task saves and leaves, continues after the higher task, and its losses are those of a task alone."""

    fast = tmp_path / "fast"

    def send(name: str, steps: int, *options: str) -> str:
        where = project("", script="task.py", text=TASK)
        (where / "cloudtrain.yaml").write_text(CONFIG % (fast, steps))
        cli.ok("submit", "-d", "-y", "--name", name, *options, cwd=where)
        return name

    def state(job: str) -> Any:
        return cli("status", job, "--json").json

    low = send("low", 40, "--queue", "--set", "queue.priority=low")
    until(lambda: len(losses(cli, low)) > 5, 120, 0.2)
    high = send("high", 2, "--queue", "--set", "queue.priority=high", "--set", "queue.preempt=true")
    until(lambda: state(high)["state"] == "succeeded", 120, 0.2)
    assert 5 < len(losses(cli, low)) < 40
    fast.touch()
    until(lambda: state(low)["state"] == "succeeded", 120, 0.2)
    assert state(low)["attempt"] == 1
    alone = send("alone", 40)
    until(lambda: state(alone)["state"] == "succeeded", 120, 0.2)
    assert losses(cli, low) == losses(cli, alone)
    assert len(losses(cli, alone)) == 40

"""For a job with only damaged checkpoints, no attempt starts from step 0 until a person agrees."""

from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.job import State
from cloudtrain.launcher.store.registry import Registry
from doubles import damage
from doubles.plans import make_job

TASK = """
import os
import torch

def model(params):
    return torch.nn.Linear(2, 1)

def dataset(params, split):
    return torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1)) if split == "train" else None

def loss(model, batch):
    steps.append(1)
    if len(steps) > int(os.environ["STEPS"]):
        raise RuntimeError("enough")
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

steps = []
"""
CONFIG = """name: one
backend: local
task: task.py
env: {STEPS: "11"}
training: {global_batch_size: 4, max_steps: 12}
checkpoint: {every_steps: 5, blocking: true}
"""


@pytest.mark.slow
def test_resume_asks_before_it_starts_over(cli: Any, tmp_path: Path, home: Path) -> None:
    """The node refuses first and names both folders; then `resume` asks, and `-y` trains from step 0."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "cloudtrain.yaml").write_text(CONFIG)
    assert cli("submit", "-y").code == 1
    (newer,) = home.rglob("step-00000010")
    damage.swap(newer)
    refused = cli("resume", "last", "-y")
    assert refused.code == 1
    assert "trainer.json is of step 5, which contradicts the folder's name step-00000010" in refused.stderr
    assert newer.is_dir()
    asked = cli("resume", "last")
    assert (asked.code, "answer with yes: all checkpoints were damaged" in asked.stderr) == (2, True), asked.stderr
    again = cli("resume", "last", "-y", "--set", "env.STEPS=99")
    assert (again.code, cli("status", "last", "--json").json["step"]) == (0, 12), again.stderr
    assert Registry().find("last").config["checkpoint"]["all_damaged"] == "stop"


def test_different_error_asks_no_question() -> None:
    """Only the trainer's error type counts, not a similar message."""
    assert make_job("one").attempt.state.all_damaged is False
    assert State("failed", "error", error={"message": "all checkpoints are damaged", "type": None}).all_damaged is False

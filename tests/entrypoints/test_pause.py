"""A training paused by `training.pause_at` equals the uninterrupted training, bit for bit."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from doubles import warmpython

pytestmark = pytest.mark.slow

RUNGS = (1, 3, 9)
TASK = """
import torch
from torch import nn
from torch.nn import functional as F

class Points:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, index): return torch.arange(6.0).mul(index).sin() + 0.1 * torch.rand(6), index % 3

def dataset(params, split): return Points(37 if split == "train" else 11)
def model(params):
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
def evaluate(model, batch): return {"loss": loss(model, batch)}
"""
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.01}
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}


def train(folder: Path, pause_at: int | None, **settings: Any) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Run two ranks to the pause or the end, from the newest checkpoint on; return exit code, events and outcome."""
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK)
    training = {
        "strategy": "ddp",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "max_steps": 14,
        "seed": 1,
        "log_every": 1,
        "eval_every": 6,
        "optimizer": ADAMW,
        "pause_at": pause_at,
        "ema_decay": 0.9,
        "schedule": {"name": "cosine", "warmup_steps": 4},
        "monitor": {"metric": "loss", "patience": 50},
        **settings,
    }
    checkpoint = {"keep": 5, "keep_best": True}
    run = {"kind": "task", "target": "task.py"}
    spec = {"job": "test", "run": run, "training": training, "checkpoint": checkpoint, "timeout_s": 30}
    (folder / "spec.json").write_text(json.dumps(spec))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CLOUDTRAIN_SPEC": "spec.json",
        "CLOUDTRAIN_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "CLOUDTRAIN_OUTPUT_DIR": str(folder / "output"),
        "CLOUDTRAIN_RESULT_DIR": str(folder),
    }
    args = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = warmpython.run([*args, "-m", "cloudtrain.entrypoints.trainer.train"], folder, environment, 100)
    found = [fields for line in done.stdout.splitlines() if (fields := events.parse(line)[1])]
    assert (folder / "outcome.json").exists(), done.stderr
    return done.returncode, found, json.loads((folder / "outcome.json").read_text())


def said(found: list[dict[str, Any]], event: str, name: str) -> list[tuple[int, str]]:
    """Return the field of every such event, by step, as hexadecimal numbers."""
    return [(each["step"], float(each[name]).hex()) for each in found if each["e"] == event and name in each]


def state(folder: Path) -> dict[str, Any]:
    """Return the sums of the last checkpoint's tensors, and the monitor's memory in the checkpoint."""
    last = folder / "checkpoints" / "step-00000014"
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in last.glob("*.safetensors")}
    assert sums
    told = json.loads((last / "trainer.json").read_text().partition("\n")[0])
    names = ("samples", "metrics", "best", "best_of", "best_step", "stale", "evaluated_step", "config_sha256")
    return sums | {name: told[name] for name in names}


MOMENTUM = pytest.param({"optimizer": SGD}, marks=pytest.mark.soak)  # the optimizer's state is saved as AdamW's


@pytest.mark.parametrize("settings", [{}, {"strategy": "fsdp"}, MOMENTUM], ids=["ddp", "fsdp", "momentum"])
def test_run_paused_at_every_rung_equals_the_uninterrupted(settings: dict[str, Any], tmp_path: Path) -> None:
    """Losses, evaluations, weights, averages and optimizer state are equal; no evaluation is repeated."""
    _, whole, _ = train(tmp_path / "whole", None, **settings)
    parts: list[dict[str, Any]] = []
    for rung in RUNGS:
        _, found, outcome = train(tmp_path / "paused", rung, **settings)
        told = next(each for each in found if each["e"] == "paused")
        assert (outcome["outcome"], outcome["step"], told["step"]) == ("paused", rung, rung)
        assert (
            told["value"]
            == outcome["metrics"]["loss"]
            == next(e["loss"] for e in found if e["e"] == "eval" and e["step"] == rung)
        )
        assert not (tmp_path / "paused" / "output" / "model.pt").exists()
        parts += found
    _, last, outcome = train(tmp_path / "paused", None, **settings)
    assert outcome["outcome"] == "done"
    assert [each["changed"] for each in [*parts, *last] if each["e"] == "restart"] == [[]] * len(RUNGS)
    parts += last
    for name in ("loss", "lr"):
        assert said(parts, "step", name) == said(whole, "step", name)
    evaluated = said(parts, "eval", "loss")
    assert [step for step, _ in evaluated] == [1, 3, 6, 9, 12, 14]
    assert set(evaluated) >= set(said(whole, "eval", "loss"))
    assert state(tmp_path / "paused") == state(tmp_path / "whole")
    weights = [(tmp_path / run / "output" / "model.pt").read_bytes() for run in ("whole", "paused")]
    assert weights[0] == weights[1]


def test_pause_at_an_earlier_step_or_at_the_end(tmp_path: Path) -> None:
    """A resumed job at or beyond the pause ends as paused without a step; a pause after the end changes nothing."""
    train(tmp_path, 6)
    for earlier in (6, 4):
        _, found, outcome = train(tmp_path, earlier)
        assert (outcome["outcome"], outcome["step"]) == ("paused", 6)
        assert not [each for each in found if each["e"] in ("step", "eval", "checkpoint")]
    _, found, outcome = train(tmp_path, 20)
    assert (outcome["outcome"], outcome["step"]) == ("done", 14)
    assert [each["step"] for each in found if each["e"] == "eval"] == [12, 14]

"""Real runs of the shared trainer for the tests of trainings: a small task, and the run with its events."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import events
from doubles import warmpython

# 37 samples in steps of 8: epochs end inside steps. Dropout, noise from three generators, two micro-batches a rank.
TASK = """
import math, os, random, resource, signal, time
import numpy, torch
from torch import nn
from torch.nn import functional as F

RANK = int(os.environ.get("RANK", 0))
calls = 0

class Points:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, index):
        x = torch.arange(6.0).mul(index).sin() + 0.1 * torch.rand(6)
        return x + 0.1 * random.random() + 0.1 * numpy.random.random(), index % 3

def dataset(params, split):
    return Points(37 if split == "train" else 11)

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        # A bias before batch norm has no gradient but rounding errors, which AdamW would blow up.
        self.first, self.norm = nn.Linear(6, width, bias=False), nn.BatchNorm1d(width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3)) for _ in range(2))
        self.last = nn.Linear(width, 3)
    def forward(self, x):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)

def model(params):
    return Net(params.get("width", 16))

def loss(model, batch):
    global calls
    calls += 1
    todo = os.environ.get("DO", "").split(":")  # what to do, on which rank, in which micro-batch
    if todo[0] and RANK == int(todo[1]) and calls == int(todo[2]):
        if todo[0] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if todo[0] == "term":
            os.killpg(0, signal.SIGTERM)
        if todo[0] == "nan":
            return F.cross_entropy(model(batch[0]), batch[1]) * math.nan
        if todo[0] == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, -1))
    return F.cross_entropy(model(batch[0]), batch[1])

def evaluate(model, batch):
    return {"loss": F.cross_entropy(model(batch[0]), batch[1])}
"""

TRAINING = {
    "strategy": "ddp",
    "precision": "fp32",
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "max_steps": 16,
    "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.01},
    "schedule": {"name": "cosine", "warmup_steps": 4},
    "clip_norm": 1.0,
    "seed": 1,
    "log_every": 1,
    "eval_every": 6,
}


@dataclass
class Run:
    """A finished run: torchrun's exit code, its output, and its working folder."""

    code: int
    output: str
    errors: str
    folder: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def values(self, event: str, name: str) -> dict[int, float]:
        """Return the field of every such event, by step."""
        return {found["step"]: found[name] for found in self.events if found["e"] == event and name in found}

    def only(self, event: str) -> dict[str, Any]:
        """Return the only event of the kind."""
        (found,) = (found for found in self.events if found["e"] == event)
        return found

    def outcome(self) -> dict[str, Any]:
        """Return rank 0's outcome for the supervisor."""
        path = self.folder / "outcome.json"
        assert path.exists(), self.errors
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def run(
    folder: Path,
    ranks: int = 2,
    do: str = "",
    env: dict[str, str] | None = None,
    *,
    cold: bool = False,
    **settings: Any,
) -> Run:
    """Train in the folder, from its newest checkpoint on; a single rank runs without torchrun.

    Saves block by default, so the durable step at a kill does not depend on timing. `cold`: by a new interpreter, with
    all imports.
    """
    params, checkpoint = settings.pop("params", {}), settings.pop("checkpoint", {})
    text, job = settings.pop("text", None) or TASK, settings.pop("job", "test")
    further = {name: settings.pop(name) for name in ("init_from", "evaluate") if name in settings}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(text)
    spec = {
        "job": job,
        "run": {"kind": "task", "target": "task.py"},
        "params": params,
        "training": {**TRAINING, **settings},
        "checkpoint": {"every_steps": 5, "keep": 5, "resume": "auto", "blocking": True, **checkpoint},
        "timeout_s": 30,
        **further,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    args = ["-m", *launcher, "cloudtrain.entrypoints.trainer.train"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "CLOUDTRAIN_SPEC": "spec.json",
        "CLOUDTRAIN_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "CLOUDTRAIN_OUTPUT_DIR": str(folder / "output"),
        "CLOUDTRAIN_RESULT_DIR": str(folder),
        "DO": do,
        **(env or {}),
    }
    if cold:
        found = subprocess.run(
            [sys.executable, *args],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            start_new_session=True,  # `term` signals the whole process group
        )
    else:
        found = warmpython.run(args, folder, environment, 100)
    parsed = [fields for line in found.stdout.splitlines() if (fields := events.parse(line)[1])]
    return Run(found.returncode, found.stdout, found.stderr, folder, parsed)


def whole_run(folder: Path, *args: Any, **settings: Any) -> Run:
    """Train as `run`, to the end."""
    found = run(folder, *args, **settings)
    assert found.code == 0, found.errors
    return found

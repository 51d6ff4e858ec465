"""Real runs of the shared trainer for the tests of trainings: a small task, and the run with its events.

torchrun starts this file as the ranks of `on_ranks`.
"""

import contextlib
import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.checkpoints import shards
from cloudtrain.entrypoints.trainer.strategies.strategy import Strategy
from doubles import warmpython

# 37 samples in steps of 8: epochs end inside steps. Dropout, noise from three generators, two micro-batches a rank.
TASK = """
import itertools, math, os, random, resource, signal, time
from pathlib import Path
import numpy, torch
from torch import nn
from torch.nn import functional as F

RANK = int(os.environ.get("RANK", 0))
calls = itertools.count(1)  # a plain number would be named as state that no checkpoint has

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
    call = next(calls)
    todo = os.environ.get("DO", "").split(":")  # what to do once, on which rank or on any, in which micro-batch
    done = Path("done-" + "-".join(todo))
    if todo[0] and todo[1] in ("any", str(RANK)) and call == int(todo[2]) and not done.exists():
        done.touch()
        if todo[0] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if todo[0] == "rank":  # of the worker
            os.kill(os.getppid(), signal.SIGKILL)
        if todo[0] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if todo[0] == "term":
            os.killpg(0, signal.SIGTERM)
        if todo[0] == "raise":
            raise ValueError("no such label")
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

    def exported(self) -> dict[str, torch.Tensor]:
        """Return the exported weights."""
        found: dict[str, torch.Tensor] = torch.load(self.folder / "output" / "model.pt", weights_only=True)
        return found

    def saved(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint, by default of the newest, with the optimizer's."""
        pattern = "step-????????" if step is None else f"step-{step:08d}"
        found: dict[str, torch.Tensor] = {}
        for path in max((self.folder / "checkpoints").glob(pattern)).glob("shard-*"):
            shard = shards.open_shard(path)
            for box, begin in shard.boxes:
                whole = found.setdefault(box.name, torch.empty(box.whole, dtype=box.dtype))
                place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                whole[place] = shard.tensor(box, begin)
        return found


def joined(*runs: Run, event: str = "step") -> dict[int, float]:
    """Return the loss of each step over several runs; runs must agree on steps trained twice."""
    losses: dict[int, float] = {}
    for one in runs:
        for step, loss in one.values(event, "loss").items():
            assert losses.setdefault(step, loss) == loss, (step, one.folder)
    return losses


def parameters(done: Run) -> dict[str, bytes]:
    """Return every tensor of the newest checkpoint as bytes, without single numbers."""
    saved = {name: tensor.flatten().view(torch.uint8) for name, tensor in done.saved().items() if tensor.dim()}
    return {name: bytes(tensor.tolist()) for name, tensor in saved.items()}


def on_ranks(file: str, ranks: int, folder: Path, *args: str, cold: bool = False) -> Any:
    """Return what `on_rank(*args)` of the file returns on each of the ranks."""
    result = folder / "result.json"
    done = torchrun(ranks, [__file__, file, str(result), *args], folder, {}, cold=cold)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(result.read_text())


def digest(state: Mapping[str, Any]) -> str:
    """Return a hash of every bit of whole tensors."""
    found = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode() + bytes(whole.detach().contiguous().view(-1).view(torch.uint8).tolist()))
    return found.hexdigest()[:16]


def called(spread: Strategy, *inputs: Any) -> Any:
    """Return the model's outputs, from the forward pass of training."""
    return spread.model(lambda model: model(*inputs))


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list that gets the bytes of each all-reduce meanwhile."""
    sizes: list[int] = []
    real = dist.all_reduce

    def count(tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
        sizes.append(tensor.nbytes)
        return real(tensor, *args, **how)

    dist.all_reduce = count
    try:
        yield sizes
    finally:
        dist.all_reduce = real


def torchrun(
    ranks: int, args: list[str], folder: Path, env: dict[str, str], timeout_s: float = 280, *, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on ranks, a single rank of a module without torchrun.

    `cold`: by a new interpreter, with all imports.
    """
    if ranks > 1 or args[0] != "-m":
        args = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **env}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # not a process for each core
    if not cold:
        found = warmpython.run(args, folder, environment, timeout_s)
        if "EADDRINUSE" in found.stderr:  # another process took the port that torchrun had found free; nothing has run
            found = warmpython.run(args, folder, environment, timeout_s)
        return found
    return subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        start_new_session=True,  # `term` signals the whole process group
    )


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
    environment = {
        "CLOUDTRAIN_SPEC": "spec.json",
        "CLOUDTRAIN_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "CLOUDTRAIN_OUTPUT_DIR": str(folder / "output"),
        "CLOUDTRAIN_RESULT_DIR": str(folder),
        "DO": do,
        **(env or {}),
    }
    found = torchrun(ranks, ["-m", "cloudtrain.entrypoints.trainer.train"], folder, environment, 100, cold=cold)
    parsed = [fields for line in found.stdout.splitlines() if (fields := events.parse(line)[1])]
    return Run(found.returncode, found.stdout, found.stderr, folder, parsed)


def whole_run(folder: Path, *args: Any, **settings: Any) -> Run:
    """Train as `run`, to the end."""
    found = run(folder, *args, **settings)
    assert found.code == 0, found.errors
    return found


def _main() -> None:
    """Call `on_rank` of a file on this rank; rank 0 writes the results of all ranks."""
    file, result, *args = sys.argv[1:]
    sys.path.insert(0, str(Path(file).parent))
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    torch.set_num_threads(1)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, importlib.import_module(Path(file).stem).on_rank(*args))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(everywhere))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's teardown may abort or hang


if __name__ == "__main__":
    _main()

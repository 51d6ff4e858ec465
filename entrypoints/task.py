"""What the user asked for: the settings in the spec, and the plain functions of the task file.

Required: `model(params)`; `dataset(params, split)`, split "train" or "eval" (None: there is no such split);
`loss(model, batch)`, the mean over the batch. Optional: `optimizer(model, params)`; `evaluate(model, batch)`, numbers
by name, each a mean over the batch; `collate(samples)`; `blocks(model)`, the submodules that fsdp shards one by one.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import IterableDataset

__all__ = [
    "CheckpointSettings",
    "Optimizer",
    "Schedule",
    "Spec",
    "Task",
    "TaskError",
    "Training",
    "load_task",
    "read_spec",
]

REQUIRED = {"model": ("params",), "dataset": ("params", "split"), "loss": ("model", "batch")}
OPTIONAL = {
    "optimizer": ("model", "params"),
    "evaluate": ("model", "batch"),
    "collate": ("samples",),
    "blocks": ("model",),
}


class TaskError(Exception):
    """The task file or the settings are wrong: trying again changes nothing, and the message says how to mend it."""


@dataclass(frozen=True)
class Optimizer:
    """The built-in optimizer's settings; a field that the named one does not know is ignored."""

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class Schedule:
    """How the learning rate moves: linear warm-up, then `name` down to `min_lr_ratio` of the full rate."""

    name: str = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0


@dataclass(frozen=True)
class Training:
    """Section `training` of cloudtrain.yaml. Batch sizes count samples; steps are optimizer steps."""

    global_batch_size: int
    micro_batch_size: int | None = None  # on one rank, one forward pass; None: no accumulation
    strategy: str = "ddp"
    precision: str = "fp32"
    max_steps: int | None = None
    epochs: float | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    clip_norm: float | None = None
    seed: int = 0
    log_every: int = 10
    eval_every: int | None = None
    eval_batches: int | None = None  # on each rank; None: the whole split
    num_workers: int = 0


@dataclass(frozen=True)
class CheckpointSettings:
    """Section `checkpoint`: when to save, how many to keep, and what to resume from (auto, never, or a path)."""

    every_steps: int | None = None
    every_s: float | None = None
    keep: int = 3
    resume: str = "auto"


@dataclass(frozen=True)
class Spec:
    """One job's spec as the ranks see it; `config_sha256` covers training and params."""

    job: str
    attempt: int
    target: str
    params: dict[str, Any]
    training: Training
    checkpoint: CheckpointSettings
    timeout_s: float
    config_sha256: str


@dataclass(frozen=True)
class Task:
    """The user's functions; `code_sha256` is that of the task file."""

    model: Callable[..., Any]
    dataset: Callable[..., Any]
    loss: Callable[..., Any]
    code_sha256: str
    optimizer: Callable[..., Any] | None = None
    evaluate: Callable[..., Any] | None = None
    collate: Callable[..., Any] | None = None
    blocks: Callable[..., Any] | None = None

    def make_dataset(self, params: dict[str, Any], split: str) -> Any:
        """Return the split, checked to be map-style and not empty, or None where the task says there is none."""
        data = self.dataset(params, split)
        if data is None:
            return None
        is_stream = isinstance(data, IterableDataset)  # it inherits a __getitem__ that only raises
        if is_stream or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
            raise TaskError(
                f"dataset(params, {split!r}) returned a {type(data).__name__}, which has no length or no items by "
                "index, so no resume could be exact; return a map-style Dataset with __len__ and __getitem__"
            )
        if not len(data):
            raise TaskError(f"dataset(params, {split!r}) is empty; look at the path it reads and at params")
        return data


def read_spec(path: str | Path) -> Spec:
    """Return the spec with every field checked for name and range. Raises TaskError."""
    raw = json.loads(Path(path).read_text())
    run = raw.get("run", {})
    if run.get("kind", "task") != "task":
        raise TaskError(f"the shared trainer runs a task file; this spec's run.kind is {run['kind']!r}")
    settings = dict(raw["training"])
    betas = tuple((settings.get("optimizer") or {}).get("betas") or (0.9, 0.999))
    optimizer = _fill(Optimizer, "training.optimizer", {**(settings.get("optimizer") or {}), "betas": betas})
    schedule = _fill(Schedule, "training.schedule", settings.get("schedule") or {})
    training = _fill(Training, "training", {**settings, "optimizer": optimizer, "schedule": schedule})
    _check_training(training)
    known = {f.name for f in dataclasses.fields(CheckpointSettings)}  # its other keys are for who stages the folder
    checkpoint = {k: v for k, v in (raw.get("checkpoint") or {}).items() if k in known}
    params = raw.get("params") or {}
    config = json.dumps({"training": raw["training"], "params": params}, sort_keys=True)
    return Spec(
        job=str(raw.get("job", "job")),
        attempt=int(raw.get("attempt", 1)),
        target=run.get("target", "task.py"),
        params=params,
        training=training,
        checkpoint=_fill(CheckpointSettings, "checkpoint", checkpoint),
        timeout_s=float(raw.get("timeout_s") or 600),
        config_sha256=hashlib.sha256(config.encode()).hexdigest(),
    )


def _fill(kind: type[Any], where: str, values: dict[str, Any]) -> Any:
    """Return `kind` filled from `values`; None stands for the default. Raises TaskError at an unknown key."""
    names = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in names:
            raise TaskError(f"{where}.{key} is not a setting of this trainer{_suggest(key, names)}")
    try:
        return kind(**{k: v for k, v in values.items() if v is not None})
    except TypeError as error:
        raise TaskError(f"{where}: {error}") from error


def _check_training(training: Training) -> None:
    if (training.max_steps is None) == (training.epochs is None):
        raise TaskError("training needs exactly one of max_steps and epochs")
    for name in (
        "max_steps",
        "epochs",
        "global_batch_size",
        "micro_batch_size",
        "log_every",
        "eval_every",
        "clip_norm",
    ):
        value = getattr(training, name)
        if value is not None and not value > 0:
            raise TaskError(f"training.{name} is {value}; it must be positive")


def load_task(target: str | Path) -> Task:
    """Return the functions of the task file, all its faults found at once. What the file itself raises propagates."""
    path = Path(target).resolve()
    if not path.is_file():
        raise TaskError(f"task file {target} does not exist (looked for {path})")
    source = path.read_bytes()
    module = _import(path)
    faults: list[str] = []
    found = {name: getattr(module, name, None) for name in (*REQUIRED, *OPTIONAL)}
    public = [name for name, value in vars(module).items() if inspect.isfunction(value)]
    for name, arguments in (REQUIRED | OPTIONAL).items():
        call, signature = found[name], f"{name}({', '.join(arguments)})"
        if call is None and name in REQUIRED:
            faults.append(f"it has no function {signature}{_suggest(name, public)}")
        elif call is not None and not callable(call):
            faults.append(f"`{name}` is a {type(call).__name__}; it must be a function {signature}")
        elif call is not None and not _accepts(call, len(arguments)):
            faults.append(f"{name}{inspect.signature(call)} does not take {len(arguments)} arguments: {signature}")
    if faults:
        raise TaskError(f"task file {path}: " + "; ".join(faults))
    return Task(**found, code_sha256=hashlib.sha256(source).hexdigest())  # type: ignore[arg-type]


def _import(path: Path) -> ModuleType:
    # Its neighbours import as they would beside a script, and its classes pickle by the module's own name.
    sys.path.insert(0, str(path.parent))
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"cloudtrain_task_{path.stem}" if taken else path.stem
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise TaskError(f"task file {path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        raise TaskError(f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    return module


def _accepts(call: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(call).bind(*range(count))
    except ValueError:  # a builtin without a signature: its own error will do
        return True
    except TypeError:
        return False
    return True


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""

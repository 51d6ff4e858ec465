"""The user's settings: the spec's fields, checked for name and range.

The launcher has checked the same keys, with their positions in the file (launcher/config/schema.py). The trainer checks
them again, because a spec may not come from the launcher. Sections are as in cloudtrain.yaml.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "CheckpointSettings",
    "Monitor",
    "Optimizer",
    "Schedule",
    "Spec",
    "TaskError",
    "Training",
    "read_spec",
    "suggest",
]


class TaskError(Exception):
    """The task file or the settings are wrong: a retry cannot help, and the message says how to fix the fault."""


@dataclass(frozen=True)
class Optimizer:
    """The built-in optimizer's settings; a field that the named optimizer does not know is ignored.

    `lr_scaling` linear or sqrt: `lr` is meant for `base_batch_size` samples a step, and is scaled to the global batch.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    trust_coefficient: float = 1e-3
    lr_scaling: str = "none"
    base_batch_size: int = 256


@dataclass(frozen=True)
class Schedule:
    """The learning-rate schedule: linear warm-up, then `name` down to `min_lr_ratio` of the full rate."""

    name: str = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0


@dataclass(frozen=True)
class Monitor:
    """The evaluation's metric for the best step, as min or max; `patience` evaluations without a gain stop the job."""

    metric: str = "loss"
    mode: str = "min"
    patience: int | None = None
    min_delta: float = 0.0


@dataclass(frozen=True)
class Training:
    """Section `training`. Batch sizes count samples; steps are optimizer steps."""

    global_batch_size: int
    micro_batch_size: int | None = None  # of a rank's forward pass; None: no accumulation
    strategy: str = "ddp"
    shard_size: int | None = None  # hsdp: ranks that share a copy of the model; None: the ranks of a node
    precision: str = "fp32"
    reproducible: str = "standard"  # strict: the same bits on any number of ranks that divides the virtual ranks
    compile: bool = False
    compression: str = "none"  # of gradients between ranks, ddp: none fp16 bf16 powersgd
    powersgd_rank: int = 2
    activation_checkpointing: bool = False  # compute the blocks' activations again in the backward pass
    cpu_offload: bool = False  # fsdp and hsdp: parameters, gradients and optimizer state stay in host memory
    wrap_min_params: int | None = None  # fsdp: shard every submodule with as many parameters; None: the layers
    max_steps: int | None = None
    epochs: float | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    clip_norm: float | None = None
    ema_decay: float | None = None
    on_nan: str = "stop"  # or skip: leave out the step whose loss or gradient is not finite
    seed: int = 0
    log_every: int | None = None  # steps between step events; None: as many as take about two seconds
    eval_every: int | None = None
    eval_batches: int | None = None  # on each rank; None: the whole split
    monitor: Monitor = field(default_factory=Monitor)
    num_workers: int = 0
    tokens_per_sample: int | None = None  # for the tokens per second
    peak_tflops: float | None = None  # of a rank's device, for MFU; None: from a table of GPUs
    diagnose_steps: int | None = None  # measure what bounds a step, in place of training
    tensorboard: bool = False


@dataclass(frozen=True)
class CheckpointSettings:
    """Section `checkpoint`: when to save, how many to keep, and the source of a resume (auto, never, or a path)."""

    every_steps: int | None = None
    every_s: float | None = None
    keep: int = 3
    keep_best: bool = False
    blocking: bool = False  # True: training waits until a checkpoint is durable
    mirror: str | None = None  # the URI of a second place for copies of finished checkpoints
    export: str = "torch"  # the form of the weights in the output folder: torch or safetensors
    resume: str = "auto"
    all_damaged: str = "stop"  # or start-over: train from step 0 if checkpoints exist and all are damaged


@dataclass(frozen=True)
class Spec:
    """A job's spec, as read by the ranks; `config_sha256` covers training and params."""

    job: str
    attempt: int
    target: str
    params: dict[str, Any]
    training: Training
    checkpoint: CheckpointSettings
    timeout_s: float
    config_sha256: str


_POSITIVE = (
    "max_steps",
    "epochs",
    "global_batch_size",
    "micro_batch_size",
    "shard_size",
    "powersgd_rank",
    "wrap_min_params",
    "log_every",
    "eval_every",
    "eval_batches",
    "clip_norm",
    "tokens_per_sample",
    "peak_tflops",
)
_CHOICES = {
    "precision": ("fp32", "bf16", "fp16"),
    "reproducible": ("standard", "strict"),
    "compression": ("none", "fp16", "bf16", "powersgd"),
    "on_nan": ("stop", "skip"),
}


def read_spec(path: str | Path) -> Spec:
    """Return the spec with every field checked for name and range. Raises TaskError."""
    raw = json.loads(Path(path).read_text())
    run = raw.get("run", {})
    if run.get("kind", "task") != "task":
        raise TaskError(f"the shared trainer runs a task file; this spec's run.kind is {run['kind']!r}")
    settings = dict(raw["training"])
    betas = tuple((settings.get("optimizer") or {}).get("betas") or (0.9, 0.999))
    settings["optimizer"] = _fill(
        Optimizer, "training.optimizer", {**(settings.get("optimizer") or {}), "betas": betas}
    )
    settings["schedule"] = _fill(Schedule, "training.schedule", settings.get("schedule") or {})
    settings["monitor"] = _fill(Monitor, "training.monitor", settings.get("monitor") or {})
    training = _fill(Training, "training", settings)
    _check(training)
    known = {f.name for f in dataclasses.fields(CheckpointSettings)}  # the rest is for the folder sync
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


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` if a known word is close, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _fill(kind: type[Any], where: str, values: dict[str, Any]) -> Any:
    """Return `kind` filled from `values`; None stands for the default. Raises TaskError at an unknown key."""
    names = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in names:
            raise TaskError(f"{where}.{key} is not a setting of this trainer{suggest(key, names)}")
    try:
        return kind(**{k: v for k, v in values.items() if v is not None})
    except TypeError as error:
        raise TaskError(f"{where}: {error}") from error


def _check(training: Training) -> None:
    if (training.max_steps is None) == (training.epochs is None):
        raise TaskError("training needs exactly one of max_steps and epochs")
    for name in _POSITIVE:
        value = getattr(training, name)
        if value is not None and not value > 0:
            raise TaskError(f"training.{name} is {value}; it must be positive")
    for name, known in _CHOICES.items():
        value = getattr(training, name)
        if value not in known:
            raise TaskError(f"training.{name} is {value!r}; there are {', '.join(known)}{suggest(str(value), known)}")
    if training.monitor.mode not in ("min", "max"):
        raise TaskError(f"training.monitor.mode is {training.monitor.mode!r}; there are min and max")

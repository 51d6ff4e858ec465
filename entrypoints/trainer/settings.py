"""The user's settings in numbers and names: the spec's fields, by the sections of cloudtrain.yaml.

Only the launcher writes a spec. The launcher has checked names, ranges and choices, for a sweep also the ends of each
range (launcher/config/schema_training.py). contradictions.py has the rules across settings.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..contract import CheckpointSettings, EvaluateSettings, InitSettings, JobSpec
from ..errors import TaskError
from ..records import Record

REHEARSAL_EVAL_BATCHES = 2  # per rank: a few batches show that evaluation works


@dataclass(frozen=True)
class OptimizerSettings(Record):
    """The built-in optimizer's settings (optim.py)."""

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    trust_coefficient: float = 1e-3
    lr_scaling: str = "none"
    """linear or sqrt: `lr` is meant for `base_batch_size` samples a step, and is scaled to the global batch."""
    base_batch_size: int = 256


@dataclass(frozen=True)
class ScheduleSettings(Record):
    """The course of the learning rate: linear warm-up, then `name` down to `min_lr_ratio` of the full rate."""

    name: str = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    milestones: tuple[int, ...] = ()
    """Of step: the steps, counted from 0, from which on the rate is multiplied by `gamma` once more."""
    gamma: float = 0.1
    patience: int = 3
    """Of plateau: evaluations without gain until the rate is multiplied by `gamma`."""

    @property
    def is_flat(self) -> bool:
        """Whether the rate never changes."""
        return self.name == "constant" and self.warmup_steps == 0


@dataclass(frozen=True)
class MonitorSettings(Record):
    """The metric that selects the best checkpoint."""

    metric: str = "loss"
    mode: str = "min"
    """min or max: whether less or more is better."""
    patience: int | None = None
    """Evaluations without gain before training stops; None: never."""
    min_delta: float = 0.0


@dataclass(frozen=True)
class ParallelSettings(Record):
    """How one copy of the model is spread over ranks, beside the data dimension of `strategy`."""

    tensor: int = 1
    """Ranks that share each layer's matrices."""
    sequence: bool = False
    """Between the layers these ranks share the sequence too."""
    plan: dict[str, str] | None = None
    """The kind of each module by name or pattern; None: the task's `tensor_plan`, the model's own, or by names."""
    pipeline: int = 1
    """Stages, one after the other."""
    schedule: str = "1f1b"
    cut: str | list[int] = "even"
    """even, timed, or the first block of each later stage."""
    chunks: int = 1
    """Pieces of the model in each stage, for the schedule interleaved."""
    weights: str = "stash"
    """Of a backward pass under the schedule async: those of its forward pass (stash), or the newest (latest)."""

    @property
    def ranks(self) -> int:
        """The ranks that hold one copy of the model together."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class ServerSettings(Record):
    """The parameter servers of strategy async."""

    shards: int | None = None
    """Shards of the weights, each on a rank of its own; None: one a node."""
    staleness: str = "capped"
    """The weight of a gradient that is tau updates late: min(1, N / (1 + tau)) for capped, 1 for none."""
    softsync: int = 1
    """Gradients averaged in an update."""
    max_lead: int | None = None
    """Tickets that a worker may be ahead of the slowest (SSP)."""
    order: str = "arrival"
    """Gradients are applied as they arrive, or by tickets."""
    lease_s: float = 60.0
    """A worker silent for so long is lost."""


@dataclass(frozen=True)
class OuterSettings(Record):
    """The outer optimizer of `strategy: local`, SGD with Nesterov momentum; 1.0 and 0.0 are plain averaging."""

    lr: float = 1.0
    momentum: float = 0.0


@dataclass(frozen=True)
class LocalSettings(Record):
    """Section `training.local`: when the ranks of `strategy: local` average their weights."""

    period: int = 16
    """Steps between averages."""
    sync_steps: int = 0
    """The first steps, which are ddp's."""
    optimizer_state: str | None = None
    """average or keep; None: keep with outer momentum, else average."""
    group_period: int | None = None
    """Steps between averages within an instance."""
    outer: OuterSettings = field(default_factory=OuterSettings)

    @property
    def keeps_state(self) -> bool:
        """Whether each rank keeps its own optimizer state at an average.

        With outer momentum that is the default: Douillard et al. 2023 (DiLoCo) saw no gain from three times the bytes.
        """
        return self.optimizer_state == "keep" or (self.optimizer_state is None and self.outer.momentum > 0)

    @property
    def has_outer(self) -> bool:
        """Whether an average is more than the mean of the weights."""
        return self.outer != OuterSettings()


@dataclass(frozen=True)
class TrainingSettings(Record):
    """Section `training`. Batch sizes count samples; steps are optimizer steps."""

    global_batch_size: int
    micro_batch_size: int | None = None  # on one rank, one forward pass; None: no accumulation
    strategy: str = "ddp"
    local: LocalSettings | None = None  # of the strategy local
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    # What ranks share: ddp: the optimizer's state (ZeRO-1), or None; fsdp, hsdp: gradients too (ZeRO-2), or parameters
    shard: str | None = None
    shard_size: int | None = None  # hsdp: ranks that share one copy of the model; None: the ranks of one node
    precision: str = "fp32"
    reproducible: str = "standard"  # strict: the same bits on any number of ranks that divides the virtual ranks
    compile: bool = False
    compression: str = "none"  # of gradients between ranks, ddp: none fp16 bf16 powersgd threshold topk
    powersgd_rank: int = 2
    compression_density: float = 0.01  # threshold, topk: the share of the gradient's entries that a rank sends
    compression_warmup_steps: int = 0  # threshold, topk: the density falls to compression_density in these steps
    activation_checkpointing: bool = False  # recompute the blocks' activations in the backward pass
    activation_offload: bool = False  # keep the activations for the backward pass in host memory
    cpu_offload: bool = False  # fsdp and hsdp: parameters, gradients and optimizer state stay in host memory
    wrap_min_params: int | None = None  # fsdp: shard each submodule with this many parameters or more; None: the layers
    max_steps: int | None = None
    epochs: float | None = None
    pause_at: int | None = None  # stop after this step, save, and end as paused; max_steps stays the planned end
    pause_epochs: int | None = None  # the same after so many passes over the data: the rung of a sweep with `epochs`
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    clip_norm: float | None = None
    ema_decay: float | None = None
    on_nan: str = "stop"  # or skip: leave out steps with a nonfinite loss or gradient
    seed: int = 0
    shuffle: bool = True  # or each epoch has the dataset's own order
    log_every: int | None = None  # steps between step events; None: the steps of about two seconds
    eval_every: int | None = None
    eval_batches: int | None = None  # per rank; None: the whole split
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    num_workers: int = 0
    tokens_per_sample: int | None = None  # for tokens a second
    peak_tflops: float | None = None  # of one rank's device, for MFU; None: from a table of GPUs
    diagnose_steps: int | None = None  # measure the bound of a step, in place of training
    tensorboard: bool = False


@dataclass(frozen=True)
class Spec:
    """One job's spec for the ranks; `config_sha256` covers training, but for the pauses, and params."""

    job: str
    attempt: int
    target: str
    params: dict[str, Any]
    training: TrainingSettings
    checkpoint: CheckpointSettings
    timeout_s: float
    config_sha256: str
    init_from: InitSettings | None = None
    evaluate: EvaluateSettings | None = None


_PAUSES = ("pause_at", "pause_epochs")  # change no step


def read_spec(path: str | Path) -> Spec:
    """Return the spec. Raises TaskError if the job is not a task."""
    spec = JobSpec.load(json.loads(Path(path).read_text()))
    if spec.run.kind != "task":
        raise TaskError(f"the shared trainer runs a task file; this spec's run.kind is {spec.run.kind!r}")
    params = dict(spec.params or {})
    compared = {key: value for key, value in (spec.training or {}).items() if key not in _PAUSES}
    config = json.dumps({"training": compared, "params": params}, sort_keys=True)
    return Spec(
        job=spec.job,
        attempt=spec.attempt,
        target=spec.run.target,
        params=params,
        training=TrainingSettings.load(spec.training or {}),
        checkpoint=spec.checkpoint,
        timeout_s=spec.timeout_s,
        config_sha256=hashlib.sha256(config.encode()).hexdigest(),
        init_from=spec.init_from,
        evaluate=spec.evaluate,
    )


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` if a known word is close, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def shortened(spec: Spec) -> Spec:
    """Return the spec without pauses, with an evaluation of a few batches; `config_sha256` stays the whole job's."""
    batches = min(spec.training.eval_batches or REHEARSAL_EVAL_BATCHES, REHEARSAL_EVAL_BATCHES)
    changes: dict[str, Any] = {"eval_batches": batches, "log_every": 1, **dict.fromkeys(_PAUSES)}
    return replace(spec, training=replace(spec.training, **changes))

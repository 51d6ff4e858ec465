"""The config's keys below `training`, `checkpoint`, `sweep`, `init_from` and `evaluate`.

On the nodes they are in entrypoints/trainer/settings.py and entrypoints/contract.py.
"""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from cloudtrain.entrypoints import stores
from cloudtrain.entrypoints.sweep import search
from cloudtrain.entrypoints.trainer.optimizer_facts import BY_LAYER, OPTIMIZERS, SCHEDULES, heeded_by
from cloudtrain.entrypoints.trainer.strategies.facts import FACTS

from .kinds import CheckpointChoice, Duration, Many, NamePattern, Section, Shorthand, SplitName, Text, key, section_key

if TYPE_CHECKING:
    Strategy = str
    OptimizerName = str
    ScheduleName = str
    Algorithm = str
else:  # the names of the nodes' tables
    Strategy = Literal[tuple(FACTS)]
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    ScheduleName = Literal[SCHEDULES]
    Algorithm = Literal[search.ALGORITHMS]
*_FIRST, _LAST = (f"{facts.spread} ({name})" for name, facts in FACTS.items())
_HEEDED_BY = {key: ", ".join(names) for key, names in heeded_by().items()}
_MIRRORS = stores.forms("PREFIX")


class Optimizer(Section):
    """The built-in optimizers; a task with its own `optimizer(model, params)` does without."""

    name: OptimizerName = key(
        "adamw", f"Which optimizer; {' and '.join(BY_LAYER)} are for very large batches.", "adamw"
    )
    lr: float = key(1e-3, "Highest learning rate.", 3e-4, gt=0)
    weight_decay: float = key(0.0, "Weight decay.", 0.01, ge=0)
    momentum: float = key(0.0, f"Momentum ({_HEEDED_BY['momentum']}).", 0.9, ge=0, lt=1)
    betas: Many[Annotated[float, Field(ge=0, lt=1)]] = key(
        (0.9, 0.999), f"The two decay rates ({_HEEDED_BY['betas']}).", [0.9, 0.95], min_length=2, max_length=2
    )
    eps: float = key(1e-8, f"Added to the denominator ({_HEEDED_BY['eps']}).", 1e-8, gt=0)
    trust_coefficient: float = key(
        1e-3, f"How far a layer's weights may move for their norm ({_HEEDED_BY['trust_coefficient']}).", 1e-3, gt=0
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = key(
        "none",
        "`lr` is meant for `base_batch_size`: scale it to `global_batch_size` in proportion (linear, for "
        "sgd) or by the square root (for adamw, lamb). A warm-up then starts from the unscaled rate.",
        "linear",
    )
    base_batch_size: int = key(256, "Samples a step that `lr` was found for; only with `lr_scaling`.", 256, ge=1)


class Schedule(Section):
    """The learning rate's schedule: up in a line, then as named."""

    name: ScheduleName = key(
        "constant",
        "Its shape after the warm-up: step falls at `milestones`, plateau after `patience` evaluations without a "
        "better `monitor.metric`; one-cycle rises from 1/25 along a cosine, by default for 30 % of the steps.",
        "cosine",
    )
    warmup_steps: int = key(0, "Steps of linear warm-up.", 100, ge=0)
    min_lr_ratio: float = key(0.0, "Last or least learning rate as a share of the highest.", 0.1, ge=0, le=1)
    milestones: Many[Annotated[int, Field(ge=1)]] = key(
        (), "Steps at which the rate is multiplied by `gamma` (step).", [1000, 2000]
    )
    gamma: float = key(0.1, "The factor of a fall of the rate (step, plateau).", 0.5, gt=0, lt=1)
    patience: int = key(3, "Evaluations without a better one before the rate falls (plateau).", 5, ge=1)


class Monitor(Section):
    """Which metric of the evaluation says what is best, and early stopping: when to stop looking for better."""

    metric: Text = key("loss", "Name of the metric, as `evaluate` returns it.", "accuracy")
    mode: Literal["min", "max"] = key("min", "Whether less of it is better, or more.", "max")
    patience: int | None = key(None, "Evaluations without a better one before training stops. Default: never.", 5, ge=1)
    min_delta: float = key(0.0, "Least change that counts as better.", 0.001, ge=0)


class Parallel(Section):
    """For models that do not fit on one GPU: how a copy is spread over ranks; `strategy` spreads copies and data."""

    tensor: int = key(1, "Neighbouring ranks that share the matrices of each layer, within an instance.", 2, ge=1)
    sequence: bool = key(
        False, "With `tensor`: between the layers the ranks share the sequence too, which saves memory.", True
    )
    plan: dict[Text, Literal["column", "row", "head", "embedding", "sequence", "whole"]] | None = key(
        None,
        "The kind of each module that is split, by its name or a pattern. Default: the task's "
        "`tensor_plan(model)`, else the model's own plan, else well-known names of layers.",
        {"layers.*.mlp.up": "column", "layers.*.mlp.down": "row"},
    )
    pipeline: int = key(1, "Stages of the model, one after the other, on different ranks.", 2, ge=1)
    schedule: Literal["1f1b", "gpipe", "interleaved", "async"] = key(
        "1f1b",
        "The order of passes: 1f1b keeps one micro-batch, and one more for each later stage, gpipe all of "
        "a step; interleaved has several `chunks` a stage, and waits less; async never waits, and trains with older "
        "weights.",
        "gpipe",
    )
    cut: Literal["even", "timed"] | Many[Annotated[int, Field(ge=1)]] = key(
        "even",
        "Where stages begin: equal numbers of blocks; equal times, measured at the start; or the first "
        "block of each later stage.",
        "timed",
        [4, 8],
    )
    chunks: int = key(1, "Separate pieces of the model in each stage, for `schedule: interleaved`.", 2, ge=1)
    weights: Literal["stash", "latest"] = key(
        "stash",
        "The weights of a backward pass under `schedule: async`: those of its forward pass, of which "
        "copies are kept, or the latest.",
        "latest",
    )


class ParameterServer(Section):
    """The parameter servers of `strategy: async`, and how they apply gradients that are late."""

    shards: int | None = key(
        None, "Parts of the weights, each served by another rank. Default: one an instance.", 2, ge=1
    )
    staleness: Literal["capped", "none"] = key(
        "capped", "The weight of a gradient that is tau updates late, on N ranks: min(1, N / (1 + tau)), or 1.", "none"
    )
    softsync: int = key(1, "Gradients that are averaged in an update, at most the ranks.", 2, ge=1)
    max_lead: int | None = key(
        None,
        "Gradients that a rank may be ahead of the slowest (bounded staleness, SSP). Default: any number.",
        3,
        ge=0,
    )
    order: Literal["arrival", "tickets"] = key(
        "arrival",
        "Apply gradients as they arrive; or in a fixed order, which repeats a run to the bit but waits for "
        "the slowest rank.",
        "tickets",
    )
    lease_s: float = key(60.0, "Seconds without a sign of life after which a worker is lost.", 20, ge=2)


class OuterTraining(Section):
    """How averages move the weights: SGD, Nesterov momentum along the mean movement (DiLoCo). Default: to the mean."""

    lr: float = key(1.0, "Learning rate of an average; 1.0 takes the mean.", 0.7, gt=0)
    momentum: float = key(
        0.0, "Momentum over averages. 0.6 suits some tens of averages; 0.9 needs 100 or more.", 0.6, ge=0, lt=1
    )


class LocalTraining(Section):
    """When the ranks of `strategy: local` average their weights; between averages they send nothing."""

    period: int = key(16, "Steps between averages over all ranks, 2 or more.", 32, ge=1)
    sync_steps: int = key(0, "First steps that are ddp's, a multiple of `period` (post-local SGD).", 160, ge=0)
    optimizer_state: Literal["average", "keep"] | None = key(
        None,
        "The optimizer's state at an average: averaged too, or kept by each rank. Default: average, or "
        "keep with `outer.momentum`.",
        "keep",
    )
    group_period: int | None = key(None, "Steps between averages within an instance; divides `period`.", 4, ge=1)
    outer: OuterTraining = section_key(OuterTraining, {"lr": 0.7, "momentum": 0.6})


class Training(Section):
    """The shared trainer's settings; only for a `task`."""

    strategy: Strategy = key(
        "ddp",
        f"How model and gradients are spread over the ranks: {', '.join(_FIRST)}, or {_LAST}.",
        "fsdp",
    )
    local: LocalTraining | None = key(None, "When the ranks average (`strategy: local`).", {"period": 32})
    parallel: Parallel = section_key(Parallel, {"tensor": 2})
    server: ParameterServer = section_key(ParameterServer, {"softsync": 2})
    shard: Literal["optimizer", "gradients", "parameters"] | None = key(
        None,
        "What the ranks share beside the data. optimizer: its state (ddp, ZeRO-1); gradients: these too "
        "(fsdp, hsdp, ZeRO-2); parameters: these too (fsdp, hsdp, ZeRO-3). Default: nothing (ddp), parameters (fsdp, "
        "hsdp).",
        "optimizer",
    )
    shard_size: int | None = key(
        None, "Ranks that share one copy of the model (hsdp). Default: an instance's.", 8, ge=1
    )
    precision: Literal["fp32", "bf16", "fp16"] = key("fp32", "Arithmetic of the forward and backward pass.", "bf16")
    reproducible: Literal["standard", "strict"] = key(
        "standard",
        "strict: the same bits on any number of ranks that divides global_batch_size / micro_batch_size, "
        "a power of two; gradients are then summed in a fixed order, at a cost in time.",
        "strict",
    )
    compile: bool = key(False, "Compile the model with torch.compile.", True)
    compression: Literal["none", "fp16", "bf16", "powersgd", "threshold", "topk"] = key(
        "none",
        "How gradients travel between ranks (ddp): in half precision, at low rank, or as their largest "
        "entries: by sign and mean (threshold) or by value (topk), with the rest added to later steps.",
        "bf16",
        "threshold",
    )
    powersgd_rank: int = key(2, "Rank of powersgd's approximation.", 4, ge=1)
    compression_density: float = key(
        0.01,
        "Share of the entries that a rank sends in a step, for `compression: threshold` (below 1) and `topk`.",
        0.1,
        gt=0,
        le=1,
    )
    compression_warmup_steps: int = key(
        0,
        "Steps in which the density falls from 25 % in stages of a quarter (6.25 %, 1.6 %, ...) to "
        "`compression_density`.",
        200,
        ge=0,
    )
    activation_checkpointing: bool = key(
        False, "Compute each layer's activations again in the backward pass: less memory, more time.", True
    )
    activation_offload: bool = key(
        False, "Keep the activations for the backward pass in host memory: less GPU memory, more time.", True
    )
    cpu_offload: bool = key(False, "Keep parameters and optimizer state in host memory (fsdp, hsdp).", True)
    wrap_min_params: int | None = key(
        None,
        "Shard each submodule of at least so many parameters (fsdp, hsdp). Default: the model's layers.",
        10_000_000,
        ge=1,
    )
    global_batch_size: int = key(32, "Samples an optimizer step, over all ranks and accumulation steps.", 256, ge=1)
    micro_batch_size: int | None = key(
        None,
        "Samples a forward pass on one rank; accumulation steps follow. Default: a rank's whole share; with "
        "`resources.min_instances` the largest that each possible number of machines can share.",
        32,
        ge=1,
    )
    max_steps: int | None = key(None, "Optimizer steps to train; or `epochs`.", 2000, ge=1)
    epochs: int | None = key(None, "Passes over the data; or `max_steps`. With neither, 1.", 10, ge=1)
    pause_at: int | None = key(
        None, "Stop after this step, save, and end as paused; schedules and sample order keep max_steps.", 400, ge=1
    )
    optimizer: Optimizer = section_key(Optimizer, {"name": "sgd", "lr": 0.1})
    schedule: Schedule = section_key(Schedule, {"name": "cosine", "warmup_steps": 100})
    clip_norm: float | None = key(None, "Largest norm of all gradients together. Default: not clipped.", 1.0, gt=0)
    ema_decay: float | None = key(
        None,
        "Keep a moving average of the weights with this decay a step; it is evaluated and exported.",
        0.999,
        gt=0,
        lt=1,
    )
    on_nan: Literal["stop", "skip"] = key(
        "stop", "A loss or gradient that is not finite: stop, or leave that step out.", "skip"
    )
    seed: int = key(0, "Seed of weights, shuffling and dropout.", 1, ge=0, le=2**32 - 1)
    shuffle: bool = key(
        True,
        "Shuffle the samples in each epoch; false keeps the dataset's order. A task's `sampler` gives its own.",
        False,
    )
    log_every: int | None = key(
        None, "Steps between step events. Default: as many as take about two seconds.", 10, ge=1
    )
    eval_every: int | None = key(None, "Steps between evaluations. Default: one, after the last step.", 500, ge=1)
    eval_batches: int | None = key(None, "Batches of an evaluation on each rank. Default: all.", 50, ge=1)
    monitor: Monitor = section_key(Monitor, {"metric": "accuracy", "mode": "max", "patience": 5})
    num_workers: int = key(0, "Data loader processes of each rank; 0 loads in the rank itself.", 4, ge=0, le=256)
    tokens_per_sample: int | None = key(None, "Tokens of one sample, to report tokens a second.", 2048, ge=1)
    peak_tflops: float | None = key(
        None,
        "Peak of a rank's device at the precision of the job, for MFU. Default: known GPUs' data sheets.",
        989,
        gt=0,
    )
    diagnose_steps: int | None = key(
        None, "Measure what bounds a step, over so many, in place of training; `cloudtrain diagnose` sets it.", 30, ge=5
    )
    tensorboard: bool = key(False, "Write TensorBoard event files to CLOUDTRAIN_OUTPUT_DIR/tensorboard.", True)

    @model_validator(mode="before")
    @classmethod
    def _one_epoch(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("epochs") is None and given.get("max_steps") is None:
            return {**given, "epochs": 1}
        return given


class Checkpoint(Section):
    """When state is saved, where, and what a start does with it."""

    every_steps: int | None = key(None, "Optimizer steps between checkpoints.", 200, ge=1)
    every: Duration | None = key(
        None, "Time between checkpoints; with `every_steps`, whichever comes first. With neither, 10m.", "10m"
    )
    keep: int = key(3, "Newest checkpoints kept.", 3, ge=1)
    keep_best: bool = key(False, "Keep the best one by `training.monitor`, too; it is saved when found.", True)
    blocking: bool = key(False, "Let training wait until each checkpoint is durable, as it need not.", True)
    export: Literal["torch", "safetensors"] = key(
        "torch", "Form of the final weights in CLOUDTRAIN_OUTPUT_DIR: model.pt or model.safetensors.", "safetensors"
    )
    mirror: Text | None = key(
        None,
        f"A second place to which each rank copies finished checkpoints: a folder, {', '.join(_MIRRORS[:-1])}, or "
        f"{_MIRRORS[-1]}, below which each job has its own. A job without its own checkpoints resumes from there.",
        "/mnt/nas/mirror",
        "s3://bucket/mirror",
        "https://acc.blob.core.windows.net/ckpt/mirror",
    )
    uri: Text | None = key(
        None,
        "Where they go: each job has URI/JOB/, on every backend, and no other job reads from there. To start from "
        "another job's weights: init_from. Default: a place of the backend's, by job name.",
        "s3://bucket/ckpt",
    )
    resume: Text = key(
        "auto",
        "auto: resume from this job's newest; never: from the start; or a checkpoint's path.",
        "auto",
        "never",
        "s3://bucket/ckpt/step-200",
    )
    all_damaged: Literal["stop", "start-over"] = key(
        "stop",
        "What a start does if there are checkpoints and all are damaged. stop: end with an error that "
        "names them, and let `resume` ask; start-over: train from step 0.",
        "start-over",
    )

    @model_validator(mode="before")
    @classmethod
    def _ten_minutes(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("every") is None and given.get("every_steps") is None:
            return {**given, "every": "10m"}
        return given


class Sweep(Section):
    """A search over values of other keys: many trials within one budget."""

    space: dict[Text, Any] = key(
        ...,
        "Keys of this file, each with its values: `{uniform: [0, 0.3]}`, `{log: [1e-5, 1e-1]}`, "
        "`{int: [16, 256], log: true}`, or a list of choices. A range of a grid needs `points`.",
        {"training.optimizer.lr": {"log": [1e-5, 1e-1]}, "training.optimizer.name": ["adamw", "lamb"]},
        min_length=1,
    )
    algorithm: Algorithm = key("asha", search.IN_WORDS, "halving")
    metric: Text | None = key(None, "Metric of the evaluation. Default: training.monitor's.", "accuracy")
    mode: Literal["min", "max"] | None = key(
        None, "Whether less of the metric is better, or more. Default: training.monitor's.", "max"
    )
    trials: int | None = key(None, "Trials in all. Default: a grid's size, else 27.", 81, ge=1, le=10_000)
    parallel: int | None = key(
        None, "Trials at once in the whole sweep. Default: all that fit, without GPUs 4 a machine.", 8, ge=1, le=1000
    )
    slots: int = key(1, "GPUs of a trial on a machine; without GPUs: ranks.", 2, ge=1, le=64)
    instances: int = key(1, "Machines of a trial, which takes them whole.", 2, ge=1, le=1000)
    keep: int = key(5, "Trials whose checkpoints stay after the end.", 1, ge=1)
    steps: int | None = key(
        None,
        "Steps of a whole training of a `script` or `module`, as the program prints steps; without it, each trial of "
        "`random` and `grid` trains to its own end. A task has `training.max_steps`.",
        3000,
        ge=1,
        le=1_000_000_000,
    )
    first_rung: int | None = key(
        None,
        "Steps of the first segment, of a generation for pbt; epochs for a training in `epochs`. Default: "
        "the whole training / 81 (pbt: / 20), and at least `eval_every`.",
        200,
        ge=1,
    )
    factor: int = key(3, "Each rung has so many times the steps of the rung before.", 4, ge=2, le=10)
    seed: int = key(0, "Seed of the trials' values.", 1, ge=0)


class InitFrom(Section):
    """The weights of the first step, from another job or a file. The job's own checkpoints always win."""

    job: Text | None = key(None, "The parent: a job's id or name. Exactly one of `job` and `path`.", "digits")
    checkpoint: CheckpointChoice | None = key(
        None,
        "Which checkpoint: best, last or step-N. Default: the best where one is kept, else the last.",
        "best",
        "step-200",
    )
    path: Text | None = key(
        None,
        "A checkpoint's folder, a folder with model.safetensors (or its index, or model.pt), or a file, "
        "on the job's machine; on the clouds a uri of the platform's storage.",
        "s3://bucket/export/",
    )
    load: Literal["weights", "weights+optimizer"] = key(
        "weights",
        "weights: those that were evaluated, so the average's where `ema_decay` was set, with a fresh "
        "optimizer. weights+optimizer: the trained weights and the optimizer's state. Step, schedule and sample order "
        "begin anew in both.",
        "weights+optimizer",
    )
    rename: dict[NamePattern, str] = key(
        {},
        "Regular expression -> replacement, applied to the parent's names, in this order.",
        {"^backbone\\.": "encoder."},
    )
    skip: Many[NamePattern] = key(
        (),
        "Regular expressions that find names: these weights are not loaded, and begin as `model` does.",
        ["^head\\."],
    )
    strict: bool = key(
        True,
        "Every weight of the model is found, and every weight of the parent is used. With false, names of "
        "one side are left out and named in the log; a different shape is always refused.",
        False,
    )


def _init_from(value: Any) -> Any:
    """Return text as a mapping: a path or uri with a slash, else a job with or without `@checkpoint`."""
    if isinstance(value, dict | BaseModel | None):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a job such as `digits` or `digits@best`, or a mapping of `job` or `path`")
    if "/" in value or value.endswith((".safetensors", ".pt")):
        return {"path": value}
    job, at, checkpoint = value.partition("@")
    if at and not re.fullmatch(r"best|last|step-[0-9]{1,12}", checkpoint):
        raise ValueError(f"best, last or a step such as step-200 after `@`, not `{checkpoint}`")
    return {"job": job, **({"checkpoint": checkpoint} if at else {})}


InitFromOrText = Annotated[InitFrom, Shorthand("text", _init_from, {"type": "string"})]


class Evaluate(Section):
    """The test of a task: figures on a split that has chosen nothing (docs/evaluate.md)."""

    split: SplitName = key("test", "The split's name: `dataset(params, split)`.", "test")
    checkpoint: Literal["best", "last"] | None = key(
        None,
        "Whose figures are the job's: default the best where one is kept, else the last. The other is reported beside.",
        "best",
    )
    at_end: bool = key(True, "Test after the last step, on the job's own machines.", True)
    batch_size: int | None = key(
        None, "Samples of a forward pass, on any number of ranks. Default: micro_batch_size, else 32.", 64, ge=1
    )
    predictions: int = key(
        0,
        "Write the predictions of so many samples, the first by index, to predictions-SPLIT.jsonl.gz.",
        1000,
        ge=0,
        le=100_000,
    )
    only: bool = key(False, "Test the weights of `init_from`, and train nothing; `cloudtrain evaluate` sets it.", True)

"""The config's keys below `training` and `checkpoint`, which entrypoints/trainer/settings.py reads too, and `sweep`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .kinds import Duration, Many, Section, Text

Strategy = Literal["ddp", "fsdp", "hsdp", "local", "async"]  # as in the trainer: add a strategy in both lists


class Optimizer(Section):
    """The built-in optimizers; a task with its own `optimizer(model, params)` does without."""

    name: Literal["sgd", "adamw", "radam", "lars", "lamb"] = Field(
        "adamw", description="Which optimizer; lars and lamb are for very large batches.", examples=["adamw"]
    )
    lr: float = Field(1e-3, gt=0, description="Highest learning rate.", examples=[3e-4])
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.", examples=[0.01])
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum (sgd, lars).", examples=[0.9])
    betas: Many[Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999),
        min_length=2,
        max_length=2,
        description="The two decay rates (adamw, radam, lamb).",
        examples=[[0.9, 0.95]],
    )
    eps: float = Field(1e-8, gt=0, description="Added to the denominator (adamw, radam, lamb).", examples=[1e-8])
    trust_coefficient: float = Field(
        1e-3, gt=0, description="How far a layer's weights may move for their norm (lars).", examples=[1e-3]
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="`lr` is meant for `base_batch_size`: scale it to `global_batch_size` in proportion (linear, for "
        "sgd) or by the square root (for adamw, lamb). A warm-up then starts from the unscaled rate.",
        examples=["linear"],
    )
    base_batch_size: int = Field(
        256, ge=1, description="Samples a step that `lr` was found for; only with `lr_scaling`.", examples=[256]
    )


class Schedule(Section):
    """How the learning rate moves: up in a line, then as named."""

    name: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="Its shape after the warm-up.", examples=["cosine"]
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.", examples=[100])
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Last learning rate as a share of the highest.", examples=[0.1]
    )


class Monitor(Section):
    """Which metric of the evaluation says what is best, and when to stop looking for better."""

    metric: Text = Field("loss", description="Name of the metric, as `evaluate` returns it.", examples=["accuracy"])
    mode: Literal["min", "max"] = Field("min", description="Whether less of it is better, or more.", examples=["max"])
    patience: int | None = Field(
        None, ge=1, description="Evaluations without a better one before training stops. Default: never.", examples=[5]
    )
    min_delta: float = Field(0.0, ge=0, description="Least change that counts as better.", examples=[0.001])


class Parallel(Section):
    """How one copy of the model is spread over ranks; `training.strategy` spreads the copies and the data."""

    tensor: int = Field(
        1,
        ge=1,
        description="Neighbouring ranks that share the matrices of each layer, within an instance.",
        examples=[2],
    )
    sequence: bool = Field(
        False,
        description="With `tensor`: between the layers the ranks share the sequence too, which saves memory.",
        examples=[True],
    )
    plan: dict[Text, Literal["column", "row", "head", "embedding", "sequence", "whole"]] | None = Field(
        None,
        description="The kind of each module that is split, by its name or a pattern. Default: the task's "
        "`tensor_plan(model)`, else the model's own plan, else well-known names of layers.",
        examples=[{"layers.*.mlp.up": "column", "layers.*.mlp.down": "row"}],
    )
    pipeline: int = Field(
        1, ge=1, description="Stages of the model, one after the other, on different ranks.", examples=[2]
    )
    schedule: Literal["1f1b", "gpipe", "interleaved", "async"] = Field(
        "1f1b",
        description="The order of passes: 1f1b keeps one micro-batch, and one more for each later stage, gpipe all of "
        "a step; interleaved has several `chunks` a stage, and waits less; async never waits, and trains with older "
        "weights.",
        examples=["gpipe"],
    )
    cut: Literal["even", "timed"] | Many[Annotated[int, Field(ge=1)]] = Field(
        "even",
        description="Where stages begin: equal numbers of blocks; equal times, measured at the start; or the first "
        "block of each later stage.",
        examples=["timed", [4, 8]],
    )
    chunks: int = Field(
        1, ge=1, description="Separate pieces of the model in each stage, for `schedule: interleaved`.", examples=[2]
    )
    weights: Literal["stash", "latest"] = Field(
        "stash",
        description="The weights of a backward pass under `schedule: async`: those of its forward pass, of which "
        "copies are kept, or the latest.",
        examples=["latest"],
    )


class ParameterServer(Section):
    """The parameter servers of `strategy: async`, and how they apply gradients that are late."""

    shards: int | None = Field(
        None,
        ge=1,
        description="Parts of the weights, each served by another rank. Default: one an instance.",
        examples=[2],
    )
    staleness: Literal["capped", "none"] = Field(
        "capped",
        description="The weight of a gradient that is tau updates late, on N ranks: min(1, N / (1 + tau)), or 1.",
        examples=["none"],
    )
    softsync: int = Field(
        1, ge=1, description="Gradients that are averaged in an update, at most the ranks.", examples=[2]
    )
    max_lead: int | None = Field(
        None,
        ge=0,
        description="Gradients that a rank may be ahead of the slowest (bounded staleness, SSP). Default: any number.",
        examples=[3],
    )
    order: Literal["arrival", "tickets"] = Field(
        "arrival",
        description="Apply gradients as they arrive; or in a fixed order, which repeats a run to the bit but waits for "
        "the slowest rank.",
        examples=["tickets"],
    )
    lease_s: float = Field(
        60.0, ge=2, description="Seconds without a sign of life after which a worker is lost.", examples=[20]
    )


class OuterTraining(Section):
    """The optimizer of the averages: SGD with Nesterov momentum along the ranks' mean movement (DiLoCo)."""

    lr: float = Field(1.0, gt=0, description="Learning rate of an average; 1.0 takes the mean.", examples=[0.7])
    momentum: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Momentum over averages. 0.6 suits some tens of averages; 0.9 needs 100 or more.",
        examples=[0.6],
    )


class LocalTraining(Section):
    """When the ranks of `strategy: local` average their weights; between averages they send nothing."""

    period: int = Field(16, ge=1, description="Steps between averages over all ranks, 2 or more.", examples=[32])
    sync_steps: int = Field(
        0, ge=0, description="First steps that are ddp's, a multiple of `period` (post-local SGD).", examples=[160]
    )
    optimizer_state: Literal["average", "keep"] | None = Field(
        None,
        description="The optimizer's state at an average: averaged too, or kept by each rank. Default: average, or "
        "keep with `outer.momentum`.",
        examples=["keep"],
    )
    group_period: int | None = Field(
        None, ge=1, description="Steps between averages within an instance; divides `period`.", examples=[4]
    )
    outer: OuterTraining = Field(
        OuterTraining.model_construct(),
        description="How an average moves the weights. Default: to the mean.",
        examples=[{"lr": 0.7, "momentum": 0.6}],
    )


class Training(Section):
    """The shared trainer's settings; only for a `task`."""

    strategy: Strategy = Field(
        "ddp",
        description="How model and gradients are spread over the ranks: replicated (ddp), sharded (fsdp), sharded "
        "within a group of ranks and replicated over the groups (hsdp), replicated and averaged from time to time, "
        "for slow networks (local), or trained by workers that do not wait for each other (async).",
        examples=["fsdp"],
    )
    local: LocalTraining | None = Field(
        None, description="When the ranks average (`strategy: local`).", examples=[{"period": 32}]
    )
    parallel: Parallel = Field(
        Parallel.model_construct(),
        description="For models that do not fit on one GPU.",
        examples=[{"tensor": 2}],
    )
    server: ParameterServer = Field(
        ParameterServer.model_construct(),
        description="The servers of `strategy: async`.",
        examples=[{"softsync": 2}],
    )
    shard: Literal["optimizer", "gradients", "parameters"] | None = Field(
        None,
        description="What the ranks share beside the data. optimizer: its state (ddp, ZeRO-1); gradients: these too "
        "(fsdp, hsdp, ZeRO-2); parameters: these too (fsdp, hsdp, ZeRO-3). Default: nothing (ddp), parameters (fsdp, "
        "hsdp).",
        examples=["optimizer"],
    )
    shard_size: int | None = Field(
        None, ge=1, description="Ranks that share one copy of the model (hsdp). Default: an instance's.", examples=[8]
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Arithmetic of the forward and backward pass.", examples=["bf16"]
    )
    reproducible: Literal["standard", "strict"] = Field(
        "standard",
        description="strict: the same bits on any number of ranks that divides global_batch_size / micro_batch_size, "
        "a power of two; gradients are then summed in a fixed order, at a cost in time.",
        examples=["strict"],
    )
    compile: bool = Field(False, description="Compile the model with torch.compile.", examples=[True])
    compression: Literal["none", "fp16", "bf16", "powersgd", "threshold", "topk"] = Field(
        "none",
        description="How gradients travel between ranks (ddp): in half precision, at low rank, or as their largest "
        "entries: by sign and mean (threshold) or by value (topk), with the rest added to later steps.",
        examples=["bf16", "threshold"],
    )
    powersgd_rank: int = Field(2, ge=1, description="Rank of powersgd's approximation.", examples=[4])
    compression_density: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Share of the entries that a rank sends in a step, for `compression: threshold` (below 1) and "
        "`topk`.",
        examples=[0.1],
    )
    compression_warmup_steps: int = Field(
        0,
        ge=0,
        description="Steps in which the density falls from 25 % in stages of a quarter (6.25 %, 1.6 %, ...) to "
        "`compression_density`.",
        examples=[200],
    )
    activation_checkpointing: bool = Field(
        False,
        description="Compute each layer's activations again in the backward pass: less memory, more time.",
        examples=[True],
    )
    activation_offload: bool = Field(
        False,
        description="Keep the activations for the backward pass in host memory: less GPU memory, more time.",
        examples=[True],
    )
    cpu_offload: bool = Field(
        False, description="Keep parameters and optimizer state in host memory (fsdp, hsdp).", examples=[True]
    )
    wrap_min_params: int | None = Field(
        None,
        ge=1,
        description="Shard each submodule of at least so many parameters (fsdp, hsdp). Default: the model's layers.",
        examples=[10_000_000],
    )
    global_batch_size: int = Field(
        32, ge=1, description="Samples an optimizer step, over all ranks and accumulation steps.", examples=[256]
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples a forward pass on one rank; accumulation steps follow. Default: a rank's whole share.",
        examples=[32],
    )
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps to train; or `epochs`.", examples=[2000])
    epochs: int | None = Field(
        None, ge=1, description="Passes over the data; or `max_steps`. With neither, 1.", examples=[10]
    )
    pause_at: int | None = Field(
        None,
        ge=1,
        description="Stop after this step, save, and end as paused; schedules and sample order keep max_steps.",
        examples=[400],
    )
    optimizer: Optimizer = Field(
        Optimizer.model_construct(), description="The optimizer.", examples=[{"name": "sgd", "lr": 0.1}]
    )
    schedule: Schedule = Field(
        Schedule.model_construct(),
        description="The learning rate's schedule.",
        examples=[{"name": "cosine", "warmup_steps": 100}],
    )
    clip_norm: float | None = Field(
        None, gt=0, description="Largest norm of all gradients together. Default: not clipped.", examples=[1.0]
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Keep a moving average of the weights with this decay a step; it is evaluated and exported.",
        examples=[0.999],
    )
    on_nan: Literal["stop", "skip"] = Field(
        "stop", description="A loss or gradient that is not finite: stop, or leave that step out.", examples=["skip"]
    )
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of weights, shuffling and dropout.", examples=[1])
    log_every: int | None = Field(
        None, ge=1, description="Steps between step events. Default: as many as take about two seconds.", examples=[10]
    )
    eval_every: int | None = Field(
        None, ge=1, description="Steps between evaluations. Default: one, after the last step.", examples=[500]
    )
    eval_batches: int | None = Field(
        None, ge=1, description="Batches of an evaluation on each rank. Default: all.", examples=[50]
    )
    monitor: Monitor = Field(
        Monitor.model_construct(),
        description="Which evaluation is the best, and early stopping.",
        examples=[{"metric": "accuracy", "mode": "max", "patience": 5}],
    )
    num_workers: int = Field(
        0, ge=0, le=256, description="Data loader processes of each rank; 0 loads in the rank itself.", examples=[4]
    )
    tokens_per_sample: int | None = Field(
        None, ge=1, description="Tokens of one sample, to report tokens a second.", examples=[2048]
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak of a rank's device at the precision of the job, for MFU. Default: known GPUs' data sheets.",
        examples=[989],
    )
    diagnose_steps: int | None = Field(
        None,
        ge=5,
        description="Measure what bounds a step, over so many, in place of training; `cloudtrain diagnose` sets it.",
        examples=[30],
    )
    tensorboard: bool = Field(
        False, description="Write TensorBoard event files to CLOUDTRAIN_OUTPUT_DIR/tensorboard.", examples=[True]
    )

    @model_validator(mode="before")
    @classmethod
    def _one_epoch(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("epochs") is None and given.get("max_steps") is None:
            return {**given, "epochs": 1}
        return given


class Checkpoint(Section):
    """When state is saved, where, and what a start does with it."""

    every_steps: int | None = Field(None, ge=1, description="Optimizer steps between checkpoints.", examples=[200])
    every: Duration | None = Field(
        None,
        description="Time between checkpoints; with `every_steps`, whichever comes first. With neither, 10m.",
        examples=["10m"],
    )
    keep: int = Field(3, ge=1, description="Newest checkpoints kept.", examples=[3])
    keep_best: bool = Field(
        False, description="Keep the best one by `training.monitor`, too; it is saved when found.", examples=[True]
    )
    blocking: bool = Field(
        False, description="Let training wait until each checkpoint is durable, as it need not.", examples=[True]
    )
    export: Literal["torch", "safetensors"] = Field(
        "torch",
        description="Form of the final weights in CLOUDTRAIN_OUTPUT_DIR: model.pt or model.safetensors.",
        examples=["safetensors"],
    )
    mirror: Text | None = Field(
        None,
        description="A second place to which each rank copies finished checkpoints: a folder, s3://BUCKET/PREFIX, "
        "gs://BUCKET/PREFIX, or https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX, below which each job has its "
        "own. A job without its own checkpoints resumes from there.",
        examples=["/mnt/nas/mirror", "s3://bucket/mirror", "https://acc.blob.core.windows.net/ckpt/mirror"],
    )
    uri: Text | None = Field(
        None,
        description="Where they go. Default: a place of the backend's, by job name.",
        examples=["s3://bucket/ckpt"],
    )
    resume: Text = Field(
        "auto",
        description="auto: resume from this job's newest; never: from the start; or a checkpoint's path.",
        examples=["auto", "never", "s3://bucket/ckpt/step-200"],
    )
    all_damaged: Literal["stop", "start-over"] = Field(
        "stop",
        description="What a start does if there are checkpoints and all are damaged. stop: end with an error that "
        "names them, and let `resume` ask; start-over: train from step 0.",
        examples=["start-over"],
    )

    @model_validator(mode="before")
    @classmethod
    def _ten_minutes(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("every") is None and given.get("every_steps") is None:
            return {**given, "every": "10m"}
        return given


class Sweep(Section):
    """A search over values of other keys: many trials within one budget."""

    space: dict[Text, Any] = Field(
        min_length=1,
        description="Keys of this file, each with its values: `{uniform: [0, 0.3]}`, `{log: [1e-5, 1e-1]}`, "
        "`{int: [16, 256], log: true}`, or a list of choices. A range of a grid needs `points`.",
        examples=[{"training.optimizer.lr": {"log": [1e-5, 1e-1]}, "training.optimizer.name": ["adamw", "lamb"]}],
    )
    algorithm: Literal["grid", "random", "halving", "asha", "pbt"] = Field(
        "asha",
        description="grid and random train each trial to the end. asha pauses trials at rungs, and lets the best "
        "1/factor of a rung go on; halving first waits for all trials of a rung, so its result does not depend on the "
        "order of ends. pbt: after each generation the lowest quarter continues from copies of the highest quarter, "
        "with changed values.",
        examples=["halving"],
    )
    metric: Text | None = Field(
        None, description="Metric of the evaluation. Default: training.monitor's.", examples=["accuracy"]
    )
    mode: Literal["min", "max"] | None = Field(
        None,
        description="Whether less of the metric is better, or more. Default: training.monitor's.",
        examples=["max"],
    )
    trials: int | None = Field(
        None, ge=1, le=10_000, description="Trials in all. Default: a grid's size, else 27.", examples=[81]
    )
    parallel: int | None = Field(
        None, ge=1, le=1000, description="Trials at once. Default: all slots of a packed sweep, else 4.", examples=[8]
    )
    place: Literal["packed", "jobs"] | None = Field(
        None,
        description="packed: one job, whose machines train the trials side by side. jobs: each trial is a job of its "
        "own. Default: packed for a task with `max_steps` or `epochs` and a script with `steps`, else jobs.",
        examples=["jobs"],
    )
    slots: int = Field(
        1, ge=1, le=64, description="GPUs of a trial, of one instance; without GPUs: ranks (packed).", examples=[2]
    )
    keep: int = Field(
        5, ge=1, description="Trials whose checkpoints stay after the end of a packed sweep.", examples=[1]
    )
    steps: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="Steps of a whole training of a `script` or `module`, as the program prints steps. A task has "
        "`training.max_steps`.",
        examples=[3000],
    )
    first_rung: int | None = Field(
        None,
        ge=1,
        description="Steps of the first segment, of a generation for pbt; epochs for a training in `epochs`. Default: "
        "the whole training / 81 (pbt: / 20), and at least `eval_every`.",
        examples=[200],
    )
    factor: int = Field(
        3, ge=2, le=10, description="Each rung has so many times the steps of the rung before.", examples=[4]
    )
    seed: int = Field(0, ge=0, description="Seed of the trials' values.", examples=[1])

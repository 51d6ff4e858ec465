"""One training job in a rank's memory: device and process group, data, and progress."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from ..checkpoints.mirror import Uploader, open_mirror
from ..checkpoints.saver import Saver
from ..errors import FormError, TaskError
from ..rank import exchange
from ..rank.agree import Agreement
from ..rank.rehearsal import RehearsalSteps
from . import data, optim, tensorboard
from .ema import Ema
from .generators import search
from .metrics import ThroughputMeter, ddp_communication, device_peak_tflops
from .modelform import ModelForm, module_of
from .own_optimizer import OwnOptimizer
from .settings import ParallelSettings, ScheduleSettings, Spec, TrainingSettings
from .strategies.cut import Probe
from .strategies.facts import facts_of
from .strategies.strategy import Strategy
from .strategies.wrap import explaining, refusals, wrap
from .task import Task
from .weighted import Tally

EXIT_DONE, EXIT_SAVED = 0, 75
ASK_FILE = "save-now"  # any user may create the file in the checkpoint folder: save, and continue
# Each agreement aligns the ranks, which wait for no other rank between averages. In the deadline's spare seconds.
_APART_SPACING_S = 2.0
_SAVE_BYTES_PER_S = 100e6  # for the deadline's margin until a save is timed: a slow disk or network share


@dataclass(frozen=True)
class RankContext:
    """This rank, the number of ranks, and the rank's device.

    `tensor` neighbouring ranks share each layer's matrices; `pipeline` stages of neighbouring ranks follow each other.
    The ranks of all stages that hold one copy of the model compute the same micro-batches.
    """

    rank: int
    ranks: int
    device: torch.device
    tensor: int = 1
    pipeline: int = 1

    @property
    def is_head(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The position among the ranks that compute different micro-batches."""
        return self.rank // self.tensor % self.data_ranks

    @property
    def data_ranks(self) -> int:
        """The number of groups of ranks that compute different micro-batches."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def holders(self) -> range:
        """The ranks of this rank's stage: together they hold the stage's parameters."""
        width = self.ranks // self.pipeline
        return range(self.rank // width * width, (self.rank // width + 1) * width)

    @property
    def counts(self) -> bool:
        """Whether this rank's losses count: of the ranks with the same micro-batches, the first of the last stage."""
        return self.rank % self.tensor == 0 and self.holders.stop == self.ranks


@dataclass(frozen=True)
class TrainingJob:
    """The constant parts of a running job."""

    spec: Spec
    task: Task
    place: RankContext
    agreement: Agreement
    split: data.Split
    train_data: Any
    order: data.SampleOrder
    eval_data: Any | None
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # active only in fp16
    ema: Ema | None
    own: OwnOptimizer | None  # of a task with an optimizer of its own
    scaled: Any  # the optimizer, as the loss scaler takes it
    groups: list[dict[str, Any]]  # of parameters that share a rate, of all optimizers inside
    base_lrs: list[float]
    factor: Callable[[int, int, int], float]  # on the rates: of the step counted from 0, the last step, plateau's falls
    identity: dict[str, Any]  # the job's description in every checkpoint, compared at a resume
    meter: ThroughputMeter
    saver: Saver
    folder: Path  # of the checkpoints
    uploader: Uploader | None
    owned: range  # the virtual ranks of this rank
    board: tensorboard.Board | None
    tally: Tally
    roots: tuple[Any, ...]  # what runs in a step or an evaluation, and may draw random numbers
    generators: list[Any]  # that a search of the roots finds

    def batches(self, dataset: Any, keys: Iterator[list[data.Key]]) -> data.Batches:
        """Return the batches of these samples, loaded according to the settings, on this rank's device."""
        training = self.spec.training
        return data.load(dataset, keys, training.seed, self.task.collate, training.num_workers, self.place.device)

    def seed(self, *words: int) -> None:
        """Seed all generators, also those of the task's functions and of the model, for a use of the job's seed."""
        data.seed_all(data.mix(self.spec.training.seed, *words), self.generators)

    def tell(self, progress: TrainState, ahead: int = 0) -> None:
        """Tell the task where the training is, before a call of `loss` or `evaluate`; `ahead`: so many steps later."""
        if (told := self.task.progress) is None:
            return
        told.step, told.max_steps = progress.step + ahead, progress.max_steps
        told.epoch = (progress.samples + ahead * self.split.global_batch) // self.order.length

    def clear_gradients(self) -> None:
        """Clear all gradients, also of parameters that a task's own optimizer does not change."""
        self.optimizer.zero_grad()
        for parameter in self.own.left if self.own is not None else ():
            parameter.grad = None

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its averaged weights, if the job, or its optimizer, has any."""
        if self.own is not None and self.own.has_modes and self.ema is None:
            return self.own.averaged(self.strategy.module)
        return nullcontext() if self.ema is None else self.ema.swapped()


@dataclass
class TrainState:
    """The progress of the job, changed by the loop."""

    step: int = 0
    samples: int = 0  # the position in the sample stream
    max_steps: int = 0
    pause_at: int | None = None  # the step at which the settings pause the job
    resumed_from: int | None = None
    begun_step: int | None = None  # the newest step with a begun save
    saved_step: int | None = None  # the newest step with a durable save
    evaluated_step: int | None = None
    compared_step: int | None = None  # the newest step at which the ranks' copies of the model were equal
    evaluated_at_s: float | None = None  # on the monotonic clock: the begin of this run's last evaluation
    metrics: dict[str, float] = field(default_factory=dict)
    save_s: float = 0.0  # duration of the newest save until durable
    failed_saves: int = 0  # in a row
    best: float | None = None  # of the monitored metric
    best_of: str | None = None  # the metric's name, and whether less or more is better
    best_step: int | None = None
    stale: int = 0  # evaluations since the best
    falls: int = 0  # of the learning rate under the schedule plateau
    log_every: int = 10  # without a setting, until the duration of a step is known
    skipped: int = 0  # steps in a row left out because of a nonfinite loss or gradient
    left_out: int = 0  # of this rank alone, since the last average
    own_loss: torch.Tensor | float = 0.0  # the sum of this rank's losses in the present step
    loss: float | None = None
    path: Path | None = None  # of the newest checkpoint
    parent: dict[str, Any] | None = None  # the origin of the first step's weights: job, step, sha256
    rehearsal: RehearsalSteps | None = None
    form: ModelForm | None = None  # of the model, before this run's first step

    @property
    def last_step(self) -> int:
        """Return the step at which this run ends: the job's last step, except before a pause and in a rehearsal."""
        if self.pause_at is None and self.rehearsal is None:
            return self.max_steps
        leave_at = self.rehearsal.leave_at if self.rehearsal else None
        return min(step for step in (self.max_steps, self.pause_at, leave_at) if step is not None)

    @property
    def is_paused(self) -> bool:
        """Whether the job has reached the step of a pause, before its last step."""
        return self.pause_at is not None and self.pause_at <= self.step < self.max_steps


def connect(timeout_s: float, is_strict: bool = False, parallel: ParallelSettings | None = None) -> RankContext:
    """Join the process group that torchrun's variables describe; without the variables, be the only rank.

    `is_strict`: sums on this rank's device have a fixed order too, if torch has one. Raises TaskError if `parallel`
    does not divide the ranks.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    parallel = parallel or ParallelSettings()
    if ranks % parallel.ranks:
        fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise TaskError(
            f"parallel.tensor {parallel.tensor} x parallel.pipeline {parallel.pipeline} does not divide the {ranks} "
            f"ranks; the product must be one of {fits}"
        )
    cuda = torch.cuda.is_available()
    if is_strict:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise cuBLAS sums in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:  # the thread count changes the order of sums, so the count is fixed, and recorded in the checkpoint
        # Strict uses one thread: a changed number of ranks per machine would change the number of threads.
        torch.set_num_threads(1 if is_strict else int(os.environ.get("OMP_NUM_THREADS") or 1))
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    # Agreements are CPU tensors, over gloo even if gradients use NCCL: reading them never waits for the GPU.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **({} if "RANK" in os.environ else alone))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return RankContext(rank, ranks, device, parallel.tensor, parallel.pipeline)


def build(spec: Spec, task: Task, place: RankContext, agreement: Agreement, *, silent: bool = False) -> TrainingJob:
    """Return the job, with the weights from `model(params)`; `silent` ranks send no gradients. Raises TaskError."""
    wanted = spec.training
    if faults := refusals(wanted, spec.checkpoint.every_steps):
        raise TaskError("; ".join(faults))
    task.check(wanted)
    split = data.split_batch(wanted.global_batch_size, wanted.micro_batch_size, place.data_ranks)
    train_data, fingerprint = train_split(spec, task)
    order = order_of(spec, task, train_data)
    eval_data = eval_split(spec, task, fingerprint, place)
    module = module_of(spec, task)
    parameters = sum(p.numel() for p in module.parameters())
    probe = _probe(spec, task, train_data, order, split) if place.pipeline > 1 else None
    strategy = wrap(wanted, module, place.device, split, **task.layout, probe=probe, silent=silent)
    split = replace(split, is_strided=strategy.strided)
    optimizer, own = _optimizer(spec, task, place, strategy, split)
    groups = optimizer.param_groups if own is None else own.rated or [{"lr": 0.0}]
    of_data = {"dataset_length": len(train_data), "dataset_fingerprint": fingerprint, "order": order.kind}
    of_model = {"optimizer": type(optimizer).__name__, "parameters": parameters}
    folder = Path(os.environ.get("CLOUDTRAIN_CHECKPOINT_DIR") or "checkpoints").absolute()
    second = open_mirror(spec.checkpoint.mirror, spec.job)
    uploader = None if second is None else Uploader(second, spec.checkpoint.keep)
    guess_s = 12 * parameters / place.ranks / _SAVE_BYTES_PER_S  # of the duration of a save and an upload
    spacing = {"spacing_s": _APART_SPACING_S} if facts_of(wanted).averages_weights else {}
    upload_s, every_s = guess_s if uploader is not None else 0.0, spec.checkpoint.every_s
    agreement.start(place.rank, every_s, guess_s, folder / ASK_FILE, upload_s, **spacing)
    roots = (task.loss, task.evaluate, task.outputs, task.after_step, strategy.module)
    # Before an exchange the ranks have different gradients: then they agree on whether to leave out a step.
    kind = torch.amp.GradScaler if strategy.exchange is None else ShardedGradScaler
    scaler = kind(place.device.type, enabled=wanted.precision == "fp16")
    strategy.attach(optimizer, scaler)
    return TrainingJob(
        spec=spec,
        task=task,
        place=place,
        agreement=agreement,
        split=split,
        train_data=train_data,
        order=order,
        eval_data=eval_data,
        strategy=strategy,
        optimizer=optimizer,
        scaler=scaler,
        ema=None if wanted.ema_decay is None else Ema(strategy.module, wanted.ema_decay),
        own=own,
        scaled=optimizer if own is None else own.scaled,
        groups=groups,
        base_lrs=[float(group["lr"]) for group in groups],
        factor=_factor(spec, task, split),
        identity={**_settings(spec, task, split), **of_model, **of_data},
        meter=_meter(wanted, split, place, strategy),
        saver=Saver(folder, place.device, spec.checkpoint.keep, uploader, place.holders),
        folder=folder,
        uploader=uploader,
        owned=split.owned(place.data_rank),
        board=_board(spec, place),
        tally=Tally(split, wanted.tokens_per_sample, says=place.counts and place.data_rank == 0),
        roots=roots,
        generators=list(search(roots)),
    )


def train_split(spec: Spec, task: Task) -> tuple[Any, str]:
    """Return the training data and their fingerprint. Collective. Raises TaskError."""
    dataset = task.make_dataset(spec.params, "train", spec.training.seed)
    if dataset is None:
        raise TaskError("dataset(params, 'train') returned None; the training split is needed")
    fingerprint = data.fingerprint(dataset, spec.training.seed)
    some = data.some_hashes(dataset, spec.training.seed) if dist.get_world_size() > 1 else []
    seen = exchange.gather([len(dataset), fingerprint, some])  # else the ranks might train different numbers of steps
    fewest = min(len(hashes) for *_, hashes in seen)
    known = [(*one, hashes[:fewest]) for *one, hashes in seen]
    other = next((rank for rank, one in enumerate(known) if one != known[0]), None)
    if other is not None and isinstance(dataset, data.Stream):
        raise TaskError(
            f"ranks 0 and {other} read different streams; return the same stream on all ranks, not a rank's share: the "
            "trainer gives each rank its micro-batches"
        )
    if other is not None:
        raise TaskError(
            f"the ranks read different training data: rank 0 has {seen[0][0]} items, rank {other} {seen[other][0]}, "
            "or their first, last or another item differs; is a local copy stale, is a list of files not sorted or a "
            "split not seeded, or do items draw from a generator that no seed reaches?"
        )
    return dataset, fingerprint


def order_of(spec: Spec, task: Task, dataset: Any) -> data.SampleOrder:
    """Return the order of the training samples. Collective. Raises TaskError."""
    wanted = spec.training
    seed, shuffles, epochs = wanted.seed, wanted.shuffle, wanted.epochs
    if isinstance(dataset, data.Stream):
        if epochs is not None or wanted.pause_epochs is not None:
            raise FormError("the training data are a stream, which has no length: set training.max_steps, not epochs")
        if task.sampler is not None:
            raise FormError("sampler gives indices, and the training data are a stream, which has none: leave it out")
        return data.SampleOrder(seed, sys.maxsize, data.AS_IT_IS)
    if task.sampler is None:
        return data.SampleOrder(seed, len(dataset), "shuffled" if shuffles else data.AS_IT_IS)
    if not shuffles:
        raise FormError("the task's sampler gives the order of the samples; leave `shuffle: false` out")
    data.seed_all(data.mix(seed, data.INIT, 0))
    sampler = task.sampler(dataset, spec.params)
    first = data.drawn(sampler, seed, 0, len(dataset))
    last = math.ceil(epochs or (wanted.max_steps or 1) * wanted.global_batch_size / len(first)) - 1
    looked = sorted({1, min(2, last), last} - {0})  # an order that grows is found here, not in a later epoch
    more = [data.drawn(sampler, seed, epoch, len(dataset), len(first)) for epoch in (*looked, 0)]
    digest = hashlib.sha256(torch.cat(more).numpy().tobytes()).hexdigest()
    seen = exchange.gather([digest, torch.equal(first, more[-1])])
    if not all(one == [seen[0][0], True] for one in seen):
        raise FormError(
            "sampler gives different indices on two ranks, or when it is read again under the same seed: draw from "
            "torch, random or numpy.random, and give the samples of all ranks together, as DistributedSampler does not"
        )
    return data.SampleOrder(seed, len(first), "the sampler's", sampler, len(dataset))


def _probe(spec: Spec, task: Task, train_data: Any, order: data.SampleOrder, split: data.Split) -> Probe:
    """Return a function that computes the loss of the first micro-batch, to trace and to time the model."""
    keys = iter([data.stream(order, 0, split.micro)])
    batch = next(data.load(train_data, keys, seed=spec.training.seed, collate=task.collate))
    return lambda model, device: task.loss(model, data.to_device(batch, device))


def _optimizer(
    spec: Spec, task: Task, place: RankContext, strategy: Strategy, split: data.Split
) -> tuple[Any, OwnOptimizer | None]:
    """Return the optimizer, and the record of a task's own."""
    wanted = spec.training
    if task.optimizer is not None:
        with strategy.optimized(), explaining("optimizer", wanted, strategy.module):
            optimizer = task.optimizer(strategy.module, spec.params)
        return optimizer, own_of(wanted, place, strategy, optimizer)
    # On CPUs, fused AdamW rounds a tensor's last elements differently, so shards would differ from the whole.
    fused = wanted.reproducible != "strict" or (facts_of(wanted).is_whole and wanted.shard is None)
    with strategy.optimized():
        parameters = list(strategy.module.parameters())
    optimizer = optim.build(wanted.optimizer, parameters, split.global_batch, fused=fused)
    strategy.adopt(optimizer)  # a user's optimizer keeps its settings
    return optimizer, None


def _factor(spec: Spec, task: Task, split: data.Split) -> Callable[[int, int, int], float]:
    """Return the factor on the rates, as a function. Raises TaskError if a rate is scaled up without a warm-up."""
    own, wanted, start = task.schedule, spec.training, 0.0
    if own is not None:
        return lambda step, max_steps, _: optim.own_factor(own, step, max_steps, spec.params)
    if task.optimizer is None:
        start = optim.warmup_start(wanted.optimizer, wanted.schedule, split.global_batch)
    return lambda step, max_steps, falls: optim.lr_factor(wanted.schedule, step, max_steps, start, falls)


def own_of(wanted: TrainingSettings, place: RankContext, strategy: Strategy, optimizer: Any) -> OwnOptimizer:
    """Return the task's optimizer. Raises TaskError."""
    is_apart = facts_of(wanted).averages_weights and place.ranks > 1
    unable = "parallel.pipeline" if place.pipeline > 1 else f"strategy: {wanted.strategy}" if is_apart else None
    with strategy.optimized():
        trained = [p for p in strategy.module.parameters() if p.requires_grad]
    own = OwnOptimizer(optimizer, strategy.parameter_names(), unable, trained)
    if not own.rated and wanted.schedule != ScheduleSettings():
        raise FormError(
            f"training.schedule changes `lr` in param_groups, and {type(optimizer).__name__} has no group with `lr`; "
            "leave the schedule out, or give the groups an lr"
        )
    return own


def _meter(wanted: TrainingSettings, split: data.Split, place: RankContext, strategy: Strategy) -> ThroughputMeter:
    # Under local the clocks of the first steps would be reported for ever.
    is_local = facts_of(wanted).averages_weights
    # Compiled code cannot be counted, and with the schedule async a step holds other passes than its own.
    is_counted = not wanted.compile and wanted.parallel.schedule != "async"
    peak_tflops = wanted.peak_tflops or device_peak_tflops(place.device, wanted.precision)
    return ThroughputMeter(
        split.global_batch,
        tokens_per_sample=wanted.tokens_per_sample,
        ranks=place.ranks,
        peak_tflops=peak_tflops if is_counted else None,
        communication=None if is_local else ddp_communication(strategy.model, wanted.log_every or 10),
        stage_times=strategy.stage_times,
        figures=strategy.figures,
        device=place.device,
    )


def _board(spec: Spec, place: RankContext) -> tensorboard.Board | None:
    """Return rank 0's writer of event files, if requested and if an output folder exists."""
    folder = os.environ.get("CLOUDTRAIN_OUTPUT_DIR")
    if not spec.training.tensorboard or not place.is_head or not folder:
        return None
    return tensorboard.Board(Path(folder) / "tensorboard")


def _settings(spec: Spec, task: Task, split: data.Split) -> dict[str, Any]:
    """Return the settings and the code's hash for a checkpoint, compared at a resume."""
    wanted = spec.training
    return {
        "format": 2,
        "job": spec.job,
        "seed": wanted.seed,
        "world_size": split.ranks * wanted.parallel.ranks,
        "tensor": wanted.parallel.tensor,
        "pipeline": wanted.parallel.pipeline,
        "virtual_ranks": split.virtual,
        "global_batch_size": split.global_batch,
        "micro_batch_size": split.micro,
        "strategy": wanted.strategy,
        "precision": wanted.precision,
        "reproducible": wanted.reproducible,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "config_sha256": spec.config_sha256,
        "code_sha256": task.code_sha256,
    }


def eval_split(spec: Spec, task: Task, train_fingerprint: str, place: RankContext) -> Any | None:
    """Return the split to evaluate on, or None if the task has no split. Collective: all ranks or no rank have a split.

    A task that asked for evaluation must have a split. Otherwise a `dataset` that refuses the name "eval", or ignores
    the name and returns the training split again, counts as having no split. Raises TaskError.
    """
    wanted, dataset = spec.training, None
    asked = task.evaluate is not None or wanted.eval_every is not None
    limit = wanted.eval_batches and wanted.eval_batches * wanted.global_batch_size
    try:
        dataset = task.make_dataset(spec.params, "eval", wanted.seed, limit)
    except Exception as error:
        if asked:
            raise
        # Evaluation is optional: a task without the split is valid, but a mistake is printed.
        if place.is_head:
            print(f"no evaluation: dataset(params, 'eval') raised {type(error).__name__}: {error}")
    if dataset is None and asked:
        why = "evaluation is asked for, by `evaluate` or eval_every"
        raise TaskError(f"{why}, but dataset(params, 'eval') returned None")
    if dataset is not None and not asked and data.fingerprint(dataset, wanted.seed) == train_fingerprint:
        dataset = None
    having = sum(exchange.gather(dataset is not None))
    if 0 < having < place.ranks:
        raise TaskError(f"dataset(params, 'eval') gave {having} of {place.ranks} ranks a split, the others none")
    return dataset

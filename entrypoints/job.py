"""A training job on a rank: the rank's place, the model and the data, and the progress."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cloudtrain.entrypoints import data, exchange, flops, optim, strategies, tensorboard
from cloudtrain.entrypoints.agree import Agreement
from cloudtrain.entrypoints.checkpoints import mirror
from cloudtrain.entrypoints.checkpoints.saver import Saver
from cloudtrain.entrypoints.checkpoints.uploader import Uploader
from cloudtrain.entrypoints.ema import Ema
from cloudtrain.entrypoints.metrics import Meter, ddp_communication
from cloudtrain.entrypoints.rehearsal import Rehearsal
from cloudtrain.entrypoints.settings import Spec, TaskError, Training
from cloudtrain.entrypoints.task import Task

__all__ = ["Job", "Place", "Progress", "build", "connect"]

ASK_FILE = "save-now"  # a user makes this file in the checkpoint folder: the job saves and continues
_SAVE_BYTES_PER_S = 100e6  # for the deadline's margin until a save has been timed: a slow disk or network share


@dataclass(frozen=True)
class Place:
    """This rank, the number of ranks, and the rank's device."""

    rank: int
    ranks: int
    device: torch.device

    @property
    def is_head(self) -> bool:
        """Whether this is rank 0, which reports and writes for all ranks."""
        return self.rank == 0


@dataclass(frozen=True)
class Job:
    """The parts of a job that stay the same while the job runs."""

    spec: Spec
    task: Task
    place: Place
    agreement: Agreement
    split: data.Split
    train_data: Any
    eval_data: Any | None
    strategy: strategies.Strategy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # active only in fp16
    ema: Ema | None
    base_lrs: list[float]
    warmup_start: float  # the factor on the learning rate at the warm-up's begin
    identity: dict[str, Any]  # the job's facts in every checkpoint, which a resume compares
    meter: Meter
    saver: Saver
    folder: Path  # of the checkpoints
    mirror: mirror.Mirror | None
    uploader: Uploader | None
    owned: range  # the virtual ranks of this rank
    board: tensorboard.Board | None

    def batches(self, dataset: Any, keys: Iterator[list[data.Key]]) -> data.Batches:
        """Return the batches of the samples in `keys`, loaded by the settings, on this rank's device."""
        return data.Batches(
            dataset,
            keys,
            seed=self.spec.training.seed,
            collate=self.task.collate,
            num_workers=self.spec.training.num_workers,
            device=self.place.device,
        )

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, if the job keeps an average."""
        return contextlib.nullcontext() if self.ema is None else self.ema.swapped()


@dataclass
class Progress:
    """The job's progress, which the loop changes."""

    step: int = 0
    samples: int = 0  # the position in the sample stream
    max_steps: int = 0
    resumed_from: int | None = None
    begun_step: int | None = None  # the newest step whose save has begun
    saved_step: int | None = None  # the newest step whose save is durable
    evaluated_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    save_s: float = 0.0  # the newest save's time until the checkpoint was durable
    failed_saves: int = 0  # in a row
    best: float | None = None  # of the monitored metric
    best_of: str | None = None  # mode and name of the metric, as in `min loss`
    best_step: int | None = None
    stale: int = 0  # evaluations since the best
    log_every: int = 10  # if the settings have no value, until the step's time is known
    skipped: int = 0  # steps in a row left out for a loss or gradient that was not finite
    loss: float | None = None
    path: Path | None = None  # of the newest checkpoint
    rehearsal: Rehearsal | None = None

    @property
    def last_step(self) -> int:
        """Return the last step of this run: the job's last step, or in a rehearsal an earlier step."""
        leave_at = self.rehearsal.leave_at if self.rehearsal else None
        return self.max_steps if leave_at is None else min(leave_at, self.max_steps)


def connect(timeout_s: float, is_strict: bool = False) -> Place:
    """Join the process group of torchrun's variables, or without the variables a group of a single rank.

    `is_strict`: sums on this rank's device have a fixed order too, where torch offers a fixed order.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if is_strict:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS sums in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:  # the thread count changes the order of sums, so the count is fixed, and recorded in the checkpoint
        # Strict takes 1 thread: a different number of ranks on a machine would mean a different thread count.
        torch.set_num_threads(1 if is_strict else int(os.environ.get("OMP_NUM_THREADS") or 1))
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    # Agreements are CPU tensors over gloo, even if gradients go over NCCL: a read never waits for the GPU.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **alone)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return Place(rank, ranks, device)


def build(spec: Spec, task: Task, place: Place, agreement: Agreement, *, silent: bool = False) -> Job:
    """Return the job; the model still has the weights from `model(params)`. Raises TaskError.

    `silent`: the ranks exchange no gradients, to measure the cost of the exchange.
    """
    wanted = spec.training
    split = data.split_batch(wanted.global_batch_size, wanted.micro_batch_size, place.ranks)
    optim.lr_factor(wanted.schedule, 0, 1)  # raise for an unknown schedule before the data load
    data.seed_all(data.mix(wanted.seed, data.INIT, 0))
    train_data = task.make_dataset(spec.params, "train")
    if train_data is None:
        raise TaskError("dataset(params, 'train') returned None; the training split is needed")
    fingerprint = data.fingerprint(train_data, wanted.seed)
    _check_alike(len(train_data), fingerprint)
    eval_data = _eval_split(spec, task, fingerprint, place)
    data.seed_all(data.mix(wanted.seed, data.INIT, 1))
    module = task.model(spec.params)
    if not isinstance(module, torch.nn.Module):
        raise TaskError(f"model(params) returned a {type(module).__name__}; it must return a torch.nn.Module")
    if not module.training:  # as pretrained models are; submodules frozen in eval mode stay in eval mode
        module.train()
    spread = strategies.wrap(wanted, module, place.device, split, blocks=task.blocks, silent=silent)
    split = dataclasses.replace(split, is_strided=spread.strided)
    optimizer, warmup_start = _optimizer(spec, task, spread, split)
    parameters = sum(p.numel() for p in spread.module.parameters())
    identity = {
        **_settings(spec, task, split),
        "optimizer": type(optimizer).__name__,
        "parameters": parameters,
        "dataset_length": len(train_data),
        "dataset_fingerprint": fingerprint,
    }
    folder = Path(os.environ.get("CLOUDTRAIN_CHECKPOINT_DIR") or "checkpoints").absolute()
    second = mirror.open_mirror(mirror.of_job(spec.checkpoint.mirror, spec.job))
    uploader = None if second is None else Uploader(second, spec.checkpoint.keep)
    guess_s = 12 * parameters / place.ranks / _SAVE_BYTES_PER_S
    agreement.start(place.rank, spec.checkpoint.every_s, guess_s, folder / ASK_FILE, guess_s if uploader else 0.0)
    return Job(
        spec=spec,
        task=task,
        place=place,
        agreement=agreement,
        split=split,
        train_data=train_data,
        eval_data=eval_data,
        strategy=spread,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(place.device.type, enabled=wanted.precision == "fp16"),
        ema=None if wanted.ema_decay is None else Ema(spread.module, wanted.ema_decay),
        base_lrs=[float(group["lr"]) for group in optimizer.param_groups],
        warmup_start=warmup_start,
        identity=identity,
        meter=_meter(wanted, split, place, spread),
        saver=Saver(folder, place.device, spec.checkpoint.keep, uploader),
        folder=folder,
        mirror=second,
        uploader=uploader,
        owned=split.owned(place.rank),
        board=_board(spec, place),
    )


def _optimizer(
    spec: Spec, task: Task, spread: strategies.Strategy, split: data.Split
) -> tuple[torch.optim.Optimizer, float]:
    """Return the optimizer, and the share of the learning rate at which the warm-up begins."""
    wanted = spec.training
    if task.optimizer is not None:
        return task.optimizer(spread.module, spec.params), 0.0
    # On CPUs fused AdamW rounds a tensor's last elements differently, so shards and a whole tensor would differ.
    fused = wanted.reproducible != "strict" or wanted.strategy == "ddp"
    warmup_start = optim.warmup_start(wanted.optimizer, wanted.schedule, split.global_batch)
    return optim.build(wanted.optimizer, spread.module.parameters(), split.global_batch, fused=fused), warmup_start


def _check_alike(length: int, fingerprint: str) -> None:
    """Raise TaskError on all ranks if the ranks' datasets differ: ranks could train different numbers of steps."""
    found = exchange.gather([length, fingerprint])
    other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if other is not None:
        raise TaskError(
            f"the ranks read different training data: rank 0 has {found[0][0]} items, rank {other} {found[other][0]}, "
            "or their first or last item differs; is a local copy stale?"
        )


def _meter(wanted: Training, split: data.Split, place: Place, spread: strategies.Strategy) -> Meter:
    return Meter(
        split.global_batch,
        tokens_per_sample=wanted.tokens_per_sample,
        ranks=place.ranks,
        peak_tflops=wanted.peak_tflops or flops.device_peak_tflops(place.device, wanted.precision),
        communication=ddp_communication(spread.model, wanted.log_every or 10),
        device=place.device,
    )


def _board(spec: Spec, place: Place) -> tensorboard.Board | None:
    """Return rank 0's TensorBoard writer, or None if the settings ask for no files or the job has no output folder."""
    folder = os.environ.get("CLOUDTRAIN_OUTPUT_DIR")
    if not spec.training.tensorboard or not place.is_head or not folder:
        return None
    return tensorboard.Board(Path(folder) / "tensorboard")


def _settings(spec: Spec, task: Task, split: data.Split) -> dict[str, Any]:
    """Return the facts of the settings and the code that a checkpoint records and a resume compares."""
    wanted = spec.training
    return {
        "format": 2,
        "job": spec.job,
        "seed": wanted.seed,
        "world_size": split.ranks,
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


def _eval_split(spec: Spec, task: Task, train_fingerprint: str, place: Place) -> Any | None:
    """Return the evaluation split, or None if the task has no split. Collective: the result is alike on all ranks.

    If the task or the settings ask for evaluation, the split is required. Else the result is None if `dataset` raises
    for "eval", or ignores the name and returns the training split again. Raises TaskError.
    """
    asked = task.evaluate is not None or spec.training.eval_every is not None
    found = _own_eval_split(spec, task, train_fingerprint, asked, place)
    having = torch.tensor(int(found is not None))
    dist.all_reduce(having)
    if 0 < int(having) < place.ranks:
        raise TaskError(f"dataset(params, 'eval') gave {int(having)} of {place.ranks} ranks a split, the others none")
    return found


def _own_eval_split(spec: Spec, task: Task, train_fingerprint: str, asked: bool, place: Place) -> Any | None:
    try:
        found = task.make_dataset(spec.params, "eval")
    except Exception as error:
        if asked:
            raise
        # Evaluation is optional here: a task without the split is correct, but a mistake must be visible.
        if place.is_head:
            print(f"no evaluation: dataset(params, 'eval') raised {type(error).__name__}: {error}")
        return None
    if found is None and asked:
        raise TaskError(
            "evaluation is asked for, by `evaluate` or eval_every, but dataset(params, 'eval') returned None"
        )
    if found is not None and not asked and data.fingerprint(found, spec.training.seed) == train_fingerprint:
        return None
    return found

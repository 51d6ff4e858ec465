"""One training job as a rank holds it: where it runs, what it trains on, and how far it has come."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cloudtrain.entrypoints import data, optim, strategy
from cloudtrain.entrypoints.agree import Agreement
from cloudtrain.entrypoints.metrics import Meter
from cloudtrain.entrypoints.settings import Spec, TaskError
from cloudtrain.entrypoints.task import Task

__all__ = ["Job", "Place", "Progress", "build", "connect"]

_SAVE_BYTES_PER_S = 100e6  # for the deadline's margin until a save has been timed: a slow disk or network share


@dataclass(frozen=True)
class Place:
    """This rank, among how many, and the device it computes on."""

    rank: int
    ranks: int
    device: torch.device

    @property
    def is_head(self) -> bool:
        """Whether this is rank 0, which speaks and writes for all."""
        return self.rank == 0


@dataclass(frozen=True)
class Job:
    """Everything that stays the same while the job runs."""

    spec: Spec
    task: Task
    place: Place
    agreement: Agreement
    split: data.Split
    train_data: Any
    eval_data: Any | None
    strategy: strategy.Strategy
    optimizer: torch.optim.Optimizer
    base_lrs: list[float]
    identity: dict[str, Any]  # what every checkpoint says of the job, and a resume compares
    meter: Meter
    folder: Path  # of the checkpoints


@dataclass
class Progress:
    """How far the job has come; what the loop changes."""

    step: int = 0
    samples: int = 0  # the position in the sample stream
    max_steps: int = 0
    resumed_from: int | None = None
    saved_step: int | None = None
    evaluated_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    path: Path | None = None  # of the newest checkpoint


def connect(timeout_s: float) -> Place:
    """Join the process group that torchrun's variables describe; without them, be the only rank."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:  # the thread count changes the order of sums, so it is fixed, and recorded in the checkpoint
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    # Agreements are CPU tensors, over gloo even where gradients go over NCCL: reading them never waits for the GPU.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **alone)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return Place(rank, ranks, device)


def build(spec: Spec, task: Task, place: Place, agreement: Agreement) -> Job:
    """Return the job, its model still with the weights that `model(params)` gave it. Raises TaskError."""
    wanted = spec.training
    split = data.split_batch(wanted.global_batch_size, wanted.micro_batch_size, place.ranks)
    optim.lr_factor(wanted.schedule, 0, 1)  # an unknown schedule shows before the data are read
    data.seed_all(data.mix(wanted.seed, data.INIT, 0))
    train_data = task.make_dataset(spec.params, "train")
    if train_data is None:
        raise TaskError("dataset(params, 'train') returned None; the training split is needed")
    fingerprint = data.fingerprint(train_data, wanted.seed)
    eval_data = _eval_split(spec, task, fingerprint, place)
    data.seed_all(data.mix(wanted.seed, data.INIT, 1))
    module = task.model(spec.params)
    if not isinstance(module, torch.nn.Module):
        raise TaskError(f"model(params) returned a {type(module).__name__}; it must return a torch.nn.Module")
    spread = strategy.wrap(wanted.strategy, module, place.device, wanted.precision, task.blocks)
    if task.optimizer is None:
        optimizer = optim.build(wanted.optimizer, spread.module.parameters())
    else:
        optimizer = task.optimizer(spread.module, spec.params)
    parameters = sum(p.numel() for p in module.parameters())
    agreement.start(place.rank, spec.checkpoint.every_s, save_s=12 * parameters / _SAVE_BYTES_PER_S)
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
        base_lrs=[float(group["lr"]) for group in optimizer.param_groups],
        identity={
            "format": 1,
            "job": spec.job,
            "seed": wanted.seed,
            "world_size": place.ranks,
            "virtual_ranks": split.virtual,
            "global_batch_size": split.global_batch,
            "micro_batch_size": split.micro,
            "strategy": wanted.strategy,
            "precision": wanted.precision,
            "optimizer": type(optimizer).__name__,
            "parameters": parameters,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "dataset_length": len(train_data),
            "dataset_fingerprint": fingerprint,
            "config_sha256": spec.config_sha256,
            "code_sha256": task.code_sha256,
        },
        meter=Meter(split.global_batch),
        folder=Path(os.environ.get("CLOUDTRAIN_CHECKPOINT_DIR") or "checkpoints").absolute(),
    )


def _eval_split(spec: Spec, task: Task, train_fingerprint: str, place: Place) -> Any | None:
    """Return the split to evaluate on, or None where the task has none. Collective: all ranks have it, or none has.

    A task that asked for evaluation must have one. Else a `dataset` that refuses the name "eval", or pays no heed to
    it and returns the training split again, has none. Raises TaskError.
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
        # Nobody asked: a task that knows no such split is as it should be, but a slip shows.
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

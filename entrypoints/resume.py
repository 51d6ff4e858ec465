"""Going on from a checkpoint: which one, and what has changed since it was written."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cloudtrain.entrypoints import checkpoint
from cloudtrain.entrypoints.events import emit
from cloudtrain.entrypoints.job import Job, Progress
from cloudtrain.entrypoints.settings import TaskError

__all__ = ["choose", "differences", "resume"]

# What a resume may change and still go on, and what the change means for the run.
_COMPARED = {
    "dataset_length": "the dataset has {now} items, then {then}: samples may repeat or be skipped in this epoch",
    "dataset_fingerprint": "the dataset's first or last item is another one",
    "global_batch_size": "the global batch is {now}, then {then}",
    "micro_batch_size": "the micro-batch is {now}, then {then}: losses agree to rounding, not to the bit",
    "seed": "the seed is {now}, then {then}: this epoch's order is another one, so samples may repeat or be skipped",
    "world_size": "{now} ranks, then {then}: losses agree to rounding, not to the bit",
    "strategy": "the strategy is {now}, then {then}: losses agree to rounding, not to the bit",
    "precision": "the precision is {now}, then {then}",
    "optimizer": "the optimizer is {now}, then {then}: it starts with fresh state",
    "threads": "{now} threads a rank, then {then}: losses agree to rounding, not to the bit",
    "torch": "torch is {now}, then {then}",
    "config_sha256": "training settings or params differ; the new ones hold",
    "code_sha256": "the task file differs; the new one holds",
}


def resume(job: Job) -> Progress:
    """Load what the settings say to resume from, if it is there; say what changed; return how far the job has come."""
    found, damaged = _agree(job)
    progress = Progress()
    if found is not None:
        _load(job, found)
        progress = Progress(
            step=found.step,
            samples=int(found.trainer["samples"]),
            resumed_from=found.step,
            saved_step=found.step if found.path.parent == job.folder else None,
            evaluated_step=found.trainer["evaluated_step"],
            metrics=found.trainer["metrics"],
            loss=found.trainer["loss"],
            path=found.path,
        )
    training = job.spec.training
    if training.epochs is not None:  # from here on, so that it holds where the global batch has changed
        left = math.ceil(training.epochs * len(job.train_data)) - progress.samples
        progress.max_steps = progress.step + max(0, math.ceil(left / job.split.global_batch))
    else:
        progress.max_steps = training.max_steps or 0
    if job.place.is_head:
        _report(job, found, damaged)
    return progress


def choose(folder: Path, wanted: str, is_first: bool) -> tuple[checkpoint.Found | None, list[tuple[Path, str]]]:
    """Return the checkpoint to resume from and the damaged ones passed over, which are set aside.

    `wanted` is auto, never, or a path; the latter two hold for the job's first start: after that, its own are newer.
    What would outrank this run's checkpoints, being of a later step, is set aside too. Raises CheckpointError.
    """
    checkpoint.prepare(folder)
    own = checkpoint.list_steps(folder)
    if wanted == "never" and is_first:
        for _, path in own:
            checkpoint.set_aside(path, "old")
        return None, []
    if wanted not in ("auto", "never") and (is_first or not own):
        found = _at(Path(wanted))
        for step, path in own:
            if step > found.step:
                checkpoint.set_aside(path, "old")
        return found, []
    newest, damaged = checkpoint.newest(folder)
    for path, _ in damaged:
        checkpoint.set_aside(path, "damaged")
    return newest, damaged


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return in words what differs between a checkpoint's job and this one."""
    return [
        text.format(then=then[key], now=now[key])
        for key, text in _COMPARED.items()
        if key in then and then[key] != now[key]
    ]


def _at(path: Path) -> checkpoint.Found:
    if not path.is_dir():
        raise TaskError(f"checkpoint.resume names {path}, which does not exist; auto takes the newest of this job")
    if (path / checkpoint.MANIFEST).exists() or not checkpoint.list_steps(path):
        return checkpoint.open_found(path.absolute())
    found, damaged = checkpoint.newest(path.absolute())
    if found is None:
        raise checkpoint.CheckpointError(f"no checkpoint in {path} is intact: {damaged[0][0].name}: {damaged[0][1]}")
    return found


def _agree(job: Job) -> tuple[checkpoint.Found | None, list[tuple[Path, str]]]:
    """Let rank 0 choose and tell the others: only it need see the folder, and all take the same or fail together."""
    told: list[Any] = [None]
    if job.place.is_head:
        is_first = job.spec.attempt == 1 and _restarts() == 0
        try:
            told = [choose(job.folder, job.spec.checkpoint.resume, is_first)]
        except (TaskError, checkpoint.CheckpointError, OSError) as error:
            told = [error]
    dist.broadcast_object_list(told, 0, device=torch.device("cpu"))
    if isinstance(told[0], Exception):
        raise told[0]
    found, damaged = told[0]
    return found, damaged


def _load(job: Job, found: checkpoint.Found) -> None:
    weights, optimizer_state = None, None
    if job.place.is_head:
        state = checkpoint.read_state(found.path)
        weights = state["model"]
        if found.trainer["optimizer"] == job.identity["optimizer"]:
            optimizer_state = state["optimizer"]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in job.optimizer.param_groups]
    job.strategy.load(job.optimizer, weights, optimizer_state)
    if job.task.optimizer is None:  # the settings of today hold; a user's optimizer may keep state among its own
        for group, setting in zip(job.optimizer.param_groups, settings, strict=True):
            group.update(setting)


def _report(job: Job, found: checkpoint.Found | None, damaged: list[tuple[Path, str]]) -> None:
    step = found.step if found else 0
    for path, fault in damaged:
        instead = f"using the one of step {step}" if found else "none is left"
        text = f"checkpoint {path.name} is damaged ({fault}); {instead}, and {path.name} is set aside"
        emit("checkpoint", text, step=step, damaged=str(path), reason=fault)
    if found is None and _restarts() == 0 and job.spec.attempt == 1:
        return
    changed = differences(found.trainer, job.identity) if found else []
    origin = f"resuming from step {step} ({found.path})" if found else "there is no checkpoint: starting from step 0"
    text = f"{origin}; changed since: {'; '.join(changed)}" if changed else origin
    emit("restart", text, step=step, path=str(found.path) if found else None, restarts=_restarts(), changed=changed)


def _restarts() -> int:
    return int(os.environ.get("CLOUDTRAIN_RESTART") or 0)

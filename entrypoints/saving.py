"""What the trainer saves: the job's state on its way to a checkpoint, and the weights at the end."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cloudtrain.entrypoints import heartbeat, report
from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.checkpoints import weights
from cloudtrain.entrypoints.checkpoints.folder import CheckpointError
from cloudtrain.entrypoints.checkpoints.saver import Snapshot
from cloudtrain.entrypoints.checkpoints.uploader import Uploader
from cloudtrain.entrypoints.figures import quantity
from cloudtrain.entrypoints.job import Job, Progress

__all__ = ["NonFiniteError", "begin", "collect", "export", "finish", "optimizer_names", "publish"]
__all__ += ["retry_later", "tensors", "wait"]

# What of the progress a checkpoint carries; a resume goes on with it.
CARRIED = (
    *("step", "samples", "evaluated_step", "metrics", "loss", "save_s", "skipped"),
    *("best", "best_of", "best_step", "stale"),
)
MAX_FAILED = 3  # saves in a row, behind the training: a share may stumble, but a job that cannot save must not go on


class NonFiniteError(ArithmeticError):
    """The loss or a parameter became nan or infinite; no checkpoint holds it."""


def begin(job: Job, progress: Progress, best: tuple[str, float] | None = None) -> None:
    """Copy the state for a checkpoint of this step, unless there is one; it is written behind. All ranks call it."""
    if progress.begun_step == progress.step:
        if best is not None and job.place.is_head:
            job.saver.wait(heartbeat.beat)
            with contextlib.suppress(OSError):
                folders.mark_best(job.folder, progress.step, *best)
        return
    begin_s = time.perf_counter()
    progress.begun_step = progress.step
    carried = {name: getattr(progress, name) for name in CARRIED}
    job.agreement.saving()
    job.strategy.sync_buffers()  # every rank writes some of what all of them hold
    job.saver.begin(
        Snapshot(
            step=progress.step,
            tensors=tensors(job),
            own=job.strategy.rank_state(),
            plain=_plain(job),
            trainer={**job.identity, **carried},
            parameters=frozenset(f"model.{name}" for name, _ in job.strategy.module.named_parameters()),
            best=best,
        ),
        heartbeat.beat,
    )
    if job.spec.checkpoint.blocking:
        finish(job, progress)
    job.meter.add("checkpoint", time.perf_counter() - begin_s)


def collect(job: Job, progress: Progress) -> None:
    """Take note of what has become durable, and of what has reached the mirror; say so on rank 0."""
    for saved in job.saver.news():
        progress.saved_step, progress.path, progress.save_s = saved.step, saved.path, saved.seconds
        progress.failed_saves = 0
        job.agreement.saved(saved.seconds)
        still = f"training stood still for {1000 * saved.blocked_s:.0f} ms"
        report.say(
            job,
            "checkpoint",
            f"checkpoint step {saved.step} saved in {saved.seconds:.2f}s ({quantity(saved.size)}B, {still})",
            step=saved.step,
            path=str(saved.path),
            seconds=saved.seconds,
            blocked_s=saved.blocked_s,
            bytes=saved.size,
        )
    if job.uploader is not None:
        _collect_uploads(job, job.uploader)


def _collect_uploads(job: Job, uploader: Uploader) -> None:
    if uploader.is_busy:
        job.agreement.uploading(uploader.seconds)
    for sent in uploader.news():
        if sent.fault is None:
            job.agreement.uploaded(sent.seconds)
            text = f"checkpoint step {sent.step} is in the mirror after {sent.seconds:.2f}s"
        else:
            text = f"the mirror has no copy of step {sent.step}: {sent.fault}; the next save tries again"
        report.say(job, "checkpoint", text, step=sent.step, mirror_s=sent.seconds, mirror_fault=sent.fault)


def publish(job: Job, progress: Progress, limit_s: float = math.inf) -> None:
    """Wait until the newest checkpoint is in the mirror too, if there is one, or for so long.

    All ranks call it, with no save under way.
    """
    if job.uploader is not None:
        job.uploader.finish(heartbeat.beat, limit_s)
        collect(job, progress)


def retry_later(job: Job, progress: Progress) -> None:
    """Take note of a save that failed behind the training, on all ranks; the next one may not. Raises as `finish`."""
    job.saver.wait(heartbeat.beat)
    failure = job.saver.failure
    progress.failed_saves += 1
    if failure is None or failure.is_sick or progress.failed_saves >= MAX_FAILED:
        finish(job, progress)
        return
    job.saver.failure = None
    text = f"{failure.message}; the next save tries again ({progress.failed_saves} of {MAX_FAILED} failed)"
    report.say(job, "checkpoint", text, step=failure.step, failed=failure.message)


def finish(job: Job, progress: Progress) -> None:
    """Wait until what has begun is durable. Raises CheckpointError or NonFiniteError, on all ranks, where it failed."""
    job.saver.wait(heartbeat.beat)
    collect(job, progress)
    failure = job.saver.failure
    if failure is None:
        return
    if failure.is_sick:
        fail(job, progress, failure.message)
    raise CheckpointError(failure.message)


def wait(job: Job, limit_s: float) -> None:
    """Give what is being written, here and to the mirror, as long to become durable: this rank is about to fail."""
    end_s = time.monotonic() + limit_s
    job.saver.wait(heartbeat.beat, limit_s)
    if job.uploader is not None:
        job.uploader.wait(heartbeat.beat, end_s - time.monotonic())


def fail(job: Job, progress: Progress, what: str, **fields: Any) -> None:
    """Raise NonFiniteError, on every rank alike, and say on rank 0 what to look at."""
    job.saver.wait(heartbeat.beat)
    collect(job, progress)
    kept = (
        f"the checkpoint of step {progress.saved_step} is intact"
        if progress.saved_step
        else "no checkpoint was written"
    )
    message = f"{what}; {kept}; look at the data of this step, a lower lr, more warm-up, or clip_norm"
    report.say(job, "error", message, step=progress.step, **fields)
    raise NonFiniteError(message)


def tensors(job: Job) -> dict[str, torch.Tensor]:
    """Return the whole state's tensors by name, as they live: to be read for a save, or filled by a load."""
    model = job.strategy.module.state_dict()
    found = {f"model.{name}": value for name, value in model.items() if isinstance(value, torch.Tensor)}
    for parameter, name in optimizer_names(job).items():
        for key, value in job.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer.{name}.{key}"] = value
    if job.ema is not None:
        found |= {f"ema.{name}": value for name, value in job.ema.tensors().items()}
    return found


def optimizer_names(job: Job) -> dict[torch.Tensor, str]:
    """Return the name of each parameter that the optimizer holds, in its order."""
    names = {parameter: name for name, parameter in job.strategy.module.named_parameters()}
    return {p: names[p] for group in job.optimizer.param_groups for p in group["params"]}


def export(job: Job) -> None:
    """Write the plain weights to the output folder, for whoever uses the model. All ranks call it."""
    folder = os.environ.get("CLOUDTRAIN_OUTPUT_DIR")
    if not folder:
        return
    with job.averaged():
        found: dict[str, torch.Tensor] = {}
        for name, value in job.strategy.module.state_dict().items():
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                if job.place.is_head:
                    found[name] = whole.cpu()  # one at a time: the device may have no room for all
        if job.place.is_head:  # inside: on a CPU these are the weights themselves, no copies
            ending = {"torch": "pt", "safetensors": "safetensors"}[job.spec.checkpoint.export]
            weights.write(Path(folder) / f"model.{ending}", found)
    job.saver.meet(heartbeat.beat)  # a slow disk may take rank 0 longer than a collective call may last


def _plain(job: Job) -> dict[str, Any]:
    """Return what is no tensor: the optimizer's settings by parameter name, the scaler, a module's extra state."""
    names = optimizer_names(job)
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names[p] for p in group["params"]]}
        for group in job.optimizer.param_groups
    ]
    state = {
        names[p]: {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)}
        for p, values in job.optimizer.state.items()
        if isinstance(p, torch.Tensor) and p in names
    }
    extra = {n: v for n, v in job.strategy.module.state_dict().items() if not isinstance(v, torch.Tensor)}
    return {"groups": groups, "state": state, "scaler": job.scaler.state_dict(), "extra": extra}

"""The trainer's saves: the job's state for a checkpoint, and the weights at the end."""

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

# The fields of the progress that a checkpoint holds; a resume restores them.
CARRIED = (
    *("step", "samples", "evaluated_step", "metrics", "loss", "save_s", "skipped"),
    *("best", "best_of", "best_step", "stale"),
)
MAX_FAILED = 3  # background saves in a row: a network share may fail briefly, but a job that cannot save must end


class NonFiniteError(ArithmeticError):
    """The loss or a parameter became nan or infinite; no checkpoint holds the bad value."""


def begin(job: Job, progress: Progress, best: tuple[str, float] | None = None) -> None:
    """Copy the state for a checkpoint of this step, unless done; a background thread writes it. All ranks call."""
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
    job.strategy.sync_buffers()  # each rank writes a part of the replicated state
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
    """Record the checkpoints that became durable or reached the mirror; report them on rank 0."""
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
    """Wait until the newest checkpoint is also in the mirror, if the job has a mirror, but at most `limit_s`.

    All ranks call, with no save under way.
    """
    if job.uploader is not None:
        job.uploader.finish(heartbeat.beat, limit_s)
        collect(job, progress)


def retry_later(job: Job, progress: Progress) -> None:
    """Record a failed background save, on all ranks; the next save retries. Raises as `finish` at a final fault."""
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
    """Wait until the save is durable. Raises CheckpointError or NonFiniteError, on all ranks, if the save failed."""
    job.saver.wait(heartbeat.beat)
    collect(job, progress)
    failure = job.saver.failure
    if failure is None:
        return
    if failure.is_sick:
        fail(job, progress, failure.message)
    raise CheckpointError(failure.message)


def wait(job: Job, limit_s: float) -> None:
    """Wait at most `limit_s` for the save and the upload under way, because this rank is about to fail."""
    end_s = time.monotonic() + limit_s
    job.saver.wait(heartbeat.beat, limit_s)
    if job.uploader is not None:
        job.uploader.wait(heartbeat.beat, end_s - time.monotonic())


def fail(job: Job, progress: Progress, what: str, **fields: Any) -> None:
    """Raise NonFiniteError on every rank, and report advice on rank 0."""
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
    """Return the complete state's live tensors by name: a save reads them, a load fills them."""
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
    """Return the name of each parameter of the optimizer, in the optimizer's order."""
    names = {parameter: name for name, parameter in job.strategy.module.named_parameters()}
    return {p: names[p] for group in job.optimizer.param_groups for p in group["params"]}


def export(job: Job) -> None:
    """Write the plain weights to the output folder, for the use of the model. All ranks call."""
    folder = os.environ.get("CLOUDTRAIN_OUTPUT_DIR")
    if not folder:
        return
    with job.averaged():
        found: dict[str, torch.Tensor] = {}
        for name, value in job.strategy.module.state_dict().items():
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                if job.place.is_head:
                    found[name] = whole.cpu()  # one by one: the device may lack memory for all
        if job.place.is_head:  # inside the context: on a CPU the tensors are the live weights, not copies
            ending = {"torch": "pt", "safetensors": "safetensors"}[job.spec.checkpoint.export]
            weights.write(Path(folder) / f"model.{ending}", found)
    job.saver.meet(heartbeat.beat)  # on a slow disk rank 0 may take longer than a collective call may last


def _plain(job: Job) -> dict[str, Any]:
    """Return the state that is no tensor: the optimizer's settings by parameter name, the scaler, the extra state."""
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

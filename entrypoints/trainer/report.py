"""The trainer's reports: events on standard output, TensorBoard's files, and the task's own logger."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import atomic_json, events
from ..format import quantity, span
from .job import TrainingJob, TrainState
from .strategies.strategy import LOW

_silenced: list[Exception] = []
_TYPES = {torch.float32: "fp32", torch.float64: "fp64", **{kind: name for name, kind in LOW.items()}}


def say(job: TrainingJob, event: str, text: str, **fields: Any) -> None:
    """Report an event, on rank 0 only. A failure of the task's logger is reported once."""
    if not job.place.is_head:
        return
    events.emit(event, text, **fields)
    if job.board is not None:
        job.board.write(event, fields)
    if job.task.on_event is not None and not _silenced:
        try:
            job.task.on_event(event, fields)
        except Exception as error:  # an error of a service's client must not end training
            _silenced.append(error)
            print(f"on_event failed and is not called any more: {type(error).__name__}: {error}")


def say_start(job: TrainingJob, progress: TrainState) -> None:
    """Report the start: the job, the batch, and the device."""
    split, known = job.split, job.identity
    shared = f" / {job.place.tensor} that share each layer" if job.place.tensor > 1 else ""
    shared += f" / {job.place.pipeline} stages" if job.place.pipeline > 1 else ""
    text = (
        f"start {job.spec.job}: {job.place.ranks} ranks{shared} x {split.accumulation} accumulation x {split.micro} = "
        f"{split.global_batch} samples a step, {known['strategy']} {known['precision']} on {job.place.device}, "
        f"{quantity(known['parameters'])} parameters{_weights(job)}, step {progress.step} of {progress.max_steps}"
    )
    if job.order.length < split.global_batch:
        text += f"; the {job.order.length} training samples are fewer than a step takes: each step repeats some"
    parent = {} if progress.parent is None else {"parent": progress.parent}
    of_ranks = {"ranks": job.place.ranks, "accumulation": split.accumulation, "device": str(job.place.device)}
    at = {"step": progress.step, "max_steps": progress.max_steps, **_machine(job.place.device)}
    settings = {k: v for k, v in known.items() if k not in ("format", "job", "world_size")}
    say(job, "start", text, resumed_from=progress.resumed_from, **parent, **of_ranks, **at, **settings)


def _weights(job: TrainingJob) -> str:
    """Return the types of the weights for the start line, empty for fp32; warn of types that lose small updates."""
    parameters = list(job.strategy.module.parameters())
    types = {_TYPES.get(p.dtype, str(p.dtype).removeprefix("torch.")): p.dtype for p in parameters}
    low = {p.dtype for p in parameters if p.requires_grad} & set(LOW.values())
    if low and job.task.optimizer is None and job.place.is_head:
        named, lost = next((name, torch.finfo(kind).eps / 2) for name, kind in types.items() if kind in low)
        print(
            f"warning: trained weights are {named}, so {job.spec.training.optimizer.name} loses each update below "
            f"1/{1 / lost:.0f} of a weight; call .float() on the model in model(params): "
            f"training.precision: {named} still computes in {named}",
            flush=True,
        )
    return "" if list(types) == ["fp32"] else f", weights {' and '.join(sorted(types))}"


def _machine(device: torch.device) -> dict[str, Any]:
    """Return rank 0's versions, and its GPU's name and memory. Assumes that all nodes are alike."""
    found: dict[str, Any] = {"python": platform.python_version(), "nodes": int(os.environ.get("GROUP_WORLD_SIZE") or 1)}
    if device.type != "cuda":
        return found
    card = torch.cuda.get_device_properties(device)
    found |= {"gpu": card.name, "memory_total_bytes": card.total_memory, "cuda": torch.version.cuda}
    if dist.get_backend() == "nccl":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def is_logged(job: TrainingJob, progress: TrainState, step: int) -> bool:
    """Return whether the step has an event of its own."""
    return step % (job.spec.training.log_every or progress.log_every) == 0 or step == progress.last_step


def say_step(job: TrainingJob, progress: TrainState, loss: float, lr: float, norm: torch.Tensor | None) -> None:
    """Report a step; all ranks call it, since the clocks of all ranks begin a new window."""
    progress.loss = loss
    speed = job.meter.measure()
    if not job.place.is_head:
        return
    eta_s = job.meter.eta_s(progress.max_steps - progress.step)
    text = f"step {progress.step}/{progress.max_steps} loss {loss:.4g} {speed.text()} eta {span(eta_s)}"
    at = {"step": progress.step, "max_steps": progress.max_steps, "loss": loss, "lr": lr, **rounded(speed.fields())}
    passed = {"eta_s": eta_s, "epoch": progress.samples / job.order.length, "samples": progress.samples}
    per_sample = job.spec.training.tokens_per_sample
    tokens = {"tokens": progress.samples * per_sample} if per_sample else {}
    clipped = {} if norm is None else {"grad_norm": norm.item()}
    scaled = {"scale": job.scaler.get_scale()} if job.scaler.is_enabled() else {}
    say(job, "step", text, **at, **passed, **tokens, **clipped, **scaled)


def rounded(value: Any) -> Any:
    """Return the figures in four digits, also inside dicts and lists: more would only lengthen every log line."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.4g}"))


def say_left_out(job: TrainingJob, progress: TrainState, what: str, **fields: int) -> None:
    """Report a step that was left out, or the steps that ranks left out, each alone, since the last average."""
    text = f"step {progress.step}/{progress.max_steps}{what}"
    say(job, "step", text, step=progress.step, max_steps=progress.max_steps, skipped=True, **fields)


def say_preempted(job: TrainingJob, progress: TrainState, reason: str) -> None:
    """Report that the job stops before its end, with all state saved."""
    at = f"{progress.step}/{progress.max_steps}"
    text = f"stopped at step {at} ({reason}), saved; the next start continues from this step"
    say(job, "preempt", text, step=progress.step, reason=reason, saved=True, path=str(progress.path))


def say_paused(job: TrainingJob, progress: TrainState) -> None:
    """Report that the job pauses at the step of its settings, with the metrics of the evaluation there."""
    monitor = job.spec.training.monitor.metric
    value = progress.metrics.get(monitor)
    shown = f" of {progress.max_steps}" + ("" if value is None else f", {monitor} {value:.4g}")
    text = f"paused at step {progress.step}{shown}; saved, and a resume continues from this step"
    at = {"step": progress.step, "max_steps": progress.max_steps, "path": str(progress.path)}
    say(job, "paused", text, **at, metric=monitor, value=value, metrics=progress.metrics)


def say_done(job: TrainingJob, progress: TrainState, seconds: float, why: str | None) -> None:
    """Report the end of the job."""
    shown = " ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())
    early = f" ({why}: no better than at step {progress.best_step})" if why else ""
    text = f"done at step {progress.step} in {span(seconds)}{early} {shown}".rstrip()
    at = {"step": progress.step, "seconds": seconds, "loss": progress.loss, "metrics": progress.metrics}
    say(job, "done", text, **at, best=progress.best, best_step=progress.best_step, checkpoint=str(progress.path))


def write_outcome(
    job: TrainingJob, progress: TrainState, outcome: str, reason: str | None = None, *, together: bool = True
) -> None:
    """Write the outcome for the supervisor, beyond torchrun's exit code. Ranks leave together, to cut off no rank."""
    if job.board is not None:
        job.board.close()
    folder = os.environ.get("CLOUDTRAIN_RESULT_DIR")
    if folder and job.place.is_head:
        found: dict[str, Any] = {"outcome": outcome, "reason": reason, "step": progress.step}
        found |= {"checkpoint": str(progress.path), "metrics": progress.metrics}
        found |= {} if progress.best is None else {"best": progress.best}
        atomic_json.write_json(Path(folder) / "outcome.json", found)
    if together:
        dist.barrier()

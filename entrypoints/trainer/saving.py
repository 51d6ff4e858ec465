"""The data that the trainer saves: the job's state for a checkpoint, and the weights at the end."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import atomic_json
from ..checkpoints import folder as folders
from ..checkpoints import layout, weights
from ..checkpoints.folder import CheckpointError
from ..checkpoints.saver import Snapshot
from ..errors import TaskError
from ..format import first_of, quantity
from ..rank import exchange, heartbeat
from . import data, report
from .job import TrainingJob, TrainState
from .modelform import differing, unequal
from .own_optimizer import PLAIN, is_name

# The fields of the progress in a checkpoint; a resume continues with the saved values.
CARRIED = (
    *("step", "samples", "evaluated_step", "metrics", "loss", "save_s", "skipped"),
    *("best", "best_of", "best_step", "stale", "falls", "parent"),
)
MAX_SKIPPED = 100  # consecutive steps with on_nan: skip; then the model itself is broken
EVALUATED = "evaluated.json"  # in the checkpoint folder: see note_evaluation
# The most time for which a later evaluation waits for a save: an abort in an evaluation ends the thread that writes.
SECURE_S, SECURE_SHARE = 1.0, 0.01  # in seconds, and as a share of the time since the evaluation before
MAX_FAILED = 3  # background saves in a row: a share may fail briefly, but a job that cannot save must not continue


class NonFiniteError(ArithmeticError):
    """The loss or a parameter became nan or infinite; no checkpoint holds it."""


def begin(job: TrainingJob, progress: TrainState, best: tuple[str, float] | None = None) -> None:
    """Copy the state for this step's checkpoint, unless saved; a background thread writes. All ranks call it.

    Raises TaskError if the model's form has changed, and, on all ranks, if the copies of the model differ.
    """
    if progress.begun_step == progress.step:
        if best is not None and job.place.is_head:
            job.saver.mark_best(progress.step, best, heartbeat.beat)
        return
    begin_s = time.perf_counter()
    progress.begun_step = progress.step
    job.agreement.saving()
    if progress.form is not None:
        progress.form.check(progress.step)
    job.strategy.sync_buffers()  # every rank writes a part of the replicated state
    with job.strategy.merged() as own:
        compare(job, progress)
        attributes, trees = job.own.saved(job.strategy.parameter_names()) if job.own is not None else ({}, None)
        plain = _plain(job)
        of_model = {"extra": list(plain["extra"]), "tied": plain.pop("tied")}
        progressed = {name: getattr(progress, name) for name in CARRIED}
        job.saver.begin(
            Snapshot(
                step=progress.step,
                tensors={**_saved_here(job), **attributes},
                own={**job.strategy.rank_state(), **own},
                plain={**plain, "own": trees},
                trainer={**job.identity, **progressed, **of_model},
                parameters=frozenset(f"model.{name}" for name, _ in job.strategy.module.named_parameters()),
                best=best,
            ),
            heartbeat.beat,
        )
    if job.spec.checkpoint.blocking:
        finish(job, progress)
    job.meter.add_checkpoint(time.perf_counter() - begin_s)


def compare(job: TrainingJob, progress: TrainState) -> None:
    """Compare the copies, whose buffers are in step, and the streams. Raises TaskError, on all ranks; all call it."""
    if job.place.ranks == 1 or progress.compared_step == progress.step:
        return
    job.strategy.compare_passes()
    if isinstance(job.train_data, data.Stream):
        marks = {f"{at}": mark for at, mark in enumerate(job.train_data.marks.tolist()) if mark}
        if unequal(exchange.gather(marks)):
            raise TaskError(
                f"the ranks read different streams, as their items up to step {progress.step} show; return the same "
                "stream on all ranks, not a rank's share: the trainer gives each rank its micro-batches"
            )
    if names := differing(job.strategy.module, job.place.holders):
        equal = "" if progress.compared_step is None else f", and were equal at step {progress.compared_step}"
        plan = "a split layer that needs the kind `sequence` in the tensor plan, " if job.place.tensor > 1 else ""
        raise TaskError(
            f"the ranks' copies of the model differ at step {progress.step}{equal}, so a checkpoint would mix them: "
            f"{first_of(names, 4)}. The usual causes: {plan}an optimizer, a learning rate or other code that follows "
            "this rank's own loss, batch or random numbers, or machines of different kinds. Average such values over "
            "the ranks (torch.distributed.all_reduce), or seed them alike"
        )
    progress.compared_step = progress.step


def collect(job: TrainingJob, progress: TrainState) -> None:
    """Record finished saves and uploads to the mirror; report them on rank 0."""
    for saved in job.saver.news():
        progress.saved_step, progress.path, progress.save_s = saved.step, saved.path, saved.seconds
        progress.failed_saves = 0
        job.agreement.save_s = saved.seconds
        still = f"training stood still for {1000 * saved.blocked_s:.0f} ms"
        text = f"checkpoint step {saved.step} saved in {saved.seconds:.2f}s ({quantity(saved.size)}B, {still})"
        fields = {"path": str(saved.path), "seconds": saved.seconds, "blocked_s": saved.blocked_s, "bytes": saved.size}
        report.say(job, "checkpoint", text, step=saved.step, **fields)
    if job.uploader is None:
        return
    if job.uploader.is_busy:
        job.agreement.upload_s = max(job.agreement.upload_s, job.uploader.seconds)
    for sent in job.uploader.news():
        if sent.fault is None:
            job.agreement.upload_s = sent.seconds
            text = f"checkpoint step {sent.step} is in the mirror after {sent.seconds:.2f}s"
        else:
            text = f"the mirror has no copy of step {sent.step}: {sent.fault}; the next save tries again"
        report.say(job, "checkpoint", text, step=sent.step, mirror_s=sent.seconds, mirror_fault=sent.fault)


def publish(job: TrainingJob, progress: TrainState, limit_s: float = math.inf) -> None:
    """Wait until the newest checkpoint is in the mirror, if the job has a mirror, for at most `limit_s`.

    All ranks call it, with no save in progress.
    """
    if job.uploader is not None:
        job.uploader.finish(heartbeat.beat, limit_s)
        collect(job, progress)


def retry_later(job: TrainingJob, progress: TrainState) -> None:
    """Record a failed background save, on all ranks; the next save may succeed. Raises as `finish`."""
    job.saver.wait(heartbeat.beat)
    failure = job.saver.failure
    progress.failed_saves += 1
    if failure is None or failure.is_sick or progress.failed_saves >= MAX_FAILED:
        finish(job, progress)
        return
    job.saver.failure = None
    text = f"{failure.message}; the next save tries again ({progress.failed_saves} of {MAX_FAILED} failed)"
    report.say(job, "checkpoint", text, step=failure.step, failed=failure.message)


def finish(job: TrainingJob, progress: TrainState) -> None:
    """Wait until the begun save is durable. Raises CheckpointError or NonFiniteError, on all ranks, after a failure."""
    job.saver.wait(heartbeat.beat)
    collect(job, progress)
    failure = job.saver.failure
    if failure is None:
        return
    if failure.is_sick:
        fail(job, progress, failure.message)
    raise CheckpointError(failure.message)


def secure(job: TrainingJob, progress: TrainState) -> None:
    """Wait until the begun save is durable, before an evaluation: the first waits as long as needed, others briefly."""
    begin_s, before_s = time.monotonic(), progress.evaluated_at_s
    limit_s = math.inf if before_s is None else max(SECURE_S, SECURE_SHARE * (begin_s - before_s))
    job.saver.wait(heartbeat.beat, limit_s)
    progress.evaluated_at_s = time.monotonic()
    job.meter.add_checkpoint(progress.evaluated_at_s - begin_s)


def note_evaluation(job: TrainingJob, progress: TrainState) -> None:
    """Write the progress beside the checkpoint of this evaluated step, on rank 0: a pause is evaluated once.

    Without the note, a resume evaluates the step again.
    """
    if job.place.is_head and progress.evaluated_step == progress.step:
        with contextlib.suppress(OSError, ValueError, KeyError):
            path = job.folder / folders.step_name(progress.step) / folders.TRAINER
            fields = {name: getattr(progress, name) for name in CARRIED}
            atomic_json.write_json(job.folder / EVALUATED, {**fields, "save": json.loads(folders.read(path))["save"]})


def noted(job: TrainingJob, trainer: dict[str, Any]) -> dict[str, Any]:
    """Return what `note_evaluation` wrote about the checkpoint with these trainer's fields, else them. Collective."""
    note = atomic_json.read_json(job.folder / EVALUATED) if job.place.is_head else None
    is_its_own = isinstance(note, dict) and note.get("save") == trainer.get("save", "")
    found: dict[str, Any] = exchange.share(note if is_its_own else trainer)
    return found


def wait(job: TrainingJob, limit_s: float) -> None:
    """Wait for saves and uploads in progress, for at most `limit_s`: this rank is about to fail."""
    end_s = time.monotonic() + limit_s
    job.saver.wait(heartbeat.beat, limit_s)
    if job.uploader is not None:
        job.uploader.wait(heartbeat.beat, end_s - time.monotonic())


def fail(job: TrainingJob, progress: TrainState, what: str, **fields: Any) -> None:
    """Raise NonFiniteError, on every rank alike, and report on rank 0 what to check."""
    job.saver.wait(heartbeat.beat)
    collect(job, progress)
    saved = progress.saved_step
    kept = f"the checkpoint of step {saved} is intact" if saved else "no checkpoint was written"
    message = f"{what}; {kept}; look at the data of this step, a lower lr, more warm-up, or clip_norm"
    report.say(job, "error", message, step=progress.step, **fields)
    raise NonFiniteError(message)


def _saved_here(job: TrainingJob) -> dict[str, torch.Tensor]:
    """Return the live tensors that this rank's stage saves, by name: all but parameters that another stage saves."""
    model = job.strategy.module.state_dict()
    found = {f"model.{name}": value for name, value in model.items() if isinstance(value, torch.Tensor)}
    for parameter, name in optimizer_names(job).items():
        for key, value in job.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and is_name(key):
                found[f"optimizer.{name}.{key}"] = value
    if job.ema is not None:
        found |= {f"ema.{name}": value for name, value in job.ema.averages.items()}
    for own in job.strategy.saved_elsewhere:
        others = (f"model.{own}", f"ema.{own}")
        found = {n: v for n, v in found.items() if n not in others and not n.startswith(f"optimizer.{own}.")}
    return found | {f"strategy.{name}": value for name, value in job.strategy.shared_state().items()}


def optimizer_names(job: TrainingJob) -> dict[torch.Tensor, str]:
    """Return the name of each parameter in the optimizer, in the optimizer's order; {} if its state is in a tree."""
    if job.own is not None and not job.own.is_torch:
        return {}
    names = job.strategy.parameter_names()
    return {p: names[p] for group in job.optimizer.param_groups for p in group["params"]}


def export(job: TrainingJob) -> None:
    """Write the plain weights to the output folder, for users of the model. All ranks call it."""
    folder = os.environ.get("CLOUDTRAIN_OUTPUT_DIR")
    if not folder:
        return
    with job.averaged():
        found: dict[str, torch.Tensor] = {}
        for name, whole in _whole_weights(job):
            if job.place.is_head:
                found[name] = whole.cpu()  # one tensor at a time: the device may lack room for all
        if job.place.is_head:  # inside the block: on a CPU these are the weights themselves, no copies
            ending = {"torch": "pt", "safetensors": "safetensors"}[job.spec.checkpoint.export]
            weights.write(Path(folder) / f"model.{ending}", found)
    job.saver.meet(heartbeat.beat)  # a slow disk may delay rank 0 longer than a collective call may last


def _whole_weights(job: TrainingJob) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole tensors of the model by name, one at a time, those of all stages. All ranks call it."""
    own = {name: value for name, value in job.strategy.module.state_dict().items() if isinstance(value, torch.Tensor)}
    if job.place.pipeline == 1:
        yield from ((name, exchange.whole(value)) for name, value in own.items())
    else:
        yield from layout.whole_tensors(own, job.place.device)


def _plain(job: TrainingJob) -> dict[str, Any]:
    """Return the state without tensors: the optimizer's settings by parameter name, the scaler, extra state, ties."""
    names = optimizer_names(job)
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names[p] for p in group["params"]]}
        for group in (job.optimizer.param_groups if names else ())
    ]
    state = {
        names[p]: {k: v for k, v in values.items() if type(v) in PLAIN}
        for p, values in (job.optimizer.state.items() if names else ())
        if isinstance(p, torch.Tensor) and p in names
    }
    extra = {n: v for n, v in job.strategy.module.state_dict().items() if not isinstance(v, torch.Tensor)}
    tied = weights.tied_names(job.strategy.module)
    plain = {"groups": groups, "state": state, "scaler": job.scaler.state_dict(), "extra": extra, "tied": tied}
    return plain if job.place.pipeline == 1 else _of_all_stages(job, plain)


def _of_all_stages(job: TrainingJob, plain: dict[str, Any]) -> dict[str, Any]:
    """Return the state without tensors of all stages together. All ranks call it."""
    written = io.BytesIO()
    is_first = job.place.rank == job.place.holders.start
    torch.save(plain if is_first else {}, written)
    texts = exchange.gather(written.getvalue().hex())
    parts = [torch.load(io.BytesIO(bytes.fromhex(text)), weights_only=True) for text in texts]
    whole: dict[str, Any]
    whole, *others = filter(None, parts)
    for part in others:
        for group, other in zip(whole["groups"], part["groups"], strict=True):
            group["params"] += [name for name in other["params"] if name not in group["params"]]
        whole["state"] |= part["state"]
        whole["extra"] |= part["extra"]
        whole["tied"] |= part["tied"]
    return whole

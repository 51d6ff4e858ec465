"""The shared trainer: what every rank runs, whatever started it.

    CLOUDTRAIN_SPEC=spec.json python -m torch.distributed.run --nproc-per-node 2 -m cloudtrain.entrypoints.train

Read from top to bottom: `main` connects the ranks, builds the job and resumes it; `train` is the loop. The spec's
fields are in task.py, the ways to spread a model in strategy.py, what a step reads in data.py.
Exit codes: 0 done; 75 stopped early but saved, so that starting it again goes on from there.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cloudtrain.entrypoints import checkpoint, data, durable, optim, strategy
from cloudtrain.entrypoints.agree import Agreement, Verdict
from cloudtrain.entrypoints.evaluate import evaluate
from cloudtrain.entrypoints.events import emit
from cloudtrain.entrypoints.job import Job, Progress, build, connect
from cloudtrain.entrypoints.metrics import duration, quantity
from cloudtrain.entrypoints.resume import resume
from cloudtrain.entrypoints.settings import TaskError, read_spec
from cloudtrain.entrypoints.task import load_task

__all__ = ["EXIT_DONE", "EXIT_SAVED", "NonFiniteError", "main"]

EXIT_DONE, EXIT_SAVED = 0, 75


class NonFiniteError(ArithmeticError):
    """The loss or a parameter became nan or infinite; no checkpoint holds it."""


def main() -> int:
    """Train what CLOUDTRAIN_SPEC describes and return the exit code, with everything durable. Raises TaskError."""
    deadline = os.environ.get("CLOUDTRAIN_DEADLINE")
    agreement = Agreement(float(deadline) if deadline else None)  # first: a signal may come while the data are read
    spec = read_spec(os.environ["CLOUDTRAIN_SPEC"])
    task = load_task(spec.target)
    job = build(spec, task, connect(spec.timeout_s), agreement)
    progress = resume(job)
    begin_s = time.perf_counter()
    _say_start(job, progress)
    stop = train(job, progress)
    if stop is not None:
        return _leave_early(job, progress, stop)
    if job.place.is_head:
        seconds = time.perf_counter() - begin_s
        shown = " ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())
        emit(
            "done",
            f"done at step {progress.step} in {duration(seconds)} {shown}".rstrip(),
            step=progress.step,
            seconds=seconds,
            loss=progress.loss,
            metrics=progress.metrics,
            checkpoint=str(progress.path),
        )
    _write_outcome(job, progress, "done")
    return EXIT_DONE


def train(job: Job, progress: Progress) -> str | None:
    """Train to the last step, evaluate and save. Return None then, else why the ranks agreed to stop before."""
    training, place = job.spec.training, job.place
    steps = progress.max_steps - progress.step
    batches = data.Batches(
        job.train_data,
        data.train_keys(training.seed, len(job.train_data), job.split, place.rank, progress.samples, steps),
        seed=training.seed,
        collate=job.task.collate,
        num_workers=training.num_workers,
        device=place.device,
    )
    try:
        stop = evaluate(job, progress) if _evaluation_is_due(job, progress) else None  # interrupted before it was done
        while stop is None and progress.step < progress.max_steps:
            lr = _set_lr(job, progress)
            norm, verdict = _step(job, progress, batches)
            _check_and_log(job, progress, verdict, lr, norm)
            stop = verdict.stop
            if stop is None and _evaluation_is_due(job, progress):
                stop = evaluate(job, progress)
            every = job.spec.checkpoint.every_steps
            if verdict.save or (every and progress.step % every == 0):
                save(job, progress)
    finally:
        batches.close()
    if stop is None:
        save(job, progress)
        _export(job)
    return stop


def _set_lr(job: Job, progress: Progress) -> float:
    factor = optim.lr_factor(job.spec.training.schedule, progress.step, progress.max_steps)
    return optim.set_lr(job.optimizer, job.base_lrs, factor)


def _step(job: Job, progress: Progress, batches: data.Batches) -> tuple[torch.Tensor | None, Verdict]:
    """Take one optimizer step; return the gradient's norm, if clipped, and what the ranks agreed on meanwhile.

    Each micro-batch's loss is a mean over m samples. Divided by A here and by the number of ranks in the strategy's
    all-reduce, the gradient is the mean over the G = m x A x ranks samples of the global batch.
    """
    training, spread, split = job.spec.training, job.strategy, job.split
    total = torch.zeros((), device=job.place.device)
    for virtual in split.owned(job.place.rank):
        is_last = virtual == split.owned(job.place.rank)[-1]
        batch = next(batches)
        data.seed_all(data.mix(training.seed, data.FORWARD, progress.step, virtual))
        with spread.accumulate(is_last):
            with spread.autocast():
                loss = job.task.loss(spread.model, batch)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TaskError(
                    f"loss(model, batch) must return a tensor of one number, the mean; it returned {loss!r:.200}"
                )
            total += loss.detach().squeeze()
            # Begun here, the agreement travels while the gradients are computed.
            if is_last and job.agreement.is_due(_is_logged(job, progress.step + 1, progress.max_steps)):
                job.agreement.begin(job.meter.step_s, _loss_to_share(job, progress, total))
            (loss / split.accumulation if split.accumulation > 1 else loss).backward()  # type: ignore[no-untyped-call]
    norm = strategy.clip(spread.module.parameters(), training.clip_norm) if training.clip_norm else None
    job.optimizer.step()
    job.optimizer.zero_grad()
    progress.step += 1
    progress.samples += split.global_batch
    job.meter.tick()
    return norm, job.agreement.finish()


def _loss_to_share(job: Job, progress: Progress, total: torch.Tensor) -> float:
    """Return the sum of this rank's losses; on a GPU only for a step that is logged, since reading it waits there."""
    is_cheap = job.place.device.type == "cpu"
    return total.item() if is_cheap or _is_logged(job, progress.step + 1, progress.max_steps) else 0.0


def _is_logged(job: Job, step: int, max_steps: int) -> bool:
    return step % job.spec.training.log_every == 0 or step == max_steps


def _check_and_log(job: Job, progress: Progress, verdict: Verdict, lr: float, norm: torch.Tensor | None) -> None:
    loss = verdict.loss / job.split.virtual
    if not math.isfinite(loss):
        _fail(job, progress, f"loss is {loss} at step {progress.step}, learning rate {lr:g}", loss=loss, lr=lr)
    if not _is_logged(job, progress.step, progress.max_steps):
        return
    progress.loss = loss
    rate = job.meter.read()
    if not job.place.is_head:
        return
    eta_s = (progress.max_steps - progress.step) * job.meter.step_s
    clipped = {} if norm is None else {"grad_norm": norm.item()}
    text = f"step {progress.step}/{progress.max_steps} loss {loss:.4g} {quantity(rate)} samples/s eta {duration(eta_s)}"
    emit(
        "step",
        text,
        step=progress.step,
        max_steps=progress.max_steps,
        loss=loss,
        lr=lr,
        samples_per_s=rate,
        eta_s=eta_s,
        epoch=progress.samples / len(job.train_data),
        **clipped,
    )


def _fail(job: Job, progress: Progress, what: str, **fields: Any) -> None:
    """Raise NonFiniteError, on every rank alike, and say on rank 0 what to look at."""
    kept = (
        f"the checkpoint of step {progress.saved_step} is intact"
        if progress.saved_step
        else "no checkpoint was written"
    )
    message = f"{what}; {kept}; look at the data of this step, a lower lr, more warm-up, or clip_norm"
    if job.place.is_head:
        emit("error", message, step=progress.step, **fields)
    raise NonFiniteError(message)


def _evaluation_is_due(job: Job, progress: Progress) -> bool:
    if job.eval_data is None or progress.evaluated_step == progress.step:
        return False
    every = job.spec.training.eval_every
    return progress.step == progress.max_steps or bool(every and progress.step and progress.step % every == 0)


def save(job: Job, progress: Progress) -> None:
    """Write a checkpoint of this step, unless there is one. All ranks return once it is durable, or raise together."""
    if progress.saved_step == progress.step:
        return
    begin_s = time.perf_counter()
    healthy = torch.tensor([strategy.finite(job.strategy.module)], dtype=torch.int32)
    dist.all_reduce(healthy, dist.ReduceOp.MIN)
    if not healthy.item():
        _fail(job, progress, f"a parameter is nan or infinite after step {progress.step}")
    state = {"model": job.strategy.weights(), "optimizer": job.strategy.optimizer_state(job.optimizer)}
    told: list[Any] = [None, 0]
    if job.place.is_head:
        place = {name: getattr(progress, name) for name in ("step", "samples", "evaluated_step", "metrics", "loss")}
        try:
            told = list(checkpoint.save(job.folder, progress.step, state, {**job.identity, **place}))
            with contextlib.suppress(OSError):  # one too many does no harm, and the next save tries again
                checkpoint.retain(job.folder, job.spec.checkpoint.keep)
        except (checkpoint.CheckpointError, OSError) as error:
            told = [checkpoint.CheckpointError(str(error)), 0]
    dist.broadcast_object_list(told, 0, device=torch.device("cpu"))
    path, size = told
    if isinstance(path, checkpoint.CheckpointError):
        raise path
    progress.saved_step, progress.path = progress.step, path
    seconds = time.perf_counter() - begin_s
    job.agreement.saved(seconds)
    job.meter.skip(seconds)
    if job.place.is_head:
        text = f"checkpoint step {progress.step} saved in {seconds:.2f}s ({quantity(size)}B)"
        emit("checkpoint", text, step=progress.step, path=str(path), seconds=seconds, bytes=size)


def _export(job: Job) -> None:
    """Write the plain weights to the output folder, for whoever uses the model."""
    weights = job.strategy.weights()
    folder = os.environ.get("CLOUDTRAIN_OUTPUT_DIR")
    if folder and job.place.is_head:
        checkpoint.write_weights(Path(folder) / "model.pt", weights)


def _leave_early(job: Job, progress: Progress, reason: str) -> int:
    save(job, progress)
    if job.place.is_head:
        text = f"stopped at step {progress.step}/{progress.max_steps} ({reason}), saved; a new start goes on from here"
        emit("preempt", text, step=progress.step, reason=reason, saved=True, path=str(progress.path))
    _write_outcome(job, progress, "saved", reason)
    return EXIT_SAVED


def _write_outcome(job: Job, progress: Progress, outcome: str, reason: str | None = None) -> None:
    """Tell the supervisor how it ended: torchrun's own exit code cannot. Ranks leave together, so none is cut off."""
    folder = os.environ.get("CLOUDTRAIN_RESULT_DIR")
    if folder and job.place.is_head:
        found = {"outcome": outcome, "reason": reason, "step": progress.step, "checkpoint": str(progress.path)}
        durable.write_json(Path(folder) / "outcome.json", found)
    dist.barrier()


def _say_start(job: Job, progress: Progress) -> None:
    if not job.place.is_head:
        return
    split, known = job.split, job.identity
    emit(
        "start",
        f"start {job.spec.job}: {split.ranks} ranks x {split.accumulation} accumulation x {split.micro} = "
        f"{split.global_batch} samples a step, {known['strategy']} {known['precision']} on {job.place.device}, "
        f"{quantity(known['parameters'])} parameters, step {progress.step} of {progress.max_steps}",
        resumed_from=progress.resumed_from,
        ranks=split.ranks,
        accumulation=split.accumulation,
        device=str(job.place.device),
        step=progress.step,
        max_steps=progress.max_steps,
        **{k: v for k, v in known.items() if k not in ("format", "job", "world_size")},
    )


if __name__ == "__main__":
    code = main()
    # Tearing gloo down aborts or hangs one time in nine (torch 2.13): everything is durable, so leave.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

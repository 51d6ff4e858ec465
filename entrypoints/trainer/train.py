"""The shared trainer: the program of every rank, on every platform.

    CLOUDTRAIN_SPEC=spec.json python -m torch.distributed.run --nproc-per-node 2 -m cloudtrain.entrypoints.train

Read from top to bottom: `main` connects the ranks, builds the job and resumes it; `train` is the loop. The spec's
fields are in settings.py, the parallel strategies in strategies/, the data of a step in data.py, the events in
report.py. Exit codes: 0 done; 75 stopped early or paused, but saved, so that a new start continues.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch

from ..checkpoints.folder import CheckpointError
from ..errors import TaskError
from ..rank import exchange, heartbeat, rehearsal, variables
from ..rank.agree import NOTHING, Agreed, Agreement
from . import data, metrics, optim, own_optimizer, report, saving, splits, testing, unsaved
from .diagnose import diagnose
from .evaluate import evaluate
from .generators import reseed
from .initial import initialize
from .job import EXIT_DONE, EXIT_SAVED, TrainingJob, TrainState, build, connect
from .modelform import ModelForm
from .parameter_server.training import WorkerRank
from .resume import resume
from .saving import NonFiniteError
from .settings import read_spec, shortened
from .strategies.blocks import saved_on_host
from .strategies.facts import facts_of
from .strategies.fsdp import reshard
from .strategies.strategy import Feed
from .strategies.wrap import SparseCalls, explaining
from .task import load_task

EARLY = "early stop"  # by the monitored metric: the job is done, and reports it
_AS_IT_IS = nullcontext()
LAST_SAVE_S = 60.0  # the other ranks wait for this rank, or have died and their part of the save is lost


def main() -> int:
    """Train the job in CLOUDTRAIN_SPEC and return the exit code, with all state durable. Raises TaskError."""
    agreement = Agreement(variables.deadline_s(os.environ))  # first: a signal may come while the data are read
    spec, rehearsed = read_spec(os.environ["CLOUDTRAIN_SPEC"]), rehearsal.of_environment()
    spec = spec if rehearsed is None else shortened(spec)
    task = load_task(spec.target, spec.training.seed)
    place = connect(spec.timeout_s, spec.training.reproducible == "strict", spec.training.parallel)
    if spec.training.diagnose_steps:
        return diagnose(spec, task, place, agreement, gradients)
    if spec.evaluate is not None and spec.evaluate.only:
        return testing.only(spec, task, place, agreement)
    job = build(spec, task, place, agreement)
    split = testing.require_split(job)  # before the first step: after the last step would be late
    splits.say_faults(job, split)
    progress = resume(job)
    initialize(job, progress)
    progress.rehearsal = rehearsed
    begin_s = time.perf_counter()
    report.say_start(job, progress)
    try:
        stop = train(job, progress)
        saving.begin(job, progress)
        saving.finish(job, progress)
    except NonFiniteError:  # on all ranks alike
        saving.publish(job, progress, LAST_SAVE_S)
        raise
    except Exception:  # the save in progress becomes durable first
        saving.wait(job, LAST_SAVE_S)
        raise
    if stop not in (None, EARLY):
        # A deadline's margin includes the upload; after a signal the time is short, and the event must appear in time.
        saving.publish(job, progress, math.inf if stop == "deadline" else LAST_SAVE_S)
        report.say_preempted(job, progress, stop)
        report.write_outcome(job, progress, "saved", stop)
        return EXIT_SAVED
    if stop is None and progress.is_paused:
        saving.note_evaluation(job, progress)
        saving.publish(job, progress)
        report.say_paused(job, progress)
        report.write_outcome(job, progress, "paused")
        return EXIT_SAVED
    saving.export(job)
    saving.publish(job, progress)

    def finish(*, together: bool = True) -> None:
        report.say_done(job, progress, time.perf_counter() - begin_s, stop)
        report.write_outcome(job, progress, "done", stop, together=together)

    if split is not None:
        testing.at_end(job, progress, split, lambda: finish(together=False))
    finish()
    return EXIT_DONE


def train(job: TrainingJob, progress: TrainState) -> str | None:
    """Train to the last step and evaluate. Return None, or the reason why the ranks agreed to stop earlier."""
    every, patience = job.spec.checkpoint.every_steps, job.spec.training.monitor.patience
    rehearsed = progress.rehearsal
    if patience is not None and progress.stale >= patience:  # the job had stopped early, and failed after the stop
        return EARLY
    if progress.is_paused and progress.step > progress.last_step:  # the pause was set for an earlier step
        return None
    form = ModelForm(job.strategy, has_after_step=job.task.after_step is not None, has_optimizer=job.own is not None)
    progress.form = form
    job.meter.restart()
    heartbeat.at(progress.step)
    watch = unsaved.watch(job)
    next(watch)
    with _steps(job, progress) as take_step:
        # Evaluate first, if the evaluation was interrupted.
        stop = _evaluate(job, progress) if _evaluation_is_due(job, progress) else None
        while stop is None and progress.step < progress.last_step:
            verdict = take_step()
            heartbeat.at(progress.step)
            next(watch, None)
            if form.checked_step is None:
                form.check(progress.step)
            stop = verdict.stop
            # Early, for errors of the task file. The stages of a pipeline meet at saves only.
            if progress.compared_step is None and job.strategy.is_alike() and job.place.pipeline == 1:
                job.strategy.sync_buffers()
                saving.compare(job, progress)
            is_due = verdict.save or progress.step == progress.last_step or bool(every and progress.step % every == 0)
            # First: an evaluation that fails, hangs or aborts costs no step. A resume from this save evaluates again.
            if is_due and job.strategy.is_alike():  # a request waits in the agreement for the ranks' next average
                saving.begin(job, progress)
            if stop is None and _evaluation_is_due(job, progress):
                stop = _evaluate(job, progress)
            saving.collect(job, progress)
            if rehearsed is not None and rehearsed.hold_at == progress.step and stop is None:
                _hold(job, progress)
    return stop


def _hold(job: TrainingJob, progress: TrainState) -> None:
    """Wait, in a rehearsal, for the planned interruption at this step; saves in progress become durable."""
    until_s = time.monotonic() + rehearsal.HOLD_S
    while not job.agreement.is_told_to_stop and time.monotonic() < until_s:
        saving.collect(job, progress)
        heartbeat.beat()
        time.sleep(0.02)
    job.agreement.hurry()


@contextmanager
def _steps(job: TrainingJob, progress: TrainState) -> Iterator[Callable[[], Agreed]]:
    """Yield a function that takes a step; under strategy async, all steps to the next save or evaluation."""
    if facts_of(job.spec.training).has_servers:
        with closing(WorkerRank(job, progress)) as rank:
            yield rank.train_to_boundary
        return
    steps = progress.last_step - progress.step
    keys = data.train_keys(job.order, job.split, job.place.data_rank, progress.samples, steps)
    with closing(job.batches(job.train_data, keys)) as batches:
        yield functools.partial(_step, job, progress, batches)


def _step(job: TrainingJob, progress: TrainState, batches: data.Batches) -> Agreed:
    """Take one optimizer step; return the ranks' agreement. After a stop request inside, take no step."""
    training, strategy = job.spec.training, job.strategy
    lr = _set_lr(job, progress)
    is_logged = report.is_logged(job, progress, progress.step + 1)
    earlier = gradients(job, progress, batches, is_logged)
    if earlier is not None and earlier.stop:
        return earlier
    skips, is_lone = training.on_nan == "skip", strategy.is_lone(progress.step)
    agrees = (skips or job.tally.needs_total) and not is_lone
    verdict = _agreed(job) if agrees else NOTHING  # all ranks must agree before any update
    count, norm = job.tally.total(verdict, is_lone=is_lone), None
    if count:
        strategy.scale((len(job.owned) if is_lone else job.split.virtual) / count)
    if training.clip_norm or skips or strategy.exchange is not None or count == 0:
        job.scaler.unscale_(job.scaled)
    if training.clip_norm:
        norm = strategy.clip(training.clip_norm)
    total = progress.own_loss if is_lone else verdict.loss
    # In fp16 the scaler checks the gradient.
    is_sick = skips and not (math.isfinite(total) and (job.scaler.is_enabled() or strategy.finite_gradients()))
    is_left_out = is_sick or count == 0  # no terms have no mean
    if is_sick:
        strategy.undo_buffers()
    if not is_left_out:
        if strategy.exchange is not None:
            strategy.exchange(progress.step)
        _update(job, progress.step)
        strategy.share_update()
        if job.task.after_step is not None:
            _after_step(job, job.task.after_step, progress.step + 1)
    covered = strategy.after_step(progress.step + 1, progress.last_step)
    if job.ema is not None and covered and (is_lone or not is_left_out):
        job.ema.update(progress.step + 1, covered)
    job.scaler.update()
    job.clear_gradients()
    progress.step += 1
    progress.samples += job.split.global_batch
    job.meter.tick()
    verdict = verdict if agrees else earlier or _agreed(job)
    loss = verdict.loss / (verdict.count or job.split.virtual)
    progress.skipped = progress.skipped + 1 if is_left_out else 0
    if is_lone and (skips or count is not None):
        _add_left_out(job, progress, is_left_out, is_met=covered > 0)
    elif is_left_out:
        why = "its count is 0" if count == 0 else f"its loss ({loss:.4g}) or gradient is not finite"
        report.say_left_out(job, progress, f" left out: {why}")
        if progress.skipped >= saving.MAX_SKIPPED:
            saving.fail(job, progress, f"{saving.MAX_SKIPPED} steps in a row were left out: {why}")
    if verdict.failed:
        saving.retry_later(job, progress)
    if not (is_left_out or (skips and not math.isfinite(loss))):  # of a lone step: on any rank
        if not math.isfinite(loss):
            what = f"loss is {loss} at step {progress.step}, learning rate {lr:g}"
            saving.fail(job, progress, what, loss=loss, lr=float(lr))
        if is_logged:
            report.say_step(job, progress, loss, float(lr), norm)
    progress.log_every = verdict.log_every or progress.log_every
    return verdict


def _agreed(job: TrainingJob) -> Agreed:
    """Return the ranks' agreement, whose first one tells the form of the loss."""
    verdict = job.agreement.finish()
    job.tally.compare(verdict)
    return verdict


@torch.no_grad()
def _after_step(job: TrainingJob, function: Callable[[Any, int], Any], step: int) -> None:
    """Call the task's function with the same model, buffers and random numbers on all ranks."""
    job.strategy.sync_buffers()
    reshard(job.strategy.module)
    job.seed(data.AFTER_STEP, step)
    with explaining("after_step", job.spec.training, job.strategy.module):
        function(job.strategy.module, step)


def _update(job: TrainingJob, step: int) -> None:
    """Take the optimizer's step, in which a task's own optimizer may draw random numbers. Raises TaskError."""
    if job.own is None:
        job.scaler.step(job.scaled)
        return
    words = (job.spec.training.seed, data.OPTIMIZER, step)
    data.seed_all(data.mix(*words, job.strategy.shard))
    for generator in job.own.generators:  # alike on all ranks
        reseed(generator, data.mix(*words))
    with own_optimizer.explained(job.optimizer):
        job.scaler.step(job.scaled)


def _set_lr(job: TrainingJob, progress: TrainState) -> float:
    """Set the rates of this step, and return the first. Without a schedule a task's own optimizer has its own rates."""
    if job.own is not None and job.task.schedule is None and job.spec.training.schedule.is_flat:
        return job.groups[0]["lr"]  # type: ignore[no-any-return]  # a tensor on a GPU is read only if logged
    factor = job.factor(progress.step, progress.max_steps, progress.falls)
    if job.own is None:
        return optim.set_lr(job.groups, job.base_lrs, factor)
    return job.own.set_lr(job.groups, job.base_lrs, factor)


def gradients(job: TrainingJob, progress: TrainState, batches: data.Batches, is_logged: bool = False) -> Agreed | None:
    """Sum the gradients of this rank's micro-batches. Return None, or an agreement: with a stop request, or an earlier.

    Each micro-batch's loss is a mean over m samples. Divided by the strategy's divisor in this function, and summed or
    averaged over the ranks by the strategy, the gradient is the mean over the G samples of the global batch.
    """
    training, strategy, owned = job.spec.training, job.strategy, job.owned
    is_lone = strategy.is_lone(progress.step)
    must_agree = is_logged or (training.on_nan == "skip" and not is_lone)
    job.tally.count = 0.0
    job.tell(progress)
    if strategy.walk is not None:
        return _piped_gradients(job, progress, batches, must_agree)
    total: torch.Tensor | float = 0.0  # in float64, with room for float32 sums in any order
    for virtual in owned:
        is_last = virtual == owned[-1]
        batch = job.meter.wait_for(batches)
        job.seed(data.FORWARD, progress.step, virtual)
        with strategy.micro_batch(virtual, is_last), _counted(job):
            loss: torch.Tensor = strategy.model(functools.partial(_loss, job, batch=batch))
            must_agree = must_agree or (job.tally.needs_total and not is_lone)
            total += loss.item() if loss.device.type == "cpu" else loss.detach().double()
            # The agreement travels while the gradients are computed.
            if job.agreement.is_due(is_last and must_agree):
                # On a GPU only for a step that needs the loss, since reading the loss waits for the GPU.
                is_known = is_last and (must_agree or isinstance(total, float))
                _begin_agreement(job, total, is_known=is_known)
            share = loss if strategy.divisor == 1 else loss / strategy.divisor
            job.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
        heartbeat.beat()  # after the backward pass: a first pass compiles for as long as needed
        if not is_last:
            verdict = _agreed(job)
            if verdict.failed:
                saving.retry_later(job, progress)
            if verdict.stop:
                job.clear_gradients()
                strategy.undo_buffers()  # the save then holds the state after the last whole step
                return verdict
    progress.own_loss = total
    strategy.finish()
    return None


def _begin_agreement(job: TrainingJob, total: torch.Tensor | float, *, is_known: bool) -> None:
    """Begin an agreement with this rank's losses, and their counts, if `is_known` and if this rank's losses count."""
    counts, tally = job.place.counts, job.tally
    job.agreement.begin(
        job.meter.step_s,
        len(job.owned),
        loss=float(total) if is_known and counts else 0.0,
        failed=job.saver.failure is not None,
        saving=job.saver.is_busy,
        count=float(tally.count) if is_known and counts else 0.0,
        pairs=counts and tally.is_weighted is True,
    )


def _piped_gradients(job: TrainingJob, progress: TrainState, batches: data.Batches, must_agree: bool) -> Agreed | None:
    """Sum the gradients of a step over the stages. The stages agree at its end: inside they are at different passes.

    With the schedule async a stage does not wait for the others at the end of a step: the agreement of an earlier step
    is returned, except in a step that is logged.
    """
    strategy, training = job.strategy, job.spec.training
    assert strategy.walk is not None

    def seed(virtual: int, steps: int) -> None:
        job.seed(data.FORWARD, progress.step + steps, virtual)
        job.tell(progress, steps)

    def backward(loss: torch.Tensor) -> None:
        (loss if strategy.divisor == 1 else loss / strategy.divisor).backward()  # type: ignore[no-untyped-call]

    batch = functools.partial(job.meter.wait_for, batches)
    # Until a save by steps, an evaluation or the end. There async has no micro-batch in flight: a resume is exact.
    every = (job.spec.checkpoint.every_steps, training.eval_every)
    ends = [-(-(progress.step + 1) // steps) * steps for steps in every if steps]
    left = min([*ends, progress.last_step]) - progress.step - 1
    # After the last step an evaluation or a save may follow, with agreements of its own.
    must_agree = must_agree or not left or job.tally.needs_total
    with _counted(job):
        feed = Feed(job.owned, batch, seed, functools.partial(_loss, job), backward, heartbeat.beat, left)
        total = strategy.walk(feed)
    earlier = _agreed(job) if training.parallel.schedule == "async" else None
    if earlier is not None and earlier.stop:
        job.clear_gradients()
        return earlier
    if job.agreement.is_due(must_agree):
        _begin_agreement(job, total, is_known=must_agree or total.device.type == "cpu")
    strategy.finish()
    return None if must_agree else earlier


@contextmanager
def _counted(job: TrainingJob) -> Iterator[None]:
    """Count the arithmetic of the first micro-batch, or of a pipeline's first step, if the meter can use the count."""
    if job.meter.flops_per_step is not None or job.meter.peak_tflops is None:
        yield
        return
    with metrics.FlopCounter() as counter:
        yield
    count, is_whole = float(counter.total or 0), job.place.pipeline == 1
    job.meter.flops_per_step = count * job.split.virtual if is_whole else sum(exchange.gather(count)) / job.place.tensor


def _loss(job: TrainingJob, model: Any, batch: Any) -> torch.Tensor:
    """Return the task's loss, a scalar. Raises TaskError if the value or the use of the model is wrong."""
    training, module = job.spec.training, job.strategy.module
    is_first = job.tally.is_weighted is None and not training.compile
    sparse = SparseCalls(training, module, job.task.optimizer is not None) if is_first else _AS_IT_IS
    offloaded = saved_on_host(module) if training.activation_offload else _AS_IT_IS
    try:
        with job.strategy.autocast(), sparse, offloaded:
            return job.tally.take(job.task.loss(model, batch))
    except (AttributeError, RuntimeError) as error:
        with explaining("loss", training, module):
            raise error


def _add_left_out(job: TrainingJob, progress: TrainState, is_left_out: bool, *, is_met: bool) -> None:
    """Count the steps that this rank left out alone; at an average (`is_met`) report those of all ranks."""
    progress.left_out += is_left_out
    if not is_met:
        return
    in_a_row, counts = zip(*exchange.gather([progress.skipped, progress.left_out]), strict=True)
    progress.left_out = 0
    if sum(counts):
        what = f": ranks left out {sum(counts)} of their steps since the last average: loss or gradient not finite, or "
        report.say_left_out(job, progress, f"{what}a count of 0", left_out=sum(counts))
    if max(in_a_row) >= saving.MAX_SKIPPED:
        what = f"rank {in_a_row.index(max(in_a_row))} had {max(in_a_row)} steps in a row"
        saving.fail(job, progress, f"{what} whose loss or gradient was not finite")


def _evaluation_is_due(job: TrainingJob, progress: TrainState) -> bool:
    if job.eval_data is None or progress.evaluated_step == progress.step or not job.strategy.is_alike():
        return False
    is_inherited = progress.step == 0 and progress.parent is not None  # the parent's number, before the first step
    return is_inherited or progress.step == progress.last_step or _is_planned(job, progress)


def _is_planned(job: TrainingJob, progress: TrainState) -> bool:
    """Return whether the job would evaluate at this step without a pause."""
    every = job.spec.training.eval_every
    is_end = progress.step == progress.last_step and not progress.is_paused
    return is_end or bool(every and progress.step and progress.step % every == 0)


def _evaluate(job: TrainingJob, progress: TrainState) -> str | None:
    """Evaluate; keep the best checkpoint, if requested; return the reason to stop, or None."""
    saving.secure(job, progress)
    with job.averaged():
        stop = evaluate(job, progress)
    monitor, keeps, schedule = job.spec.training.monitor, job.spec.checkpoint.keep_best, job.spec.training.schedule
    is_needed = monitor.patience is not None or keeps or schedule.name == "plateau"
    if stop is not None or not is_needed or not _is_planned(job, progress):
        return stop
    if monitor.metric not in progress.metrics:
        known = ", ".join(sorted(progress.metrics))
        raise TaskError(f"training.monitor.metric is {monitor.metric!r}; the evaluation has {known}")
    value, what = progress.metrics[monitor.metric], f"{monitor.mode} {monitor.metric}"
    if progress.best_of != what:  # a different metric than before a resume cannot be compared
        progress.best_of, progress.best, progress.stale = what, None, 0
    gain = math.inf if progress.best is None else (value - progress.best) * (1 if monitor.mode == "max" else -1)
    if math.isfinite(value) and gain > monitor.min_delta:
        progress.best, progress.best_step, progress.stale = value, progress.step, 0
        if keeps:
            saving.begin(job, progress, best=(monitor.metric, value))
        return None
    progress.stale += 1
    progress.falls += schedule.name == "plateau" and progress.stale % schedule.patience == 0
    return EARLY if monitor.patience is not None and progress.stale >= monitor.patience else None


if __name__ == "__main__":
    try:
        code = main()
    except (TaskError, CheckpointError) as error:  # the user's error: the trainer's frames do not help
        sys.stderr.writelines(traceback.format_exception_only(error))
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    # Tearing gloo down aborts or hangs one time in nine (torch 2.13): all state is durable, so exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

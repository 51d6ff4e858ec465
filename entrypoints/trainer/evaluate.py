"""Evaluation over all ranks: each sample once, for any number of ranks."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TaskError
from ..rank import exchange, heartbeat
from . import data, report, weighted
from .job import TrainingJob, TrainState
from .modelform import train_mode
from .strategies.wrap import explaining

Number = float | tuple[float, float]  # a mean over the batch, or a sum with its count
Measure = Callable[[Any, Any], Any]  # of a batch and the model
Take = Callable[[list[int], int, Callable[[], Any]], None]
_SPREADERS = ("torch.distributed.fsdp", "torch.distributed.tensor")
_EPOCH = -1  # evaluation samples draw the same random numbers each time, and no numbers that training draws


def shares(
    length: int, micro: int, limit: int | None, rank: int, ranks: int, *, is_even: bool = False
) -> list[tuple[list[data.Key], int]]:
    """Return the rank's batches with the weight of each: its number of samples.

    Every rank gets the same number of batches, since under fsdp each forward pass takes all ranks: a rank without
    further batches repeats the first batch with weight 0. With `is_even` the ranks' batches of a round have one size:
    the samples after the whole rounds are divided evenly, and the last of them are batches of one sample.
    """
    end = length if limit is None else min(length, limit * ranks * micro)
    starts = list(range(0, end, micro))
    if is_even:
        rest = end % (micro * ranks)
        whole, singles = end - rest, end - rest % ranks
        starts = [*range(0, whole, micro), *range(whole, singles, max(1, rest // ranks)), *range(singles, end)]
    batches = [range(start, stop) for start, stop in itertools.pairwise([*starts, end])]
    repeated = (batches[-1:] if is_even else batches[:1]) * (-len(batches) % ranks)
    weighed = [*((batch, len(batch)) for batch in batches), *((batch, 0) for batch in repeated)]
    return [([(_EPOCH, index) for index in batch], weight) for batch, weight in weighed[rank::ranks]]


def evaluate(job: TrainingJob, progress: TrainState) -> str | None:
    """Evaluate the model; emit the result, the mean over samples. Return the reason to stop, or None.

    Counts from before an interruption are dropped: the resumed job evaluates this step again.
    """
    begin_s = time.perf_counter()
    limit, strict = job.spec.training.eval_batches, job.spec.training.reproducible == "strict"
    if limit is not None and strict:  # the same samples for any number of ranks
        limit = limit * job.split.virtual // job.place.data_ranks
    found: list[tuple[dict[str, Number], int]] = []

    def take(_indices: list[int], weight: int, measured: Callable[[], Any]) -> None:
        found.append((measured() or {}, weight))

    job.tell(progress)
    with eval_mode(job):
        stop = visit(job, job.eval_data or (), job.split.micro, functools.partial(numbers, job), take, limit)
        metrics = {} if stop else mean(found)
    seconds = time.perf_counter() - begin_s
    job.meter.skip(seconds)
    if stop is not None:
        return stop
    progress.metrics, progress.evaluated_step = metrics, progress.step
    text = " ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    fields = {"step": progress.step, **metrics, "metrics": metrics, "seconds": seconds}
    report.say(job, "eval", f"eval step {progress.step} {text}", **fields)
    return None


@contextmanager
def eval_mode(job: TrainingJob) -> Iterator[None]:
    """Put the model in eval mode, with rank 0's buffers; then restore the modes of its parts. Collective."""
    module = job.strategy.module
    job.strategy.sync_buffers()
    modes = [(part, part.training) for part in module.modules()]  # parts may be frozen in eval mode
    module.eval()
    try:
        yield
    finally:
        train_mode(module, modes)
    job.strategy.compare_passes()


@torch.no_grad()
def visit(
    job: TrainingJob, split: Any, size: int, measure: Measure, take: Take, limit: int | None = None
) -> str | None:
    """Visit a split's batches of `size`, at most `limit`; return the reason to stop, or None. Collective.

    `take` gets the indices of a batch, the number of its samples that count, and a function that calls `measure` with
    the batch and the model.
    """
    place, seen, batch_s = job.place, itertools.count(), 0.0
    is_even = _uses_collectives(job, split, size, measure)
    plan = shares(len(split), size, limit, place.data_rank, place.data_ranks, is_even=is_even)
    batches = job.batches(split, iter([keys for keys, _ in plan]))

    def measured() -> Any:
        batch = next(batches)
        job.seed(data.EVAL, next(seen) * place.data_ranks + place.data_rank)
        with job.strategy.autocast():
            return job.strategy.evaluate(functools.partial(measure, batch))

    job.agreement.hurry()
    try:
        for keys, weight in plan:
            begin_s = time.perf_counter()
            if job.agreement.is_due():
                job.agreement.begin(batch_s)
            take([index for _, index in keys], weight if place.counts else 0, measured)
            heartbeat.beat()
            stop = job.agreement.finish().stop
            if stop is not None:
                return stop
            batch_s = time.perf_counter() - begin_s
    finally:
        job.agreement.hurry()
        batches.close()
    return None


def _uses_collectives(job: TrainingJob, split: Any, size: int, measure: Measure) -> bool:
    """Return whether the task's own code calls collectives in an evaluation; these need batches of equal size.

    The first call evaluates a batch which does not count, the same on all ranks, unless the batches are even anyway.
    """
    place = job.place
    if job.tally.uses_collectives is None and place.data_ranks > 1 and len(split) % (size * place.data_ranks):
        keys = [(_EPOCH, index) for index in range(min(size, len(split)))]
        watch = _CollectiveWatch()  # type: ignore[no-untyped-call]
        # A compiled model would not be compiled again after a pass under the watch.
        eager = torch.compiler.set_stance("force_eager")
        batch = next(job.batches(split, iter([keys])))  # the dataset runs without autocast
        with eager, job.strategy.autocast(), watch:
            job.strategy.evaluate(functools.partial(measure, batch))
        job.tally.uses_collectives = any(exchange.gather(watch.has_seen))
    return bool(job.tally.uses_collectives)


class _CollectiveWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the collectives that the task calls, not those of a strategy inside the model."""

    has_seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            callers = [f.f_globals.get("__name__", "") for f, _ in traceback.walk_stack(sys._getframe(1))]
            ours = next(i for i, name in enumerate(callers) if name.startswith(f"{__package__}."))
            is_strategys = ".strategies." in callers[ours] or any(n.startswith(_SPREADERS) for n in callers[:ours])
            self.has_seen = self.has_seen or not is_strategys
        return func(*args, **(kwargs or {}))


def numbers(job: TrainingJob, batch: Any, model: Any) -> dict[str, Number]:
    """Return the task's numbers of a batch: those of `evaluate`, else the loss. Raises TaskError."""
    function = "loss" if job.task.evaluate is None else "evaluate"
    with explaining(function, job.spec.training, job.strategy.module):
        found = {"loss": job.task.loss(model, batch)} if job.task.evaluate is None else job.task.evaluate(model, batch)
    if not isinstance(found, dict):
        found = {"metric": found}
    try:
        return {str(name): _number(value) for name, value in found.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise TaskError(
            f"{function}(model, batch) must return numbers, means over the batch or (sum, count), by name: {error}"
        ) from error


def _number(value: Any) -> Number:
    return (float(value[0]), float(weighted.checked_count(value[1]))) if weighted.is_pair(value) else float(value)


def mean(found: list[tuple[dict[str, Number], int]]) -> dict[str, float]:
    """Return the means over the samples, or over the counts, of all ranks: nan without any.

    `found` has the numbers of each batch, and its weight. The bits are the same for any distribution of the batches.
    """
    names: list[str] = next(filter(None, exchange.gather(sorted(found[0][0]))), [])
    if not names:
        return {}
    table = torch.tensor(
        [[_terms(values.get(name, 0.0), weight) for name in names] for values, weight in found], dtype=torch.float64
    )
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, table)
    means = {}
    for name, terms in zip(names, torch.cat(tables).unbind(1), strict=True):
        sums, counts = terms[terms[:, 1] != 0].T.tolist()
        # Sums that are rounded once do not depend on the order.
        total = math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)
        means[name] = total / math.fsum(counts) if counts else math.nan
    return means


def _terms(value: Number, weight: int) -> tuple[float, float]:
    """Return the sum and the count of a batch of `weight` samples; (0, 0) for a batch that does not count."""
    if not weight:
        return 0.0, 0.0
    return value if isinstance(value, tuple) else (weight * value, float(weight))

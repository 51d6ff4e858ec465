"""Finds the bound of a step, network, data or compute, from three short runs of the job, and prints a sentence.

    normal      as in training
    silent      no gradient or weight is sent: the saved time is the network's share
    synthetic   the first batches repeated, already loaded: the saved time is the data's share

The normal run is repeated at the end: the difference is the accuracy of the figures.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import atomic_json
from ..events import emit
from ..rank import exchange, savings
from ..rank.agree import Agreed, Agreement
from . import data
from .job import EXIT_DONE, EXIT_SAVED, RankContext, TrainingJob, TrainState, build
from .optimizer_facts import OPTIMIZERS
from .settings import Spec
from .strategies.cut import now_s
from .strategies.facts import facts_of, together
from .task import Task

Gradients = Callable[[TrainingJob, TrainState, Any], Agreed | None]

WARM_UP = 5  # steps before the clock: caches, DDP's second bucket layout, the GPU's own tuning
NOTABLE = 0.1  # of a step: less is not worth a change


@dataclass(frozen=True)
class TimedRun:
    """Seconds of a step, the median for the slowest rank, and each rank's own; the stages' waits in a step.

    `gradient_bytes`: the size of all gradients.
    """

    step_s: float
    waits_s: tuple[float, ...] = ()
    ranks_s: tuple[float, ...] = ()
    gradient_bytes: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    """Seconds of a step, and each part's share of the step; `noise` is the share by which two equal runs differ.

    `bubble`: the stages of a pipeline wait for each other. `stages_s`: the seconds in which each stage computes.
    `step`: what rank/savings.py needs to compare methods, for ddp whose network share is above the noise.
    """

    step_s: float
    network: float
    data: float
    bubble: float
    compute: float
    noise: float
    bound: str
    sentence: str
    stages_s: tuple[float, ...] = ()
    step: savings.MeasuredStep | None = None


def diagnose(spec: Spec, task: Task, place: RankContext, agreement: Agreement, gradients: Gradients) -> int:
    """Measure the three runs, report the bound, and return the exit code. No training, no saving.

    The step of a strategy whose ranks do not meet in each step is measured as ddp's.
    """
    spec = replace(spec, training=together(spec.training))
    runs = []
    for name in ("normal", "silent", "synthetic", "normal"):
        if (run := _measure(spec, task, place, agreement, gradients, name)) is None:
            return EXIT_SAVED
        runs.append(run)
        if place.is_head:
            emit("step", f"{name}: {_ms(run.step_s)} a step", run=name, seconds=run.step_s)
    normal, silent, synthetic, again = runs
    found = conclude([normal, again], silent, synthetic, spec, place)
    if place.is_head:
        emit("done", found.sentence, diagnosis=asdict(found))
        folder = os.environ.get("CLOUDTRAIN_RESULT_DIR")
        if folder:
            atomic_json.write_json(Path(folder) / "outcome.json", {"outcome": "done", "diagnosis": asdict(found)})
    dist.barrier()
    return EXIT_DONE


def conclude(
    normal: list[TimedRun], silent: TimedRun, synthetic: TimedRun, spec: Spec, place: RankContext
) -> Diagnosis:
    """Return the diagnosis from the runs. The stages' waits are the synthetic run's: not for data of another stage."""
    times, waits = [run.step_s for run in normal], synthetic.waits_s
    step_s = statistics.mean(times)
    noise = (max(times) - min(times)) / step_s
    network = max(0.0, 1 - silent.step_s / step_s) if place.ranks > 1 else 0.0
    loading = max(0.0, 1 - synthetic.step_s / step_s)
    bubble = min(1.0, statistics.mean(waits) / step_s) if waits else 0.0
    stages_s = tuple(max(0.0, step_s - wait) for wait in waits)
    compute = max(0.0, 1 - network - loading - bubble)
    shares = {"network": network, "data": loading, **({"bubble": bubble} if waits else {}), "compute": compute}
    parts = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
    measured = f"of {_ms(step_s)} a step, {parts} (two like runs differ by {100 * noise:.0f} %){_stages(stages_s)}"
    bound = max(shares, key=lambda name: shares[name])
    if noise > NOTABLE and noise > abs(shares[bound] - sorted(shares.values())[-2]):
        sentence = f"unclear: {measured}; try again on a quieter machine, or with more --steps"
        return Diagnosis(step_s, network, loading, bubble, compute, noise, "unclear", sentence, stages_s)
    sentence = f"bound by {bound}: {measured}; {_advice(bound, shares, spec, place)}"
    step, wanted = None, spec.training
    is_dense = wanted.compression == "none" and wanted.shard is None and wanted.reproducible != "strict"
    # A step that all-reduces whole gradients, which the other methods replace.
    is_plain = facts_of(wanted).averages_gradients and wanted.parallel.ranks == 1 and is_dense
    if network > max(noise, NOTABLE) and silent.gradient_bytes and is_plain:
        ranks_s, size = silent.ranks_s, silent.gradient_bytes
        sent = 2 * (place.ranks - 1) / place.ranks * size
        facts, momentum = OPTIMIZERS[wanted.optimizer.name], wanted.optimizer.momentum
        states = 0 if facts.is_state_momentum and not momentum else facts.states
        step = savings.MeasuredStep(step_s * (1 - network), size, sent / (network * step_s), states, ranks_s)
        expected = savings.expected_steps(step, place.ranks)
        sentence += f"; {savings.in_words(step, place.ranks, expected)} (docs/training.md says what each costs)"
    return Diagnosis(step_s, network, loading, bubble, compute, noise, bound, sentence, stages_s, step)


def _stages(stages_s: tuple[float, ...]) -> str:
    if not stages_s:
        return ""
    slowest_s, mean = max(stages_s), _ms(statistics.mean(stages_s))
    which = f"the slowest stage is {stages_s.index(slowest_s) + 1} of {len(stages_s)}"
    return f"; {which}: it computes {_ms(slowest_s)}, the stages' mean is {mean}"


def _advice(bound: str, shares: dict[str, float], spec: Spec, place: RankContext) -> str:
    """Return the settings to try, except settings already in use."""
    wanted = spec.training
    if bound == "data":
        more = max(2, 2 * wanted.num_workers)
        return f"try num_workers: {more} (now {wanted.num_workers}), cheaper transforms, or data nearer to the machine"
    if bound == "bubble":
        tries = ["more micro-batches a step: a smaller micro_batch_size or a larger global_batch_size"]
        if wanted.parallel.cut != "timed":
            tries.append("parallel.cut: timed")
        return "try " + ", or ".join(tries)
    if bound == "network":
        tries = ["a larger micro_batch_size or global_batch_size, so that ranks send less often"]
        facts = facts_of(wanted)
        if facts.averages_gradients and wanted.compression == "none" and wanted.parallel.ranks == 1:
            tries.insert(0, "compression: bf16")
        if facts.nearer:
            tries.insert(0, facts.nearer)
        return "try " + ", or ".join(tries)
    tries = []
    if wanted.precision == "fp32" and place.device.type == "cuda":
        tries.append("precision: bf16")
    if not wanted.compile and wanted.parallel.ranks == 1:
        tries.append("compile: true")
    tries.append("more ranks")
    second = [name for name in ("network", "data", "bubble") if shares.get(name, 0.0) > NOTABLE]
    rest = f"then look at {' and '.join(second)}" if second else "nothing else waits"
    return f"try {', '.join(tries)}; {rest}"


def _measure(
    spec: Spec, task: Task, place: RankContext, agreement: Agreement, gradients: Gradients, name: str
) -> TimedRun | None:
    """Return the measured run, None after a stop request."""
    job = build(spec, task, place, agreement, silent=name == "silent")
    count = spec.training.diagnose_steps or 1
    progress = TrainState(max_steps=WARM_UP + count)
    took, is_synthetic = [], name == "synthetic"
    keys = data.train_keys(job.order, job.split, place.data_rank, 0, 1 if is_synthetic else progress.max_steps)
    with closing(job.batches(job.train_data, keys)) as loaded:
        batches = itertools.cycle(list(loaded)) if is_synthetic else loaded
        for number in range(progress.max_steps):
            if number == WARM_UP:
                dist.barrier()
                _waits(job)
            begin_s = now_s(place.device)
            earlier = gradients(job, progress, batches)
            if earlier is not None and earlier.stop:
                return None
            if job.strategy.exchange is not None:
                job.scaler.unscale_(job.scaled)
                job.strategy.exchange(progress.step)
            job.scaler.step(job.scaled)
            job.strategy.share_update()
            job.scaler.update()
            job.clear_gradients()
            progress.step += 1
            job.meter.tick()
            stop = agreement.finish().stop
            took.append(now_s(place.device) - begin_s)
            if stop is not None:
                return None
    ranks_s = tuple(exchange.gather(statistics.median(took[WARM_UP:])))
    size = float(sum(p.nbytes for p in job.strategy.module.parameters() if p.requires_grad))
    waits = tuple(seconds / count for seconds in _waits(job))
    del job, batches, loaded
    gc.collect()  # one model at a time
    return TimedRun(max(ranks_s), waits, ranks_s, size)


def _waits(job: TrainingJob) -> tuple[float, ...]:
    """Return the seconds in which each stage of a pipeline has waited since the last call; () without a pipeline."""
    times = job.strategy.stage_times
    return () if times is None else times().waited_s


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"

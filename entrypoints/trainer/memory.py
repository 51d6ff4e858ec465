"""The memory that a rank will need, without the memory: the job's own layout, run on tensors without data.

    python -m cloudtrain.entrypoints.trainer.memory SPEC USABLE

Runs in the code folder, before a submit. Prints a JSON line for each layout: first the job's, then either the first
layout that fits into USABLE bytes, or layouts that fit without a setting that costs time. The model, the strategy
and the optimizer are the trainer's own, on FakeTensors (torch's shapes without data) and a process group that sends
nothing. So the figure holds gathered shards, recomputation and parts of layers as the job will. A GPU's context, NCCL
and the fragments of the allocator are not in it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import resource
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from ..contract import JobSpec
from ..errors import FormError, TaskError
from . import data, optim, own_optimizer, splits, weighted
from .contradictions import SPARSE
from .ema import Ema
from .job import RankContext, eval_split, order_of, own_of, train_split
from .metrics import StorageCounter, require_counts
from .modelform import module_of
from .optimizer_facts import OPTIMIZERS
from .settings import LocalSettings, ParallelSettings, Spec, TrainingSettings, read_spec
from .strategies.blocks import default_blocks, saved_on_host
from .strategies.buffers import ROOM_BYTES, changed, keep_frozen, refusal
from .strategies.cut import Output
from .strategies.ddp import shard_optimizer
from .strategies.facts import facts_of, together
from .strategies.links import Activation, Links
from .strategies.local import outer_copies
from .strategies.strategy import Feed, Strategy
from .strategies.wrap import SparseCalls, wrap
from .task import Task, load_task

try:  # names that torch may change in any version; this module and fitting.py are programs for the launcher
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._pytree import tree_map_only
except ImportError as error:
    print(json.dumps({"why": f"torch {torch.__version__} differs inside: {error}"}), flush=True)
    raise SystemExit(0) from error

Changes = dict[str, Any]  # keys of `training` with their values

_CPU = torch.device("cpu")
_DATA = "it reads values of tensors, and an estimate has only their shapes"


@dataclass(frozen=True)
class Estimate:
    """A rank's memory."""

    bytes: int
    static_bytes: int
    """Of parameters, gradients and the optimizer's state, without activations."""
    parameters: int
    is_assumed: bool = False
    """The optimizer cannot run without data, and its state counts as 8 bytes a parameter, like AdamW's."""
    why: str | None = None
    """Why `bytes` is only the static part."""
    stage: int | None = None
    """The number of the pipeline's stage that needs most, from 1."""


def main(spec_file: str, usable_bytes: int) -> None:
    """Print the layouts, a JSON line each; `usable_bytes` is 0 if unknown."""
    with answering() as answer:
        require_counts()
        spec, job = read_spec(spec_file), JobSpec.load(json.loads(Path(spec_file).read_text()))
        os.environ["LOCAL_WORLD_SIZE"] = str(job.nproc_per_node)  # hsdp reads it
        ranks = job.nodes * job.nproc_per_node
        task = load_task(spec.target, spec.training.seed)
        task.check(spec.training)
        _be_rank(0, 1, ParallelSettings())  # for the functions that compare the ranks' data
        dataset, fingerprint = train_split(spec, task)
        order_of(spec, task, dataset)
        for changes, layout in _layouts(spec, task, dataset, ranks, job.nproc_per_node, usable_bytes):
            answer({"changes": changes, **asdict(layout)})
            for note in _notes(spec, task, dataset, fingerprint) if not changes else ():
                answer({"note": note})


@contextlib.contextmanager
def answering() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that prints a JSON line, for a block that builds a model; an exception becomes `{"why": ...}`.

    Limit this process to half of the main memory: a model that needs values has real weights.
    """
    out = sys.stdout
    warnings.simplefilter("ignore")
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (physical_bytes // 2,) * 2)

    def answer(fields: dict[str, Any]) -> None:
        print(json.dumps(fields), file=out, flush=True)

    with contextlib.redirect_stdout(sys.stderr):  # the task may print
        try:
            yield answer
        except Exception as error:
            answer({"why": _reason(error), **({"is_refused": True} if isinstance(error, FormError) else {})})


def _notes(spec: Spec, task: Task, dataset: Any, fingerprint: str) -> list[str]:
    """Return the faults of the splits, as far as this machine has the data. Raises FormError."""
    with _forms_only():
        is_stream = isinstance(dataset, data.Stream)  # whose samples are not compared
        held = None if is_stream else eval_split(spec, task, fingerprint, RankContext(0, 1, _CPU))
        return list(splits.faults(dataset, {"eval": held}, spec.training.seed))
    return []


@contextlib.contextmanager
def _forms_only() -> Iterator[list[Exception]]:
    """Suppress exceptions but FormError: the job's machines may have other files, and its tensors have values.

    The list then has the exception.
    """
    suppressed = list[Exception]()
    try:
        yield suppressed
    except FormError:
        raise
    except Exception as error:
        suppressed.append(error)


def _layouts(
    spec: Spec, task: Task, dataset: Any, ranks: int, nproc: int, usable_bytes: int
) -> Iterator[tuple[Changes, Estimate]]:
    """Yield the job's layout, and those that would serve better; their changed keys of `training` come first."""

    @functools.cache
    def batch_of(size: int) -> Any:
        return (task.collate or default_collate)([dataset[index % len(dataset)] for index in range(size)])

    own = estimate(spec, task, ranks, batch_of)
    yield {}, own
    if own.why or not usable_bytes:
        return
    does_fit = own.bytes <= usable_bytes
    slower = {"parallel.pipeline": 1, "parallel.tensor": 1, "activation_checkpointing": False}
    in_use = [{key: off} for key, off in slower.items() if attrgetter(key)(spec.training) != off]
    tried = in_use if does_fit else _with(spec.training, ranks, nproc, own, usable_bytes)
    for changes in tried:
        with contextlib.suppress(Exception):  # a layout that this model or these ranks do not allow
            other = estimate(replace(spec, training=_changed(spec.training, changes)), task, ranks, batch_of)
            if other.why is None and other.bytes <= usable_bytes:
                yield changes, other
                if not does_fit:
                    return


def _with(wanted: TrainingSettings, ranks: int, nproc: int, own: Estimate, usable_bytes: int) -> Iterator[Changes]:
    """Yield settings that need less memory, the cheapest in time first."""
    data_ranks, sharded = ranks // wanted.parallel.ranks, facts_of(wanted).sharded
    size = micro = data.split_batch(wanted.global_batch_size, wanted.micro_batch_size, data_ranks).micro
    while micro > 1 and own.static_bytes + (own.bytes - own.static_bytes) * micro / size > usable_bytes:
        micro = 1 if micro % 2 else micro // 2  # until the activations leave room
    small: Changes = {} if micro == size else {"micro_batch_size": micro}
    least: Changes = dict.fromkeys(small, 1)
    shards: Changes = {"strategy": sharded} if sharded and ranks > wanted.parallel.ranks else {}
    again: Changes = {} if wanted.activation_checkpointing else {"activation_checkpointing": True}
    whole: Changes = {**shards, **again, **least}
    wider = [{**whole, "parallel.tensor": n} for n in (2, nproc) if nproc % n == 0 and n > wanted.parallel.tensor]
    micro = 1 if small else wanted.micro_batch_size or wanted.global_batch_size
    # Otherwise a step has less than two micro-batches for each stage, whatever their number, and stages mostly wait.
    is_filled = wanted.global_batch_size * wanted.parallel.tensor >= 2 * micro * ranks
    stages = [n for n in (2, 4, 8) if is_filled and ranks % n == 0 and n > wanted.parallel.pipeline]
    longer = [{**again, **least, "parallel.pipeline": n} for n in stages]  # shards are not allowed by some models
    tried: list[Changes] = [{}]
    for changes in (shards, small, again, {**shards, **small}, {**shards, **again}, whole, *wider, *longer):
        is_split = not {"strategy", "parallel.tensor", "parallel.pipeline"}.isdisjoint(changes)
        if changes not in tried and (is_split or own.static_bytes <= usable_bytes):
            tried.append(changes)
            yield changes


def _changed(wanted: TrainingSettings, changes: Changes) -> TrainingSettings:
    own = {key: value for key, value in changes.items() if "." not in key}
    layout = {key.partition(".")[2]: value for key, value in changes.items() if "." in key}
    if layout.get("tensor") == 1:
        layout |= {"sequence": False, "plan": None}
    if layout.get("pipeline") == 1:
        layout |= {"schedule": "1f1b", "cut": "even", "chunks": 1, "weights": "stash"}
    return replace(wanted, parallel=replace(wanted.parallel, **layout), **own)


def estimate(spec: Spec, task: Task, ranks: int, batch_of: Callable[[int], Any]) -> Estimate:
    """Return the memory of the rank that needs most; `batch_of` returns a micro-batch of a size. Raises TaskError.

    Of equal blocks the first stage keeps the most micro-batches, and the last has the largest output. A cut by time is
    not known before the job, and is taken as even.
    """
    parallel = spec.training.parallel
    if parallel.pipeline == 1:
        return _of_rank(spec, task, ranks, 0, batch_of)
    if parallel.cut == "timed":
        spec = replace(spec, training=replace(spec.training, parallel=replace(parallel, cut="even")))
    module = without_data(spec, task, FakeTensorMode(allow_non_fake_inputs=True))
    blocks = default_blocks(module) if task.blocks is None else task.blocks(module)
    is_equal = len({tuple(p.shape for p in block.parameters()) for block in blocks}) == 1
    is_even = is_equal and not isinstance(parallel.cut, list)
    ranks_of_stage, stages = ranks // parallel.pipeline, list[Estimate]()
    for number in (0, parallel.pipeline - 1) if is_even else range(parallel.pipeline):
        stages.append(replace(_of_rank(spec, task, ranks, number * ranks_of_stage, batch_of), stage=number + 1))
        if stages[-1].why:  # the larger figure of another stage would hide the reason
            return stages[-1]
    return max(stages, key=lambda stage: stage.bytes)


def _of_rank(spec: Spec, task: Task, ranks: int, rank: int, batch_of: Callable[[int], Any]) -> Estimate:
    wanted = replace(spec.training, compile=False)  # compiled code cannot run without data
    local, facts = wanted.local or LocalSettings(), facts_of(wanted)
    is_local = facts.averages_weights and ranks > 1
    parallel = (wanted := together(wanted)).parallel
    _be_rank(rank, ranks, parallel)
    split = data.split_batch(wanted.global_batch_size, wanted.micro_batch_size, ranks // parallel.ranks)
    # By DistributedDataParallel: the gradients are views of its buckets, which live all the time.
    is_copied = facts_of(wanted).averages_gradients and parallel.ranks == 1 and ranks > 1
    is_averaged = is_copied and wanted.reproducible != "strict"
    is_shared = wanted.shard == "optimizer" and ranks > 1
    split = replace(split, ranks=1) if is_averaged else split
    # A rank that trains alone, or sends codes, has no buckets.
    is_sparse = wanted.compression in SPARSE and ranks > 1
    has_momentum = OPTIMIZERS[wanted.optimizer.name].is_state_momentum and wanted.optimizer.momentum > 0
    # A worker trains alone, beside its rank's copy; codes keep the residual, the mean over the ranks, and the momentum.
    copies = facts.has_servers + (2 + has_momentum) * is_sparse
    is_averaged = is_averaged and not facts.has_servers and not is_sparse and (not is_local or local.sync_steps > 0)
    mode, counter = FakeTensorMode(allow_non_fake_inputs=True), StorageCounter()
    module = without_data(spec, task, mode)
    _require_kept(spec, task, ranks, module, batch_of)
    parameters = sum(p.numel() for p in module.parameters())
    for held in (*module.parameters(), *module.buffers()):
        counter.count(held)
    batch = tree_map_only(torch.Tensor, mode.from_tensor, batch_of(split.micro))
    # Outside the mode, so that numbers which are no part of the model have values; the model's tensors keep the mode.
    with counter:
        strategy = _spread(wanted, task, module, split, batch)
        trained = [p for p in strategy.module.parameters() if p.requires_grad]
        if is_shared and is_averaged:
            strategy = shard_optimizer(wanted, strategy, _CPU, silent=False)
        outer = outer_copies(local, trained) if is_local else []
        outer += [[p.detach().clone() for p in trained] for _ in range(copies)]
        average = None if wanted.ema_decay is None else Ema(strategy.module, wanted.ema_decay)
        optimizer, spare = _first_step(spec, task, strategy, ranks, mode)
        if is_shared:
            optimizer.zero_grad()
            _give_gradients(trained)
        gc.collect()
        static_bytes = counter.live_bytes
        if not is_averaged:
            optimizer.zero_grad()
    held_bytes = counter.live_bytes if wanted.cpu_offload else 0  # in the host's memory
    static_bytes, counter.peak_bytes = static_bytes - held_bytes, counter.live_bytes

    def step(count: int) -> None:
        with mode, counter:
            _passes(wanted, task, strategy, batch, range(count), weighted.Tally(split, wanted.tokens_per_sample))
        with counter:
            strategy.finish()
            if not spare:  # else the optimizer cannot run without data
                optimizer.step()
            strategy.share_update()
            optimizer.zero_grad()

    peak_bytes = static_bytes
    with _forms_only() as errors:
        peak_bytes = _peak_bytes(counter, step, parallel, split.accumulation) - held_bytes
    del average, outer
    return Estimate(peak_bytes, static_bytes, parameters, bool(spare), _reason(errors[0]) if errors else None)


def _spread(wanted: TrainingSettings, task: Task, module: nn.Module, split: data.Split, batch: Any) -> Strategy:
    """Return the module spread over the ranks as in the job, without connections to other stages."""
    return wrap(
        replace(wanted, cpu_offload=False),
        module,
        _CPU,
        split,
        **task.layout,
        probe=lambda model, _: task.loss(model, batch),
        connect=_Unconnected,
    )


def _be_rank(rank: int, ranks: int, parallel: ParallelSettings) -> None:
    """Be a rank of a process group that sends nothing. Raises TaskError if the layout does not divide the ranks."""
    if ranks % parallel.ranks:
        layout = f"training.parallel.tensor {parallel.tensor} x pipeline {parallel.pipeline}"
        raise TaskError(f"{layout} does not divide the {ranks} ranks")
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def _peak_bytes(
    counter: StorageCounter, step: Callable[[int], None], parallel: ParallelSettings, accumulation: int
) -> int:
    """Return the most bytes that live at once in a step of so many micro-batches; `step` takes their number."""
    peaks: list[int] = []
    counts = [min(accumulation, 2 * parallel.pipeline)]
    if parallel.schedule == "gpipe":  # holds every micro-batch of a step: two steps show the memory of a further one
        counts = [3, 4] if accumulation > 4 else [accumulation]
    for count in counts:
        step(count)
        peaks.append(counter.peak_bytes)
    return peaks[-1] + (accumulation - counts[-1]) * (peaks[-1] - peaks[0])


class _Unconnected(Links):
    """A stage without neighbours: activations have the right shape and no data, and nothing is sent."""

    def __init__(self, stages: int, device: torch.device) -> None:
        super().__init__(stages, device)
        self._traced: deque[Output] = deque()

    def expect(self, traced: Output) -> None:
        self._traced.append(traced)

    def take(self) -> Activation:
        traced = self._traced.popleft()
        return Activation(torch.empty(traced.shape, dtype=traced.dtype, requires_grad=True), None)

    def give(self, output: torch.Tensor, traced: Output) -> None:
        """Send nothing."""

    def _send(self, tensor: torch.Tensor, target: int, group: dist.ProcessGroup, tag: int = 0) -> None:
        """Send nothing."""


def without_data(spec: Spec, task: Task, mode: FakeTensorMode) -> nn.Module:
    """Return the model on tensors without data; a model whose construction needs values takes its memory once."""
    try:
        with mode:
            module = module_of(spec, task)
    except Exception:
        module = module_of(spec, task)
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            held_here: dict[str, Any] = held
            for name, value in held_here.items():
                if value is not None and not isinstance(value, FakeTensor):
                    held_here[name] = mode.from_tensor(value)
    module.to = lambda *_args, **_kwargs: module  # type: ignore[method-assign]  # nothing to move
    return module


def _require_kept(spec: Spec, task: Task, ranks: int, module: nn.Module, batch_of: Callable[[int], Any]) -> None:
    """Raise FormError if a pass of a small model, with values, shows frozen parameters that change and are not kept."""
    wanted, facts = spec.training, facts_of(spec.training)
    keeps = facts.is_whole and not facts.has_servers and (ranks == 1 or not facts.averages_weights)
    size = sum(p.nbytes for p in module.parameters())
    if keeps or wanted.parallel.pipeline > 1 or size > ROOM_BYTES or all(p.requires_grad for p in module.parameters()):
        return
    with _forms_only():
        kept = keep_frozen(real := module_of(spec, task))
        task.loss(real, batch_of(2))
        if names := changed(kept):
            raise FormError(refusal(names))


def _give_gradients(trained: list[nn.Parameter]) -> None:
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)


def _first_step(
    spec: Spec, task: Task, strategy: Strategy, ranks: int, mode: FakeTensorMode
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """Return the optimizer with its state, and tensors in place of a state that the optimizer cannot make."""
    make = task.optimizer or (lambda module, _: optim.build(spec.training.optimizer, module.parameters()))
    is_async, own = facts_of(spec.training).has_servers, None
    with strategy.optimized():
        trained = [p for p in strategy.module.parameters() if p.requires_grad]
        # The optimizer's state of async is in the servers' main memory.
        optimizer = torch.optim.SGD(trained, 0.0) if is_async else make(strategy.module, spec.params)
    own_optimizer.require_form(optimizer)
    with _forms_only():
        names = strategy.parameter_names()
        others = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
        # A model that was built with values holds other parameters in its own lists: `without_data` has replaced them.
        is_replaced = any(not isinstance(p, FakeTensor) and mode.from_tensor(p) in names for p in others)
        if task.optimizer is not None and not is_replaced:
            place = RankContext(0, ranks, _CPU, pipeline=spec.training.parallel.pipeline)
            own = own_of(spec.training, place, strategy, optimizer)
    _give_gradients(trained)
    with _forms_only() as errors, own_optimizer.explained(optimizer):
        optimizer.step()
    if errors:
        getattr(optimizer, "state", {}).clear()
        return optimizer, [torch.zeros_like(parameter) for parameter in trained for _ in range(2)]
    with _forms_only():
        if own is not None:
            own.check(strategy.parameter_names())
    return optimizer, []


def _passes(
    wanted: TrainingSettings, task: Task, strategy: Strategy, batch: Any, owned: range, tally: weighted.Tally
) -> None:
    """Run the forward and backward passes of the micro-batches of a step."""
    offloaded = functools.partial(saved_on_host, strategy.module, "meta")
    around = offloaded if wanted.activation_offload else contextlib.nullcontext

    def loss_of(model: Any, batch: Any) -> Any:
        with strategy.autocast(), around(), SparseCalls(wanted, strategy.module, task.optimizer is not None):
            return tally.take(task.loss(model, batch))

    if strategy.walk is None:
        for virtual in owned:
            with strategy.micro_batch(virtual, virtual == owned[-1]):
                (strategy.model(functools.partial(loss_of, batch=batch)) / strategy.divisor).backward()
        return
    stages = wanted.parallel.pipeline
    unseeded, backward = lambda *_: None, lambda loss: (loss / strategy.divisor).backward()
    feed = Feed(owned, lambda: batch, unseeded, loss_of, backward, lambda: None, steps_left=stages)
    for _ in range(stages if wanted.parallel.schedule == "async" else 1):  # until all versions of the weights are kept
        strategy.walk(feed)


def _reason(error: Exception) -> str:
    """Return the error in one line."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return _DATA
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, TaskError) else f"{type(error).__name__}: {first}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # a data set of the task may leave threads

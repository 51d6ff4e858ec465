"""How a model is spread over the ranks: ddp (a copy each), fsdp (a shard each), hsdp (shards within, copies between).

A strategy is a record of functions (strategy.py), created by one function for each strategy; the training loop uses
only the record. A new strategy is a file beside ddp.py and a line in STRATEGIES.
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.rank.exchange import share
from cloudtrain.entrypoints.trainer import data
from cloudtrain.entrypoints.trainer.settings import ParallelSettings, TrainingSettings, suggest
from cloudtrain.entrypoints.trainer.strategies import cut, schedules, tensor
from cloudtrain.entrypoints.trainer.strategies.blocks import default_blocks
from cloudtrain.entrypoints.trainer.strategies.ddp import ddp
from cloudtrain.entrypoints.trainer.strategies.fsdp import data_mesh, fsdp, hsdp, shard_width
from cloudtrain.entrypoints.trainer.strategies.pipeline import PipelineStage
from cloudtrain.entrypoints.trainer.strategies.strategy import (
    LOW,
    Blocks,
    State,
    Strategy,
    autocaster,
    finite,
    share_weights,
)
from cloudtrain.entrypoints.trainer.strategies.zero import shard_optimizer

__all__ = ["STRATEGIES", "Blocks", "State", "Strategy", "default_blocks", "finite", "wrap"]

Probe = Callable[[nn.Module, torch.device], object]  # computes the loss of a micro-batch, on a device
Maker = Callable[
    [TrainingSettings, nn.Module, torch.device, data.Split, Blocks | None, bool, DeviceMesh | None], Strategy
]

STRATEGIES: dict[str, Maker] = {"ddp": ddp, "fsdp": fsdp, "hsdp": hsdp}
_SHARDS = {"optimizer": "ddp", "gradients": "fsdp", "parameters": "fsdp"}  # the strategy that goes with `shard`


def wrap(
    settings: TrainingSettings,
    module: nn.Module,
    device: torch.device,
    split: data.Split,
    *,
    blocks: Blocks | None = None,
    tensor_plan: tensor.TensorPlan | None = None,
    probe: Probe | None = None,
    silent: bool = False,
) -> Strategy:
    """Return the module spread as the settings ask. Collective. Raises TaskError with all faults of the settings.

    `probe` is needed to cut a model into the stages of a pipeline. `silent`: no gradient or weight is sent, and the
    numbers are wrong: to measure the cost of communication.
    """
    faults = [*_faults(settings, split), *_faults_here(settings, module, device)]
    if faults:
        raise TaskError("; ".join(faults))
    make = STRATEGIES[settings.strategy]
    if settings.parallel.ranks == 1:
        spread = make(settings, module, device, split, blocks, silent, None)
        is_shared = settings.shard == "optimizer" and split.ranks > 1
        return shard_optimizer(settings, spread, device, silent) if is_shared else spread
    mesh = data_mesh(settings, device, split.ranks)
    share_weights(module.parameters(), device)
    found = default_blocks(module) if blocks is None else list(blocks(module))
    if settings.parallel.pipeline == 1:
        _split_layers(settings, module, device, found, tensor_plan, mesh)
        return make(settings, module, device, split, lambda _: found, silent, mesh)
    assert probe is not None
    stage = _cut_out(settings, module, found, probe, device, split.accumulation)
    if settings.parallel.tensor > 1:
        _split_layers(settings, module, device, found, tensor_plan, mesh)
    stage.attach()
    return stage.spread(make(settings, module, device, split, lambda _: stage.blocks, silent, mesh))


def _cut_out(
    settings: TrainingSettings,
    module: nn.Module,
    blocks: list[nn.Module],
    probe: Probe,
    device: torch.device,
    micro_batches: int,
) -> PipelineStage:
    """Return this rank's stage of the model; print all stages."""
    parallel, is_head = settings.parallel, dist.get_rank() == 0
    names = {part: name for name, part in module.named_modules()}
    found = cut.trace(module, blocks, lambda model: probe(model, torch.device("cpu")))
    times: list[float] = []
    if parallel.cut == "timed":
        recomputes = settings.activation_checkpointing
        if is_head:
            with autocaster(settings.precision, device)():
                times = cut.block_times(module, found.blocks, probe, device, recomputes=recomputes)
        times = share(times)
    starts = cut.cut(parallel, len(found.blocks), times)
    spans = [slice(*span) for span in itertools.pairwise([*starts, len(found.blocks)])]
    of_stages = [spans[stage :: parallel.pipeline] for stage in range(parallel.pipeline)]
    stages_s = [sum(sum(times[span]) for span in own) for own in of_stages] if times else []
    equal = [1.0] * parallel.pipeline
    expected = schedules.idle_share(parallel.schedule, stages_s or equal, parallel.chunks, micro_batches)
    if is_head:
        pieces = [[[names[block] for block in found.blocks[span]] for span in own] for own in of_stages]
        print(_in_words(parallel, pieces, stages_s, micro_batches, expected), flush=True)
    return PipelineStage.cut_out(parallel, module, found, starts, device, expected)


def _in_words(
    parallel: ParallelSettings,
    pieces: list[list[list[str]]],
    stages_s: list[float],
    micro_batches: int,
    expected: float,
) -> str:
    """Return the blocks of each stage, the measured time of a micro-batch in each stage, and the expected bubble."""
    stages = []
    for number, own in enumerate(pieces):
        stage = " and ".join(names[0] + (f" to {names[-1]}" if len(names) > 1 else "") for names in own)
        stages.append(stage + (f" ({1000 * stages_s[number]:.3g} ms)" if stages_s else ""))
    words = (
        f"pipeline {parallel.pipeline}: {'; '.join(stages)}; with {parallel.schedule} and {micro_batches} "
        f"micro-batches stages wait {100 * expected:.0f} % of a step, "
        + ("by these times" if stages_s else "if the stages take equal time")
    )
    if parallel.schedule == "async":
        words += f"; the weights of stage 1 are up to {parallel.pipeline - 1} micro-batches old, which costs accuracy"
    return words


def _split_layers(
    settings: TrainingSettings,
    module: nn.Module,
    device: torch.device,
    blocks: list[nn.Module],
    tensor_plan: tensor.TensorPlan | None,
    mesh: DeviceMesh,
) -> None:
    """Split the module's layers over neighbouring ranks; print the plan."""
    parallel = settings.parallel
    plan = tensor.find_plan(parallel, module, blocks, tensor_plan)
    if dist.get_rank() == 0:
        print(f"tensor {parallel.tensor}: {tensor.in_words(module, plan)}", flush=True)
    own = {name for name, part in module.named_modules() if any(True for _ in part.parameters(recurse=False))}
    units = blocks if settings.activation_checkpointing or settings.strategy != "ddp" else []
    here = {name: kind for name, kind in plan.items() if name in own}  # a stage of a pipeline has some modules only
    tensor.split(module.to(device), here, mesh["tensor"], units, sequence=parallel.sequence)


def _faults(settings: TrainingSettings, split: data.Split) -> Iterator[str]:
    """Yield the contradictions in the settings."""
    name = settings.strategy
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        yield f"strategy {name!r} is unknown; there are {', '.join(STRATEGIES)}" + (
            f"; did you mean `{close[0]}`?" if close else ""
        )
    if settings.precision not in ("fp32", *LOW):
        yield f"precision {settings.precision!r} is unknown; there are fp32, {', '.join(LOW)}"
    if settings.compression != "none" and name != "ddp":
        yield f"compression {settings.compression} is ddp's; {name} sends shards: leave it out, or set precision: bf16"
    if settings.cpu_offload and name == "ddp":
        yield "cpu_offload needs shards to offload, and ddp has none; set strategy: fsdp"
    if settings.shard and settings.shard not in _SHARDS:
        yield f"shard {settings.shard!r} is unknown; there are {', '.join(_SHARDS)}{suggest(settings.shard, _SHARDS)}"
    elif settings.shard and _SHARDS[settings.shard] != name.replace("hsdp", "fsdp"):
        yield f"shard: {settings.shard} does not go with {name}; set strategy: {_SHARDS[settings.shard]}"
    if settings.shard_size and name != "hsdp":
        yield f"shard_size is hsdp's, and the strategy is {name}; leave it out, or set strategy: hsdp"
    if settings.parallel.ranks > 1:
        yield from _parallel_faults(settings)
    if settings.parallel.pipeline > 1:
        yield from _pipeline_faults(settings, split)
    if settings.parallel.tensor == 1 and settings.parallel.sequence:
        yield "parallel.sequence shares the sequence among the ranks of parallel.tensor, which is 1: set 2"
    if name == "hsdp":
        yield from _hsdp_faults(settings, split.ranks)
    if settings.reproducible == "strict":
        yield from _strict_faults(settings, split)


def _parallel_faults(settings: TrainingSettings) -> Iterator[str]:
    """Yield the settings that do not go with parallel.tensor or parallel.pipeline."""
    key = "parallel.tensor" if settings.parallel.tensor > 1 else "parallel.pipeline"
    if settings.shard == "optimizer":
        yield f"shard: optimizer does not go with {key}; set strategy: fsdp and shard: gradients"
    if settings.reproducible == "strict":
        yield f"reproducible: strict has a fixed order of sums, and {key} changes it; set standard"
    if settings.compile:
        yield f"compile does not go with {key}; leave one of them out"
    if settings.compression != "none":
        yield f"compression {settings.compression} does not go with {key}; set compression: none"
    if settings.precision == "fp16":
        yield f"precision fp16 does not go with {key}; set precision: bf16"
    if settings.cpu_offload:
        yield f"cpu_offload does not go with {key}; leave one of them out"


def _pipeline_faults(settings: TrainingSettings, split: data.Split) -> Iterator[str]:
    """Yield the settings that do not go with the schedule of the pipeline."""
    parallel = settings.parallel
    known = schedules.SCHEDULES
    if parallel.schedule not in known:
        yield f"parallel.schedule {parallel.schedule!r} is unknown; there are {', '.join(known)}"
    if parallel.chunks > 1 and parallel.schedule != "interleaved":
        yield f"parallel.chunks goes with schedule: interleaved, and the schedule is {parallel.schedule}"
    if parallel.schedule == "interleaved":
        if parallel.chunks == 1:
            yield "parallel.schedule: interleaved needs parallel.chunks: 2 or more"
        if split.accumulation % parallel.pipeline:
            yield (
                f"parallel.schedule: interleaved needs a multiple of parallel.pipeline {parallel.pipeline} "
                f"micro-batches a step, and there are {split.accumulation}; set another micro_batch_size or "
                "schedule: 1f1b"
            )
    if parallel.schedule == "async":
        yield from _async_faults(settings)


def _async_faults(settings: TrainingSettings) -> Iterator[str]:
    """Yield the settings that do not go with updates while later micro-batches are in flight."""
    parallel, does_not = settings.parallel, "does not go with parallel.schedule: async"
    if settings.strategy != "ddp":
        yield f"strategy {settings.strategy} {does_not}; set strategy: ddp, or schedule: 1f1b"
    if parallel.tensor > 1:
        yield f"parallel.tensor {does_not}; set schedule: 1f1b"
    if settings.clip_norm:
        yield f"clip_norm {does_not}, because the norm needs all stages at once; leave it out, or set schedule: 1f1b"
    if settings.on_nan == "skip":
        yield f"on_nan: skip {does_not}; set on_nan: stop"
    for name in ("activation_checkpointing", "activation_offload"):
        if getattr(settings, name):
            yield f"{name} {does_not}; leave one of them out"
    if parallel.weights not in ("stash", "latest"):
        yield f"parallel.weights {parallel.weights!r} is unknown; there are stash, latest"
    if parallel.weights == "latest" and settings.precision != "fp32":
        yield f"parallel.weights: latest needs precision: fp32, since {settings.precision} computes with copies"


def _hsdp_faults(settings: TrainingSettings, ranks: int) -> Iterator[str]:
    width = shard_width(settings, ranks)
    if ranks % width:
        fits = ", ".join(str(n) for n in range(2, ranks + 1) if ranks % n == 0)
        yield f"shard_size {width} does not divide the {ranks} ranks; set one of {fits}"
    elif width == 1 and ranks > 1:
        yield f"shard_size 1 shards nothing over {ranks} ranks; set strategy: ddp, or a larger shard_size"


def _strict_faults(settings: TrainingSettings, split: data.Split) -> Iterator[str]:
    if split.virtual & (split.virtual - 1):
        yield (
            f"reproducible: strict sums over a binary tree, and {split.virtual} micro-batches a step are no power of "
            f"two (global_batch_size {split.global_batch} / micro_batch_size {split.micro}); change one of the sizes"
        )
    if settings.strategy != "ddp" and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        yield f"reproducible: strict under {settings.strategy} needs a newer torch than {torch.__version__}; set ddp"
    if settings.optimizer.name in ("lars", "lamb") and (settings.strategy != "ddp" or settings.shard):
        yield (
            f"reproducible: strict needs norms that do not depend on shards, and {settings.optimizer.name}'s do under "
            f"{'shard: optimizer' if settings.shard == 'optimizer' else settings.strategy}; set strategy: ddp without "
            "shard, or optimizer: adamw"
        )
    if settings.compression != "none":
        yield (
            f"reproducible: strict sums exactly, and compression {settings.compression} rounds by rank; set "
            "compression: none, or reproducible: standard"
        )


def _faults_here(settings: TrainingSettings, module: nn.Module, device: torch.device) -> Iterator[str]:
    """Yield the settings that this model or this machine does not allow."""
    if not any(p.requires_grad for p in module.parameters()):
        yield "model(params) returned a module without a parameter that needs gradients: nothing to train"
    numbers = [name for name, parameter in module.named_parameters() if not parameter.dim()]
    if settings.shard == "optimizer" and numbers:
        yield f"parameter {numbers[0]} is a single number, which cannot be sharded; give it the shape (1,)"
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        if device.type == "cpu":
            yield "SyncBatchNorm needs GPUs, and this job runs on CPUs; use BatchNorm, or GroupNorm"
        elif settings.reproducible == "strict":
            yield "SyncBatchNorm's statistics depend on the number of ranks, and reproducible is strict; use BatchNorm"
    if not settings.compile:
        return
    if device.type == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        yield "compile needs a C++ compiler on CPUs, and there is neither g++ nor clang++; install one, or set it false"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        yield "compile needs the package triton on GPUs, which is not installed; install it, or set compile: false"

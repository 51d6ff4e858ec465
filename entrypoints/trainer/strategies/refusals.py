"""Refusals: contradictions in the settings, and settings that the model or the machine does not allow.

A refusal is a sentence with a cure. The launcher refuses most contradictions before a submit
(launcher/config/rules.py). The trainer checks them again, because a spec may come from other sources.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .. import data
from ..settings import LocalSettings, ServerSettings, TrainingSettings, suggest
from . import schedules
from .fsdp import shard_width
from .sparse import SPARSE
from .strategy import LOW, WHOLE

_SHARDS = {"optimizer": "ddp", "gradients": "fsdp", "parameters": "fsdp"}  # the strategy that goes with `shard`


def of_settings(settings: TrainingSettings, split: data.Split, strategies: Collection[str]) -> Iterator[str]:
    """Yield the contradictions in the settings; `strategies` are the known names."""
    name = settings.strategy
    if name not in strategies:
        close = difflib.get_close_matches(name, strategies, n=1)
        yield f"strategy {name!r} is unknown; there are {', '.join(strategies)}" + (
            f"; did you mean `{close[0]}`?" if close else ""
        )
    if settings.precision not in ("fp32", *LOW):
        yield f"precision {settings.precision!r} is unknown; there are fp32, {', '.join(LOW)}"
    if settings.compression != "none" and name != "ddp":
        sent = "weights" if name == "local" else "shards"
        yield f"compression {settings.compression} is ddp's; {name} sends {sent}: leave it out, or set precision: bf16"
    yield from _sparse_faults(settings)
    if settings.cpu_offload and name in WHOLE:
        yield f"cpu_offload needs shards to offload, and {name} has none; set strategy: fsdp"
    if settings.shard and settings.shard not in _SHARDS:
        yield f"shard {settings.shard!r} is unknown; there are {', '.join(_SHARDS)}{suggest(settings.shard, _SHARDS)}"
    elif settings.shard and _SHARDS[settings.shard] != name.replace("hsdp", "fsdp"):
        yield f"shard: {settings.shard} does not go with {name}; set strategy: {_SHARDS[settings.shard]}"
    if settings.shard_size and name != "hsdp":
        yield f"shard_size is hsdp's, and the strategy is {name}; leave it out, or set strategy: hsdp"
    if settings.local is not None and name != "local":
        yield f"the section local is of strategy: local, and the strategy is {name}; leave it out, or set local"
    if name == "local":
        yield from _local_faults(settings)
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
    if name == "async":
        yield from _server_faults(settings, split.ranks)
    elif settings.server != ServerSettings():
        yield f"server is async's, and the strategy is {name}; leave it out, or set strategy: async"


def _local_faults(settings: TrainingSettings) -> Iterator[str]:
    """Yield the contradictions between the settings and strategy: local."""
    wanted = settings.local or LocalSettings()
    outer, period = wanted.outer, wanted.period
    if period < 2:
        yield f"local.period is {period}, and an average after each step is ddp; set strategy: ddp, or 2 or more"
    elif wanted.group_period is not None and (wanted.group_period < 1 or period % wanted.group_period):
        fits = ", ".join(str(n) for n in range(1, period) if period % n == 0)
        yield f"local.group_period {wanted.group_period} does not divide local.period {period}; set one of {fits}"
    if period > 1:
        yield from _odd(wanted.sync_steps, "local.sync_steps", period)
        yield from _odd(settings.eval_every or 0, "eval_every", period)
    if wanted.optimizer_state not in (None, "average", "keep"):
        yield f"local.optimizer_state {wanted.optimizer_state!r} is unknown; there are average, keep"
    if outer.lr <= 0 or not 0 <= outer.momentum < 1:
        yield f"local.outer has lr {outer.lr} and momentum {outer.momentum}; set lr over 0, momentum from 0 to below 1"
    if settings.parallel.ranks > 1:
        yield "parallel spreads one copy over several ranks, and under local each rank has a copy; set strategy: ddp"
    if settings.reproducible == "strict":
        yield "reproducible: strict gives the same bits on any number of ranks, and local cannot; set standard, or ddp"


def of_saves(settings: TrainingSettings, every_steps: int | None) -> Iterator[str]:
    """Yield the contradictions of checkpoint.every_steps and pause_at: the ranks save where a resume is exact."""
    pause_at = settings.pause_at or 0
    if settings.strategy == "local" and (period := (settings.local or LocalSettings()).period) > 1:
        yield from _odd(every_steps or 0, "checkpoint.every_steps", period)
        yield from _odd(pause_at, "pause_at", period)
    ends = [steps for steps in (every_steps, settings.eval_every) if steps]
    is_piped = settings.parallel.pipeline > 1 and settings.parallel.schedule == "async"
    averages_late = settings.strategy == "local" and (settings.local or LocalSettings()).period > 1
    if settings.pause_epochs and (is_piped or averages_late):
        yield "rungs in epochs end between two saves of this strategy: give max_steps in place of epochs"
    if pause_at and is_piped and not any(pause_at % steps == 0 for steps in ends):
        yield (
            f"pause_at {pause_at} is no multiple of checkpoint.every_steps or eval_every, and with the schedule async "
            "only these steps leave no micro-batch in flight; set a multiple"
        )


def _odd(steps: int, name: str, period: int) -> Iterator[str]:
    """Yield the fault of a number of steps after which the ranks do not average."""
    if steps % period:
        near = " or ".join(str(n) for n in (steps // period * period, -(-steps // period) * period) if n)
        yield f"{name} {steps} is no multiple of local.period {period}, and the ranks differ then; set {near}"


def _sparse_faults(settings: TrainingSettings) -> Iterator[str]:
    """Yield the contradictions between the settings and compression threshold or topk."""
    density, kind = settings.compression_density, settings.compression
    if kind not in SPARSE:
        for key in ("compression_density", "compression_warmup_steps"):
            if getattr(settings, key) != getattr(TrainingSettings, key):
                yield f"{key} goes with compression threshold or topk, and the compression is {kind}; leave it out"
        return
    if kind == "threshold" and density >= 1:
        yield (
            f"compression_density {density:g} needs a threshold of 0, which sends each entry as a mean of all entries; "
            "set a density below 1, for example 0.01, or compression: topk"
        )
    elif density > 1:
        yield f"compression_density {density:g} is more than all entries; set 1 or less, for example 0.01"
    if settings.shard == "optimizer":
        yield f"shard: optimizer does not go with compression {kind}; leave one of them out"


def _parallel_faults(settings: TrainingSettings) -> Iterator[str]:
    """Yield the contradictions between the settings and parallel.tensor or parallel.pipeline."""
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
    """Yield the contradictions between the settings and the schedule of the pipeline."""
    parallel = settings.parallel
    known = schedules.SCHEDULES
    if parallel.schedule not in known:
        yield f"parallel.schedule {parallel.schedule!r} is unknown; there are {', '.join(known)}"
    if isinstance(parallel.cut, str) and parallel.cut not in ("even", "timed"):
        yield f"parallel.cut {parallel.cut!r} is unknown; there are even, timed, or the first block of each later stage"
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
    """Yield the contradictions between the settings and the schedule async."""
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


def _server_faults(settings: TrainingSettings, ranks: int) -> Iterator[str]:
    """Yield the contradictions between the settings and strategy async."""
    server, does_not = settings.server, "does not go with strategy: async"
    if settings.precision == "fp16":
        yield f"precision fp16 {does_not}; set precision: bf16"
    if settings.optimizer.name in ("lars", "lamb"):
        yield f"optimizer {settings.optimizer.name} {does_not}, whose servers hold parts of layers; set adamw or sgd"
    if settings.reproducible == "strict":
        yield f"reproducible: strict {does_not}; server.order: tickets repeats a run to the bit on the same ranks"
    if settings.num_workers:
        yield f"num_workers {does_not}: a worker loads the samples of its own ticket; leave it out"
    if settings.cpu_offload or settings.parallel.ranks > 1:
        yield f"{'cpu_offload' if settings.cpu_offload else 'parallel'} {does_not}; leave it out"
    for key, most in (("softsync", server.softsync), ("shards", server.shards or 1)):
        if most > ranks:
            yield f"server.{key} {most} is more than the {ranks} ranks; set at most {ranks}"
    if server.max_lead is not None and server.order == "tickets":
        yield "server.max_lead does not go with server.order: tickets, where no rank gets ahead; leave it out"


def _hsdp_faults(settings: TrainingSettings, ranks: int) -> Iterator[str]:
    """Yield the contradictions between the number of ranks and shard_size."""
    width = shard_width(settings, ranks)
    if ranks % width:
        fits = ", ".join(str(n) for n in range(2, ranks + 1) if ranks % n == 0)
        yield f"shard_size {width} does not divide the {ranks} ranks; set one of {fits}"
    elif width == 1 and ranks > 1:
        yield f"shard_size 1 shards nothing over {ranks} ranks; set strategy: ddp, or a larger shard_size"


def _strict_faults(settings: TrainingSettings, split: data.Split) -> Iterator[str]:
    """Yield the contradictions between the settings and reproducible: strict."""
    if split.virtual & (split.virtual - 1):
        yield (
            f"reproducible: strict sums over a binary tree, and {split.virtual} micro-batches a step are no power of "
            f"two (global_batch_size {split.global_batch} / micro_batch_size {split.micro}); change one of the sizes"
        )
    if settings.strategy not in WHOLE and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
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


def of_place(settings: TrainingSettings, module: nn.Module, device: torch.device) -> Iterator[str]:
    """Yield the settings that the model or the machine does not allow."""
    if not any(p.requires_grad for p in module.parameters()):
        yield "model(params) returned a module without a parameter that needs gradients: nothing to train"
    kinds = {p.dtype for p in module.parameters() if p.requires_grad}
    if settings.strategy == "async" and len(kinds) > 1:
        yield f"strategy async needs parameters of one type; there are {', '.join(sorted(map(str, kinds)))}"
    numbers = [name for name, parameter in module.named_parameters() if not parameter.dim()]
    if settings.shard == "optimizer" and numbers:
        yield f"parameter {numbers[0]} is a single number, which cannot be sharded; give it the shape (1,)"
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        if settings.strategy in ("local", "async"):
            yield f"SyncBatchNorm needs all ranks in a step, and under {settings.strategy} each is alone; use BatchNorm"
        elif device.type == "cpu":
            yield "SyncBatchNorm needs GPUs, and this job runs on CPUs; use BatchNorm, or GroupNorm"
        elif settings.reproducible == "strict":
            yield "SyncBatchNorm's statistics depend on the number of ranks, and reproducible is strict; use BatchNorm"
    if not settings.compile:
        return
    if device.type == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        yield "compile needs a C++ compiler on CPUs, and there is neither g++ nor clang++; install one, or set it false"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        yield "compile needs the package triton on GPUs, which is not installed; install it, or set compile: false"

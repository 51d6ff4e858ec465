"""Refusals on a rank: contradictions of the settings, and settings that the model or the machine does not allow.

A refusal is a sentence with a cure. The launcher refuses the contradictions too, before a submit (contradictions.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .. import contradictions, data
from ..settings import TrainingSettings
from .facts import facts_of
from .fsdp import shard_width


def in_words(settings: TrainingSettings, every_steps: int | None = None) -> list[str]:
    """Return the contradictions in the settings, as the launcher words them; `every_steps`: between checkpoints."""
    checkpoint = {} if every_steps is None else {"every_steps": every_steps}
    refused = contradictions.of({"training": contradictions.differing(settings), "checkpoint": checkpoint})
    return [f"{refusal.message}; {refusal.cure}" for refusal in refused]


def of_settings(settings: TrainingSettings, split: data.Split) -> Iterator[str]:
    """Yield the contradictions in the settings, and between the settings and the number of ranks."""
    yield from in_words(replace(settings, micro_batch_size=split.micro))
    for refusal in contradictions.of_ranks(settings, split.ranks, split.accumulation):
        yield f"{refusal.message}; {refusal.cure}"
    width, ranks = shard_width(settings, split.ranks), split.ranks
    if settings.strategy == "hsdp" and ranks % width:
        fits = ", ".join(str(n) for n in range(2, ranks + 1) if ranks % n == 0)
        yield f"shard_size {width} does not divide the {ranks} ranks; set one of {fits}"
    elif settings.strategy == "hsdp" and width == 1 and ranks > 1:
        yield f"shard_size 1 shards nothing over {ranks} ranks; set strategy: ddp, or a larger shard_size"
    needs_newer = settings.reproducible == "strict" and not facts_of(settings).is_whole
    if needs_newer and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        yield f"reproducible: strict under {settings.strategy} needs a newer torch than {torch.__version__}; set ddp"


def of_place(settings: TrainingSettings, module: nn.Module, device: torch.device) -> Iterator[str]:
    """Yield the settings that the model or the machine does not allow."""
    if not any(p.requires_grad for p in module.parameters()):
        yield "model(params) returned a module without a parameter that needs gradients: nothing to train"
    kinds = {p.dtype for p in module.parameters() if p.requires_grad}
    facts = facts_of(settings)
    if facts.has_servers and len(kinds) > 1:
        yield f"strategy async needs parameters of one type; there are {', '.join(sorted(map(str, kinds)))}"
    numbers = [name for name, parameter in module.named_parameters() if not parameter.dim()]
    if settings.shard == "optimizer" and numbers:
        yield f"parameter {numbers[0]} is a single number, which cannot be sharded; give it the shape (1,)"
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        if facts.is_apart:
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

"""Spreads a model over the ranks: the table of the strategies, refusals, and models that are split over several ranks.

A refusal is a sentence with a cure: contradictions of the settings, which the launcher refuses too (contradictions.py),
and settings that the model or the machine does not allow.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...errors import FormError, TaskError
from ...format import first_of
from ...rank.exchange import share
from .. import contradictions, data, weighted
from ..optimizer_facts import OPTIMIZERS
from ..settings import ParallelSettings, TrainingSettings
from . import cut, schedules, tensor
from .blocks import default_blocks
from .cut import Probe
from .ddp import copies, ddp, shard_optimizer
from .facts import facts_of
from .fsdp import data_mesh, shard_width, sharded
from .links import Links
from .local import local
from .pipeline import PipelineStage
from .strategy import Blocks, Setup, Strategy, autocaster, share_weights, sparse_layers

STRATEGIES: dict[str, Callable[[Setup], Strategy]] = {
    "ddp": ddp,
    "fsdp": sharded,
    "hsdp": sharded,
    "local": local,
    "async": copies,
}


def wrap(
    settings: TrainingSettings,
    module: nn.Module,
    device: torch.device,
    split: data.Split,
    *,
    blocks: Blocks | None = None,
    tensor_plan: tensor.TensorPlan | None = None,
    probe: Probe | None = None,
    connect: Callable[[int, torch.device], Links] | None = None,
    silent: bool = False,
    has_optimizer: bool = False,
) -> Strategy:
    """Return the module spread as the settings ask. Collective. Raises TaskError with all faults of the settings.

    `probe` is needed to cut a model into the stages of a pipeline, which `connect` joins. `silent`: no gradient or
    weight is sent, and the numbers are wrong: to measure the cost of communication. `has_optimizer`: the task has one.
    """
    faults = [*_of_settings(settings, split), *_of_place(settings, module, device)]
    form = list(_of_sparse_gradients(settings, module, split.ranks, has_optimizer=has_optimizer))
    if faults or form:  # a machine of another kind may have no `faults`
        raise (TaskError if faults else FormError)("; ".join([*faults, *form]))
    make, setup = STRATEGIES[settings.strategy], Setup(settings, module, device, split, blocks, silent)
    if settings.parallel.ranks == 1:
        strategy = make(setup)
        is_shared = settings.shard == "optimizer" and split.ranks > 1
        return shard_optimizer(settings, strategy, device, silent) if is_shared else strategy
    setup = replace(setup, mesh=data_mesh(settings, device, split.ranks))
    share_weights(module.parameters(), device)
    is_cut = settings.parallel.pipeline > 1
    units = default_blocks(module, whole=is_cut) if blocks is None else list(blocks(module))
    if not is_cut:
        _split_layers(setup, units, tensor_plan)
        return make(replace(setup, blocks=lambda _: units))
    assert probe is not None
    links = (connect or Links)(settings.parallel.pipeline, device)
    stage = _cut_out(setup, units, probe, links)
    if settings.parallel.tensor > 1:
        _split_layers(setup, units, tensor_plan)
    stage.attach()
    return stage.spread(make(replace(setup, blocks=lambda _: stage.blocks)))


@contextlib.contextmanager
def explaining(function: str, settings: TrainingSettings, module: nn.Module) -> Iterator[None]:
    """Raise TaskError, with a cure, in place of an error from the way in which the task's function uses the module."""
    try:
        yield
    except AttributeError as error:
        if error.name != "module" or error.obj is not module:
            raise
        raise TaskError(
            f"{function} reads model.module, but under every strategy `model` is your own module: use `model` itself"
        ) from error
    except RuntimeError as error:
        blocks = [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]
        why = tensor.explained(error) if settings.parallel.tensor > 1 else None
        if settings.parallel.tensor == 1 and blocks and "mixed torch.Tensor and DTensor" in str(error):
            why = (
                f"{function} uses weights or parts of a block of {settings.strategy} outside the block's own forward "
                f"pass, where a rank holds only a shard of them: call the block itself, or leave it out of "
                f"blocks(model). The blocks are {first_of(blocks, 4)}"
            )
        if why is None:
            raise
        raise TaskError(why) from error


class SparseCalls(TorchFunctionMode):
    """A context that refuses F.embedding(sparse=True) in `loss`, as wrap() refuses layers. Raises FormError."""

    def __init__(self, settings: TrainingSettings, module: nn.Module, has_optimizer: bool) -> None:
        super().__init__()
        ranks, called = dist.get_world_size() // settings.parallel.ranks, "F.embedding outside a layer"
        self._faults = [*_of_sparse_gradients(settings, module, ranks, has_optimizer=has_optimizer, called=called)]
        self._known = [module.get_parameter(f"{name}.weight") for name in sparse_layers(module)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_sparse = func in (F.embedding, F.embedding_bag) and (kwargs or {}).get("sparse") and args[1].requires_grad
        if is_sparse and self._faults and not any(args[1] is weight for weight in self._known):
            raise FormError(self._faults[0])
        return func(*args, **(kwargs or {}))


def refusals(settings: TrainingSettings, every_steps: int | None = None) -> list[str]:
    """Return the contradictions in the settings, as the launcher words them; `every_steps`: between checkpoints."""
    checkpoint = {} if every_steps is None else {"every_steps": every_steps}
    refused = contradictions.of({"training": contradictions.differing(settings), "checkpoint": checkpoint})
    return [f"{refusal.message}; {refusal.cure}" for refusal in refused]


def _of_settings(settings: TrainingSettings, split: data.Split) -> Iterator[str]:
    """Yield the contradictions in the settings, and between the settings and the number of ranks."""
    yield from refusals(replace(settings, micro_batch_size=split.micro))
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


def _of_place(settings: TrainingSettings, module: nn.Module, device: torch.device) -> Iterator[str]:
    """Yield the settings that the model or the machine does not allow."""
    if not any(p.requires_grad for p in module.parameters()):
        yield "model(params) returned a module without a parameter that needs gradients: nothing to train"
    kinds = {p.dtype for p in module.parameters() if p.requires_grad}
    facts = facts_of(settings)
    if facts.has_servers and len(kinds) > 1:
        yield f"strategy async needs parameters of one type; there are {', '.join(sorted(map(str, kinds)))}"
    numbers = [name for name, parameter in module.named_parameters() if not parameter.dim()]
    empty = [name for name, parameter in module.named_parameters() if not parameter.numel()]
    if empty and not facts.is_whole:
        yield f"parameter {empty[0]} has no elements, which {settings.strategy} cannot shard; leave it out of the model"
    if torch.float16 in kinds and settings.precision == "fp16" and settings.compression not in contradictions.SPARSE:
        yield "precision: fp16 needs weights in fp32: the loss scaler takes no fp16 gradients; call model.float()"
    if settings.shard == "optimizer" and numbers:
        yield f"parameter {numbers[0]} is a single number, which cannot be sharded; give it the shape (1,)"
    hooked = [n for n, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked and (settings.parallel.ranks > 1 or not facts.is_whole):
        where = f"strategy: {settings.strategy}" if settings.parallel.ranks == 1 else "parallel"
        yield f"{where} would lose the hook of parameter {hooked[0]} (register_hook); scale the loss, or set ddp alone"
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
    if device.type == "cuda" and not any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "clang", "cc")):
        yield "compile needs a C compiler on GPUs, and there is neither gcc nor clang; install one, or set it false"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        yield "compile needs the package triton on GPUs, which is not installed; install it, or set compile: false"


def _of_sparse_gradients(
    settings: TrainingSettings, module: nn.Module, ranks: int, *, has_optimizer: bool, called: str = ""
) -> Iterator[str]:
    """Yield the settings that cannot take sparse gradients of layers, or of a `called` function (torch 2.13)."""
    facts, chosen = facts_of(settings), settings.optimizer
    has_codes = settings.compression in contradictions.SPARSE and ranks > 1
    makes_dense = facts.averages_gradients and (settings.reproducible == "strict" or has_codes)
    layers = [] if makes_dense else [called] if called else sparse_layers(module)
    is_sgd = OPTIMIZERS[chosen.name].is_state_momentum
    refused = {
        f"strategy: {settings.strategy}": facts.has_servers or not facts.is_whole,
        f"strategy: {settings.strategy} on {ranks} ranks": called and facts.averages_gradients and ranks > 1,
        "shard": settings.shard == "optimizer" and ranks > 1,
        "parallel.tensor": settings.parallel.tensor > 1,
        f"compression: {settings.compression}": settings.compression in ("fp16", "powersgd") and ranks > 1,
        "clip_norm": settings.clip_norm,
        "on_nan: skip": settings.on_nan == "skip",
        f"optimizer.name: {chosen.name}": not has_optimizer and not is_sgd,
        "optimizer.momentum": not has_optimizer and is_sgd and chosen.momentum,  # would be sparse, and is not saved
        "optimizer.weight_decay": not has_optimizer and is_sgd and chosen.weight_decay,
    }
    if keys := [key for key, is_refused in refused.items() if layers and is_refused]:
        yield (
            f"{first_of(layers, 4)} makes sparse gradients (sparse=True), which do not go with {', '.join(keys)}; "
            "create the layer with sparse=False, or change these settings"
        )


def _cut_out(setup: Setup, blocks: list[nn.Module], probe: Probe, links: Links) -> PipelineStage:
    """Return this rank's stage of the model, without the parameters of the other stages; print all stages."""
    settings, module, device, micro_batches = setup.settings, setup.module, setup.device, setup.split.accumulation
    parallel, is_head = settings.parallel, dist.get_rank() == 0
    names = {part: name for name, part in module.named_modules()}

    def run(model: nn.Module) -> None:
        if weighted.is_pair(probe(model, torch.device("cpu"))) and parallel.schedule == "async":
            raise TaskError(
                "parallel.schedule: async changes the weights before all counts are known, and loss(model, batch) "
                "returns (sum, count); return the mean over the batch, or set schedule: 1f1b"
            )

    with autocaster(settings.precision, torch.device("cpu"))():
        traced = cut.trace(module, blocks, run)
    times: list[float] = []
    if parallel.cut == "timed":
        recomputes = settings.activation_checkpointing
        if is_head:
            with autocaster(settings.precision, device)():
                times = cut.block_times(module, traced.blocks, probe, device, recomputes=recomputes)
        times = share(times)
    starts = cut.cut(parallel, len(traced.blocks), times)
    spans = [slice(*span) for span in itertools.pairwise([*starts, len(traced.blocks)])]
    of_stages = [spans[stage :: parallel.pipeline] for stage in range(parallel.pipeline)]
    stages_s = [sum(sum(times[span]) for span in own) for own in of_stages] if times else []
    equal = [1.0] * parallel.pipeline
    expected = schedules.idle_share(parallel.schedule, stages_s or equal, parallel.chunks, micro_batches)
    if is_head:
        pieces = [[[names[block] for block in traced.blocks[span]] for span in own] for own in of_stages]
        print(_in_words(parallel, pieces, stages_s, micro_batches, expected), flush=True)
    shared = cut.keep_stage(module, traced, starts, parallel.pipeline, links.number, device)
    is_frozen = not any(parameter.requires_grad for parameter in module.parameters())
    if is_frozen or (links.number == 0 and not traced.outputs[starts[1] - 1].needs_gradient):
        raise TaskError(
            f"parallel.pipeline: stage {1 + links.number} of {parallel.pipeline} computes nothing that needs "
            "gradients; set another parallel.cut or fewer stages"
        )
    return PipelineStage(module, tuple(starts), traced, shared, links, parallel, device, expected)


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
        f"micro-batches, stages wait {100 * expected:.0f} % of a step, "
        + ("by these times" if stages_s else "assuming equal stages")
    )
    if parallel.schedule == "async":
        words += f"; the weights of stage 1 are up to {parallel.pipeline - 1} micro-batches old, which costs accuracy"
    return words


def _split_layers(setup: Setup, blocks: list[nn.Module], tensor_plan: tensor.TensorPlan | None) -> None:
    """Split the module's layers over neighbouring ranks; print the plan."""
    settings, module, parallel = setup.settings, setup.module, setup.settings.parallel
    assert setup.mesh is not None
    plan = tensor.find_plan(parallel, module, blocks, tensor_plan)
    if dist.get_rank() == 0:
        print(f"tensor {parallel.tensor}: {tensor.in_words(module, plan)}", flush=True)
    own = {name for name, part in module.named_modules() if any(True for _ in part.parameters(recurse=False))}
    units = blocks if settings.activation_checkpointing or not facts_of(settings).is_whole else []
    here = {name: kind for name, kind in plan.items() if name in own}  # a stage of a pipeline has some modules only
    tensor.split(module.to(setup.device), here, setup.mesh["tensor"], units, sequence=parallel.sequence)

"""Strategy ddp: every rank holds the whole model; gradients are averaged during the last backward pass of a step.

With `reproducible: strict`, torch's DistributedDataParallel is not used, because its order of summation is not fixed:
summation.py sums over a fixed tree instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ...errors import TaskError
from ...format import first_of
from ...rank.exchange import local_part
from ..contradictions import SPARSE
from . import blocks as blocks_of
from .buffers import Buffers
from .compression import compress
from .sparse import spread_sparsely
from .strategy import LOW, Setup, Strategy, buckets, clip_split, finite_gradients, share_weights
from .summation import TreeGradients
from .tensor import sum_partial_gradients

_AS_IT_IS = contextlib.nullcontext()


def ddp(setup: Setup) -> Strategy:
    """Return the module on every rank, as the settings ask. Raises TaskError."""
    settings, split, mesh = setup.settings, setup.split, setup.mesh
    setup = replace(setup, module=setup.module.to(setup.device))
    if settings.compile or settings.activation_checkpointing:
        blocks_of.prepare(settings, setup.module, blocks_of.find(settings, setup.module, setup.blocks), whole=True)
    data_rank = dist.get_rank() if mesh is None else mesh.get_local_rank("replicate")
    buffers = Buffers(
        setup.module,
        split,
        data_rank * split.accumulation,
        setup.silent,
        keeps=settings.on_nan == "skip",
        stages=settings.parallel.pipeline,
    )
    if mesh is not None:
        return _of_split_model(setup, buffers, mesh)
    if settings.reproducible == "strict":
        return _strict(setup, buffers)
    if split.ranks == 1:
        if settings.compression in SPARSE:
            print(f"compression {settings.compression}: one rank sends nothing; gradients stay dense", flush=True)
        return setup.of_one_rank(buffers)
    if settings.compression in SPARSE:
        return spread_sparsely(setup, setup.of_one_rank(buffers))
    return _averaged(setup, buffers)


def copies(setup: Setup) -> Strategy:
    """Return the module on every rank, for strategy async: the ranks save and evaluate, and its workers train."""
    setup = replace(setup, module=setup.module.to(setup.device))
    share_weights(setup.module.parameters(), setup.device)
    strategy = setup.of_one_rank(Buffers(setup.module, setup.split, 0, setup.silent))
    return replace(strategy, has_servers=True)


def _averaged(setup: Setup, buffers: Buffers) -> Strategy:
    settings, module, split, silent = setup.settings, setup.module, setup.split, setup.silent
    # Gradients as views of the buckets save a copy: 16 % of the step of a transformer of 10 M parameters.
    device_ids = [setup.device.index] if setup.device.type == "cuda" else None
    model = DistributedDataParallel(module, device_ids=device_ids, gradient_as_bucket_view=True)
    # With one micro-batch a step, DDP's own broadcast does the work of buffers.py, and faster. Otherwise buffers.py
    # does the work, after DDP's first broadcast, which made the buffers equal.
    is_simple = split.accumulation == 1 and settings.on_nan != "skip"
    model.broadcast_buffers = is_simple and not silent
    keeper = None
    if silent:
        model.register_comm_hook(None, noop_hook)
    elif settings.compression != "none":
        keeper = compress(model, settings.compression, settings.powersgd_rank)
    parameters = setup.trained
    # What a ring sends: Patarasuk and Yuan 2009.
    summed_bytes = sum(p.nbytes for p in parameters) if keeper is None else keeper.summed_bytes
    ring_bytes = 2 * (split.ranks - 1) / split.ranks * summed_bytes
    if settings.compression in LOW:
        ring_bytes *= LOW[settings.compression].itemsize / torch.float32.itemsize

    @contextlib.contextmanager
    def unsynced(virtual: int) -> Iterator[None]:
        with buffers.micro_batch(virtual, False), model.no_sync():
            yield

    def micro_batch(virtual: int, last: bool) -> AbstractContextManager[Any]:
        if is_simple:
            return _AS_IT_IS
        return buffers.micro_batch(virtual, last) if last else unsynced(virtual)

    strategy = replace(
        setup.of_one_rank(buffers),
        model=model,
        micro_batch=micro_batch,
        finish=_once_all_are_used(module),
        finite_gradients=lambda: finite_gradients(parameters, agree=silent),
        figures=lambda: {"bytes_sent": 0.0 if silent else ring_bytes},
    )
    return strategy if keeper is None else replace(strategy, rank_state=keeper.state, load_rank_state=keeper.load)


def _strict(setup: Setup, buffers: Buffers) -> Strategy:
    share_weights(setup.module.parameters(), setup.device)
    buffers.sync()
    parameters = setup.trained
    gradients = TreeGradients(parameters, setup.silent)

    @contextlib.contextmanager
    def micro_batch(virtual: int, last: bool) -> Iterator[None]:
        with buffers.micro_batch(virtual, last):
            gradients.begin(last)
            yield
            gradients.end()

    return replace(
        setup.of_one_rank(buffers),
        divisor=setup.split.virtual,  # a power of two, so that the division rounds nothing
        micro_batch=micro_batch,
        finish=gradients.finish,
        finite_gradients=lambda: finite_gradients(parameters, agree=setup.silent),
    )


def _of_split_model(setup: Setup, buffers: Buffers, mesh: DeviceMesh) -> Strategy:
    """Return copies of a model that is split over ranks.

    torch's DistributedDataParallel takes no DTensors, and no forward passes before the backward pass of an earlier one.
    """
    parameters, ranks = setup.trained, setup.split.ranks
    copies, groups = mesh.get_group("replicate"), buckets(parameters)

    @torch.no_grad()
    def finish() -> None:
        sum_partial_gradients(parameters)
        if ranks == 1 or setup.silent:
            return
        for parameter in parameters:  # a rank without a gradient must not leave the others waiting
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for group in groups:
            parts = [local_part(parameter.grad) for parameter in group if parameter.grad is not None]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat, group=copies)
            flat /= ranks
            for part, mean in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
                part.copy_(mean.view(part.shape))

    return replace(
        setup.of_one_rank(buffers),
        finish=finish,
        clip=lambda max_norm: clip_split(parameters, max_norm),
        finite_gradients=lambda: finite_gradients(parameters, agree=True),
    )


def _once_all_are_used(module: nn.Module) -> Any:
    """Return a check of the first step: ddp waits for every gradient, and reports its own error only a step later."""
    unchecked = [module]

    def finish() -> None:
        if not unchecked:
            return
        unchecked.clear()
        unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise TaskError(
                f"the loss does not depend on {first_of(unused, 4)}, and ddp waits for every gradient; "
                "use them, freeze them with requires_grad_(False), or set strategy: fsdp, which takes them as zero"
            )

    return finish

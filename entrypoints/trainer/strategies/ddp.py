"""Strategy ddp: every rank holds the whole model; gradients are averaged during the last backward pass of a step.

With `reproducible: strict`, torch's DistributedDataParallel is not used, because its order of summation is not fixed:
summation.py sums over a fixed tree instead.

`compression` makes the gradients between the ranks smaller: fp16, bf16, or PowerSGD's matrices of low rank. PowerSGD
adds the approximation error to the next step's gradient. torch's own version keeps errors by bucket, and ddp changes
the buckets after its first step, so a resumed job could not use the errors; here errors are kept by parameter. For
threshold and topk see sparse.py.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.stateless import _reparametrize_module

from ...errors import TaskError
from ...format import first_of
from ...rank.exchange import local_part
from ..contradictions import SPARSE
from ..settings import TrainingSettings
from . import blocks as blocks_of
from .buffers import Buffers, gradient_refusal
from .sparse import spread_sparsely
from .strategy import (
    LOW,
    OneForward,
    Setup,
    State,
    Strategy,
    all_gather,
    buckets,
    clip_split,
    clip_whole,
    finite_gradients,
    scale_down,
    scale_gradients,
    share_weights,
    sparse_layers,
)
from .summation import TreeGradients, begun
from .tensor import sum_partial_gradients

# torch's account of the parameters, by their places among the trained, that a rank still waits for.
_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_MIN_GAIN = 2  # two thin matrices replace a matrix if they have at most half its size


def ddp(setup: Setup) -> Strategy:
    """Return the module on every rank, as the settings ask. Raises TaskError."""
    settings, split, mesh = setup.settings, setup.split, setup.mesh
    setup = replace(setup, module=setup.module.to(setup.device))
    if settings.compile or settings.activation_checkpointing:
        blocks_of.prepare(settings, setup.module, blocks_of.find(settings, setup.module, setup.blocks), whole=True)
    data_rank = dist.get_rank() if mesh is None else mesh.get_local_rank("replicate")
    buffers = setup.buffers(data_rank * split.accumulation)
    if mesh is not None:
        return _of_split_model(setup, buffers, mesh)
    if settings.reproducible == "strict":
        return _strict(setup, buffers)
    if split.ranks == 1:
        if settings.compression in SPARSE:
            print(f"compression {settings.compression}: one rank sends nothing; gradients stay dense", flush=True)
        return setup.of_one_rank(buffers)
    if settings.compression in SPARSE:
        return spread_sparsely(setup, setup.of_one_rank(buffers, agree=True))
    return _averaged(setup, buffers)


def copies(setup: Setup) -> Strategy:
    """Return the module on every rank, for strategy async: the ranks save and evaluate, and its workers train."""
    setup = replace(setup, module=setup.module.to(setup.device))
    share_weights(setup.module.parameters(), setup.device)
    return setup.of_one_rank(setup.buffers(0))


def _averaged(setup: Setup, buffers: Buffers) -> Strategy:
    settings, module, split, silent = setup.settings, setup.module, setup.split, setup.silent
    # Gradients as views of the buckets save a copy: 16 % of the step of a transformer of 10 M parameters.
    device_ids = [setup.device.index] if setup.device.type == "cuda" else None
    model = DistributedDataParallel(OneForward(module), device_ids=device_ids, gradient_as_bucket_view=True)
    # With one micro-batch a step, DDP's own broadcast does the work of buffers.py, and faster. Otherwise buffers.py
    # does the work, after DDP's first broadcast, which made the buffers equal.
    is_simple = split.accumulation == 1 and settings.on_nan != "skip"
    low, kept = LOW.get(settings.compression), dict[str, Any]()
    sent_bytes = sum(p.numel() * (low or p.dtype).itemsize for p in setup.trained)
    if silent:
        model.register_comm_hook(None, noop_hook)
    elif settings.compression == "powersgd":
        keeper = PowerSGD(module, settings.powersgd_rank)
        model.register_comm_hook(None, lambda state, bucket: keeper.reduce(bucket))
        sent_bytes, kept = keeper.summed_bytes, {"rank_state": keeper.state, "load_rank_state": keeper.load}
    elif low is not None:
        hook = {torch.float16: fp16_compress_hook, torch.bfloat16: bf16_compress_hook}[low]
        model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # by its name DDP would ask for NCCL
    ring_bytes = 2 * (split.ranks - 1) / split.ranks * sent_bytes  # what a ring sends: Patarasuk and Yuan 2009
    is_known = not sparse_layers(module)  # each step sends other rows of a sparse gradient

    @contextlib.contextmanager
    def micro_batch(virtual: int, last: bool) -> Iterator[None]:
        is_ddps = is_simple and not buffers.has_moved
        if model.broadcast_buffers is not (is_ddps and not silent):  # a module's attribute is slow to set
            model.broadcast_buffers = is_ddps and not silent
        around = buffers.watch() if is_ddps else buffers.micro_batch(virtual, last)
        with around, contextlib.nullcontext() if last else model.no_sync():
            yield

    return replace(
        setup.of_one_rank(buffers, agree=silent),
        model=model,
        micro_batch=micro_batch,
        finish=_with_unused(model, module),
        figures=lambda: {"bytes_sent": 0.0 if silent else ring_bytes} if is_known else {},
        **kept,
    )


def _strict(setup: Setup, buffers: Buffers) -> Strategy:
    share_weights(setup.module.parameters(), setup.device)
    buffers.sync()
    gradients = TreeGradients(setup.trained, setup.silent)

    @contextlib.contextmanager
    def micro_batch(virtual: int, last: bool) -> Iterator[None]:
        with buffers.micro_batch(virtual, last):
            gradients.begin(last)
            yield
            gradients.end()

    return replace(
        setup.of_one_rank(buffers, agree=setup.silent),
        divisor=setup.split.virtual,  # a power of two, so that the division rounds nothing
        micro_batch=micro_batch,
        finish=gradients.finish,
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
        setup.of_one_rank(buffers, agree=True), finish=finish, clip=lambda max_norm: clip_split(parameters, max_norm)
    )


def _with_unused(model: DistributedDataParallel, module: nn.Module) -> Callable[[], None]:
    """Return the end of the backward passes: a parameter that this rank has not used gets a gradient, for DDP waits.

    This gradient is -0, which changes no sum. If the mean over the ranks is -0 in every element, no rank has used the
    parameter: the gradient is then None, as on one rank. The other ranks wait in their backward pass meanwhile. A step
    without such parameters costs the hook of one parameter; DDP's `find_unused_parameters` costs a transfer in every
    step.
    """
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]  # in the order of DDP's places
    sparse = {part.weight for part in module.modules() if getattr(part, "sparse", False)}
    untold = [True]
    # If DDP waits for no parameter, it has seen all or none in the last backward pass: then the first tells of all.
    seen = set[bool]()  # whether the first had a gradient in passes with (True) and without exchange
    named[0][1].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: seen.add(model.require_backward_grad_sync)
    )

    def waiting() -> list[tuple[str, nn.Parameter]]:
        try:
            model.reducer._check_reducer_finalized()
        except RuntimeError as error:
            if (places := _UNUSED.search(str(error))) is None:
                raise
            missing = [named[int(place)] for place in places[1].split()]
            if frozen := [name for name, p in missing if not p.requires_grad]:
                raise TaskError(gradient_refusal(frozen)) from error
            return missing
        return [] if True in seen else named

    def finish() -> None:
        names = []
        if missing := waiting():
            unused = [(name, p) for name, p in missing if p.grad is None]  # in no micro-batch of the step
            zeros = [p.detach().mul(0).to_sparse(1) if p in sparse else torch.full_like(p, -0.0) for _, p in missing]
            torch.autograd.backward([p for _, p in missing], zeros)
            for name, parameter in unused:
                assert parameter.grad is not None
                values = parameter.grad.coalesce().values() if parameter in sparse else parameter.grad
                if bool((values.signbit() & (values == 0)).all()):
                    parameter.grad = None
                    names.append(name)
        if untold and names and dist.get_rank() == 0:
            print(
                f"the loss of the first step does not depend on {first_of(names, 4)}: without a gradient they keep "
                "their values, as on one rank; freeze them with requires_grad_(False) if no step uses them",
                flush=True,
            )
        untold.clear()
        seen.clear()

    return finish


class PowerSGD:
    """Each gradient matrix M (n, m) as P Q^T, P (n, r), Q (m, r). Source: Vogels et al. 2019, algorithms 1 and 2."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        self._rank = rank
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in trained.items()}
        self._errors = {n: torch.empty_like(p.detach()).flatten(1) for n, p in trained.items() if self._fits(p)}
        self._qs = {name: error.new_empty(error.shape[1], rank) for name, error in self._errors.items()}
        # The bytes that the ranks sum in a step: P and Q of each matrix, and the other gradients.
        thin = sum(sum(error.shape) * rank * error.element_size() for error in self._errors.values())
        self.summed_bytes = thin + sum(p.nbytes for name, p in trained.items() if name not in self._errors)
        self.load({})

    def state(self) -> State:
        """Return this rank's approximation errors so far, and the Q of every matrix."""
        errors = {f"powersgd.error.{name}": value for name, value in self._errors.items()}
        return {**errors, **{f"powersgd.q.{name}": value for name, value in self._qs.items()}}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Load saved state; for missing state, begin as at the first step."""
        for name, q in self._qs.items():
            # The same on every rank, and without changing the generators that the loss draws from.
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            q.copy_(state.get(f"powersgd.q.{name}", torch.randn(q.shape, generator=seed)))
            self._errors[name].copy_(state.get(f"powersgd.error.{name}", torch.zeros(())))

    def reduce(self, bucket: Any) -> Any:
        """Replace the bucket's gradients by their mean over the ranks, matrices by an approximation of the mean.

        Return a future of the bucket.
        """
        gradients = {self._names[id(p)]: g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        matrices = {name: g.flatten(1) for name, g in gradients.items() if name in self._errors}
        others = [g for name, g in gradients.items() if name not in matrices]
        for name, matrix in matrices.items():
            matrix.add_(self._errors[name])
            self._errors[name].copy_(matrix)
        ps = [matrix @ self._qs[name] for name, matrix in matrices.items()]
        work = begun(dist.all_reduce(torch.cat([t.flatten() for t in (*ps, *others)]), async_op=True))
        future, result = work.get_future(), bucket.buffer()
        if result.device.type == "cpu":
            # gloo would run the callback on a thread of its own, and the callback's transfer could overtake the next
            # bucket's on some ranks only. NCCL runs the callback at once, on a stream of its own.
            future.wait()

        def rebuild(done: Any) -> Any:
            parts = iter(torch.split(done.value()[0], [t.numel() for t in (*ps, *others)]))
            sums = [next(parts).view_as(p) for p in ps]
            for other in others:
                other.copy_(next(parts).view_as(other)).div_(dist.get_world_size())
            self._approximate(matrices, [torch.linalg.qr(p).Q for p in sums])
            return result

        return future.then(rebuild)

    def _approximate(self, matrices: State, ps: list[torch.Tensor]) -> None:
        if not matrices:
            return
        qs = [matrix.t() @ p for matrix, p in zip(matrices.values(), ps, strict=True)]
        flat = torch.cat([q.flatten() for q in qs])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        means = torch.split(flat, [q.numel() for q in qs])
        for (name, matrix), p, q, mean in zip(matrices.items(), ps, qs, means, strict=True):
            torch.mm(p, mean.view_as(q).t(), out=matrix)
            # The caller skips a step whose gradient overflowed; the overflow must not stay in this state.
            self._errors[name].sub_(matrix).nan_to_num_(0.0, 0.0, 0.0)
            self._qs[name].copy_(mean.view_as(q)).nan_to_num_(0.0, 0.0, 0.0)

    def _fits(self, parameter: nn.Parameter) -> bool:
        # A parameter that is not contiguous would need a copy.
        if parameter.dim() < 2 or not parameter.numel() or not parameter.is_contiguous():
            return False
        rows, columns = parameter.shape[0], parameter[0].numel()
        thin = min(rows, columns) >= self._rank
        return thin and (rows + columns) * self._rank * _MIN_GAIN < rows * columns


def shard_optimizer(settings: TrainingSettings, strategy: Strategy, device: torch.device, silent: bool) -> Strategy:
    """Return ddp's strategy for `shard: optimizer` (ZeRO-1), whose state is that of this rank's rows. Collective.

    The optimizer's parameters are DTensors, sharded over the ranks as under fsdp, whose local tensors are rows of the
    whole parameters: a step changes the rows in place, then the ranks exchange their rows. So the optimizer, the
    checkpoints and a resume on a different number of ranks work as under fsdp. ZeroRedundancyOptimizer gives each rank
    whole parameters instead: a large embedding makes the shares unequal, and a save must first collect the state on one
    rank. DDP still gives each rank all gradients, so a step sends 1.5 times as much as ddp's; fsdp sends as much as
    ddp. Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5.1.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    trained = [p for p in strategy.module.parameters() if p.requires_grad]
    # A DTensor for each trainable parameter, in the same memory.
    shards = {parameter: nn.Parameter(_rows(parameter.detach(), mesh)) for parameter in trained}
    named = strategy.module.named_parameters(remove_duplicate=False)
    places = {name: shards[parameter] for name, parameter in named if parameter in shards}
    groups = buckets(trained)
    rows_bytes = 0.0 if silent else (mesh.size() - 1) / mesh.size() * sum(p.nbytes for p in trained)  # of an update
    whole: list[torch.Tensor] = []  # the step's gradients
    own = list(shards.values())

    def finish() -> None:
        strategy.finish()
        whole.clear()
        for parameter, shard in shards.items():
            if parameter.grad is not None:
                whole.append(parameter.grad)
                shard.grad = _rows(parameter.grad, mesh)
                parameter.grad = None  # the optimizer clears the gradients of its shards only

    @torch.no_grad()
    def clip(max_norm: float) -> torch.Tensor:
        if settings.precision == "fp16":  # the scaler has divided this rank's rows only
            return (clip_whole if settings.reproducible == "strict" else clip_split)(own, max_norm)
        norm: torch.Tensor = nn.utils.get_total_norm(whole)  # of whole gradients, so the bits are ddp's
        scale_down([local_part(shard.grad) for shard in own if shard.grad is not None], norm, max_norm)
        return norm

    def share_update() -> None:
        whole.clear()  # DDP allocates its buckets anew before the second step, while these are views of the old
        for bucket in groups if not silent else ():
            _exchange(bucket, mesh)

    return replace(
        strategy,
        finish=finish,
        clip=clip,
        scale=lambda factor: scale_gradients(whole, factor),  # the shards' gradients are views of these
        finite_gradients=lambda: finite_gradients(own, agree=True),
        optimized=lambda: _reparametrize_module(strategy.module, dict(places), stack_weights=True),
        shard=mesh.get_local_rank(),
        share_update=share_update,
        figures=lambda: {name: value + rows_bytes for name, value in strategy.figures().items()},
    )


def _rows(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the tensor, the same on all ranks, as a DTensor whose local tensor is a view of this rank's rows."""
    count = -(-len(tensor) // mesh.size())
    first = min(mesh.get_local_rank() * count, len(tensor))
    local = tensor[first : first + count]
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


@torch.no_grad()
def _exchange(parameters: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Copy each rank's rows of the parameters to all ranks, in one transfer."""
    ranks, group = mesh.size(), mesh.get_group()
    sizes = [-(-len(p) // ranks) * (p.numel() // max(1, len(p))) for p in parameters]
    moved = parameters[0].new_empty(ranks, sum(sizes))
    sent = moved[mesh.get_local_rank()]
    for parameter, part in zip(parameters, torch.split(sent, sizes), strict=True):
        rows = local_part(_rows(parameter.detach(), mesh))
        part[: rows.numel()].view(rows.shape).copy_(rows)
    if moved.device.type == "cpu":  # 13 ms for 34 MB, and gloo's all-gather 43 ms (2 ranks)
        for work in [dist.broadcast(part, group_src=i, group=group, async_op=True) for i, part in enumerate(moved)]:
            work.wait()
    else:
        all_gather(moved.view(-1), sent, group=group)
    for parameter, parts in zip(parameters, torch.split(moved, sizes, dim=1), strict=True):
        parameter.copy_(parts.reshape(-1)[: parameter.numel()].view(parameter.shape))

"""Smaller gradients between the ranks of ddp: fp16, bf16, or PowerSGD's matrices of low rank.

PowerSGD adds the approximation error to the next step's gradient. torch's own version keeps errors by bucket, and ddp
changes the buckets after its first step, so a resumed job could not use the errors; here errors are kept by parameter.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .strategy import LOW, State

_MIN_GAIN = 2  # two thin matrices replace a matrix if they have at most half its size


def compress(model: DistributedDataParallel, kind: str, rank: int) -> PowerSGD | None:
    """Make ddp send smaller gradients; return the object with state, if any."""
    if kind == "powersgd":
        keeper = PowerSGD(model.module, rank)
        model.register_comm_hook(None, lambda state, bucket: keeper.reduce(bucket))
        return keeper
    model.register_comm_hook(None, lambda state, bucket: _cast(bucket, LOW[kind]))
    return None


def _cast(bucket: Any, dtype: torch.dtype) -> Any:
    """Sum in half the bytes. torch's own hook for bf16 needs NCCL."""
    buffer = bucket.buffer()
    small = buffer.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


class PowerSGD:
    """Each gradient matrix M (n, m) as P Q^T, P (n, r), Q (m, r). Source: Vogels et al. 2019, algorithms 1 and 2."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        self._rank = rank
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in trained.items()}
        self._matrices = {name: p for name, p in trained.items() if self._fits(p)}
        self._other_bytes = sum(p.nbytes for name, p in trained.items() if name not in self._matrices)
        self._errors: State = {}
        self._qs: State = {}
        self.load({})

    @property
    def summed_bytes(self) -> int:
        """The bytes that the ranks sum in a step: P and Q of each matrix, and the other gradients."""
        thin = sum((len(p) + p[0].numel()) * self._rank * p.element_size() for p in self._matrices.values())
        return thin + self._other_bytes

    def state(self) -> State:
        """Return this rank's approximation errors so far, and the Q of every matrix."""
        errors = {f"powersgd.error.{name}": value for name, value in self._errors.items()}
        return {**errors, **{f"powersgd.q.{name}": value for name, value in self._qs.items()}}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Load saved state; for missing state, begin as at the first step."""
        for name, parameter in self._matrices.items():
            if name not in self._errors:
                self._errors[name] = torch.empty_like(parameter.detach()).flatten(1)
                self._qs[name] = parameter.detach().new_empty(self._errors[name].shape[1], self._rank)
            error, q = state.get(f"powersgd.error.{name}"), state.get(f"powersgd.q.{name}")
            # The same on every rank, and without changing the generators that the loss draws from.
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self._qs[name].copy_(torch.randn(self._qs[name].shape, generator=seed) if q is None else q)
            if error is None:
                self._errors[name].zero_()
            else:
                self._errors[name].copy_(error)

    def reduce(self, bucket: Any) -> Any:
        """Replace the bucket's gradients by their mean over the ranks, matrices by an approximation of the mean.

        Return a future of the bucket.
        """
        gradients = {self._names[id(p)]: g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        matrices = {name: g.flatten(1) for name, g in gradients.items() if name in self._matrices}
        others = [g for name, g in gradients.items() if name not in matrices]
        for name, matrix in matrices.items():
            matrix.add_(self._errors[name])
            self._errors[name].copy_(matrix)
        ps = [matrix @ self._qs[name] for name, matrix in matrices.items()]
        work = dist.all_reduce(torch.cat([t.flatten() for t in (*ps, *others)]), async_op=True)
        assert work is not None
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
        if parameter.dim() < 2 or not parameter.is_contiguous():  # a parameter that is not contiguous would need a copy
            return False
        rows, columns = parameter.shape[0], parameter[0].numel()
        thin = min(rows, columns) >= self._rank
        return thin and (rows + columns) * self._rank * _MIN_GAIN < rows * columns

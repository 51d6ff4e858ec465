"""Buffers, as batch norm's running statistics: they follow virtual rank 0, however many ranks there are.

A step's first micro-batch begins with rank 0's persistent buffers on every rank; every other micro-batch begins with
the same values, and what it does to them is undone. So they are what a job with one micro-batch a step would have.
Rank 0 holds the truth; the others hold it after `sync`. Buffers registered with persistent=False are nobody's: they
are not saved, so no resumed job could rely on them, and they are left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cloudtrain.entrypoints import data

__all__ = ["Buffers", "places", "saved"]

Place = tuple[nn.Module, str]  # a module and a buffer's name in it: a module may replace the tensor itself


def places(module: nn.Module) -> list[Place]:
    """Return where the module and its parts have buffers, the persistent ones and the others."""
    return [(owner, name) for owner in module.modules() for name, _ in owner.named_buffers(recurse=False)]


def saved(module: nn.Module) -> list[Place]:
    """Return where the buffers are that a state dict holds."""
    names = set(module.state_dict(keep_vars=True))
    return [
        (owner, name)
        for prefix, owner in module.named_modules()
        for name, _ in owner.named_buffers(recurse=False)
        if f"{prefix}.{name}".lstrip(".") in names
    ]


class Buffers:
    """The persistent buffers of a module and, during a step of several micro-batches, the values they began with."""

    def __init__(self, module: nn.Module, split: data.Split, first: int, silent: bool, *, keeps: bool = False) -> None:
        # The widest elements come first: so each lies at a multiple of its size among the bytes that are sent.
        self._places = sorted(saved(module), key=lambda place: -getattr(*place).element_size())
        self._rank, self._ranks = dist.get_rank(), split.ranks
        self._accumulation = split.accumulation
        self._first = first  # of the virtual ranks that this rank owns
        self._silent = silent
        self._keeps = keeps or split.accumulation > 1  # what the step began with
        self._begin: list[torch.Tensor] = []
        self._end: list[torch.Tensor] = []

    def micro_batch(self, virtual: int, last: bool) -> AbstractContextManager[Any]:
        """Return what goes around one micro-batch; for a model without buffers, nothing."""
        return self._around(virtual, last) if self._places else contextlib.nullcontext()

    @torch.no_grad()
    def sync(self) -> None:
        """Give every rank rank 0's values, in one transfer."""
        if not self._places or self._ranks == 1:
            return
        here = self._tensors()
        sent = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in here])
        dist.broadcast(sent, 0)
        if self._rank:
            sizes = [tensor.numel() * tensor.element_size() for tensor in here]
            for tensor, part in zip(here, torch.split(sent, sizes), strict=True):
                tensor.copy_(part.view(tensor.dtype).view_as(tensor))

    def undo(self) -> None:
        """Write back what the step began with, where it stops between micro-batches or is left out."""
        if self._begin:
            self._write(self._begin)

    @contextlib.contextmanager
    def _around(self, virtual: int, last: bool) -> Iterator[None]:
        if virtual != self._first:
            self._write(self._begin)
        elif not self._silent:
            self.sync()
        if virtual == self._first and self._keeps:
            self._begin = [tensor.clone() for tensor in self._tensors()]
        yield
        if self._accumulation == 1:
            return  # virtual rank 0 has left what counts; what another has left, the next step overwrites
        if virtual == 0:
            self._end = [tensor.clone() for tensor in self._tensors()]
        if last and self._rank == 0:
            self._write(self._end)

    def _tensors(self) -> list[torch.Tensor]:
        return [getattr(owner, name).detach() for owner, name in self._places]

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for tensor, value in zip(self._tensors(), values, strict=True):
            tensor.copy_(value)

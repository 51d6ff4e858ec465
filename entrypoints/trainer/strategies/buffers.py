"""Buffers, for example batch norm's running statistics: equal to virtual rank 0's, for any number of ranks.

A step's first micro-batch begins with rank 0's persistent buffers on every rank; every later micro-batch begins with
the same values, and its changes to the buffers are undone. So the buffers equal those of a job with one micro-batch a
step. Rank 0 has the valid values; all ranks have them after `sync`. Buffers registered with persistent=False are not
saved, so a resumed job could not rely on them, and are left alone. Parameters without gradient that the first forward
pass changes, as momentum encoders and codebooks, are buffers from then on.

A stage of a pipeline runs several forward passes before the first backward pass, which would find a saved buffer
changed. So each forward pass of a stage has copies of the buffers.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import zlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import FormError, TaskError
from ...format import first_of
from ...rank import exchange
from ...rank.exchange import local_part
from .. import data

Place = tuple[nn.Module, str]  # a module and the name of a buffer: a module may replace the tensor itself
Kept = dict[str, tuple[Place, torch.Tensor]]  # by name: a place, and this rank's values at an earlier time

ROOM_BYTES = 1 << 28  # for copies in the first step, at least
_ROW = 509  # words of 8 bytes: odd, since the xor of an even number of equal words is 0


def _aligned(module: nn.Module, more: Iterable[Place] = ()) -> list[Place]:
    """Return the saved buffers, and more, the widest elements first: each is then aligned to its element in `pack`."""
    names = module.state_dict(keep_vars=True)  # a hook may give copies under them
    saved = {id(buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if name in names}
    named = ((owner, *pair) for owner in module.modules() for pair in owner.named_buffers(recurse=False))
    found = [(owner, name) for owner, name, buffer in named if id(buffer) in saved]
    return sorted([*found, *more], key=lambda place: -int(getattr(*place).element_size()))


def kinds_of(module: nn.Module) -> dict[str, str]:
    """Return shape and type of each tensor that a checkpoint has."""
    state = module.state_dict().items()
    return {name: f"{tuple(t.shape)} {t.dtype}" for name, t in state if isinstance(t, torch.Tensor)}


def keep_frozen(module: nn.Module) -> Kept:
    """Return copies of the parameters without gradient, the smallest first, within the room of an optimizer's state.

    So a large frozen model with adapters is left out, and parameters without values (memory.py).
    """
    room = max(ROOM_BYTES, 2 * sum(p.nbytes for p in module.parameters() if p.requires_grad))
    frozen = {n: local_part(p.detach()) for n, p in module.named_parameters() if not p.requires_grad}
    named = sorted(frozen.items(), key=lambda pair: pair[1].nbytes)
    named = [(name, values) for name, values in named if not hasattr(values, "fake_mode")]
    sizes = itertools.accumulate(values.nbytes for _, values in named)
    at = {name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in frozen}
    return {n: (at[n], values.clone()) for (n, values), size in zip(named, sizes, strict=True) if size <= room}


def changed(kept: Kept) -> list[str]:
    """Return the names of the tensors that no longer have their kept values."""
    return [name for name, (at, old) in kept.items() if not torch.equal(local_part(getattr(*at).detach()), old)]


def checksum(tensor: torch.Tensor) -> int:
    """Return a hash of the tensor's bytes: a xor of each row of words at the speed of memory, then crc32."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = len(flat) // (8 * _ROW) * _ROW if hasattr(torch, "hash_tensor") else 0  # new in torch 2.9
    rest = flat[8 * words :]
    if words:
        aligned = flat if flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0 else flat.clone()
        rows = torch.hash_tensor(aligned[: 8 * words].view(torch.int64).view(-1, _ROW), 1)
        rest = torch.cat([rows.view(torch.uint8), rest])
    rest = rest.cpu()
    return zlib.crc32(ctypes.string_at(rest.data_ptr(), len(rest)))


def pack(module: nn.Module) -> torch.Tensor:
    """Return all persistent buffers of the module as bytes, uint8."""
    return _joined(_aligned(module)).cpu()


def unpack(module: nn.Module, packed: torch.Tensor) -> None:
    """Fill the module's persistent buffers with the result of `pack`."""
    _fill(_aligned(module), packed)


def lend(found: Iterable[Place], tensors: Iterable[torch.Tensor]) -> None:
    """Put the tensors in the places."""
    for (owner, name), tensor in zip(found, tensors, strict=True):
        setattr(owner, name, tensor)


def copies(found: Iterable[Place]) -> list[torch.Tensor]:
    """Return copies of the tensors in the places."""
    return [tensor.clone() for tensor in _tensors(found)]


def _tensors(found: Iterable[Place]) -> list[torch.Tensor]:
    return [getattr(*place).detach() for place in found]


def _joined(found: Iterable[Place]) -> torch.Tensor:
    """Return the tensors in the places as bytes, uint8."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in _tensors(found)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _fill(found: Iterable[Place], joined: torch.Tensor) -> None:
    """Fill the tensors in the places with the result of `_joined`."""
    tensors = _tensors(found)
    for tensor, part in zip(tensors, torch.split(joined, [t.nbytes for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.dtype).view_as(tensor))


def refusal(names: Iterable[str]) -> str:
    """Return why parameters without gradient may not change here, and the cure."""
    return (
        f"forward changes {first_of(sorted(names), 4)}, without gradient, and this strategy cannot keep such "
        "parameters alike on all ranks: register them as buffers (register_buffer), or set strategy: ddp"
    )


def _grown(name: str, old: str | None, new: str) -> str:
    return (
        f"forward changes {name} from {old} to {new}, which no resume could load: create it in model(params) with its "
        "final shape and type and fill it in place, or register it with persistent=False"
    )


def gradient_refusal(names: Iterable[str]) -> str:
    """Return why parameters may not be frozen or unfrozen during the training, and the cure."""
    return (
        f"loss, forward or after_step changes requires_grad of {first_of(sorted(names), 4)} during the training, which "
        "the optimizer, the other ranks and a resume would miss: give all parameters a gradient from the start, in "
        "model(params), and multiply their part of the loss by 0 in the steps without them"
    )


def neighbours(width: int) -> dist.ProcessGroup | None:
    """Return the process group of this rank and its neighbours, `width` ranks at most. All ranks call it."""
    first = dist.get_rank() // width * width
    members = list(range(first, min(first + width, dist.get_world_size())))
    group: dist.ProcessGroup | None = dist.new_group(members, use_local_synchronization=True)
    return group


class Buffers:
    """The persistent buffers of a module and, during a step of several micro-batches, their values at the start."""

    def __init__(
        self, module: nn.Module, split: data.Split, first: int, silent: bool, *, keeps: bool = False, stages: int = 1
    ) -> None:
        """`first` is the first virtual rank that this rank owns. Of `stages` stages each has its own buffers."""
        self._module, self._places = module, _aligned(module)
        each = dist.get_world_size() // stages
        self._source = dist.get_rank() // each * each
        self._group = neighbours(each) if stages > 1 else None
        self._is_source, self._ranks = dist.get_rank() == self._source, split.ranks
        self._accumulation, self._first, self._silent = split.accumulation, first, silent
        self._keeps = keeps or split.accumulation > 1  # whether to keep the values at the step's start
        self._lends = stages > 1 and split.accumulation > 1
        self._begin: list[torch.Tensor] = []
        self._end: list[torch.Tensor] = []
        self._is_new, self.has_moved = True, False  # parameters

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the first micro-batch for tensors that no resume could load, or that move.

        Raises TaskError with their names.
        """
        if not self._is_new:
            yield
            return
        self._is_new, kinds = False, kinds_of(self._module)
        kept = keep_frozen(self._module) if self._group is None else {}  # the stages of a pipeline do not meet here
        yield
        for name, kind in kinds_of(self._module).items():
            if kind != kinds.get(name):
                raise FormError(_grown(name, kinds.get(name), kind))
        names = set().union(*exchange.gather(changed(kept))) if kept else set()
        moved = dict(found for name, found in kept.items() if name in names)
        is_split = any(isinstance(getattr(*place), DTensor) for place in moved)
        if moved and (self._ranks == 1 < dist.get_world_size() or (is_split and self._accumulation > 1)):
            raise TaskError(refusal(names))
        if moved and not is_split:
            self.has_moved = True
            begin = dict(zip(self._places, self._begin, strict=False)) | moved
            self._places = _aligned(self._module, moved)
            self._begin = [begin[place] for place in self._places] if self._keeps else []

    @torch.no_grad()
    def sync(self) -> None:
        """Copy rank 0's values to every rank, in one transfer."""
        if not self._places or self._ranks == 1:
            return
        sent = _joined(self._places)
        dist.broadcast(sent, self._source, self._group)
        if not self._is_source:
            _fill(self._places, sent)

    def undo(self) -> None:
        """Restore the values at the step's start, after a step that stopped between micro-batches or is left out."""
        if self._begin:
            self._write(self._begin)

    @contextlib.contextmanager
    def micro_batch(self, virtual: int, last: bool) -> Iterator[None]:
        """Wrap one micro-batch; does nothing for a model without buffers."""
        if not self._places and not self._is_new:
            yield
            return
        if virtual != self._first:
            self._write(self._begin)
        elif not self._silent:
            self.sync()
        own = _tensors(self._places)
        if virtual == self._first and self._keeps:
            self._begin = copies(self._places)
        if self._lends:
            lend(self._places, copies(self._places))
        with self.watch():
            yield
        if self._accumulation == 1:
            return  # virtual rank 0's values count; the next step overwrites the values of all other ranks
        if virtual == 0:
            self._end = copies(self._places)
        if self._lends:
            lend(self._places, own)
        if last and self._is_source:
            self._write(self._end)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for (_, name), tensor, value in zip(self._places, _tensors(self._places), values, strict=True):
            if tensor.shape != value.shape:
                raise TaskError(_grown(name, str(tuple(value.shape)), str(tuple(tensor.shape))))
            tensor.copy_(value)

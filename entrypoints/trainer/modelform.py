"""The model stays as the optimizer, the ranks' exchange and a resume need it: in its form, and alike on all ranks.

Compared after the first step and at every save. The form: names, shapes and types of the saved tensors; the parameters
themselves, and their memory if a strategy holds shards or rows of it; and which of them need gradients. Parameters
without gradient may only move from the first step on, since buffers.py watches the first micro-batch alone. The copies:
no loss shows a difference, and a checkpoint would mix them. The ranks compare hashes of the tensors that several hold:
all under ddp, the tensors of the same shard under hsdp, and of a split layer the same part's and whole tensors.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import FormError, TaskError
from ..format import first_of
from ..rank import exchange
from ..rank.exchange import local_part
from . import data
from .settings import Spec
from .strategies.buffers import checksum, gradient_refusal, kinds_of
from .strategies.fsdp import reshard
from .strategies.strategy import Strategy
from .task import Task


class ModelForm:
    """The form of a strategy's model before the first step."""

    def __init__(self, strategy: Strategy, *, has_after_step: bool, has_optimizer: bool) -> None:
        """`has_after_step` and `has_optimizer`: of the task, which may then move parameters without gradient."""
        self._module, self._has_after_step = strategy.module, has_after_step
        self.checked_step: int | None = None
        self._kinds, self._parameters, self._trained = self._found()
        is_split = any(isinstance(p, DTensor) for p in strategy.parameter_names())
        self._memory = {name: _memory(p) for name, p in self._parameters.items() if is_split}
        # Weights that a `train` merges for an evaluation differ by rounding afterwards.
        is_merged = any(type(part).train is not nn.Module.train for part in self._module.modules())
        is_fixed = not (has_after_step or has_optimizer or is_merged)
        self._sums = self._hashed(name for name in self._parameters if is_fixed and name not in self._trained)

    def check(self, step: int) -> None:
        """Raise TaskError, with the names, if a part of the form has changed."""
        if step == self.checked_step:
            return
        is_first, self.checked_step = self.checked_step is None, step
        reshard(self._module)
        kinds, parameters, trained = self._found()
        if other := [name for name in self._kinds | kinds if kinds.get(name) != self._kinds.get(name)]:
            old, new = (of.get(other[0], "absent") for of in (self._kinds, kinds))
            raise TaskError(
                f"the model changes its form by step {step}, so no resume could load a checkpoint: "
                f"{first_of(other, 4)} ({other[0]} was {old}, and is {new}). Create all parts in model(params) with "
                "their final shapes and types and fill them in place, or register buffers with persistent=False"
            )
        moved = {name for name, old in self._memory.items() if old != _memory(parameters[name])}
        if lost := [name for name, p in parameters.items() if name in moved or p is not self._parameters.get(name)]:
            raise TaskError(
                f"loss, forward or after_step gives {first_of(lost, 4)} new data (`.data =`) or a new nn.Parameter, "
                "which the optimizer and the checkpoints do not have: write in place, with p.copy_() under "
                "torch.no_grad(), and do so in after_step(model, step) under fsdp and hsdp"
            )
        # A loss that leaves parts frozen does so in each step; after_step may do so once.
        is_loss = is_first and trained < self._trained and not self._has_after_step
        if trained != self._trained and not is_loss:
            raise TaskError(gradient_refusal(trained ^ self._trained))
        self._trained = trained
        sums = self._hashed(self._sums)
        late = [name for name, value in sums.items() if value != self._sums[name]]
        if late and not is_first:
            raise TaskError(
                f"loss or forward begins to change {first_of(late, 4)}, without gradient, after the first step, too "
                "late for the trainer to keep them alike on all ranks: change them from the first micro-batch on, make "
                "them buffers (register_buffer), or change them in after_step(model, step)"
            )
        self._sums = {name: value for name, value in sums.items() if name not in late}

    def _found(self) -> tuple[dict[str, str], dict[str, nn.Parameter], set[str]]:
        """Return the kinds of the saved tensors, the parameters, and the names of the trained parameters."""
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        return kinds_of(self._module), parameters, {name for name, p in parameters.items() if p.requires_grad}

    def _hashed(self, names: Iterable[str]) -> dict[str, int]:
        return {name: checksum(local_part(self._parameters[name])) for name in names}


def _memory(parameter: nn.Parameter) -> list[torch.UntypedStorage]:
    """Return the storages: of a DTensor two, since `.data =` changes only the outer, which nothing reads."""
    return [parameter.untyped_storage(), local_part(parameter).untyped_storage()]


@torch.no_grad()
def differing(module: nn.Module, holders: range) -> list[str]:
    """Return the names of the tensors whose copies differ among the ranks of a stage, `holders`. All ranks call it."""
    own: dict[str, int] = {}  # by piece and name
    pieces: dict[str, int] = {}
    for name, tensor in module.state_dict().items():
        piece = _piece(tensor, holders) if isinstance(tensor, torch.Tensor) else None
        if piece is not None:
            value = own[f"{piece}:{name}"] = checksum(local_part(tensor))
            pieces[piece] = zlib.crc32(value.to_bytes(4, "big"), pieces.get(piece, 0))
    if not unequal(exchange.gather(pieces)):
        return []
    return list(dict.fromkeys(key.partition(":")[2] for key in unequal(exchange.gather(own))))


def unequal(listed: list[dict[str, int]]) -> list[str]:
    """Return the keys with several values."""
    values: dict[str, int] = {}
    return list(dict.fromkeys(k for own in listed for k, value in own.items() if values.setdefault(k, value) != value))


def _piece(tensor: torch.Tensor, holders: range) -> str | None:
    """Return the piece of the model that this rank's values are, None if no other rank holds the piece."""
    if not isinstance(tensor, DTensor):
        return f"{holders.start}"
    mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if math.prod(mesh.size(dim) for dim in split) == len(holders):
        return None
    return " ".join([f"{holders.start}", *(f"{dim}={at[dim]}" for dim in split)])


def module_of(spec: Spec, task: Task) -> nn.Module:
    """Return the task's model, with weights from the job's seed, in training mode. Raises TaskError."""
    data.seed_all(data.mix(spec.training.seed, data.INIT, 1))
    module = task.model(spec.params)
    if not isinstance(module, nn.Module):
        raise FormError(f"model(params) returned a {type(module).__name__}; it must return a nn.Module")
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise FormError(
            f"model(params) returned a {type(module).__name__}; return the model inside: the trainer spreads it itself"
        )
    values = [*module.named_parameters(), *module.named_buffers()]
    if lazy := [name for name, value in values if nn.parameter.is_lazy(value)]:
        raise FormError(
            f"{first_of(lazy, 4)} of model(params) has no shape yet, as in LazyLinear: give the layer its input size, "
            "or call the model once on an example in model(params)"
        )
    # Pretrained models come in eval mode; of a model in training mode, parts frozen in eval mode stay frozen.
    train_mode(module, [(part, False) for part in module.modules() if module.training and not part.training])
    return module


def train_mode(module: nn.Module, modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Put the module in training mode, then give the parts their modes, parents first.

    By the classes' own `train`, which may merge weights, or keep a part in eval mode.
    """
    module.train()
    for part, mode in modes:
        if type(part).train is nn.Module.train:
            part.training = mode
        elif part.training != mode:
            part.train(mode)

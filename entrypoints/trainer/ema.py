"""An exponential moving average of the weights, on each rank's own shards: for ddp and fsdp alike.

torch's AveragedModel copies the module, which FSDP2 forbids; the class here keeps only tensors, beside the module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..rank.exchange import local_part
from .strategies.fsdp import reshard

# Prefixes that wrappers add to parameter names: torch.compile, activation checkpointing, DistributedDataParallel.
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")


class Ema:
    """The average of a module's trainable parameters, with the same shapes and shards; in fp32 for lower precisions.

    Buffers are not averaged. Batch norm's running statistics are averages already, and counters cannot be averaged:
    evaluation with the average uses the trained weights' buffers, as torch's AveragedModel does by default.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Begin at the present weights. `module` is already sharded, and its parameters are the optimizer's."""
        self._module = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        self._decay = decay
        # After a forward pass without a backward FSDP2 keeps the root's parameters gathered, and would use them again.
        reshard(self._module)
        # The parameters are kept, not their local tensors, which FSDP2 may replace.
        self._parameters = {_WRAPPERS.sub("", n): p for n, p in self._module.named_parameters() if p.requires_grad}
        # A step of 1 - decay is lost in half precision: 0.001 of a difference is under bf16's 8 bits.
        exact = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
        # By parameter name, DTensors like the parameters: for a save, or for a load by `copy_`.
        self.averages = {n: p.detach().to(exact.get(p.dtype, p.dtype), copy=True) for n, p in self._parameters.items()}

    def decay(self, steps_done: int) -> float:
        """Return the decay of an update: slow averages begin fast, or they would hold the first weights for long.

        A function of the step alone, so nothing but the tensors need be saved.
        Source: TensorFlow's ExponentialMovingAverage with num_updates: min(decay, (1 + t) / (10 + t)).
        """
        return min(self._decay, (1 + steps_done) / (10 + steps_done))

    @torch.no_grad()
    def update(self, steps_done: int, steps: int = 1) -> None:
        """Move the average towards the weights; `steps_done` counts optimizer steps, including the present step.

        `steps` since the last update: the decay is that of so many updates.
        """
        averages = [local_part(average) for average in self.averages.values()]
        weights = [local_part(p).to(a.dtype) for p, a in zip(self._parameters.values(), averages, strict=True)]
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay(steps_done) ** steps)

    def reset(self) -> None:
        """Restart at the present weights: after loading a checkpoint without an average."""
        torch._foreach_copy_(_values(self.averages.values()), _values(self._parameters.values()))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the module the averaged weights, then the trained weights; all ranks enter, or no rank.

        `averages` has the averages inside, too. No training inside.
        """
        with restored(self._module, self._parameters.values()):
            torch._foreach_copy_(_values(self._parameters.values()), _values(self.averages.values()))
            yield


@contextmanager
def restored(module: nn.Module, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give these parameters their present values again at the end, exactly: of a copy of this rank's shards."""
    reshard(module)
    trained = [value.clone() for value in _values(parameters)]
    try:
        yield
    finally:
        reshard(module)
        torch._foreach_copy_(_values(parameters), trained)


def _values(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [local_part(tensor).detach() for tensor in tensors]

"""Sparse gradients between the ranks of ddp: each rank sends its largest entries, and keeps the rest for later steps.

    r += g                                  the residual, by parameter
    sent = entries of r with |r| >= tau     tau: the quantile 1 - density of |r|
    r -= sent
    g = mean of all ranks' sent entries     in rank order: the same bits on every rank

`threshold` sends a sign for each entry and two means, of the positive and of the negative entries; `topk` sends the
entries themselves. Sources: Seide et al. 2014 and Strom 2015 (the residual), Dryden et al. 2016 (two means), Lin et al.
2018, arXiv:1712.01887 (the falling density of the first steps), Karimireddy et al. 2019 (convergence).

SGD's momentum comes before the residual, since a momentum over sparse sums would jump: u = m u + g; r += u. Clipping
comes before too, so the norm is that of this rank's own gradient.

An entry travels as a 16-bit word: the low 15 bits are the number of elements between it and the entry before, the
highest bit is the sign. 32,767 stands for so many elements without an entry, in a word of its own. At a density of 1 %
a word is sent for 100 elements of 4 bytes: 200 times less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cloudtrain.entrypoints.trainer.strategies.strategy import State

__all__ = ["SPARSE", "SparseGradients", "decode", "density_of", "encode"]

SPARSE = ("threshold", "topk")
_LEAST = 1024  # elements of a parameter; smaller parameters, such as biases, are sent whole
_SAMPLED = 20_000  # entries that the quantile is taken from: within 7 % of a density of 1 %
_FIRST_DENSITY = 0.25
_PREFIX = "sparse."
_SKIP = 0x7FFF  # elements that a word without an entry skips


def density_of(step: int, density: float, warmup_steps: int) -> float:
    """Return the share of entries to send in a step: falling geometrically from 25 % over the first steps."""
    if step >= warmup_steps or density >= _FIRST_DENSITY:
        return density
    return float(_FIRST_DENSITY * (density / _FIRST_DENSITY) ** (step / warmup_steps))


def encode(indices: torch.Tensor, is_negative: torch.Tensor) -> torch.Tensor:
    """Return the words, int16, of entries at increasing `indices` (n,), int64, with signs (n,), bool."""
    before = torch.nn.functional.pad(indices[:-1], (1, 0), value=-1)[: indices.numel()]
    gaps = indices - before - 1
    words = gaps % _SKIP + is_negative.to(torch.int64) * (_SKIP + 1)
    skips = gaps // _SKIP
    if bool(skips.any()):
        places = torch.arange(indices.numel(), device=indices.device) + skips.cumsum(0)
        whole = words.new_full((int(places[-1]) + 1,), _SKIP)
        words = whole.index_copy_(0, places, words)
    return words.to(torch.int16)  # wraps: the sign becomes the word's


def decode(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices, int64, and the signs of the entries: the arguments of `encode`.

    A word ends at the sum of all gaps up to and including the word, where an entry takes an element of its own.
    """
    low = (words & _SKIP).to(torch.int64)
    is_entry = low != _SKIP
    ends = (low + is_entry).cumsum(0) - 1
    return ends[is_entry], words[is_entry] < 0


class SparseGradients:
    """A rank's residuals and momentum, as flat vectors in the module's order of parameters."""

    def __init__(
        self, module: nn.Module, kind: str, density: float, warmup_steps: int, *, is_silent: bool = False
    ) -> None:
        """`kind` is one of SPARSE. With `is_silent` nothing is sent, and each rank uses its own code."""
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._large = {name: p for name, p in named.items() if p.numel() >= _LEAST}
        self._small = {name: p for name, p in named.items() if p.numel() < _LEAST}
        self._kind, self._density, self._warmup_steps, self._is_silent = kind, density, warmup_steps, is_silent
        device = next(iter(named.values())).device
        self._residual = torch.zeros(sum(p.numel() for p in self._large.values()), device=device)
        self._scratch = torch.empty_like(self._residual)
        self._velocity: torch.Tensor | None = None  # SGD's momentum over all parameters, large ones first
        self._momentum = self._weight_decay = 0.0
        self._bytes, self._steps, self._sent, self._tau = 0.0, 0, 0, 0.0

    def attach(self, optimizer: torch.optim.Optimizer, _scaler: object = None) -> None:
        """Take the momentum and the weight decay from a plain SGD: both come before the residual."""
        group = optimizer.param_groups[0]
        is_plain = type(optimizer) is torch.optim.SGD and len(optimizer.param_groups) == 1
        if not is_plain or not group["momentum"] or group["nesterov"] or group["dampening"]:
            return
        self._momentum, self._weight_decay = group["momentum"], group["weight_decay"]
        group["momentum"] = group["weight_decay"] = 0.0
        size = sum(p.numel() for p in (*self._large.values(), *self._small.values()))
        self._velocity = torch.zeros(size, device=self._residual.device)

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Replace the gradients by the mean of what all ranks send in the step, counted from 0."""
        large = _flat(list(self._large.values()), self._weight_decay)
        small = _flat(list(self._small.values()), self._weight_decay)
        if self._velocity is not None:
            own = torch.split(self._velocity, [large.numel(), small.numel()])
            for velocity, gradient in zip(own, (large, small), strict=True):
                velocity.mul_(self._momentum).add_(gradient)
            large, small = own[0], own[1].clone()
        self._residual.add_(large)
        sent = self._mean_sent(step)
        if small.numel() and not self._is_silent:
            dist.all_reduce(small)
            small /= dist.get_world_size()
            self._bytes += 2 * (dist.get_world_size() - 1) / dist.get_world_size() * small.nbytes
        _fill(list(self._large.values()), sent)
        _fill(list(self._small.values()), small)
        self._steps += 1

    def _mean_sent(self, step: int) -> torch.Tensor:
        """Return the mean of all ranks' sent entries, [elements]; the residual loses this rank's own."""
        indices = self._chosen(step)
        own = _code(indices, self._residual[indices], is_exact=self._kind == "topk")
        _, values = own.entries()
        self._residual.index_add_(0, indices, values, alpha=-1)
        result, ranks = self._scratch.zero_(), 1 if self._is_silent else dist.get_world_size()
        for code in [own] if self._is_silent else _gathered(own):
            places, values = code.entries()
            result.index_add_(0, places, values / ranks)
        self._bytes += (ranks - 1) * own.packed().nbytes
        self._sent += indices.numel()
        return result

    def _chosen(self, step: int) -> torch.Tensor:
        """Return the indices of the entries to send, increasing."""
        density = density_of(step, self._density, self._warmup_steps)
        size = torch.abs(self._residual, out=self._scratch)
        if density >= 1.0 or not size.numel():
            return torch.arange(size.numel(), device=size.device)
        sample = size
        if size.numel() > 2 * _SAMPLED:
            stride = size.numel() // _SAMPLED
            sample = size[step % stride :: stride]
        self._tau = float(sample.kthvalue(max(1, round((1 - density) * sample.numel()))).values)
        found = size >= self._tau if self._tau > 0 else size > 0
        return torch.nonzero(found).flatten()

    def state(self) -> State:
        """Return this rank's residuals and momentum by parameter name."""
        return {name: tensor.clone() for name, tensor in self._named_parts()}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Load the saved state; missing parts are zero, as at the first step."""
        for name, tensor in self._named_parts():
            if name in state:
                tensor.copy_(state[name])
            else:
                tensor.zero_()

    def figures(self) -> dict[str, float]:
        """Return the means of a step since the last call, and the present threshold and norm of the residual."""
        steps, elements = max(1, self._steps), max(1, self._residual.numel())
        found = {
            "bytes_sent": self._bytes / steps,
            "density": self._sent / steps / elements,
            "threshold": self._tau,
            "residual_norm": float(torch.linalg.vector_norm(self._residual)),
        }
        self._bytes, self._steps, self._sent = 0.0, 0, 0
        return found

    def _named_parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        parts = [("residual", self._large, self._residual)]
        if self._velocity is not None:
            parts.append(("momentum", {**self._large, **self._small}, self._velocity))
        for kind, named, flat in parts:
            own = torch.split(flat, [p.numel() for p in named.values()])
            for (name, parameter), part in zip(named.items(), own, strict=True):
                yield f"{_PREFIX}{kind}.{name}", part.view(parameter.shape)


@dataclass(frozen=True)
class _Code:
    """One rank's sent entries: the words of `encode`, and their values, or the means of the two signs.

    `values`: float32, (entries,) of topk, or (2,) of threshold: the means of positive and of negative entries.
    """

    words: torch.Tensor
    values: torch.Tensor
    is_exact: bool

    def entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices and the values of the entries."""
        indices, is_negative = decode(self.words)
        return indices, self.values if self.is_exact else self.values[is_negative.to(torch.int64)]

    def packed(self) -> torch.Tensor:
        """Return the code as bytes: the values, then the words."""
        return torch.cat([self.values.view(torch.uint8), self.words.view(torch.uint8)])


def _code(indices: torch.Tensor, values: torch.Tensor, *, is_exact: bool) -> _Code:
    is_negative = values < 0
    words = encode(indices, is_negative)
    if is_exact:
        return _Code(words, values, is_exact=True)
    counts = torch.stack([(~is_negative).sum(), is_negative.sum()]).clamp(min=1)
    sums = torch.stack([values[~is_negative].sum(), values[is_negative].sum()])
    return _Code(words, sums / counts, is_exact=False)


def _gathered(own: _Code) -> list[_Code]:
    """Return the codes of all ranks, by rank."""
    packed, ranks = own.packed(), dist.get_world_size()
    sizes = torch.tensor([own.values.nbytes, packed.numel()], device=packed.device)
    of_ranks = [torch.empty_like(sizes) for _ in range(ranks)]
    dist.all_gather(of_ranks, sizes)
    listed: list[list[int]] = [each.tolist() for each in of_ranks]
    longest = -(-max(whole for _, whole in listed) // 4) * 4
    padded = torch.nn.functional.pad(packed, (0, longest - packed.numel()))
    texts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(texts, padded)
    return [
        _Code(text[values:whole].view(torch.int16), text[:values].view(torch.float32), own.is_exact)
        for text, (values, whole) in zip(texts, listed, strict=True)
    ]


def _flat(parameters: Sequence[nn.Parameter], weight_decay: float) -> torch.Tensor:
    """Return the gradients as one float32 vector; a missing gradient is zero. With weight decay: g + decay x w."""
    if not parameters:
        return torch.empty(0)
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).float() for p in parameters]
    flat = torch.cat(parts)
    if weight_decay:
        flat.add_(torch.cat([p.detach().reshape(-1).float() for p in parameters]), alpha=weight_decay)
    return flat


def _fill(parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
    """Copy the vector's parts into the gradients."""
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(part.view(parameter.shape))

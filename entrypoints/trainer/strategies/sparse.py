"""Compression threshold and topk: each rank sends the large entries of its gradient, and keeps the rest for later.

A rank's residual is the sum of all its gradients less all entries that the rank has sent. In each step

    residual += gradient                     after unscaling and clipping, by this rank's own norm
    t = quantile(|sample of residual|)       so that about the wanted share of entries is at least t
    send the entries of magnitude t or more  threshold: signs, and the means of + and of -; topk: values
    residual -= sent entries
    gradient = mean of all ranks' entries    added in rank order: the same bits on every rank

With torch's SGD, momentum comes before the residual: u = momentum u + gradient + weight_decay weights, residual += u,
and the optimizer has neither momentum nor weight decay. For digits on 4 ranks at 1 % this raises the accuracy from .968
to .978; ddp has .983 (5 seeds, 224 steps). Momentum after the exchange spreads each late entry over more steps.

Residual and momentum belong to parameters, never to ddp's buckets, which change; torch's DistributedDataParallel is not
used. Tried on CPUs with gloo only; on GPUs the tensors stay on the device, and the host waits for the sizes of codes.

Sources: Strom 2015 (threshold), Seide et al. 2014 and Dryden et al. 2016 (residual, two means), Aji and Heafield 2017
(sampled quantile), Lin et al. 2018, arXiv:1712.01887 (momentum, schedule of densities; its masking of momentum is left
out, since at densities of 10 % the mask switches momentum off), Karimireddy et al. 2019 (why a residual is needed).

The code of an entry is a word of 16 bits: the number of skipped positions, 0 to 32766, in the lower 15 bits, and the
sign in the highest bit. The word 32767 is an escape: it skips 32767 positions and names no entry. At densities of 10 %,
1 % and 0.1 % the code is 20, 200 and 2000 times smaller than fp32; the entropy allows 56, 352 and 2579 times. Golomb
and Rice codes come near the entropy, but are read bit by bit: 3 us an entry in Python. `nonzero` and the escapes make a
GPU wait for its host.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import nn

from .. import data
from ..settings import TrainingSettings
from .strategy import Setup, State, Strategy, all_gather, finite_gradients, layout, share_weights

_DENSE_BELOW = 1000  # entries of a tensor: biases and norms are few, and sensitive
_SAMPLE = 20_000  # entries, for 200 above the quantile of 1 %, which then is right to 7 %
_ABOVE = 200  # sampled entries above the quantile at densities below 1 %
_FIRST_DENSITY = 0.25  # of DGC's schedule, and the ratio of its stages
_ESCAPE = 0x7FFF
_SIGN = 1 << 15
_CHUNK = 1 << 18  # entries in the processor's cache: 13 ms for 10 M entries, and 34 ms without chunks (one thread)


def density_at(wanted: float, warmup_steps: int, step: int) -> float:
    """Return the density of the step, counted from 0: 25 %, 6.25 %, 1.6 %, ... down to the wanted density.

    The warm-up's steps are divided evenly among the stages, as DGC's first epochs are (Lin et al. 2018, section 3.3).
    """
    stages = math.ceil(math.log(wanted, _FIRST_DENSITY)) - 1
    if step >= warmup_steps or stages < 1:
        return wanted
    return _FIRST_DENSITY ** (1 + step * stages // warmup_steps)


def spread_sparsely(setup: Setup, plain: Strategy) -> Strategy:
    """Return the strategy of a single rank, extended by the exchange of gradients among several ranks. Collective."""
    share_weights(setup.module.parameters(), setup.device)
    plain.sync_buffers()
    keeper = SparseExchange(setup.settings, setup.module, setup.device, setup.split.ranks, setup.silent)
    return dataclasses.replace(
        plain,
        exchange=keeper.exchange,
        adopt=keeper.take_momentum,
        rank_state=keeper.state,
        load_rank_state=keeper.load,
        figures=keeper.figures,
    )


class SparseExchange:
    """The residuals of a rank, and the exchange of entries. All vectors hold the dense, small tensors first."""

    def __init__(
        self, settings: TrainingSettings, module: nn.Module, device: torch.device, ranks: int, silent: bool = False
    ) -> None:
        self._settings, self._ranks, self._silent = settings, ranks, silent
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        named.sort(key=lambda pair: pair[1].numel() >= _DENSE_BELOW)  # stable: else in the module's order
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        sizes = [p.numel() for p in self._parameters]
        self._dense = sum(size for size in sizes if size < _DENSE_BELOW)
        self._layouts = [layout(p) for p in self._parameters]
        self._total = torch.zeros(sum(sizes), device=device)  # the mean over the ranks, and the optimizer's gradients
        self._residual = torch.zeros_like(self._total)  # zero in the dense part, except within `exchange`
        self._momentum: torch.Tensor | None = None
        self._factors: list[tuple[float, float]] = []  # momentum and weight decay of each parameter
        self._bytes, self._sent, self._steps, self._threshold = 0, 0, 0, 0.0

    def take_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """Move momentum and weight decay of torch's SGD before the residual; leave other optimizers unchanged.

        Nesterov's momentum is another formula, and stays in the optimizer.
        """
        groups = optimizer.param_groups
        if not isinstance(optimizer, torch.optim.SGD) or not any(group["momentum"] for group in groups):
            return
        if any(group["nesterov"] or group["dampening"] for group in groups):
            return
        found: dict[torch.Tensor, tuple[float, float]] = {}
        for group in optimizer.param_groups:
            found |= dict.fromkeys(group["params"], (group["momentum"], group["weight_decay"]))
            group["momentum"] = group["weight_decay"] = 0
        self._factors = [found[parameter] for parameter in self._parameters]
        self._momentum = torch.zeros_like(self._total)

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Replace the gradients by the mean over the ranks of the sent entries.

        With fp16 a gradient that is not finite changes nothing: the scaler leaves out the step on all ranks. With
        on_nan: skip the caller has checked the gradients. Otherwise all ranks get nan, and the job will stop.
        """
        if self._settings.precision == "fp16" and not finite_gradients(self._parameters, agree=True):
            return
        self._accumulate()
        small, large = self._total[: self._dense], self._total[self._dense :]
        small.copy_(self._residual[: self._dense]).div_(self._ranks)
        self._residual[: self._dense] = 0
        is_finite = bool(torch.isfinite(self._residual.sum() + small.sum()))
        work = None if self._silent or not self._dense else dist.all_reduce(small, async_op=True)
        entries = self._take(step) if len(large) and is_finite else (large[:0], large[:0].to(torch.int16))
        gathered = self._gather(*entries, is_finite)
        if work is not None:
            work.wait()
        large.zero_()
        for values, code in gathered or ():
            positions, negative = decode(code)
            if self._settings.compression == "threshold" and len(values):
                values = torch.where(negative, values[1], values[0])
            large.scatter_add_(0, positions, values / self._ranks)  # 6 times as fast as index_add_
        if gathered is None:
            self._total.fill_(math.nan)
        for parameter, part in zip(self._parameters, self._views(self._total), strict=True):
            parameter.grad = part.to(parameter.dtype)
        self._steps += 1

    def state(self) -> State:
        """Return this rank's residual, and momentum if any, by the names of the parameters."""
        vectors = {"residual": self._residual} | ({} if self._momentum is None else {"momentum": self._momentum})
        return {
            f"{kind}.{name}": part
            for kind, vector in vectors.items()
            for name, part in zip(self._names, self._views(vector), strict=True)
            if kind == "momentum" or part.numel() >= _DENSE_BELOW
        }

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Load saved state; missing state begins at zero."""
        for name, part in self.state().items():
            part.copy_(state.get(name, torch.zeros(())))

    def figures(self) -> dict[str, float]:
        """Return the means since the last call of bytes sent and density, the newest threshold, the residual's norm."""
        steps, entries = max(1, self._steps), max(1, len(self._total) - self._dense)
        found = {
            "bytes_sent": self._bytes / steps,
            "density": self._sent / steps / entries,
            "threshold": self._threshold,
            "residual_norm": float(torch.linalg.vector_norm(self._residual)),
        }
        self._bytes = self._sent = self._steps = 0
        return found

    def _views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the vector's part of each parameter."""
        parts = torch.split(vector, [shape.numel() for shape, _ in self._layouts])
        return [part.as_strided(*layout) for part, layout in zip(parts, self._layouts, strict=True)]

    def _accumulate(self) -> None:
        """Add the gradients, or the momentum, to the residual. A parameter without a gradient counts as zero."""
        into = self._residual if self._momentum is None else self._momentum
        views = self._views(into)
        for view, (momentum, decay), parameter in zip(views, self._factors, self._parameters, strict=False):
            view.mul_(momentum)
            if decay:
                view.add_(parameter, alpha=decay)
        moved = [(view, p.grad) for view, p in zip(views, self._parameters, strict=True) if p.grad is not None]
        if moved:
            torch._foreach_add_([view for view, _ in moved], [gradient for _, gradient in moved])
        if self._momentum is not None:
            self._residual.add_(self._momentum)

    def _take(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Remove the entries to send from the residual; return their values, or the two means, and their code."""
        wanted, residual = self._settings, self._residual[self._dense :]
        density = density_at(wanted.compression_density, wanted.compression_warmup_steps, step)
        self._threshold = self._quantile(residual, density, step)
        positions = entries_above(residual, self._threshold)
        values = residual.index_select(0, positions)
        self._sent += len(positions)
        if wanted.compression == "topk":
            residual.index_fill_(0, positions, 0.0)
            return values, encode(positions, torch.zeros_like(values, dtype=torch.bool))
        negative = values < 0
        sides = [values[~negative], values[negative]]
        means = torch.stack([side.mean() if len(side) else side.sum() for side in sides])
        residual.index_copy_(0, positions, values - torch.where(negative, means[1], means[0]))
        return means, encode(positions, negative)

    def _quantile(self, residual: torch.Tensor, density: float, step: int) -> float:
        """Return the magnitude which about `density` of the entries reach, estimated from a sample."""
        if density >= 1.0:
            return 0.0
        size = max(_SAMPLE, math.ceil(_ABOVE / density))
        if size < len(residual):
            generator = torch.Generator().manual_seed(data.mix(self._settings.seed, step))
            residual = residual[torch.randint(len(residual), (size,), generator=generator).to(residual.device)]
        above = max(1, round(density * len(residual)))
        found = float(residual.abs().kthvalue(len(residual) - above + 1).values)
        return max(found, torch.finfo(residual.dtype).tiny)  # zeros, as of unused rows, are never sent

    def _gather(
        self, values: torch.Tensor, code: torch.Tensor, is_finite: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Return the values and codes of all ranks in rank order; None if a rank's gradient is not finite."""
        lengths = torch.tensor([[len(values), len(code), int(is_finite)]] * self._ranks, device=values.device)
        if not self._silent:
            all_gather(lengths.view(-1), lengths[0].clone())
        sizes = lengths.tolist()
        if not all(finite for *_, finite in sizes):
            return None
        # Whole fp32 words, for the next row; without a byte, row 1 would begin at byte 1.
        longest = 4 * max(1, *(count + -(-words // 2) for count, words, _ in sizes))
        own = torch.zeros(longest, dtype=torch.uint8, device=values.device)
        own[: values.nbytes] = values.view(torch.uint8)
        own[values.nbytes : values.nbytes + code.nbytes] = code.view(torch.uint8)
        packed = own.repeat(self._ranks, 1)
        if not self._silent:
            all_gather(packed.view(-1), own)
            ring = 2 * (self._ranks - 1) / self._ranks * 4 * self._dense
            self._bytes += (self._ranks - 1) * (longest + lengths[0].nbytes) + ring
        found = []
        for row, (count, words, _) in zip(packed, sizes, strict=True):
            code_at = 4 * count
            found.append((row[:code_at].view(torch.float32), row[code_at : code_at + 2 * words].view(torch.int16)))
        return found


def entries_above(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the positions, ascending, of the entries whose magnitude is at least the threshold.

    `values` is a vector. Entries that are not finite may be missing.
    """
    size = min(len(values), _CHUNK) if values.device.type == "cpu" else len(values)
    if not size:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    magnitudes, hits = torch.empty_like(values[:size]), torch.empty_like(values[:size], dtype=torch.bool)
    found = []
    for number, part in enumerate(torch.split(values, size)):
        count = len(part)
        torch.abs(part, out=magnitudes[:count])
        torch.ge(magnitudes[:count], threshold, out=hits[:count])
        found.append(hits[:count].nonzero().view(-1).add_(number * size))
    return torch.cat(found)


def encode(positions: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Return the code of ascending positions and of their signs, `negative` or not, as int16."""
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    signs = negative.to(torch.int32) * _SIGN
    longest = int(gaps.max()) if len(gaps) else 0
    if longest < _ESCAPE:
        return _words(gaps.to(torch.int32) + signs)
    escapes = gaps // _ESCAPE
    places = torch.arange(len(gaps), device=gaps.device) + escapes.cumsum(0)
    words = torch.full((int(places[-1]) + 1,), _ESCAPE, dtype=torch.int32, device=gaps.device)
    words[places] = (gaps % _ESCAPE).to(torch.int32) + signs
    return _words(words)


def decode(code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions, ascending, and whether each is negative."""
    skipped = code & _ESCAPE
    is_entry = skipped != _ESCAPE
    steps = skipped.to(torch.int64) + is_entry
    places = steps.cumsum(0) - 1
    if bool(is_entry.all()):
        return places, code < 0
    return places[is_entry], code[is_entry] < 0


def _words(values: torch.Tensor) -> torch.Tensor:
    """Return values from 0 to 65535 as int16 with the same bits."""
    return torch.where(values < _SIGN, values, values - 2 * _SIGN).to(torch.int16)

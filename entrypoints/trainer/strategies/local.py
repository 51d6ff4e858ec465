"""Strategy local: every rank trains its own copy, and all ranks average their copies every `period` steps.

Parameter averaging (Stich 2019, arXiv:1805.09767), after some steps of ddp (post-local SGD) and within instances more
often (hierarchical; both Lin et al. 2020, arXiv:1808.07217), or with an outer optimizer whose gradient is the mean
movement of the ranks since the last average (DiLoCo, Douillard et al. 2023, arXiv:2311.08105).

A step takes `global_batch_size` samples over all ranks and the learning rate of ddp. A rank's gradient is the mean over
the rank's own samples. Buffers such as batch norm's statistics are the rank's own until an average; then rank 0's hold.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...rank import exchange
from ..settings import LocalSettings
from .buffers import Buffers, neighbours
from .ddp import ddp
from .facts import together
from .strategy import Setup, State, Strategy, buckets, share_weights

_SCALER = "scaler"  # the name in a rank's state


def local(setup: Setup) -> Strategy:
    """Return the module on every rank, averaged as `settings.local` says; on one rank ddp. Raises TaskError."""
    module, split, silent = setup.module, setup.split, setup.silent
    wanted, as_ddp = setup.settings.local or LocalSettings(), together(setup.settings)
    if split.ranks == 1:
        print("strategy local on one rank is ddp: there is no other rank to average with", flush=True)
        return ddp(replace(setup, settings=as_ddp))
    if wanted.sync_steps:
        synced = ddp(replace(setup, settings=as_ddp))
        # The blocks are prepared now, and the module is on the device.
        plain = replace(as_ddp, compile=False, activation_checkpointing=False)
        alone = ddp(replace(setup, settings=plain, split=replace(split, ranks=1), blocks=None))
        own, model = alone.micro_batch, cast(DistributedDataParallel, synced.model)

        @contextlib.contextmanager
        def unsynced(virtual: int, last: bool) -> Iterator[None]:
            model.broadcast_buffers = False
            with own(virtual, last), model.no_sync():
                yield

        alone = replace(alone, micro_batch=unsynced)
    else:
        synced = alone = ddp(replace(setup, settings=as_ddp, split=replace(split, ranks=1)))
        share_weights(module.parameters(), setup.device)
    buffers = setup.buffers(dist.get_rank() * split.accumulation)
    buffers.sync()
    has_groups = wanted.group_period is not None and not silent  # this instance's ranks average more often
    group = neighbours(int(os.environ.get("LOCAL_WORLD_SIZE") or 1)) if has_groups else None
    rounds = Rounds(wanted, module, buffers, group, is_silent=silent)

    def now() -> Strategy:
        return alone if rounds.is_lone() else synced

    return replace(
        synced,
        micro_batch=lambda virtual, last: now().micro_batch(virtual, last),
        finish=lambda: now().finish(),
        finite_gradients=lambda: now().finite_gradients(),
        sync_buffers=rounds.sync_buffers,
        undo_buffers=lambda: now().undo_buffers(),
        load_rank_state=rounds.load_own,
        figures=lambda: rounds.figures(synced.figures().get("bytes_sent", 0.0)),
        attach=rounds.attach,
        is_lone=rounds.is_lone,
        after_step=rounds.after_step,
        is_alike=lambda: not rounds.is_apart,
        merged=rounds.merged,
        shared_state=rounds.shared_state,
        load_shared_state=rounds.load_shared_state,
    )


def outer_copies(wanted: LocalSettings, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the outer optimizer's copies: the weights at the last average, and the momentum; empty if unused."""
    anchor = [p.detach().clone() for p in parameters] if wanted.has_outer else []
    momentum = [torch.zeros_like(p, requires_grad=False) for p in parameters] if wanted.outer.momentum else []
    return [anchor, momentum]


class Rounds:
    """A rank's copy between averages: counts steps, averages weights and optimizer state, saves and loads both."""

    def __init__(
        self,
        wanted: LocalSettings,
        module: nn.Module,
        buffers: Buffers,
        neighbours: dist.ProcessGroup | None = None,
        *,
        is_silent: bool = False,
    ) -> None:
        """`neighbours` are the ranks that average every `group_period` steps. With `is_silent` nothing is sent."""
        self._wanted, self._module, self._buffers = wanted, module, buffers
        self._neighbours, self._is_silent = neighbours, is_silent
        self._named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._weights: list[torch.Tensor] = list(self._named.values())
        self._anchor, self._momentum = outer_copies(wanted, self._weights)
        self._optimizer: torch.optim.Optimizer | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._step = 0
        self.is_apart = False
        self.averages = 0
        self._sent_bytes, self._synced, self._counted = 0.0, 0, 0  # since the last figures

    def attach(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Use the optimizer's state and the scaler's in averages and saves."""
        self._optimizer, self._scaler = optimizer, scaler

    def is_lone(self, step: int | None = None) -> bool:
        """Return whether each rank takes the step, counted from 0, alone; by default the present step."""
        return (self._step if step is None else step) >= self._wanted.sync_steps

    def after_step(self, step: int, last_step: int) -> int:
        """Average if due after so many steps, as `Strategy.after_step` describes."""
        self._step, done = step, step - self._wanted.sync_steps
        self._counted += 1
        if done <= 0:
            self._synced += 1
            if done == 0:
                self._set_anchor()
            return 1
        self.is_apart = True
        if done % self._wanted.period and step != last_step:
            if self._wanted.group_period and done % self._wanted.group_period == 0 and self._neighbours is not None:
                self._average(self._weights, self._neighbours)
            return 0
        if not self._is_silent:
            self._meet()
        self.is_apart, self.averages = False, -(-done // self._wanted.period)
        return done % self._wanted.period or self._wanted.period

    def figures(self, synced_bytes: float) -> dict[str, float]:
        """Return the figures since the last call; `synced_bytes` is what a step of ddp sends."""
        sent = self._sent_bytes + self._synced * synced_bytes
        found = {"bytes_sent": sent / max(1, self._counted), "averages": self.averages}
        self._sent_bytes, self._synced, self._counted = 0.0, 0, 0
        return found

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, unless the ranks are apart: then each rank needs its own."""
        if not self.is_apart:
            self._buffers.sync()

    @contextlib.contextmanager
    def merged(self) -> Iterator[State]:
        """Give model and optimizer the ranks' means, then restore this rank's values exactly; yield these values."""
        has_state = self._step > self._wanted.sync_steps and (self.is_apart or self._wanted.keeps_state)
        if has_state:
            self._complete_state()
        live = self._own(weights=self.is_apart, state=has_state)
        own = {name: tensor.detach().to("cpu", copy=True) for name, tensor in live.items()}
        if self.is_apart:
            self._average(self._weights)
            self._buffers.sync()
        if has_state:
            self._average(list(self._state().values()))
        try:
            yield {**own, **self._scale()}
        finally:
            with torch.no_grad():
                for name, tensor in live.items():
                    tensor.copy_(own[name])

    @torch.no_grad()
    def load_own(self, state: State) -> None:
        """Load this rank's values from a save of the same number of ranks."""
        for name, tensor in self._own(weights=True, state=True).items():
            if name in state:
                tensor.copy_(state[name])
        self.is_apart = any(name.startswith("local.weight.") for name in state)
        if self._scaler is not None and self._scaler.is_enabled() and _SCALER in state:
            scale, growth = state[_SCALER].tolist()
            now = self._scaler.state_dict()
            self._scaler.load_state_dict({**now, "scale": scale, "_growth_tracker": int(growth)})

    def shared_state(self) -> State:
        """Return the outer optimizer's state; right after an average the weights are the anchor, which is left out."""
        state = {f"momentum.{name}": value for name, value in zip(self._named, self._momentum, strict=False)}
        if self.is_apart:
            state |= {f"anchor.{name}": value for name, value in zip(self._named, self._anchor, strict=False)}
        return state

    @torch.no_grad()
    def load_shared_state(self, state: State, step: int) -> None:
        """Continue after so many steps, with the weights already loaded."""
        self._step, self.is_apart = step, False
        self.averages = max(0, step - self._wanted.sync_steps) // self._wanted.period
        self._set_anchor()
        for kind, tensors in (("anchor", self._anchor), ("momentum", self._momentum)):
            for name, tensor in zip(self._named, tensors, strict=False):
                if f"{kind}.{name}" in state:
                    tensor.copy_(state[f"{kind}.{name}"])

    def _meet(self) -> None:
        """Give all ranks the same weights, buffers and, as the settings say, optimizer state."""
        if self._wanted.has_outer:
            self._outer_step()
        else:  # a branch of its own: anchor - mean(anchor - w) would round
            self._average(self._weights)
        if not self._wanted.keeps_state:
            self._complete_state()
            self._average(list(self._state().values()))
        self._buffers.sync()

    @torch.no_grad()
    def _outer_step(self) -> None:
        """Move the anchor against the mean movement d: v = mu v + d; anchor -= lr (d + mu v); w = anchor."""
        outer, anchors = self._wanted.outer, dict(zip(self._weights, self._anchor, strict=True))
        momenta = dict(zip(self._weights, self._momentum, strict=False))
        for weight, d in self._means(self._weights, lambda weight: anchors[weight] - weight):
            anchor, v = anchors[weight], momenta.get(weight)
            if v is not None:
                v.mul_(outer.momentum).add_(d)
                d = d.add(v, alpha=outer.momentum)
            anchor.sub_(outer.lr * d)
            weight.copy_(anchor)

    @torch.no_grad()
    def _average(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Replace the tensors by their means over the ranks, in place."""
        for tensor, mean in self._means(tensors, lambda tensor: tensor, group):
            tensor.copy_(mean)

    def _means(
        self,
        tensors: Sequence[torch.Tensor],
        term: Callable[[torch.Tensor], torch.Tensor],
        group: dist.ProcessGroup | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor with the mean of its `term` over the ranks; the extra memory is a bucket's."""
        ranks = dist.get_world_size(group)
        for bucket in buckets(tensors):
            flat = torch.cat([term(tensor).reshape(-1) for tensor in bucket])
            flat = flat.float() if flat.element_size() < 4 else flat  # a sum in half precision would lose digits
            dist.all_reduce(flat, group=group)
            flat /= ranks
            self._sent_bytes += 2 * (ranks - 1) / ranks * flat.nbytes  # by a ring, as ddp counts
            for tensor, mean in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
                yield tensor, mean.view(tensor.shape)

    @torch.no_grad()
    def _set_anchor(self) -> None:
        for anchor, weight in zip(self._anchor, self._weights, strict=False):
            anchor.copy_(weight)

    def _state(self) -> State:
        """Return the optimizer's state in floating-point tensors, by parameter and key, in the order of all ranks."""
        kept = {} if self._optimizer is None else self._optimizer.state
        return {
            f"{name}.{key}": value
            for name, parameter in self._named.items()
            for key, value in sorted(kept.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }

    def _complete_state(self) -> None:
        """Give every rank the same names of optimizer state: a rank that has left out its first steps has no state.

        Zeros are the state before the first step.
        """
        own = {name: [list(t.shape), str(t.dtype), t.device.type] for name, t in self._state().items()}
        if len(set(exchange.gather(zlib.crc32(repr(own).encode())))) == 1 or self._optimizer is None:
            return
        for listed in exchange.gather(own):
            for full, (shape, dtype, kind) in listed.items():
                name, _, key = full.rpartition(".")
                values, weight = self._optimizer.state[self._named[name]], self._named[name]
                if key not in values:
                    place = weight.device if kind == weight.device.type else torch.device(kind)
                    kind_of = getattr(torch, dtype.removeprefix("torch."))
                    values[key] = torch.zeros(shape, dtype=kind_of, device=place)

    def _own(self, *, weights: bool, state: bool) -> State:
        """Return this rank's live tensors by their names in a save; `weights` with buffers."""
        own: State = {}
        if weights:
            saved = self._module.state_dict(keep_vars=True)
            own |= {f"local.weight.{name}": p for name, p in self._named.items()}
            own |= {f"local.buffer.{name}": b for name, b in self._module.named_buffers() if name in saved}
        if state:
            own |= {f"local.state.{name}": value for name, value in self._state().items()}
        return own

    def _scale(self) -> State:
        """Return the scaler's state, which differs by rank as soon as ranks train alone; {} without a scaler."""
        if self._scaler is None or not self._scaler.is_enabled() or self._step <= self._wanted.sync_steps:
            return {}
        scaler = self._scaler.state_dict()
        return {_SCALER: torch.tensor([scaler["scale"], scaler["_growth_tracker"]], dtype=torch.float64)}

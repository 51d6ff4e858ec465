"""Optimizers, and learning-rate schedules as closed forms of the step; only plateau has state, in the job's progress.

LARS and LAMB are written here, since torch has neither. Their trust ratios are quotients of norms of whole layers; if
fsdp shards the parameters, the ranks sum the squares of all layers' norms in one all-reduce a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import TaskError
from ..rank.exchange import local_part
from .settings import OptimizerSettings, ScheduleSettings

Parameters = Iterable[nn.Parameter]
Tensors = list[torch.Tensor]


def build(
    settings: OptimizerSettings, parameters: Parameters, global_batch_size: int | None = None, *, fused: bool = True
) -> torch.optim.Optimizer:
    """Return the named optimizer over the parameters that need gradients, its rate scaled to the global batch.

    Without `global_batch_size` the rate is `settings.lr` unchanged. Under fsdp, call it after sharding. `fused`: AdamW
    may take its fused form.
    """
    lr = settings.lr
    if global_batch_size is not None:
        lr = scaled_lr(lr, global_batch_size, settings.base_batch_size, settings.lr_scaling)
    return OPTIMIZERS[settings.name](settings, lr, [p for p in parameters if p.requires_grad], fused)


def _adam(settings: OptimizerSettings, lr: float) -> dict[str, Any]:
    return {"lr": lr, "betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}


# The makers, by the settings, the rate, the parameters, and whether AdamW may be fused: one call for all parameters, as
# on small models the default's Python is most of the step. SGD is not fused: torch 2.13 has no fused SGD over fsdp's
# shards. RAdam's default is foreach on GPUs, over shards too, and a loop on CPUs, where foreach is slower on any model
# whose parameters outgrow the cache: 24 against 14 ms for 10 M (torch 2.13, one thread). RAdam's weight decay is
# decoupled as in AdamW, and in the authors' own code (Liu et al. 2020).
OPTIMIZERS: dict[str, Callable[[OptimizerSettings, float, Parameters, bool], torch.optim.Optimizer]] = {
    "sgd": lambda s, lr, params, _: torch.optim.SGD(params, lr, s.momentum, weight_decay=s.weight_decay),
    "adamw": lambda s, lr, params, fused: torch.optim.AdamW(params, **_adam(s, lr), fused=fused or None),
    "radam": lambda s, lr, params, _: torch.optim.RAdam(params, **_adam(s, lr), decoupled_weight_decay=True),
    "lars": lambda s, lr, params, _: LARS(
        params, lr=lr, momentum=s.momentum, weight_decay=s.weight_decay, trust_coefficient=s.trust_coefficient
    ),
    "lamb": lambda s, lr, params, _: LAMB(params, **_adam(s, lr)),
}


# How the rate grows with k, the global batch in base batches.
SCALING_RULES: dict[str, Callable[[float], float]] = {"none": lambda k: 1.0, "linear": lambda k: k, "sqrt": math.sqrt}


def scaled_lr(base_lr: float, global_batch_size: int, base_batch_size: int, rule: str) -> float:
    """Return the learning rate for the global batch, by the rule none, linear or sqrt.

    Batch sizes count samples per optimizer step, over all ranks and accumulation steps.
    Sources: linear, Goyal et al. 2017, section 2.1, for SGD; it holds to about 8k images a step, with warm-up. sqrt,
    Krizhevsky 2014, section 5, and Hoffer et al. 2017, section 4, keeps the variance of the steps; You et al. 2020 use
    it for LAMB.
    """
    return base_lr * SCALING_RULES[rule](global_batch_size / base_batch_size)


def warmup_start(settings: OptimizerSettings, schedule: ScheduleSettings, global_batch_size: int) -> float:
    """Return the share of the full rate at which the warm-up begins: the unscaled rate's share, else 0.

    For `lr_factor`. The warm-up of a rate scaled down begins at 0 as usual. Raises TaskError if a rate is scaled up
    without a warm-up: Goyal et al. 2017, section 2.2, found that training then starts badly.
    """
    factor = scaled_lr(1.0, global_batch_size, settings.base_batch_size, settings.lr_scaling)
    if factor <= 1.0:
        return 0.0
    if schedule.warmup_steps == 0 and schedule.name != "one-cycle":
        raise TaskError(
            f"optimizer.lr_scaling {settings.lr_scaling} raises lr {settings.lr:g} to {settings.lr * factor:g} for "
            f"{global_batch_size} samples a step, which needs a warm-up: set schedule.warmup_steps to the steps of "
            "about 5 epochs, or to 5 % of max_steps; or set lr_scaling: none, and lr to what you want"
        )
    return 1.0 / factor


# The remaining share of the decay, from 1 to 0, as the completed share goes from 0 to 1.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "one-cycle": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
# Of one-cycle: the first rate, and the share of the steps that rise. Source: the defaults of torch's OneCycleLR.
_CYCLE_START, _CYCLE_RISE = 1 / 25, 0.3


def lr_factor(schedule: ScheduleSettings, step: int, max_steps: int, start: float = 0.0, falls: int = 0) -> float:
    """Return the factor on the full rate for the step counted from 0; `falls` are those of plateau.

    Warm-up rises linearly, (step + 1) / warmup_steps, so that no step is wasted at rate 0; from a `start` above 0 (see
    `warmup_start`), step 0 has exactly `start`. The rest falls from 1 towards min_lr_ratio, the factor of the step
    after the last. Sources: cosine, Loshchilov and Hutter 2017, eq. 5; gradual warm-up, Goyal et al. 2017, section 2.2;
    one-cycle, which rises along a cosine, Smith and Topin 2018 (arXiv:1708.07120), without a cycle of the momentum.
    """
    warmup, is_cycle = schedule.warmup_steps, schedule.name == "one-cycle"
    if is_cycle:
        warmup, start = warmup or max(1, round(_CYCLE_RISE * max_steps)), start or _CYCLE_START
    if step < warmup:
        done = (step if start else step + 1) / warmup
        return start + (1.0 - start) * (1.0 - SCHEDULES["one-cycle"](done) if is_cycle else done)
    if schedule.name not in SCHEDULES:
        falls = falls if schedule.name == "plateau" else sum(step >= milestone for milestone in schedule.milestones)
        return max(schedule.min_lr_ratio, schedule.gamma**falls)
    done = (step - warmup) / max(1, max_steps - warmup)
    height = SCHEDULES[schedule.name](min(done, 1.0))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * height


def own_factor(function: Callable[..., Any], step: int, max_steps: int, params: dict[str, Any]) -> float:
    """Return the factor of the task's `schedule`. Raises TaskError unless it is a number from 0 on."""
    factor = function(step, max_steps, params)
    factor = factor.item() if getattr(factor, "ndim", None) == 0 else factor  # a tensor, or an array
    if not isinstance(factor, Real) or not 0.0 <= float(factor) < math.inf:
        what = f"schedule({step}, {max_steps}, params) returned {factor!r:.200}"
        raise TaskError(f"{what}; return the factor on lr, a number from 0 on")
    return float(factor)


def set_lr(groups: list[dict[str, Any]], base_lrs: list[float], factor: float) -> float:
    """Set each group's rate to its base times the factor; return the first group's rate."""
    lr = base_lrs[0] * factor
    if groups[0]["lr"] != lr or len(base_lrs) > 1:
        for group, base in zip(groups, base_lrs, strict=True):
            put_lr(group, base * factor)
    return lr


def put_lr(group: dict[str, Any], lr: float) -> None:
    """Set the rate of one group, in place if the optimizer's rate is a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


class _Layers(NamedTuple):
    """One group's parameters that have gradients, a layer each; `weights` and `updates` are this rank's shards.

    `adapted` are the indices of layers with a trust ratio and weight decay. Biases and norms have neither: their norms
    say little of a layer's scale. The authors' code of both optimizers does the same.
    """

    group: dict[str, Any]
    parameters: Tensors
    weights: Tensors
    updates: Tensors
    adapted: list[int]


class _Layerwise(torch.optim.Optimizer):
    """An optimizer whose rate for each layer is multiplied by a trust ratio, from the norms of weights and update."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # the loop has no closure
        """Take one step. Collective if parameters are sharded."""
        groups = [group for group in self.param_groups if any(p.grad is not None for p in group["params"])]
        all_layers = [self._prepare(group) for group in groups]
        chosen = [(layers, i) for layers in all_layers for i in layers.adapted]
        lists = ("parameters", "weights", "updates")
        norms = whole_norms(*([getattr(layers, name)[i] for layers, i in chosen] for name in lists))
        start = 0
        for layers in all_layers:
            weight_norms, update_norms = norms[:, start : start + len(layers.adapted)]
            start += len(layers.adapted)
            ratios = self._ratios(layers.group, weight_norms, update_norms)
            # Zero weights or zero gradients allow no comparison: use the plain rate.
            self._apply(layers, torch.where((weight_norms > 0) & (update_norms > 0), ratios, 1.0))

    def _prepare(self, group: dict[str, Any]) -> _Layers:
        """Return the group's layers with the updates for the trust ratios."""
        parameters = [p for p in group["params"] if p.grad is not None]
        if any(p.grad.is_sparse for p in parameters):
            raise RuntimeError(f"{type(self).__name__} takes no sparse gradients: use nn.Embedding(sparse=False)")
        return _Layers(
            group,
            parameters,
            weights=[local_part(parameter) for parameter in parameters],
            updates=[local_part(parameter.grad) for parameter in parameters],
            adapted=[i for i, parameter in enumerate(parameters) if parameter.ndim > 1],
        )

    def _ratios(self, group: dict[str, Any], weight_norms: torch.Tensor, update_norms: torch.Tensor) -> torch.Tensor:
        """Return the trust ratios, [adapted layers], where both norms are positive."""
        raise NotImplementedError

    def _apply(self, layers: _Layers, ratios: torch.Tensor) -> None:
        """Move the weights; `ratios` are of the adapted layers."""
        raise NotImplementedError

    def _state(self, layers: _Layers, name: str) -> Tensors:
        """Return this rank's shards of the named state, zero at first; `self.state` is sharded like the weights."""
        for parameter in layers.parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [local_part(self.state[parameter][name]) for parameter in layers.parameters]


class LARS(_Layerwise):
    """SGD with momentum, each layer's rate proportional to the norm of its weights over the norm of its gradient.

    For layer weights w with gradient g: ratio = trust_coefficient |w| / (|g| + weight_decay |w|), then v = momentum v +
    lr ratio (g + weight_decay w) and w = w - v. The rate enters v, as in the paper, not w's change, as in torch's SGD.
    One-dimensional parameters: ratio 1, no weight decay. Source: You, Gitman and Ginsburg 2017 (arXiv:1708.03888),
    algorithm 1.
    """

    def _ratios(self, group: dict[str, Any], weight_norms: torch.Tensor, update_norms: torch.Tensor) -> torch.Tensor:
        decay, trust = float(group["weight_decay"]), float(group["trust_coefficient"])
        return trust * weight_norms / (update_norms + decay * weight_norms)

    def _apply(self, layers: _Layers, ratios: torch.Tensor) -> None:
        group = layers.group
        moves: Any = torch._foreach_mul(layers.updates, group["lr"])
        if layers.adapted:
            adapted, weights = [moves[i] for i in layers.adapted], [layers.weights[i] for i in layers.adapted]
            torch._foreach_add_(adapted, weights, alpha=group["lr"] * group["weight_decay"])
            torch._foreach_mul_(adapted, list(ratios.unbind()))
        if group["momentum"]:
            buffers = self._state(layers, "momentum_buffer")
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, moves)
            moves = buffers
        torch._foreach_sub_(layers.weights, moves)


class LAMB(_Layerwise):
    """Adam with decoupled weight decay, each layer's step in proportion to the norm of its weights.

    For layer weights w with Adam's bias-corrected direction r: u = r + weight_decay w and w = w - lr (|w| / |u|) u.
    One-dimensional parameters: ratio 1, no weight decay.
    Source: You et al. 2020 (arXiv:1904.00962), algorithm 2, with the identity for phi.
    """

    def _prepare(self, group: dict[str, Any]) -> _Layers:
        layers = super()._prepare(group)
        beta1, beta2 = group["betas"]
        for parameter in layers.parameters:  # separate counts: late parameters correct their bias from their first step
            state = self.state[parameter]
            state["step"] = state.get("step", torch.zeros((), dtype=torch.float32, device="cpu")) + 1
        steps = [float(self.state[parameter]["step"]) for parameter in layers.parameters]
        means, squares = self._state(layers, "exp_avg"), self._state(layers, "exp_avg_sq")
        torch._foreach_lerp_(means, layers.updates, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, layers.updates, layers.updates, 1 - beta2)
        # In place from here, so that the step needs only one list of temporaries beside its state. The two bias
        # corrections are folded into one pass: mean / b1 / (sqrt(square / b2) + eps).
        updates: Any = torch._foreach_sqrt(squares)
        torch._foreach_mul_(updates, [(1 - beta1**step) / math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(updates, [(1 - beta1**step) * group["eps"] for step in steps])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, means)
        if layers.adapted and group["weight_decay"]:
            weights = [layers.weights[i] for i in layers.adapted]
            torch._foreach_add_([updates[i] for i in layers.adapted], weights, alpha=group["weight_decay"])
        return layers._replace(updates=list(updates))

    def _ratios(self, group: dict[str, Any], weight_norms: torch.Tensor, update_norms: torch.Tensor) -> torch.Tensor:
        return weight_norms / update_norms

    def _apply(self, layers: _Layers, ratios: torch.Tensor) -> None:
        if layers.adapted:
            torch._foreach_mul_([layers.updates[i] for i in layers.adapted], list(ratios.unbind()))
        torch._foreach_add_(layers.weights, layers.updates, alpha=-layers.group["lr"])


def whole_norms(parameters: Sequence[torch.Tensor], *parts: Tensors) -> torch.Tensor:
    """Return L2 norms over whole parameters, [lists of parts, parameters]; parts are their local shards.

    In fp32 even for half precision, whose squares overflow; in fp64 for fp64. On one rank and under ddp the ranks do
    not communicate, so the norms are the same bits at any number of ranks.
    """
    if not parameters:
        return torch.zeros(len(parts), 0)
    dtype = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
    norms = torch.stack([torch.stack(torch._foreach_norm(part, 2, dtype=dtype)) for part in parts])
    sharded: dict[Any, list[int]] = {}  # the indices of the parameters by their kind of sharding
    for i, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            sharded.setdefault((parameter.device_mesh, parameter.placements), []).append(i)
    for (mesh, placements), columns in sharded.items():
        # No sum over a mesh's replicating dimension (hsdp): the ranks hold equal values.
        dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        squares = norms[:, columns].square()
        for dim in dims:
            dist.all_reduce(squares, group=mesh.get_group(dim))
        if dims:
            norms[:, columns] = squares.sqrt()
    return norms

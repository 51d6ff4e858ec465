"""Optimizers, and learning-rate schedules as closed forms of the step: no state to save, none to lose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from cloudtrain.entrypoints.settings import Optimizer, Schedule, TaskError

__all__ = ["OPTIMIZERS", "SCHEDULES", "build", "lr_factor", "set_lr"]

Parameters = Iterable[nn.Parameter]


def build(settings: Optimizer, parameters: Parameters) -> torch.optim.Optimizer:
    """Return the named optimizer over the parameters that need gradients. Raises TaskError at an unknown name."""
    maker = OPTIMIZERS.get(settings.name)
    if maker is None:
        known = ", ".join(sorted(OPTIMIZERS))
        raise TaskError(f"optimizer {settings.name!r} is unknown; there are {known}, or write optimizer(model, params)")
    return maker(settings, [p for p in parameters if p.requires_grad])


def _sgd(settings: Optimizer, parameters: Parameters) -> torch.optim.Optimizer:
    # Not fused, as AdamW is: torch 2.13 has no fused SGD over fsdp's shards.
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def _adamw(settings: Optimizer, parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,  # one call for all parameters: on small models the default's Python is most of the step
    )


OPTIMIZERS: dict[str, Callable[[Optimizer, Parameters], torch.optim.Optimizer]] = {"sgd": _sgd, "adamw": _adamw}

# The share of the way down, from 1 to 0, as the share of the way done goes from 0 to 1.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def lr_factor(schedule: Schedule, step: int, max_steps: int) -> float:
    """Return the factor on the full rate for the step counted from 0.

    Warm-up rises linearly, (step + 1) / warmup_steps, so that no step is wasted at rate 0; the rest falls from 1
    towards min_lr_ratio, which the step after the last would have. Source of cosine: Loshchilov and Hutter 2017, eq. 5.
    """
    if schedule.name not in SCHEDULES:
        raise TaskError(f"schedule {schedule.name!r} is unknown; there are {', '.join(sorted(SCHEDULES))}")
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    done = (step - schedule.warmup_steps) / max(1, max_steps - schedule.warmup_steps)
    height = SCHEDULES[schedule.name](min(done, 1.0))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * height


def set_lr(optimizer: torch.optim.Optimizer, base_lrs: list[float], factor: float) -> float:
    """Set each group's rate to its base times the factor; return that of the first group."""
    for group, base in zip(optimizer.param_groups, base_lrs, strict=True):
        group["lr"] = base * factor
    return base_lrs[0] * factor

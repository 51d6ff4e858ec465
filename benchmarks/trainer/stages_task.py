"""The task of stages.py: blocks that take given times, by sleeping or by real arithmetic."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    """Takes a unit of time forward and two backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, duration_s: float) -> torch.Tensor:
        ctx.duration_s = duration_s
        time.sleep(duration_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.duration_s)
        return gradients[0], None


class Sleeping(nn.Module):
    """A block that sleeps, so that ranks on few cores do not slow each other."""

    def __init__(self, duration_s: float) -> None:
        super().__init__()
        self.linear, self.duration_s = nn.Linear(4, 4), duration_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(self.linear(x), self.duration_s)


class Working(nn.Module):
    """A residual block of two matrices."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, hidden), nn.Linear(hidden, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model(params: dict[str, Any]) -> nn.Module:
    """Return blocks of these milliseconds, or of these hidden widths."""
    if "sleeps_ms" in params:
        return nn.Sequential(*(Sleeping(each / 1e3) for each in params["sleeps_ms"]))
    return nn.Sequential(*(Working(each) for each in params["widths"]))


def dataset(params: dict[str, Any], split: str) -> Any:
    """Return noise."""
    if split != "train":
        return None
    shape = (4,) if "sleeps_ms" in params else (32, 128)
    return torch.utils.data.TensorDataset(torch.randn(2048, *shape, generator=torch.Generator().manual_seed(0)))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean square of the outputs."""
    return model(batch[0]).pow(2).mean()

"""Which of four spirals does a point belong to? Three functions are all that the shared trainer asks for."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def model(params: dict[str, Any]) -> nn.Module:
    """Return a new model; `params` is the config's."""
    hidden = params["hidden"]
    return nn.Sequential(
        nn.Linear(2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 4),
    )


def dataset(params: dict[str, Any], split: str) -> TensorDataset:
    """Return the samples of "train", "eval" or "test"; every rank must see the same ones."""
    count = params["samples"] if split == "train" else params["samples"] // 4
    random = torch.Generator().manual_seed({"train": 0, "eval": 1, "test": 2}[split])
    arm = torch.randint(0, 4, (count,), generator=random)
    radius = torch.rand(count, generator=random)
    angle = arm * torch.pi / 2 + radius * 4 + torch.randn(count, generator=random) * 0.1
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points, arm)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    points, arm = batch
    return nn.functional.cross_entropy(model(points), arm)


def evaluate(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Return metrics of a batch; optional, the loss is reported anyway."""
    points, arm = batch
    return {"accuracy": (model(points).argmax(dim=1) == arm).float().mean()}

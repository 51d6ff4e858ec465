"""A loss over the samples of all ranks: its gradient, and even batches in an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainerruns import Run, whole_run

from cloudtrain.entrypoints.trainer import evaluate

# The documented form of a loss over the features of all ranks.
CONTRASTIVE = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]

class Pairs:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, index):
        x = torch.arange(1.0, 7).mul(index + 1).sin()
        return x, x.flip(0) + 0.1

def dataset(params, split):
    return Pairs(32 if split == "train" else 21)

def model(params):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))

def loss(model, batch):
    one, other = F.normalize(model(torch.cat(batch)), dim=1).chunk(2)
    rows = torch.arange(len(one)) + len(one) * dist.get_rank()
    return F.cross_entropy(one @ Gather.apply(other).T / 0.2, rows)
"""
WHOLE = CONTRASTIVE.replace("Gather.apply(other)", "other")


@pytest.fixture(scope="module")
def contrasted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run of one rank, with a plain loss over the whole batch."""
    settings = {"optimizer": {"name": "sgd", "lr": 0.1}, "global_batch_size": 16, "micro_batch_size": 16}
    return whole_run(tmp_path_factory.mktemp("whole"), 1, text=WHOLE, eval_every=None, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"strategy": "fsdp"}, {"reproducible": "strict"}], ids=str)
def test_loss_over_all_ranks_is_the_whole_batchs(settings: dict[str, Any], contrasted: Run, tmp_path: Path) -> None:
    """Gradients, and an evaluation of 21 samples: rounds of 8 and 2 samples a rank, and one sample with its repeat."""
    settings |= {"optimizer": {"name": "sgd", "lr": 0.1}, "global_batch_size": 16, "micro_batch_size": 8}
    done = whole_run(tmp_path, 2, text=CONTRASTIVE, eval_every=None, **settings)
    assert done.values("step", "loss") == pytest.approx(contrasted.values("step", "loss"), abs=1e-6)
    for name, weight in contrasted.exported().items():
        assert torch.allclose(done.exported()[name], weight, atol=1e-6), name
    space: dict[str, Any] = {}
    exec(WHOLE.replace("dist.get_rank()", "0"), space)
    net = space["model"]({})
    net.load_state_dict(done.exported())
    samples = [space["Pairs"](21)[index] for index in (*range(21), 20)]
    total = 0.0
    for begin, end, weight in ((0, 16, 16), (16, 20, 4), (20, 22, 1)):
        batch = [torch.stack(part) for part in zip(*samples[begin:end], strict=True)]
        total += weight * space["loss"](net, batch).item()
    assert done.values("eval", "loss")[16] == pytest.approx(total / 21, abs=1e-6)


@pytest.mark.parametrize(("length", "limit", "ranks"), [(21, None, 2), (3, None, 4), (47, 2, 3), (16, None, 2)])
def test_even_batches_count_each_sample_once(length: int, limit: int | None, ranks: int) -> None:
    """In each round all ranks have batches of one size, and the weighted batches are the split."""
    plans = [evaluate.shares(length, 4, limit, rank, ranks, is_even=True) for rank in range(ranks)]
    for batches in zip(*plans, strict=True):
        assert len({len(keys) for keys, _ in batches}) == 1
    counted = sorted(index for plan in plans for keys, weight in plan if weight for _, index in keys)
    assert counted == list(range(length if limit is None else limit * ranks * 4))

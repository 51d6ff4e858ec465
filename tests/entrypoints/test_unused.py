"""Layers that are skipped at random: under ddp as in a plain loop in one process, under fsdp refused with words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainerruns import TASK, called, on_ranks, run

from cloudtrain.entrypoints.trainer import data
from cloudtrain.entrypoints.trainer.settings import TrainingSettings
from cloudtrain.entrypoints.trainer.strategies import gathers
from cloudtrain.entrypoints.trainer.strategies.wrap import wrap

pytestmark = pytest.mark.slow

# The skipped layers of each micro-batch in turn; 9 is the embedding. Some are skipped by all micro-batches of a step.
# With ALL the loss is a constant.
ALL = set(range(10))
SKIPS = [{0, 2}, {2}, {1, 2, 9}, {2, 3}, ALL, {9}, {9}, {1, 9}, {0}, ALL, {3}, {3, 9}]
STEPS, CPU = 6, torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"virtual": 2},
    "accumulation": {"virtual": 4},
    "bf16": {"virtual": 2, "compression": "bf16"},
    "topk": {"virtual": 2, "compression": "topk", "sparse": True},
    "zero 1": {"virtual": 4, "shard": "optimizer"},
    "skip": {"virtual": 2, "on_nan": "skip"},
    "sparse": {"virtual": 2, "sparse": True},
}


class Layers(nn.Module):
    """An embedding and layers, of which a pass skips some."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, skipped: set[int]) -> torch.Tensor:
        """Return a loss that depends on the layers not skipped."""
        if skipped == ALL:
            return torch.zeros((), requires_grad=True)
        x = x if 9 in skipped else x + self.embedding(torch.tensor([1, 2]))
        for number, layer in enumerate(self.layers):
            x = x if number in skipped else x + layer(x).tanh()
        return x.pow(2).mean()


def micro_batch(virtual: int, step: int, of: int) -> tuple[torch.Tensor, set[int]]:
    """Return the input of a micro-batch, and the layers that it skips."""
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + virtual))
    return x, SKIPS[(of * step + virtual) % len(SKIPS)]


def optimizer_of(parameters: Any, sparse: bool) -> torch.optim.Optimizer:
    """Return an optimizer that moves parameters with a gradient of zero, but for sparse gradients."""
    return torch.optim.SGD(parameters, lr=0.1) if sparse else torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)


def plain(virtual: int, sparse: bool = False, **_: Any) -> list[float]:
    """Return the weights of a plain loop in this process."""
    torch.manual_seed(0)
    module = Layers(sparse)
    optimizer = optimizer_of(module.parameters(), sparse)
    for step in range(STEPS):
        for number in range(virtual):
            (module(*micro_batch(number, step, virtual)) / virtual).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def spread(virtual: int, sparse: bool = False, **settings: Any) -> list[float]:
    """Return the weights that this rank has after the same steps with the other ranks."""
    torch.manual_seed(0)
    module, ranks = Layers(sparse), dist.get_world_size()
    split = data.Split(2 * virtual, 2, ranks, virtual // ranks)
    wanted = TrainingSettings(global_batch_size=split.global_batch, max_steps=1, **settings)
    strategy = wrap(wanted, module, CPU, split, has_optimizer=True)
    with strategy.optimized():
        optimizer = optimizer_of(module.parameters(), sparse)
    owned = split.owned(dist.get_rank())
    for step in range(STEPS):
        for number in owned:
            with strategy.micro_batch(number, number == owned[-1]):
                (called(strategy, *micro_batch(number, step, virtual)) / strategy.divisor).backward()
        strategy.finish()
        if strategy.exchange is not None:
            strategy.exchange(step)
        optimizer.step()
        strategy.share_update()
        optimizer.zero_grad()
    return weights(module)


def weights(module: nn.Module) -> list[float]:
    """Return all weights."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def on_rank(cases: str) -> dict[str, list[float]]:
    """Return this rank's weights in each case."""
    return {name: spread(**settings) for name, settings in json.loads(cases).items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    """The weights of two ranks in each case."""
    found: list[dict[str, list[float]]] = on_ranks(__file__, 2, tmp_path_factory.mktemp("ranks"), json.dumps(CASES))
    return found


@pytest.mark.parametrize("case", CASES)
def test_layers_skipped_at_random_train_as_in_a_plain_loop(results: Any, case: str) -> None:
    """A layer that no rank uses in a step keeps its weights; a layer that one rank uses moves on both."""
    first, second = (rank[case] for rank in results)
    assert first == second
    assert first == pytest.approx(plain(**CASES[case]), abs=3e-3 if case == "bf16" else 1e-6)


QUICK = "from cloudtrain.entrypoints.trainer.strategies import gathers\ngathers.STUCK_S, seen = 0.5, []\n"
LAYERS, EVALUATE = "        for layer in self.layers:\n", "def evaluate(model, batch):\n"
SKIPPED = "        for layer in [l for i, l in enumerate(self.layers) if i != RANK or not self.training]:\n"
BACKWARDS = (
    "        seen.append(1)\n        for layer in self.layers if RANK or len(seen) < 9 else reversed(self.layers):\n"
)
HYBRID = {"strategy": "hsdp", "shard_size": 2}
TENSOR = {"parallel": {"tensor": 2, "plan": {"layers.*.0": "head"}}}


@pytest.mark.parametrize(
    ("before", "after", "ranks", "settings", "said"),
    [
        (LAYERS, SKIPPED, 2, {}, "rank 0 calls block layers.1 where rank 1 calls block layers.0"),
        (LAYERS, BACKWARDS, 2, {}, "rank 0 calls block layers.1 where rank 1 calls block layers.0"),
        (LAYERS, SKIPPED.replace("i != RANK", "RANK"), 2, {}, "ends the batch where rank 1 calls block layers.0"),
        (LAYERS, SKIPPED.replace("i != RANK", "RANK != 3"), 4, HYBRID, "rank 0 calls block layers.0 where rank 3 ends"),
        (LAYERS, SKIPPED.replace("i != RANK", "RANK < 2"), 4, TENSOR, "rank 0 calls block layers.0 where rank 2 ends"),
        (EVALUATE, f"{EVALUATE}    if RANK: model(batch[0])\n", 2, {}, "batch where rank 1 calls block layers.0"),
        (EVALUATE, f"{EVALUATE}    if not RANK: model(batch[0])\n", 2, {}, "calls block layers.0 where rank 1 ends"),
    ],
    ids=["crosswise", "another order", "one rank", "hsdp", "tensor", "evaluate", "evaluate 0"],
)
def test_ranks_that_gather_other_blocks_are_refused(
    before: str, after: str, ranks: int, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """The error names the blocks, the ranks and the cure."""
    text = (TASK + QUICK).replace(before, after)
    done = run(tmp_path, ranks, text=text, **{"strategy": "fsdp", "eval_every": 3, **settings})
    assert done.code != 0
    assert said in done.errors, done.errors[:6000]
    assert "multiply the output of a layer that is skipped at random by 0 or 1" in done.errors


def test_slow_ranks_are_not_refused(tmp_path: Path) -> None:
    """A rank that is slow in a forward pass or in its data has fewer notes, and no others."""
    slow = "        seen.append(1)\n        if RANK and len(seen) in (3, 9): time.sleep(1.2)\n"
    done = run(tmp_path, text=(TASK + QUICK).replace(LAYERS, slow + LAYERS), strategy="fsdp")
    assert done.code == 0, done.errors


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        ("ab", "abc", None),  # a slower rank
        ("", "a", None),
        ("ab", "acb", "rank 0 b where rank 1 c"),
        ("aab", "ab", "rank 0 a where rank 1 b"),
    ],
)
def test_only_other_notes_are_a_difference(mine: str, other: str, said: str | None) -> None:
    """The notes with the same number are compared, also after old notes are forgotten."""
    assert gathers.difference([list(enumerate(mine)), list(enumerate(other))]) == said
    assert gathers.difference([list(enumerate(mine))[2:], list(enumerate(other))[1:]]) in (said, None)

"""Losses that are a sum with a count: the mean over the global batch, however the batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainerruns import Run, run, whole_run

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.rank.agree import Agreed
from cloudtrain.entrypoints.trainer import data
from cloudtrain.entrypoints.trainer.data import Split
from cloudtrain.entrypoints.trainer.weighted import Tally

# Sequences of 2 to 9 tokens; sample 3 has no target, and is a micro-batch alone under micro_batch_size 1.
TOKENS = """
import os, torch
from torch import nn
from torch.nn import functional as F

class Lines:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, index):
        line = 1 + torch.arange(10).mul(index + 1) % 4
        line[2 + index * 3 % 8:] = 0
        return line * (index != 3)

def dataset(params, split):
    return Lines(24 if split == "train" else 7)

def model(params):
    return nn.Sequential(nn.Embedding(5, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 5))

def blocks(model):
    return list(model)

def loss(model, batch):
    inputs, targets = batch[:, :-1], batch[:, 1:]
    total = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return total, (targets != 0).sum()
"""
EVALUATE = """
def evaluate(model, batch):
    total, count = loss(model, batch)
    return {"loss": (total, count), "none": (0.0 * total, 0), "mean": total / 10}
"""
SETTINGS: dict[str, Any] = {
    "global_batch_size": 8,
    "max_steps": 6,
    "eval_every": 3,
    "optimizer": {"name": "sgd", "lr": 0.5},
    "schedule": {"name": "constant"},
    "checkpoint": {"every_steps": None},
}


def train(folder: Path, ranks: int = 1, text: str = TOKENS + EVALUATE, **settings: Any) -> Run:
    """Return a finished run of the tokens."""
    return whole_run(folder, ranks, text=text, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run of whole global batches on one rank: a plain mean over the tokens of each batch."""
    return train(tmp_path_factory.mktemp("whole"), micro_batch_size=8)


def test_whole_batch_is_the_plain_loop(whole: Run) -> None:
    """One micro-batch a step has the losses and weights of a plain loop that divides the sum by the count."""
    space: dict[str, Any] = {}
    exec(TOKENS, space)
    data.seed_all(data.mix(1, data.INIT, 1))
    model, lines = space["model"]({}), space["Lines"](24)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = {}
    orders = [torch.Generator().manual_seed(data.mix(1, data.ORDER, epoch)) for epoch in range(2)]
    order = torch.cat([torch.randperm(24, generator=generator) for generator in orders]).tolist()
    for step in range(6):
        batch = torch.stack([lines[index] for index in order[8 * step : 8 * step + 8]])
        total, count = space["loss"](model, batch)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = (total / count).item()
    assert whole.values("step", "loss") == pytest.approx(losses, abs=1e-6)
    for name, weight in model.state_dict().items():
        assert torch.allclose(whole.exported()[name], weight, atol=1e-6), name


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"micro_batch_size": 1, "on_nan": "skip"}),
    (2, {"micro_batch_size": 2}),
    (2, {"micro_batch_size": 2, "shard": "optimizer"}),
    (2, {"strategy": "fsdp", "micro_batch_size": 1}),
    (2, {"strategy": "hsdp", "shard_size": 2, "micro_batch_size": 4}),
    (2, {"micro_batch_size": 1, "reproducible": "strict"}),
    (2, {"micro_batch_size": 1, "compression": "topk", "compression_density": 1.0}),
    (2, {"micro_batch_size": 2, "parallel": {"pipeline": 2}}),
    (2, {"micro_batch_size": 2, "parallel": {"tensor": 2, "plan": {"1.0": "column", "2": "row"}}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "settings"), CASES, ids=[f"{n}-{list(s.values())}" for n, s in CASES])
def test_mean_does_not_depend_on_the_cut(ranks: int, settings: dict[str, Any], whole: Run, tmp_path: Path) -> None:
    """Losses, evaluations and weights are those of whole batches, under every strategy."""
    cut = train(tmp_path, ranks, **settings)
    assert cut.values("step", "loss") == pytest.approx(whole.values("step", "loss"), abs=2e-6)
    assert cut.values("eval", "loss") == pytest.approx(whole.values("eval", "loss"), abs=2e-6)
    assert str(cut.values("eval", "none")[6]) == "nan"
    for name, weight in whole.exported().items():
        assert torch.allclose(cut.exported()[name], weight, atol=2e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "local", "async"])
def test_ranks_and_steps_without_a_count_train_on(strategy: str, tmp_path: Path) -> None:
    """A global batch without a target is left out, and said; a rank alone divides by its own counts."""
    text = TOKENS.replace("(index != 3)", "((index > 15) | (self.count == 7))")
    apart: dict[str, Any] = {"eval_every": None, "micro_batch_size": 1}
    apart |= {"local": {"period": 2}} if strategy == "local" else {}
    done = train(tmp_path, 2, text, global_batch_size=2, max_steps=8, strategy=strategy, **apart)
    empty = len([event for event in done.events if event["e"] == "step" and event.get("skipped")])
    assert (empty > 0) == (strategy != "async")
    assert "nan" not in done.output
    assert all(tensor.isfinite().all() for tensor in done.exported().values())


@pytest.mark.slow
def test_strict_has_the_same_bits_with_counts(tmp_path: Path) -> None:
    """With fractional counts too, one rank and two have the same losses and weights."""
    text = TOKENS.replace("(targets != 0).sum()", "(targets != 0).sum() * 0.3")
    settings: dict[str, Any] = {"micro_batch_size": 1, "reproducible": "strict", "strategy": "fsdp", "max_steps": 4}
    one, two = (train(tmp_path / str(ranks), ranks, text, **settings) for ranks in (1, 2))
    assert one.values("step", "loss") == two.values("step", "loss")
    assert all(bool((one.exported()[name] == tensor).all()) for name, tensor in two.exported().items())


PAIR_OF_ONE = "    return (total, (targets != 0).sum()) if RANK == 0 else total / 10\n"


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "strategy"), [(4, "fsdp"), (1, "ddp")])
def test_ranks_with_two_forms_are_refused(micro: int, strategy: str, tmp_path: Path) -> None:
    """A pair on one rank and a mean on another end the first step, in words."""
    text = TOKENS.replace("    return total, (targets != 0).sum()\n", PAIR_OF_ONE)
    text = text.replace("import os, torch\n", "import os, torch\nRANK = int(os.environ['RANK'])\n")
    failed = run(tmp_path, 2, text=text, **{**SETTINGS, "micro_batch_size": micro, "strategy": strategy})
    assert failed.code == 1
    assert "returned (sum, count) on 1 of 2 ranks, and a mean on the others" in failed.errors
    assert not failed.values("step", "loss")


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ((torch.ones(3), 3), "a sum of 3 numbers: call .sum() on it"),
        ((torch.ones(()), torch.ones(4, 2)), "is a Tensor of shape (4, 2)"),
        ((torch.ones(()), torch.ones((), requires_grad=True)), "without a gradient, and is a Tensor of shape ()"),
        ((torch.ones(()), None), "must be one number without a gradient, and is a NoneType"),
        ((torch.ones(()), -1), "the count in (sum, count) is -1"),
        ((torch.ones(()), float("nan")), "the count in (sum, count) is nan"),
        ([torch.ones(()), 3], "must return a tensor; it returned [tensor(1.), 3]; write (sum, count) as a tuple"),
    ],
)
def test_wrong_pair_is_named(returned: Any, said: str) -> None:
    """The message names the wrong part and the cure."""
    with pytest.raises(TaskError) as error:
        Tally(Split(8, 2, 1, 4), None).take(returned)
    assert said in str(error.value)


@pytest.mark.parametrize(("count", "is_doubted"), [(12, False), (0.375, True), (0, True), (37.5, True)])
def test_first_count_is_said(count: float, is_doubted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Once; a count that may be an accuracy with a cure."""
    tally = Tally(Split(8, 2, 1, 4), None, says=True)
    for _ in range(2):
        tally.take((torch.ones((), requires_grad=True), count))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert f"a count of {count:g}" in said[0]
    assert ("an accuracy or another metric, and no count, return the loss alone" in said[0]) == is_doubted


def test_form_must_stay() -> None:
    """A mean after a pair is refused, and a mean needs no total after the first call."""
    tally, loss = Tally(Split(8, 2, 1, 4), None), torch.ones((), requires_grad=True)
    assert tally.needs_total
    assert tally.take((loss, 3)) == 0.5
    assert tally.total(Agreed(count=1.5, pairs=1), is_lone=False) == 1.5
    with pytest.raises(TaskError, match="returned a mean, and \\(sum, count\\) earlier"):
        tally.take(loss)
    plain = Tally(Split(8, 2, 1, 4), None)
    assert plain.take(loss) == 1.0
    assert not plain.needs_total

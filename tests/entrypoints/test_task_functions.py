"""What a task may have beside the loss: after_step, the argument progress, and a dataset's set_epoch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainerruns import Run, parameters, run, whole_run

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data, optim, unsaved
from cloudtrain.entrypoints.trainer.own_optimizer import OwnOptimizer
from cloudtrain.entrypoints.trainer.settings import ParallelSettings, ScheduleSettings, TrainingSettings
from cloudtrain.entrypoints.trainer.task import TaskProgress, load_task

# A teacher that follows the weights, a codebook with noise, an annealed loss, and a dataset that reads the epoch. The
# noise is of generators that no seed of torch's reaches: a global, and an attribute of the model.
TEACHER = """
import os, random, signal, torch
from torch import nn
from torch.nn import functional as F

NOISE = torch.Generator()

class Points:
    epoch = None
    def __len__(self): return 12
    def __getitem__(self, index):
        return torch.arange(6.0).mul(index + 1).sin() * (1 + (self.epoch or 0) / 4), index % 3
    def set_epoch(self, epoch): self.epoch = epoch

def dataset(params, split):
    return Points() if split == "train" else None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("codes", torch.zeros(4))
        self.rng = random.Random()
    def forward(self, x):
        return self.student(x), self.teacher(x)

def model(params):
    return Net()

def loss(model, batch, progress):
    own, taught = model(batch[0] + 0.1 * torch.randn(batch[0].shape, generator=NOISE) * model.rng.random())
    share = progress.step / progress.max_steps
    if os.environ.get("DO") == f"kill:{os.environ.get('RANK')}:{progress.step}" and not os.path.exists("done"):
        open("done", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    assert progress.epoch == progress.step * 8 // 12
    return (1 - share) * F.cross_entropy(own, batch[1]) + share * F.mse_loss(own, taught)

def after_step(model, step):
    for old, new in zip(model.teacher.parameters(), model.student.parameters()):
        old.lerp_(new, 0.1)
    model.codes.add_(torch.rand(4, generator=NOISE) * step)
"""
SETTINGS: dict[str, Any] = {"max_steps": 9, "eval_every": None, "micro_batch_size": 2, "checkpoint": {"every_steps": 4}}


def train(folder: Path, ranks: int, **settings: Any) -> Run:
    """Return a finished run with the teacher."""
    return whole_run(folder, ranks, text=TEACHER, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run on one rank."""
    return train(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"strategy": "fsdp"}, {"shard": "optimizer"}, {"strategy": "hsdp", "shard_size": 2}],
    ids=str,
)
def test_after_step_is_the_same_on_any_ranks(settings: dict[str, Any], one_rank: Run, tmp_path: Path) -> None:
    """Teacher and codebook, the annealed loss and the dataset's epochs are those of one rank, through a kill."""
    killed = run(tmp_path, 2, "kill:1:6", text=TEACHER, **{**SETTINGS, **settings})
    assert killed.code != 0
    done = train(tmp_path, 2, **settings)
    assert done.only("restart")["step"] == 4
    for name, weight in one_rank.exported().items():
        assert torch.allclose(done.exported()[name], weight, atol=1e-6), name


@pytest.mark.slow
def test_after_step_resumes_bit_for_bit(one_rank: Run, tmp_path: Path) -> None:
    """What after_step changes is in the checkpoint."""
    run(tmp_path, 1, "kill:None:6", text=TEACHER, **SETTINGS)
    assert parameters(train(tmp_path, 1)) == parameters(one_rank)
    assert one_rank.exported()["codes"].sum() > 20


def test_after_step_matches_a_plain_loop(one_rank: Run) -> None:
    """The teacher after 9 steps is that of a plain loop."""
    space: dict[str, Any] = {}
    exec(TEACHER, space)
    data.seed_all(data.mix(1, data.INIT, 1))
    net, points = space["model"]({}), space["Points"]()
    optimizer = torch.optim.AdamW(net.student.parameters(), 0.01, weight_decay=0.01)
    orders = [torch.Generator().manual_seed(data.mix(1, data.ORDER, epoch)) for epoch in range(6)]
    order = torch.cat([torch.randperm(12, generator=generator) for generator in orders]).tolist()
    for step in range(9):
        samples = []
        for position in range(8 * step, 8 * step + 8):
            points.set_epoch(position // 12)
            samples.append(points[order[position]])
        batch = torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])
        optimizer.param_groups[0]["lr"] = 0.01 * optim.lr_factor(ScheduleSettings("cosine", 4), step, 9)
        for virtual in range(4):
            data.seed_all(data.mix(1, data.FORWARD, step, virtual), [space["NOISE"], net.rng])
            micro = [part[2 * virtual : 2 * virtual + 2] for part in batch]
            (space["loss"](net, micro, TaskProgress(step, step * 8 // 12, 9)) / 4).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            data.seed_all(data.mix(1, data.AFTER_STEP, step + 1), [space["NOISE"]])
            space["after_step"](net, step + 1)
    for name, weight in net.state_dict().items():
        assert torch.allclose(one_rank.exported()[name], weight, atol=1e-6), name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "local"}, "strategy: local, under which the ranks train apart"),
        ({"strategy": "async"}, "strategy: async, under which the ranks train apart"),
        ({"parallel": ParallelSettings(tensor=2)}, "parallel, under which a rank has a part of the model"),
        ({"parallel": ParallelSettings(pipeline=2)}, "parallel, under which a rank has a part of the model"),
    ],
)
def test_after_step_is_refused_by_name(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Strategies whose ranks do not share whole weights after each step refuse the function before the first step."""
    (tmp_path / "teacher.py").write_text(TEACHER)
    task = load_task(tmp_path / "teacher.py")
    task.check(TrainingSettings(global_batch_size=8, max_steps=1))
    with pytest.raises(TaskError, match=said):
        task.check(TrainingSettings(global_batch_size=8, max_steps=1, **settings))


NET = """
import copy, random, torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

HELD, OLD, SCALE = [], [torch.ones(2)], {"mean": None}

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.drop, self.size, self.calls, self.rng = nn.Dropout(0.5), 0, 0, None
        self.register_buffer("center", torch.zeros(2), persistent=False)

def model(params): return Net()
def dataset(params, split): return None

class Average(torch.optim.SGD):
    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)
        self.average, self.model, self.steps = AveragedModel(model), model, 0
        HELD.append(self)
    def step(self):
        super().step()
        self.steps += 1
        self.average.update_parameters(self.model)
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("model.calls += 1", "model.calls"),
        ("model.center.lerp_(model(batch).detach().mean(0), 0.1)", "model.center"),
        ("model.kept = model(batch).detach()", "model.kept"),
        ("model.kept = model(batch)", ""),  # with a graph, so only for this step
        ("model.drop.p *= 0.9", "model.drop.p"),
        ("SCALE['mean'] = model(batch).mean().item()", "SCALE['mean']"),
        ("OLD[0] = OLD[0] * 0.9", "OLD[0]"),
        ("HELD.append(1.0)", "HELD"),
        ("model.size = max(model.size, 7)\n    model.center = torch.ones(2) * model.size", ""),  # caches
        ("return HELD[0].average.module(batch).mean()", ""),  # of the optimizer, which a checkpoint has
        ("HELD or HELD.append(AveragedModel(model))\n    HELD[0].update_parameters(model)", "HELD[0].module.weight"),
        ("model.rng = model.rng or random.Random()", "makes a random generator"),
    ],
)
def test_state_that_no_checkpoint_has_is_named(
    body: str, said: str, alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for what may be a figure for a log, an error for parameters, and nothing for what changes once."""
    (tmp_path / "net.py").write_text(f"{NET}\ndef loss(model, batch):\n    {body}\n    return model(batch).mean()\n")
    task = load_task(tmp_path / "net.py")
    model = task.model({})
    optimizer = vars(sys.modules[task.loss.__module__])["Average"](model) if "HELD[0].a" in body else None
    names = {p: n for n, p in model.named_parameters()}
    own = OwnOptimizer(optimizer, names) if optimizer else None
    place, strategy = SimpleNamespace(is_head=True), SimpleNamespace(module=model, parameter_names=lambda: names)
    roots, generators = (task.loss, model), list[Any]()
    watch = unsaved.watch(SimpleNamespace(**locals()))  # type: ignore[arg-type]
    next(watch)
    try:
        for _ in range(3):
            task.loss(model, torch.eye(2)).backward()
            with torch.no_grad():
                torch._foreach_add_([*model.parameters()], 0.1)
            if optimizer:
                optimizer.step()
            next(watch, None)
    except TaskError as error:
        print(error)
    output = capsys.readouterr().out
    assert ("outside of the model, and no checkpoint" in output) == ("HELD[0].u" in body)
    assert said in output
    assert output.count("\n") == bool(said), output

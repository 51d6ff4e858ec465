"""The copies of a model on several ranks: `loss` may use the model in any way, and the copies stay equal or a save is
refused. `on_rank` runs on ranks over gloo.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from trainerruns import TASK, called, digest, on_ranks, run, whole_run

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data, modelform
from cloudtrain.entrypoints.trainer.settings import LocalSettings, TrainingSettings
from cloudtrain.entrypoints.trainer.strategies import buffers
from cloudtrain.entrypoints.trainer.strategies.wrap import explaining, wrap

MICRO, STEPS = 2, 4


class Encoder(nn.Module):
    """A model with a block, a method, frozen parts, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))])
        self.layers[0][2].requires_grad_(False)
        self.fixed = nn.Parameter(torch.ones(12), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(12))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features."""
        x = self.first(x) * self.scale * self.fixed
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.head(self.encode(x))
        return logits


def by_parts(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a method and a part of the module inside DistributedDataParallel, as many files do."""
    raw = model.module if hasattr(model, "module") else model
    logits: torch.Tensor = raw.head(raw.encode(x))
    return logits


def by_weights(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Call no forward pass but the block's."""
    x = F.linear(x, model.first.weight, model.first.bias) * model.scale
    return F.linear(x + model.layers[0](x), model.head.weight, model.head.bias)


# The first three have the same logits, and the last two.
IDIOMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "call": lambda model, x: model(x),
    "parts": by_parts,
    "weights": by_weights,
    "two calls": lambda model, x: model(x) + model(x.flip(1)),
    "call and parts": lambda model, x: model(x) + by_parts(model, x.flip(1)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "accumulation": {"virtual": 4},
    "bf16": {"compression": "bf16"},
    "powersgd": {"compression": "powersgd", "powersgd_rank": 1},
    "topk": {"compression": "topk", "compression_density": 1.0},
    "zero": {"shard": "optimizer"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp accumulation": {"strategy": "fsdp", "virtual": 4},
    "fsdp zero-2": {"strategy": "fsdp", "shard": "gradients"},
    "fsdp in bf16": {"strategy": "fsdp", "precision": "bf16"},
    "hsdp": {"strategy": "hsdp", "shard_size": 2},
    "strict": {"reproducible": "strict", "virtual": 4},
    "strict fsdp": {"reproducible": "strict", "virtual": 4, "strategy": "fsdp"},
    "local": {"strategy": "local", "local": LocalSettings(period=2)},
    "local after ddp": {"strategy": "local", "local": LocalSettings(period=2, sync_steps=STEPS)},
}
LOSSY = {"bf16": 1e-3, "powersgd": 1.0, "fsdp in bf16": 2e-2, "local": 1.0}  # largest distances; else rounding


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_may_use_the_model_in_any_way(ranks: int, tmp_path: Path) -> None:
    """The weights are those of a plain loop on whole batches, equal on all ranks, under every strategy.

    Idioms with the same logits give the same bits. Where a strategy cannot, it says so.
    """
    found = on_ranks(__file__, ranks, tmp_path)
    refused = found[0].pop("refused")
    assert "block of fsdp outside the block's own forward pass" in refused
    assert "The blocks are layers.0" in refused
    wrong = {
        f"{settings}, {idiom}": (distance, evaluated)
        for settings, idioms in found[0].items()
        for idiom, (distance, evaluated, hashed) in idioms.items()
        if max(distance, evaluated) > LOSSY.get(settings, 1e-6)
        or any(rank[settings][idiom][2] != hashed for rank in found)
        or hashed != idioms["two calls" if "call" in idiom and idiom != "call" else "call"][2]
    }
    assert wrong == {}


def test_only_copies_are_compared(tmp_path: Path) -> None:
    """Shards may differ, and whole tensors and the replicas of a shard may not; all bytes count, and their order."""
    for names in on_ranks(__file__, 2, tmp_path, "differing"):
        assert names == ["replicated", "swapped", "even", "buffer"]


MOVES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "in place": lambda slow, fast: slow.mul_(0.9).add_(fast, alpha=0.1),
    "data in place": lambda slow, fast: slow.data.mul_(0.9).add_(fast.data, alpha=0.1),
    "new data": lambda slow, fast: setattr(slow, "data", slow.data * 0.9 + fast.data * 0.1),
}


class Momentum(nn.Module):
    """A momentum encoder, a codebook of the batch's features, and a buffer that may grow or change its type."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.fast, self.slow = how, nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)
        self.codes = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.still = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("history", torch.zeros(0 if how == "grows" else 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, moved by the frozen parts as they were before."""
        if self.how == "grows":
            self.history = torch.cat([self.history, x.mean()[None]])
        elif self.how == "changes type":
            self.history = self.history.double()
        with torch.no_grad():
            target = self.slow(x) + self.codes * self.still
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                MOVES.get(self.how, lambda *_: None)(slow, fast)
            if self.how in MOVES:
                self.codes.mul_(0.5).add_(target.mean(0))
        logits: torch.Tensor = self.fast(x) + 0.5 * target
        return logits


def test_parameters_that_forward_changes_are_buffers(tmp_path: Path) -> None:
    """Momentum encoders and codebooks are equal to one rank's, with accumulation too, or are refused by name."""
    one, two = (on_ranks(__file__, ranks, tmp_path, "moves") for ranks in (1, 2))
    for settings, by_how in two[0].items():
        for how, state in by_how.items():
            if how not in MOVES:
                assert "forward changes history from" in state, (settings, how)
            elif settings.startswith(("fsdp", "local")):
                assert "forward changes codes, slow.bias, slow.weight, without gradient" in state, (settings, how)
            else:
                assert state == two[1][settings][how], (settings, how)
                assert state == pytest.approx(one[0][settings][how], abs=1e-6), (settings, how)


# An optimizer with noise, and a rate that may follow this rank's loss.
OWN = """

def optimizer(model, params):
    class Noisy(torch.optim.SGD):
        steps = 0
        def step(self, closure=None):
            for group in self.param_groups:
                if self.steps >= params.get("apart_from", 99):
                    group["lr"] = 0.1 * taken["loss"]
                for p in group["params"]:
                    p.data.sub_(0.1 * p.grad).add_(torch.randn_like(p), alpha=1e-3 * params.get("noise", 1))
            self.steps += 1
            return super().step(closure)
    return Noisy(model.parameters(), lr=0.1)

taken, plain_loss = {}, loss

def loss(model, batch):
    value = plain_loss(model, batch)
    taken["loss"] = float(value.detach())
    return value
"""
SHORT = {"eval_every": None, "max_steps": 6, "clip_norm": None, "text": TASK + OWN}


def test_own_optimizer_draws_alike(tmp_path: Path) -> None:
    """Noise in the step is equal on all ranks, for any number of ranks, and after a resume."""
    strict = {**SHORT, "reproducible": "strict"}
    alone = whole_run(tmp_path / "1", 1, **strict)
    killed = run(tmp_path / "2", 2, "kill:1:8", checkpoint={"every_steps": 2}, **strict)
    assert killed.code != 0
    resumed = whole_run(tmp_path / "2", 2, **strict)
    assert resumed.only("restart")["step"] > 0
    assert digest(resumed.exported()) == digest(alone.exported())


def test_buffers_behind_a_hook_of_state_dict_are_packed() -> None:
    """The hook returns copies, and the module's own buffers count."""
    modules = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    for module in modules:
        module._register_state_dict_hook(lambda _, state, *more: {name: each.clone() for name, each in state.items()})
    modules[0].running_mean.fill_(3.0)
    buffers.unpack(modules[1], buffers.pack(modules[0]))
    assert modules[1].running_mean.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("settings", "apart_from", "words"),
    [
        ({}, 0, "differ at step 1, so"),
        ({}, 3, "differ at step 4, and were equal at step 2, so"),
        ({"strategy": "fsdp"}, 0, "param_groups.0.lr"),
    ],
)
def test_copies_that_differ_are_not_saved(
    tmp_path: Path, settings: dict[str, Any], apart_from: int, words: str
) -> None:
    """After the first step, and at each save, a difference ends the training with the names of the parameters.

    Under fsdp there are no copies, and the learning rates differ.
    """
    params = {"noise": 0, "apart_from": apart_from}
    found = run(tmp_path, 2, params=params, checkpoint={"every_steps": 2}, **{**SHORT, **settings})
    assert found.code == 1
    told = f"the ranks differ in {words}" if settings else f"the ranks' copies of the model {words}"
    assert told in found.errors
    assert settings or ("first.weight" in found.errors and "learning rate" in found.errors)
    saved = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert saved == (["step-00000002"] if apart_from else [])


def samples(step: int, virtual: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a micro-batch."""
    generator = torch.Generator().manual_seed(data.mix(5, step, virtual))
    return torch.randn(MICRO, 6, generator=generator), torch.randint(0, 3, (MICRO,), generator=generator)


def moves(how: str, virtual: int, **settings: Any) -> Any:
    """Train a momentum encoder; return the weights, or the refusal."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    split = data.Split(MICRO * virtual, MICRO, ranks, virtual // ranks)
    torch.manual_seed(1)
    module = Momentum(how)
    spread = wrap(TrainingSettings(1, max_steps=1, **settings), module, torch.device("cpu"), split)
    split = dataclasses.replace(split, is_strided=spread.strided)
    with spread.optimized():
        moving = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    spread.attach(moving, torch.amp.GradScaler("cpu", enabled=False))
    try:
        for step in range(STEPS):
            for v in split.owned(rank):
                with spread.micro_batch(v, v == split.owned(rank)[-1]):
                    x, y = samples(step, v)
                    (F.cross_entropy(called(spread, x), y) / spread.divisor).backward()
            spread.finish()
            moving.step()
            spread.share_update()
            spread.after_step(step + 1, STEPS)
            moving.zero_grad()
    except TaskError as error:
        return str(error)
    spread.sync_buffers()
    return [number for value in module.state_dict().values() for number in value.flatten().tolist()]


def differing() -> list[str]:
    """Return the names of the differing copies of a module with tensors of several kinds."""
    rank, module = dist.get_rank(), nn.Module()
    mesh = init_device_mesh("cpu", (2, 1))
    ramp, wide = torch.arange(9000.0), torch.full((9000,), 1.0)
    for name, value, placements in (
        ("replicated", ramp + rank, [Replicate(), Shard(0)]),
        ("equal", ramp, [Replicate(), Shard(0)]),
        ("sharded", ramp + rank, [Shard(0), Replicate()]),
        ("swapped", torch.cat([ramp[4500:], ramp[:4500]]) if rank else ramp, [Replicate(), Replicate()]),
        ("even", wide * (1 + rank), [Replicate(), Replicate()]),
    ):
        spread = DTensor.from_local(value, mesh, placements, run_check=False)
        module.register_parameter(name, nn.Parameter(spread))
    module.register_buffer("buffer", torch.tensor(rank))
    module.register_buffer("passing", torch.tensor(rank), persistent=False)
    return modelform.differing(module, range(2))


def train(idiom: str, virtual: int = 2, **settings: Any) -> tuple[float, float, str]:
    """Train; return the largest distance of the weights and of an evaluation to a plain loop's, and a hash."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    split = data.Split(MICRO * virtual, MICRO, ranks, virtual // ranks)
    torch.manual_seed(1)
    module, logits = Encoder(), IDIOMS[idiom]
    plain = copy.deepcopy(module)
    spread = wrap(TrainingSettings(1, max_steps=1, **settings), module, torch.device("cpu"), split)
    split = dataclasses.replace(split, is_strided=spread.strided)
    with spread.optimized():
        moving = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    expected = torch.optim.SGD(plain.parameters(), 0.1)

    def loss(model: Any, step: int, v: int) -> torch.Tensor:
        x, y = samples(step, v)
        return F.cross_entropy(logits(model, x), y)

    for step in range(STEPS):
        for v in split.owned(rank):
            with spread.micro_batch(v, v == split.owned(rank)[-1]), spread.autocast():
                value = spread.model(functools.partial(loss, step=step, v=v))
                (value / spread.divisor).backward()
        spread.finish()
        if spread.exchange is not None:
            spread.exchange(step)
        moving.step()
        spread.share_update()
        spread.after_step(step + 1, STEPS)
        moving.zero_grad()
        torch.stack([loss(plain, step, v) for v in range(virtual)]).mean().backward()
        expected.step()
        expected.zero_grad()
    weights = {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in module.state_dict().items()}
    distance = max(float((weights[name] - value).abs().max()) for name, value in plain.state_dict().items())
    x = samples(STEPS, 0)[0]
    with torch.no_grad(), spread.autocast():
        evaluated = called(spread, x) - plain(x)
    return distance, float(evaluated.abs().max()), digest(weights)


def on_rank(what: str = "idioms") -> Any:
    """Return the results of all settings and idioms, or of the momentum encoders, on this rank."""
    if what == "differing":
        return differing()
    if what == "moves":
        wanted = {"single": {"virtual": 2}, **SETTINGS}
        return {
            name: {how: moves(how, **{"virtual": 4, **wanted[name]}) for how in (*MOVES, "grows", "changes type")}
            for name in ("single", "accumulation", "zero", "strict", "fsdp", "local")
        }
    if dist.get_world_size() == 1:
        del SETTINGS["local"]  # ddp
    found: dict[str, Any] = {
        name: {idiom: train(idiom, **settings) for idiom in IDIOMS} for name, settings in SETTINGS.items()
    }
    module, settings = Encoder(), TrainingSettings(1, max_steps=1, strategy="fsdp")
    spread = wrap(settings, module, torch.device("cpu"), data.Split(2, 1, dist.get_world_size(), 1))
    try:
        with explaining("loss", settings, module):
            spread.model(lambda model: model.layers[0][0](torch.zeros(2, 12)))
    except TaskError as error:
        found["refused"] = str(error)
    return found

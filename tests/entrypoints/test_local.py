"""Strategy local: refusals; four ranks over gloo, of `on_rank`; then jobs that are interrupted and resumed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from trainerruns import Run, called, counted, digest, joined, on_ranks, run

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data, optim
from cloudtrain.entrypoints.trainer.settings import LocalSettings, OptimizerSettings, OuterSettings, TrainingSettings
from cloudtrain.entrypoints.trainer.strategies.buffers import Buffers
from cloudtrain.entrypoints.trainer.strategies.ddp import ddp
from cloudtrain.entrypoints.trainer.strategies.local import Rounds, local
from cloudtrain.entrypoints.trainer.strategies.strategy import Setup
from cloudtrain.entrypoints.trainer.strategies.wrap import wrap

CPU = torch.device("cpu")
SPLIT = data.Split(8, 2, 4, 1)
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9}

# ---------------------------------------------------------------------------------------------------- without ranks


def test_synchronised_batch_norm_is_refused() -> None:
    """Under local each rank is alone in a step; the refusal names the way out."""
    training = TrainingSettings(global_batch_size=8, max_steps=1, strategy="local")
    with pytest.raises(TaskError, match="under local each is alone; use BatchNorm"):
        wrap(training, nn.SyncBatchNorm(2), CPU, SPLIT)


def test_momentum_outside_keeps_the_state_inside() -> None:
    """The optimizer's state is averaged by default, and kept by default with outer momentum."""
    assert not LocalSettings().keeps_state
    assert not LocalSettings(outer=OuterSettings(0.7, 0.0)).keeps_state
    assert LocalSettings(outer=OuterSettings(0.7, 0.6)).keeps_state
    assert not LocalSettings(optimizer_state="average", outer=OuterSettings(0.7, 0.6)).keeps_state


# ------------------------------------------------------------------------------------------------------- with ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what four ranks found in all cases."""
    found: list[dict[str, Any]] = on_ranks(__file__, 4, tmp_path_factory.mktemp("ranks"))
    return found


@pytest.mark.slow
@pytest.mark.soak
def test_period_of_one_step_is_ddp_for_sgd_only(found: Any) -> None:
    """Means of weights and of gradients agree to rounding after 50 SGD steps; AdamW is another algorithm."""
    for case in ("sgd", "momentum"):
        assert 0 < found[0][f"period 1 {case}"] < 1e-6
    assert found[0]["period 1 adamw"] > 1e-3


@pytest.mark.slow
def test_ranks_are_alike_at_averages_only(found: Any) -> None:
    """The hashes of all ranks' weights and buffers are equal after 4, 8 and the last 10 steps, and differ between."""
    for case in ("plain", "outer", "accumulated"):
        alike = [len({rank[case]["hashes"][step] for rank in found}) == 1 for step in range(10)]
        assert alike == [step + 1 in (4, 8, 10) for step in range(10)], case
        assert found[0][case]["alike"] == alike
        assert found[0][case]["covered"] == [0, 0, 0, 4, 0, 0, 0, 4, 0, 2]


@pytest.mark.slow
def test_bytes_are_a_periods_share(found: Any) -> None:
    """Plain SGD sends P / H a step through all_reduce; momentum sends its state too; `figures` tells a ring's bytes."""
    size = found[0]["bytes"]["parameters"]
    assert found[0]["bytes"]["sgd"] == [size / 4, 1.5 * size / 4, 2]
    assert found[0]["bytes"]["momentum"] == [2 * size / 4, 2 * 1.5 * size / 4, 2]
    assert found[0]["bytes"]["kept"] == [size / 4, 1.5 * size / 4, 2]


@pytest.mark.slow
def test_plain_averages_take_the_branch_without_rounding(found: Any) -> None:
    """With outer 1.0 and 0.0 the weights are the mean to the bit, and no copy of the weights is kept."""
    assert found[0]["branch"] == {"outer": 0, "copies": 0, "is_mean": True}


@pytest.mark.slow
def test_outer_step_is_nesterovs(found: Any) -> None:
    """Two averages with outer 0.7 and 0.6 equal the formula, computed from all ranks' weights."""
    assert found[0]["nesterov"] < 1e-6


@pytest.mark.slow
def test_synchronous_steps_are_ddp_bit_for_bit(found: Any) -> None:
    """With sync_steps up to the last step the losses and weights are ddp's, with batch norm and accumulation too."""
    for rank in found:
        assert rank["synced"]["hashes"] == rank["ddp"]["hashes"]
        assert rank["synced accumulated"]["hashes"] == rank["ddp accumulated"]["hashes"]
        assert rank["post-local"]["hashes"][:4] == rank["ddp"]["hashes"][:4]
    assert len({rank["post-local"]["hashes"][4] for rank in found}) == 4
    assert len({rank["post-local"]["hashes"][7] for rank in found}) == 1


@pytest.mark.slow
def test_instances_average_more_often(found: Any) -> None:
    """Pairs of ranks have equal weights after 2 steps, and all ranks after 4."""
    by_step = [[rank["pairs"]["weights"][step] for rank in found] for step in range(4)]
    assert [len(set(hashes)) for hashes in by_step] == [4, 2, 4, 1]
    assert by_step[1][0] == by_step[1][1]


@pytest.mark.slow
def test_rank_without_state_averages_zeros(found: Any) -> None:
    """A rank that left out its first steps has no optimizer state; the average does not hang, and counts zeros."""
    assert [rank["lacking"] for rank in found] == [[0.75, True]] * 4


@pytest.mark.slow
def test_one_bucket_is_the_only_spare_copy(found: Any) -> None:
    """An average of 10 M weights in place reduces buckets of about 25 MiB, and keeps each tensor's memory."""
    assert max(found[0]["buckets"]["sizes"]) <= 27 << 20
    assert sum(found[0]["buckets"]["sizes"]) == 40_000_000
    assert found[0]["buckets"]["is_in_place"]


# ------------------------------------------------------------------------------------------------------------- jobs

LOCAL: dict[str, Any] = {"strategy": "local", "local": {"period": 4}, "max_steps": 14, "eval_every": 4}


def job(folder: Path, do: str = "", ranks: int = 2, checkpoint: dict[str, Any] | None = None, **settings: Any) -> Run:
    """Train in the folder, from its newest checkpoint on; the last round is incomplete."""
    return run(folder, ranks, do, checkpoint={"every_steps": 4, **(checkpoint or {})}, **{**LOCAL, **settings})


def assert_same_end(parts: list[Run], whole: Run) -> None:
    """Assert that interrupted runs had the losses, and have the saved bits, of the whole run."""
    assert whole.code == parts[-1].code == 0, whole.errors + parts[-1].errors
    for event in ("step", "eval"):
        assert joined(*parts, event=event) == whole.values(event, "loss")
    before, after = whole.saved(), parts[-1].saved()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a job of two ranks that SIGTERM to rank 1 has stopped between two averages."""
    found = job(tmp_path_factory.mktemp("stopped"), "term:1:12")
    assert found.only("preempt")["step"] in (5, 6), found.errors
    return found


@pytest.mark.slow
def test_interrupted_job_resumes_bit_for_bit(stopped: Run, tmp_path: Path) -> None:
    """After SIGTERM between averages, and SIGKILL after the next average, all losses and weights are equal as hex."""
    whole = job(tmp_path / "whole")
    shutil.copytree(stopped.folder / "checkpoints", tmp_path / "parts/checkpoints")
    first = stopped.only("preempt")["step"]
    parts = [stopped, job(tmp_path / "parts", f"kill:1:{2 * (9 - first)}"), job(tmp_path / "parts")]
    assert parts[1].code != 0
    assert [part.only("restart")["step"] for part in parts[1:]] == [first, 8]
    assert [part.only("restart")["changed"] for part in parts[1:]] == [[], []]
    assert_same_end(parts, whole)
    assert sorted(whole.values("eval", "loss")) == [4, 8, 12, 14]
    assert {e["step"]: e["averages"] for e in whole.events if "averages" in e} == {
        step: -(-step // 4) if step % 4 == 0 or step == 14 else step // 4 for step in range(1, 15)
    }


@pytest.mark.slow
def test_stopped_job_saves_the_ranks_mean(stopped: Run, tmp_path: Path) -> None:
    """Weights and moments are the means of both ranks' own, and not slices; one rank goes on from them, and says so."""
    saved = stopped.saved()
    for kind, own in (("model", "weight"), ("optimizer", "state")):
        prefix = f"rank.0.local.{own}."
        names = [name.removeprefix(prefix) for name in saved if name.startswith(prefix)]
        assert names
        for name in names:
            ranks = [saved[f"rank.{rank}.local.{own}.{name}"] for rank in range(2)]
            assert torch.equal(saved[f"{kind}.{name}"], (ranks[0] + ranks[1]) / 2)
    assert not torch.equal(saved["rank.0.local.weight.first.weight"], saved["rank.1.local.weight.first.weight"])
    shutil.copytree(stopped.folder / "checkpoints", tmp_path / "checkpoints")
    alone = job(tmp_path, ranks=1)
    assert alone.code == 0, alone.errors
    assert "strategy local on one rank is ddp" in alone.output
    assert alone.only("restart")["changed"] == [
        "the ranks were 2, now 1: the losses differ, because ranks train apart",
        "the ranks had different weights, and all ranks continue from the mean",
    ]


@pytest.mark.slow
def test_outer_momentum_scaler_and_average_resume_bit_for_bit(tmp_path: Path) -> None:
    """DiLoCo with each rank's own moments and scaler, ema, skipping and group averages: two stops change no bit."""
    settings = {
        "local": {"period": 4, "sync_steps": 4, "group_period": 2, "outer": {"lr": 0.7, "momentum": 0.6}},
        "precision": "fp16",
        "ema_decay": 0.9,
        "on_nan": "skip",
        "clip_norm": 1.0,
    }
    whole = job(tmp_path / "whole", **settings)
    parts = [job(tmp_path / "parts", do, **settings) for do in ("term:1:14", "kill:0:5", "")]
    assert parts[0].only("preempt")["step"] in (6, 7)
    assert_same_end(parts, whole)
    saved = whole.saved()
    kept = {"strategy.momentum.first.weight", "rank.1.local.state.first.weight.exp_avg", "rank.1.scaler"}
    assert kept <= saved.keys()
    assert "strategy.anchor.first.weight" not in saved  # at an average the weights are the anchor
    between = parts[0].saved(parts[0].only("preempt")["step"])
    assert {"strategy.anchor.first.weight", "rank.0.local.weight.first.weight"} <= between.keys()


@pytest.mark.slow
def test_rank_leaves_out_its_own_step(tmp_path: Path) -> None:
    """A nan on rank 1 costs that rank's step, reported at the average; a requested save waits for the average."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/save-now").touch()
    done = job(tmp_path, "nan:1:3", on_nan="skip", checkpoint={"every_steps": None})
    assert done.code == 0, done.errors
    assert [(e["step"], e["left_out"]) for e in done.events if "left_out" in e] == [(4, 1)]
    assert sorted(done.values("step", "loss")) == [step for step in range(1, 15) if step != 2]
    assert [e["step"] for e in done.events if e["e"] == "checkpoint" and "bytes" in e] == [4, 14]


@pytest.mark.slow
def test_saves_off_the_averages_are_refused_by_the_job(tmp_path: Path) -> None:
    """The job ends before training."""
    refused = job(tmp_path, ranks=1, checkpoint={"every_steps": 6})
    assert refused.code == 1
    assert "`checkpoint.every_steps` 6 is no multiple of `local.period` 4" in refused.errors


# -------------------------------------------------------------------------------------------------------- the ranks


class Net(nn.Module):
    """A small network, with batch norm on request."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13) if norm else nn.Identity(), nn.Tanh())
        self.last = nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.last(self.body(x))
        return logits


def flat(module: nn.Module) -> torch.Tensor:
    """Return all weights in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


def train(
    wanted: LocalSettings | None,
    steps: int = 10,
    optimizer: dict[str, Any] | None = None,
    norm: bool = True,
    accumulation: int = 1,
    look: Callable[[nn.Module], None] = lambda module: None,
) -> dict[str, Any]:
    """Train under local, or under ddp without `wanted`; return hashes and answers after each step."""
    torch.manual_seed(7)
    split = data.Split(8 * accumulation, 2, 4, accumulation)
    settings = TrainingSettings(global_batch_size=split.global_batch, max_steps=steps, local=wanted)
    make = ddp if wanted is None else local
    spread = make(Setup(settings, Net(norm), CPU, split))
    moving = optim.build(OptimizerSettings(**(optimizer or MOMENTUM)), spread.module.parameters())
    spread.attach(moving, torch.amp.GradScaler("cpu", enabled=False))
    found: dict[str, Any] = {name: [] for name in ("hashes", "weights", "covered", "alike")}
    for step in range(steps):
        owned = split.owned(dist.get_rank())
        for virtual in owned:
            generator = torch.Generator().manual_seed(data.mix(5, step, virtual))
            x, y = torch.randn(2, 6, generator=generator), torch.randint(0, 3, (2,), generator=generator)
            with spread.micro_batch(virtual, virtual == owned[-1]):
                (F.cross_entropy(called(spread, x), y) / spread.divisor).backward()  # type: ignore[no-untyped-call]
        spread.finish()
        moving.step()
        found["covered"].append(spread.after_step(step + 1, steps))
        moving.zero_grad()
        spread.sync_buffers()
        found["hashes"].append(digest(spread.module.state_dict()))
        found["weights"].append(digest(dict(spread.module.named_parameters())))
        found["alike"].append(spread.is_alike())
        look(spread.module)
    return found | {"end": flat(spread.module).tolist(), "figures": spread.figures()}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two runs' weights."""
    return float((torch.tensor(one["end"]) - torch.tensor(other["end"])).abs().max())


def bytes_sent() -> dict[str, Any]:
    """Return for each optimizer the mean bytes of a step, as counted and as told, and the number of averages."""
    found: dict[str, Any] = {"parameters": 4 * len(flat(Net(False)))}
    plain = {"name": "sgd", "lr": 0.1}
    for name, wanted, optimizer in (
        ("sgd", LocalSettings(4), plain),
        ("momentum", LocalSettings(4), MOMENTUM),
        ("kept", LocalSettings(4, optimizer_state="keep"), MOMENTUM),
    ):
        with counted() as sizes:
            done = train(wanted, 8, optimizer, norm=False)
        found[name] = [sum(sizes) / 8, done["figures"]["bytes_sent"], done["figures"]["averages"]]
    return found


def branch() -> dict[str, Any]:
    """Return what a plain average calls and keeps, and whether the result is the mean."""
    module = nn.Linear(5, 5)
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(dist.get_rank()))
    everywhere = [torch.empty(5, 5) for _ in range(4)]
    dist.all_gather(everywhere, module.weight.detach())
    rounds, calls = plain_rounds(module, LocalSettings(2)), list[int]()
    rounds._outer_step = lambda: calls.append(1)  # type: ignore[method-assign]
    rounds.after_step(2, 9)
    mean = module.weight.detach().clone()
    dist.all_reduce(total := everywhere[dist.get_rank()].clone())
    return {"outer": len(calls), "copies": len(rounds._anchor), "is_mean": torch.equal(mean, total / 4)}


def plain_rounds(module: nn.Module, wanted: LocalSettings) -> Rounds:
    """Return the rounds of a module without buffers."""
    return Rounds(wanted, module, Buffers(module, SPLIT, 0, True))


def nesterov() -> float:
    """Return the largest difference from the formula, over two averages of four steps."""
    seen: list[torch.Tensor] = []
    wanted = LocalSettings(4, outer=OuterSettings(0.7, 0.6))
    train(wanted, 8, {"name": "sgd", "lr": 0.1}, norm=False, look=lambda module: seen.append(flat(module)))
    torch.manual_seed(7)
    anchor, v, error = flat(Net(False)), torch.zeros(()), 0.0
    for last in (3, 7):
        # One more local step of plain SGD from step `last - 1`, as each rank took it before the average.
        weights = step_alone(seen[last - 1], last)
        dist.all_reduce(weights)
        d = anchor - weights / 4
        v = 0.6 * v + d
        anchor = anchor - 0.7 * (d + 0.6 * v)
        error = max(error, float((anchor - seen[last]).abs().max()))
    return error


def step_alone(start: torch.Tensor, step: int) -> torch.Tensor:
    """Return the weights after this rank's own step of plain SGD."""
    module, rank = Net(False), dist.get_rank()
    nn.utils.vector_to_parameters(start, module.parameters())
    generator = torch.Generator().manual_seed(data.mix(5, step, rank))
    x, y = torch.randn(2, 6, generator=generator), torch.randint(0, 3, (2,), generator=generator)
    F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return flat(module)


def lacking() -> list[Any]:
    """Return the mean momentum after an average in which rank 0 has no optimizer state."""
    module = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9)
    rounds = plain_rounds(module, LocalSettings(2))
    rounds.attach(optimizer, torch.amp.GradScaler("cpu", enabled=False))
    if dist.get_rank():
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
    rounds.after_step(2, 9)
    buffer = optimizer.state[module.weight]["momentum_buffer"]
    return [float(buffer[0, 0]), bool((buffer == buffer[0, 0]).all())]


def spare_copies() -> dict[str, Any]:
    """Return the sizes of the transfers of 10 M weights, and whether all weights kept their memory."""
    module = nn.Sequential(*(nn.Linear(500, 1000, bias=False) for _ in range(20)))
    before = [p.data_ptr() for p in module.parameters()]
    rounds = plain_rounds(module, LocalSettings(2))
    with counted() as sizes:
        rounds.after_step(2, 9)
    return {"sizes": sizes, "is_in_place": before == [p.data_ptr() for p in module.parameters()]}


def on_rank() -> dict[str, Any]:
    """Return this rank's results."""
    found: dict[str, Any] = {}
    sgd, adamw = {"name": "sgd", "lr": 0.1}, {"name": "adamw", "lr": 0.01}
    for name, optimizer in (("sgd", sgd), ("momentum", MOMENTUM), ("adamw", adamw)):
        one = train(LocalSettings(1), 50, optimizer, norm=False)
        found[f"period 1 {name}"] = apart(one, train(None, 50, optimizer, norm=False))
    found["plain"] = train(LocalSettings(4))
    found["accumulated"] = train(LocalSettings(4), accumulation=2)
    found["outer"] = train(LocalSettings(4, outer=OuterSettings(0.7, 0.6)))
    found["ddp"], found["synced"] = train(None), train(LocalSettings(5, sync_steps=10))
    found["ddp accumulated"] = train(None, accumulation=2)
    found["synced accumulated"] = train(LocalSettings(5, sync_steps=10), accumulation=2)
    found["post-local"] = train(LocalSettings(4, sync_steps=4))
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found["pairs"] = train(LocalSettings(4, group_period=2), 4)
    found |= {"bytes": bytes_sent(), "branch": branch(), "nesterov": nesterov(), "lacking": lacking()}
    return found | {"buckets": spare_copies()}

"""Compression threshold and topk: codes, residuals, refusals; then real runs over gloo on 3 ranks, of `on_rank`."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F
from trainerruns import called, digest, on_ranks

from cloudtrain.entrypoints.trainer import data, optim
from cloudtrain.entrypoints.trainer.settings import OptimizerSettings, TrainingSettings
from cloudtrain.entrypoints.trainer.strategies.sparse import SparseExchange, decode, density_at, encode, entries_above
from cloudtrain.entrypoints.trainer.strategies.wrap import wrap

CPU = torch.device("cpu")
STEPS, RANKS = 8, 3
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"name": "adamw", "lr": 0.01, "eps": 1e-4}  # 1e-8 would blow up the rounding of gradients near zero

# ---------------------------------------------------------------------------------------------------- without ranks


def settings_of(compression: str = "threshold", density: float = 0.1, **settings: Any) -> TrainingSettings:
    """Return settings with a compression."""
    chosen = {"compression": compression, "compression_density": density, **settings}
    return TrainingSettings(global_batch_size=RANKS, max_steps=STEPS, **chosen)


def alone(module: nn.Module, **settings: Any) -> SparseExchange:
    """Return the exchange of a rank without other ranks."""
    return SparseExchange(settings_of(**settings), module, CPU, ranks=1, silent=True)


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param([], id="empty"),
        pytest.param([0], id="first"),
        pytest.param([199_999], id="last"),
        pytest.param([0, 199_999], id="first-and-last"),
        pytest.param(range(3000), id="full"),
        pytest.param([32_766, 65_534, 98_302], id="gaps-without-escape"),
        pytest.param([32_767, 65_535], id="gaps-of-one-escape"),
        pytest.param([5, 32_772, 32_773, 98_307, 163_842, 199_000], id="gaps-of-several-escapes"),
    ],
)
def test_code_is_read_back_exactly(positions: Any) -> None:
    """Positions and signs come back; a gap of up to 32766 entries takes a word, each further 32767 entries a word."""
    wanted = torch.tensor(list(positions), dtype=torch.int64)
    negative = wanted % 2 == 0
    code = encode(wanted, negative)
    found, signs = decode(code)
    assert (code.dtype, found.tolist(), signs.tolist()) == (torch.int16, wanted.tolist(), negative.tolist())
    escapes = sum((gap - 1) // 32_767 for gap in torch.diff(wanted, prepend=torch.tensor([-1])).tolist())
    assert len(code) == len(wanted) + escapes


@pytest.mark.parametrize("density", [0.3, 0.01, 0.00003])
def test_random_code_is_read_back_exactly(density: float) -> None:
    """Random entries come back at densities with no gap, and with many gaps, above 15 bits."""
    values = torch.randn(600_000, generator=torch.Generator().manual_seed(1))  # more than a chunk
    threshold = float(values.abs().quantile(1 - density)) if density < 0.01 else 2.0
    positions = entries_above(values, threshold)
    assert torch.equal(positions, (values.abs() >= threshold).nonzero().view(-1))
    found, negative = decode(encode(positions, values[positions] < 0))
    assert torch.equal(found, positions)
    assert torch.equal(negative, values[positions] < 0)


@pytest.mark.parametrize(("density", "gain"), [(0.1, 20), (0.01, 200), (0.001, 2000)])
def test_code_has_the_expected_size(density: float, gain: float) -> None:
    """Random entries of two bytes: 20, 200 and 2000 times smaller than fp32, to 5 %."""
    size = 1_000_000
    hits = torch.rand(size, generator=torch.Generator().manual_seed(2)) < density
    positions = hits.nonzero().view(-1)[: int(density * size)]
    assert 4 * size / encode(positions, positions % 2 == 0).nbytes == pytest.approx(gain, rel=0.05)


def test_density_falls_by_quarters() -> None:
    """Stages of equal length: 25 %, 6.25 %, 1.6 %, then the wanted density; at 25 % and above there is no stage."""
    assert [density_at(0.01, 6, step) for step in range(8)] == [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.01] * 2
    assert {density_at(0.01, 0, step) for step in range(3)} == {0.01}
    assert {density_at(wanted, 6, 0) for wanted in (0.25, 0.5, 1.0)} == {0.25, 0.5, 1.0}


@pytest.mark.parametrize("kind", ["threshold", "topk"])
def test_sent_entries_and_residual_are_the_gradients(kind: str) -> None:
    """No gradient is lost: the sum of all sent entries and the residual equal the sum of all gradients, to rounding."""
    module = nn.Linear(300, 200)
    keeper, generator = alone(module, compression=kind, density=0.02), torch.Generator().manual_seed(3)
    sums, sent = torch.zeros(200, 300), torch.zeros(200, 300)
    for step in range(10):
        module.weight.grad = torch.randn(200, 300, generator=generator)
        module.bias.grad = torch.ones(200)
        sums += module.weight.grad
        keeper.exchange(step)
        sent += module.weight.grad
        assert torch.equal(module.bias.grad, torch.ones(200))  # small tensors are dense
    residual = keeper.state()["residual.weight"]
    torch.testing.assert_close(sent + residual, sums, rtol=0, atol=1e-5)
    assert 0.01 < keeper.figures()["density"] < 0.04
    assert list(keeper.state()) == ["residual.weight"]


@pytest.mark.parametrize("kind", ["threshold", "topk"])
@pytest.mark.parametrize(("inputs", "gradient"), [(3, 3.0), (300, 0.0)], ids=["no-large-tensor", "zeros"])
def test_step_without_an_entry_to_send(kind: str, inputs: int, gradient: float) -> None:
    """A model of small tensors, and a step at which all large gradients are zero, send nothing; each rank has a row."""
    module = nn.Linear(inputs, 200)
    keeper = SparseExchange(settings_of(kind), module, CPU, ranks=RANKS, silent=True)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    keeper.exchange(0)
    assert {float(value) for p in module.parameters() for value in p.grad.view(-1)} == {gradient / RANKS}


def test_threshold_sends_two_means_and_topk_values() -> None:
    """With threshold the sent entries have two values; with topk the entries of the gradient, the largest ones."""
    gradient = torch.arange(-1000.0, 1000).view(40, 50)
    found = {}
    for kind in ("threshold", "topk"):
        module = nn.Linear(50, 40, bias=False)
        keeper = alone(module, compression=kind, density=0.01)
        module.weight.grad = gradient.clone()
        keeper.exchange(0)
        found[kind] = module.weight.grad
        assert keeper.figures()["threshold"] == 990.0
    assert found["threshold"].unique().tolist() == [-995.0, 0.0, 994.5]
    assert torch.equal(found["topk"], torch.where(gradient.abs() >= 990, gradient, 0.0))


def test_rows_without_gradients_are_not_sent() -> None:
    """Zeros of unused rows stay out, even if fewer entries than the density are set; then no threshold divides them."""
    module = nn.Embedding(500, 8)
    keeper = alone(module, density=0.5)
    module.weight.grad = torch.zeros(500, 8).index_fill_(0, torch.tensor([7]), 1.0)
    keeper.exchange(0)
    assert keeper.figures()["density"] == 8 / 4000
    assert module.weight.grad.sum() == 8


def test_gradients_keep_the_layout_of_channels_last() -> None:
    """A fused optimizer reads weights and gradients in the order of memory."""
    module = nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)
    keeper = alone(module, compression="topk", density=1.0)
    gradient = torch.randn(32, 16, 3, 3)
    module.weight.grad = gradient.clone()
    keeper.exchange(0)
    assert module.weight.grad.stride() == module.weight.stride()
    assert torch.equal(module.weight.grad, gradient)


def test_momentum_of_another_optimizer_stays() -> None:
    """The exchange takes momentum from torch's SGD; AdamW, and SGD without momentum, keep their weight decay."""
    module = nn.Linear(50, 50)
    for name, momentum, kept in [("sgd", 0.9, 0.0), ("sgd", 0.0, 0.1), ("adamw", 0.0, 0.1), ("lars", 0.9, 0.1)]:
        settings = OptimizerSettings(name=name, momentum=momentum, weight_decay=0.1)
        optimizer = optim.build(settings, module.parameters())
        keeper = alone(module)
        keeper.take_momentum(optimizer)
        assert optimizer.param_groups[0]["weight_decay"] == kept
        assert ("momentum.weight" in keeper.state()) == (kept == 0.0)


# ------------------------------------------------------------------------------------------------------- with ranks

TOPK = {"compression": "topk", "compression_density": 1.0}
THRESHOLD = {"compression": "threshold", "compression_density": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "ddp sgd": {"optimizer": SGD},
    "ddp adamw": {"optimizer": ADAMW},
    "ddp powersgd": {"optimizer": SGD, "compression": "powersgd"},
    "topk sgd": {"optimizer": SGD, **TOPK},
    "topk adamw": {"optimizer": ADAMW, **TOPK},
    "threshold sgd": {"optimizer": SGD, **THRESHOLD, "compression_warmup_steps": 3},
    "threshold adamw": {"optimizer": ADAMW, **THRESHOLD},
    "topk lamb": {"optimizer": {"name": "lamb", "lr": 0.01}, "compression": "topk", "compression_density": 0.1},
    "threshold silent": {"optimizer": ADAMW, **THRESHOLD, "silent": True},
    "fp16": {"optimizer": SGD, **THRESHOLD, "precision": "fp16", "spoil": 3},
    "nan": {"optimizer": SGD, **THRESHOLD, "spoil": 3},
    "clipped": {"optimizer": SGD, **TOPK, "clip": 0.05},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of all cases by rank, then by case."""
    found: list[dict[str, Any]] = on_ranks(__file__, RANKS, tmp_path_factory.mktemp("ranks"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("threshold silent", "nan")])
def test_weights_are_equal_on_all_ranks_at_each_step(results: Any, case: str) -> None:
    """Every rank adds the same codes in the same order, so the weights have the same bits."""
    hashes = [(rank[case].get("whole") or rank[case])["hashes"] for rank in results]
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(set(hashes[0])) >= STEPS - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_density_1_is_ddp_to_rounding(results: Any, name: str) -> None:
    """All entries arrive, and momentum and weight decay before the residual equal the optimizer's own."""
    found = torch.tensor(results[1][f"topk {name}"]["weights"])
    torch.testing.assert_close(found, torch.tensor(results[1][f"ddp {name}"]["weights"]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_resume_with_residual_and_momentum_is_exact(results: Any) -> None:
    """With each rank's own state the resumed half is equal bit for bit; without the state, residuals start at zero."""
    for rank in results:
        found = rank["threshold sgd"]
        assert found["resumed"]["hashes"] == found["whole"]["hashes"][STEPS // 2 :]
        assert found["reset"]["hashes"] != found["resumed"]["hashes"]
        assert sorted(found["own"]) == [
            *("momentum.0.bias", "momentum.0.weight", "momentum.2.bias", "momentum.2.weight", "residual.0.weight")
        ]
    first, second = (each["threshold sgd"]["own"]["residual.0.weight"] for each in results[:2])
    assert first != second


@pytest.mark.slow
def test_figures_count_the_bytes_of_a_rank(results: Any) -> None:
    """A code goes to two other ranks, with its sizes and two means; small tensors travel in a ring, as ddp's do."""
    ring, small = 2 * (RANKS - 1) / RANKS * 4, 60 + 60 * 3 + 3
    found = results[0]["threshold adamw"]["figures"]
    entries = found["density"] * 40 * 60
    assert entries == pytest.approx(0.05 * 40 * 60, rel=0.02)
    assert found["bytes_sent"] == pytest.approx(2 * (2 * entries + 8 + 24) + ring * small, abs=8)
    assert found["threshold"] > 0
    assert found["residual_norm"] > 0
    assert results[0]["ddp sgd"]["figures"] == {"bytes_sent": ring * (2400 + small)}
    assert results[0]["ddp powersgd"]["figures"] == {"bytes_sent": ring * (2 * (40 + 60) + small)}
    assert results[0]["threshold silent"]["figures"]["bytes_sent"] == 0


@pytest.mark.slow
def test_overflow_on_one_rank_leaves_the_step_out_on_all(results: Any) -> None:
    """In fp16 all ranks skip step 3, halve the scale, and keep residual and momentum as before the step."""
    for rank in results:
        assert rank["fp16"]["hashes"][3] == rank["fp16"]["hashes"][2]
        assert rank["fp16"]["hashes"][4] != rank["fp16"]["hashes"][3]
        assert rank["fp16"]["owns"][3] == rank["fp16"]["owns"][2]
        assert rank["fp16"]["scale"] == 512


@pytest.mark.slow
def test_nan_on_one_rank_reaches_all_ranks(results: Any) -> None:
    """With on_nan: stop all ranks get nan, as under ddp, and none is hidden in a residual."""
    assert [rank["nan"]["is_finite"] for rank in results] == [[True] * 3 + [False] * 5] * RANKS


@pytest.mark.slow
def test_clipping_comes_before_the_exchange(results: Any) -> None:
    """Each rank clips its own gradient, so the mean is at most as long; the returned norm is the rank's own."""
    norms = [rank["clipped"]["norms"] for rank in results]
    assert norms[0] != norms[1]
    assert min(map(min, norms)) > 0.05
    for rank in results:
        first_move = rank["clipped"]["moved"][0]
        assert 0.01 * SGD["lr"] < first_move < 0.0501 * SGD["lr"] + SGD["lr"] * SGD["weight_decay"] * 10


# -------------------------------------------------------------------------------------------------------- the ranks


def train(
    optimizer: dict[str, Any],
    silent: bool = False,
    spoil: int = -1,
    clip: float | None = None,
    steps: range = range(STEPS),
    kept: list[Any] | None = None,
    load: list[Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train as train.py does; return this rank's results. Rank 1's gradient is infinite in the step `spoil`."""
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3))
    training = TrainingSettings(global_batch_size=4 * RANKS, max_steps=STEPS, **settings)
    spread = wrap(training, module, CPU, data.Split(4 * RANKS, 4, RANKS, 1), silent=silent)
    moving = optim.build(OptimizerSettings(**optimizer), module.parameters(), fused=False)
    spread.adopt(moving)
    if load:
        module.load_state_dict(load[0])
        moving.load_state_dict(copy.deepcopy(load[1]))
        spread.load_rank_state(load[2])
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, enabled=training.precision == "fp16")
    found: dict[str, Any] = {"hashes": [], "owns": [], "norms": [], "moved": [], "is_finite": []}
    for step in steps:
        before = torch.cat([p.detach().flatten() for p in module.parameters()])
        generator = torch.Generator().manual_seed(data.mix(5, step, dist.get_rank()))
        x, y = torch.randn(4, 40, generator=generator), torch.randint(0, 3, (4,), generator=generator)
        with spread.micro_batch(dist.get_rank(), True), spread.autocast():
            loss = F.cross_entropy(called(spread, x), y) * (
                float("inf") if (step, dist.get_rank()) == (spoil, 1) else 1
            )
            scaler.scale(loss).backward()
        spread.finish()
        scaler.unscale_(moving)
        if clip:
            found["norms"].append(spread.clip(clip).item())
        if spread.exchange is not None:
            spread.exchange(step)
        scaler.step(moving)
        scaler.update()
        moving.zero_grad()
        after = torch.cat([p.detach().flatten() for p in module.parameters()])
        found["moved"].append(float(torch.linalg.vector_norm(after - before)))
        found["is_finite"].append(bool(torch.isfinite(after).all()))
        found["hashes"].append(digest(module.state_dict()))
        found["owns"].append(digest(spread.rank_state()))
    if kept is not None:
        kept += copy.deepcopy([module.state_dict(), moving.state_dict(), spread.rank_state()])
    return found | {"figures": spread.figures(), "weights": after.tolist(), "scale": scaler.get_scale()}


def resume(**settings: Any) -> dict[str, Any]:
    """Train in one run; then in two halves, the second half with the rank's own state and without the state."""
    kept: list[Any] = []
    found = {"whole": train(**settings)}
    train(steps=range(STEPS // 2), kept=kept, **settings)
    second = range(STEPS // 2, STEPS)
    found["resumed"] = train(steps=second, load=kept, **settings)
    found["reset"] = train(steps=second, load=[*kept[:2], {}], **settings)
    return {**found, "own": {name: digest({"": value}) for name, value in kept[2].items()}}


def on_rank() -> dict[str, Any]:
    """Return this rank's results of all cases."""
    return {name: (resume if name == "threshold sgd" else train)(**case) for name, case in CASES.items()}

"""Sparse gradients: the code; then four ranks over gloo; then jobs that are stopped and resumed.

torchrun starts this same file as the ranks: `python -m torch.distributed.run ... test_sparse.py RESULT`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data, optim, strategies
from cloudtrain.entrypoints.trainer.settings import OptimizerSettings, TrainingSettings
from cloudtrain.entrypoints.trainer.strategies.sparse import SparseGradients, decode, density_of, encode

CPU = torch.device("cpu")
SPLIT = data.Split(16, 4, 4, 1)
MOMENTUM = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"name": "adamw", "lr": 0.01}

# ---------------------------------------------------------------------------------------------------- without ranks


@pytest.mark.parametrize(
    "indices",
    [
        [],
        [0],
        [32766],
        [32767],
        [32768],
        [0, 32768, 65536, 65537],
        [200_000, 200_001, 999_999],
        list(range(1000)),
    ],
)
def test_code_gives_back_indices_and_signs(indices: list[int]) -> None:
    """Empty and full vectors, the first and the last element, and gaps around 15 bits survive the code."""
    wanted = torch.tensor(indices, dtype=torch.int64)
    signs = torch.arange(len(indices)) % 2 == 1
    found, found_signs = decode(encode(wanted, signs))
    assert found.tolist() == indices
    assert found_signs.tolist() == signs.tolist()


@pytest.mark.parametrize(("density", "times"), [(0.1, 20), (0.01, 200), (0.001, 1977)])
def test_code_has_the_size_of_a_word_an_entry(density: float, times: float) -> None:
    """A million random entries: as many times smaller than float32 as the density says, within 5 %."""
    chance = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    indices = torch.nonzero(chance < density).flatten()
    words = encode(indices, torch.zeros(indices.numel(), dtype=torch.bool))
    assert torch.equal(decode(words)[0], indices)
    assert 4_000_000 / words.nbytes == pytest.approx(times, rel=0.05)


def test_density_falls_from_a_quarter() -> None:
    """The density falls geometrically over the warm-up; a density above a quarter has none."""
    assert [density_of(step, 0.01, 4) for step in (0, 2, 4, 9)] == pytest.approx([0.25, 0.05, 0.01, 0.01])
    assert density_of(0, 0.5, 4) == 0.5
    assert density_of(0, 0.01, 0) == 0.01


@pytest.mark.parametrize("kind", ["threshold", "topk"])
def test_sent_and_residual_are_all_gradients(kind: str) -> None:
    """What was sent in ten steps and the residual sum up to the gradients; small parameters are sent whole."""
    torch.manual_seed(0)
    module = nn.Linear(64, 64)
    own = SparseGradients(module, kind, 0.05, 0, is_silent=True)
    total, sent = torch.zeros(64, 64), torch.zeros(64, 64)
    for step in range(10):
        module.weight.grad, module.bias.grad = torch.randn(64, 64), torch.ones(64)
        total += module.weight.grad
        own.exchange(step)
        sent += module.weight.grad
        assert 0.03 < float((module.weight.grad != 0).float().mean()) < 0.07
        assert module.bias.grad.tolist() == [1.0] * 64
    assert torch.allclose(sent + own.state()["sparse.residual.weight"], total, atol=1e-5)


def test_zero_gradients_send_nothing() -> None:
    """A gradient of zeros has a threshold of 0, which would send every element."""
    module = nn.Linear(64, 64)
    own = SparseGradients(module, "threshold", 0.01, 0, is_silent=True)
    own.exchange(0)
    assert own.figures()["density"] == 0.0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"compression": "threshold", "compression_density": 1.0}, "sends everything"),
        ({"compression": "topk", "compression_density": 2.0}, "sends everything"),
        ({"compression": "topk", "precision": "fp16"}, "set precision: bf16"),
        ({"compression": "topk", "shard": "optimizer"}, "needs whole gradients"),
        ({"compression": "topk", "strategy": "fsdp"}, "compression topk is ddp's"),
        ({"compression": "topk", "reproducible": "strict"}, "set compression: none"),
        ({"compression_density": 0.1}, "go with compression: threshold or topk"),
    ],
)
def test_settings_against_sparse_gradients_are_refused(settings: dict[str, Any], why: str) -> None:
    """Each refusal names the way out."""
    training = TrainingSettings(global_batch_size=16, max_steps=1, **settings)
    with pytest.raises(TaskError) as found:
        strategies.wrap(training, nn.Linear(1, 1), CPU, SPLIT)
    assert why in str(found.value)


# ------------------------------------------------------------------------------------------------------- with ranks

CASES: dict[str, dict[str, Any]] = {
    "dense": {"optimizer": MOMENTUM},
    "dense adamw": {"optimizer": ADAMW},
    "all": {"compression": "topk", "compression_density": 1.0, "optimizer": MOMENTUM},
    "all adamw": {"compression": "topk", "compression_density": 1.0, "optimizer": ADAMW},
    "threshold": {"compression": "threshold", "compression_density": 0.05, "optimizer": MOMENTUM},
    "topk": {"compression": "topk", "compression_density": 0.05, "optimizer": ADAMW},
    "clipped": {"compression": "topk", "compression_density": 1.0, "optimizer": MOMENTUM, "clip_norm": 0.1},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what four ranks found in all cases."""
    from doubles import warmpython  # the ranks, which run this file, cannot import doubles

    folder = tmp_path_factory.mktemp("ranks")
    args = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", __file__, str(folder / "found")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = warmpython.run(args, folder, environment, 200)
    assert done.returncode == 0, done.stderr[-6000:]
    loaded: list[dict[str, Any]] = json.loads((folder / "found").read_text())
    return loaded


@pytest.mark.slow
def test_all_ranks_have_the_same_bits_in_each_step(found: Any) -> None:
    """The codes are decoded in rank order, so the weights of the ranks never differ by a bit."""
    for name in CASES:
        assert len({json.dumps(rank[name]["hashes"]) for rank in found}) == 1, name


@pytest.mark.slow
def test_density_of_one_is_ddp_to_rounding(found: Any) -> None:
    """top-k that sends everything trains like ddp, with SGD's momentum and weight decay and with AdamW."""
    for name, dense in (("all", "dense"), ("all adamw", "dense adamw")):
        assert found[0][name]["last"] == pytest.approx(found[0][dense]["last"], rel=1e-4)


@pytest.mark.slow
def test_residuals_differ_by_rank_and_are_loaded(found: Any) -> None:
    """Each rank keeps its own residual, and a second run from the state ends with the same bits."""
    for name in ("threshold", "topk"):
        assert len({rank[name]["residual"] for rank in found}) == 4
        assert all(rank[name]["again"] == rank[name]["hashes"][-1] for rank in found)


@pytest.mark.slow
def test_bytes_are_the_code_to_all_other_ranks(found: Any) -> None:
    """A rank sends 2 bytes an entry to each other rank, 6 with the value, and small parameters as ddp does."""
    elements, small = 64 * 64 + 64 * 20, 84
    ring = 1.5 * 4 * small
    for name, each, head in (("threshold", 2, 8), ("topk", 6, 0)):
        wanted = 3 * (0.05 * elements * each + head) + ring
        assert found[0][name]["figures"]["bytes_sent"] == pytest.approx(wanted, rel=0.05)
        assert found[0][name]["figures"]["density"] == pytest.approx(0.05, rel=0.05)
        assert found[0][name]["figures"]["residual_norm"] > 0


@pytest.mark.slow
def test_clipping_comes_before_the_exchange(found: Any) -> None:
    """The norm is of the rank's own gradient, so the first step is at most the clipped gradient."""
    assert found[0]["clipped"]["first_norm"] <= 0.1 * 1.001


def main(path: str) -> None:
    """Run all cases on this rank; rank 0 writes what the ranks found."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    own = {name: case(name) for name in CASES}
    listed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(listed, own)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(listed))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def case(name: str) -> dict[str, Any]:
    """Train 12 steps; return the hashes of the weights, the last loss, the residual's hash, and figures."""
    settings = dict(CASES[name])
    clip_norm = settings.pop("clip_norm", None)
    optimizer = OptimizerSettings(**settings.pop("optimizer"))
    training = TrainingSettings(global_batch_size=16, max_steps=1, optimizer=optimizer, **settings)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 20))
    spread = strategies.wrap(training, module, CPU, SPLIT)
    stepper = optim.build(optimizer, list(module.parameters()))
    spread.attach(stepper, torch.amp.GradScaler("cpu", enabled=False))
    hashes, first_norm, state, kept = [], 0.0, {}, {}
    losses: list[float] = []
    for step in range(12):
        if step == 11:
            state = {key: value.clone() for key, value in spread.rank_state().items()}
            kept = {key: value.clone() for key, value in module.state_dict().items()}
            moments = {id(p): {k: v.clone() for k, v in s.items()} for p, s in stepper.state.items()}
        losses.append(take(spread, stepper, step, clip_norm))
        first_norm = first_norm or float(
            torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm()
        )
        stepper.zero_grad()
        hashes.append(hashed(module.state_dict()))
    figures, residual = spread.figures(), hashed(spread.rank_state())
    module.load_state_dict(kept)
    for parameter, values in stepper.state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                value.copy_(moments[id(parameter)][key])
    spread.load_rank_state(state)
    take(spread, stepper, 11, clip_norm)
    return {
        "hashes": hashes,
        "last": losses[-1],
        "first_norm": first_norm,
        "figures": figures,
        "residual": residual,
        "again": hashed(module.state_dict()),
    }


def take(spread: strategies.Strategy, stepper: torch.optim.Optimizer, step: int, clip_norm: float | None) -> float:
    """Take a step on samples of this rank; return the mean loss of all ranks."""
    chance = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(4, 64, generator=chance)
    with spread.micro_batch(dist.get_rank(), True):
        loss = F.cross_entropy(spread.model(x), (x.sum(1).abs().long() % 20))
        (loss / spread.divisor).backward()
    spread.finish()
    if clip_norm is not None:
        spread.clip(clip_norm)
    spread.exchange(step)
    stepper.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def hashed(tensors: dict[str, torch.Tensor]) -> str:
    """Return the hash of the tensors' bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(bytes(tensors[name].detach().contiguous().flatten().view(torch.uint8).tolist()))
    return found.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1])

"""The average of the weights: its value, its temporary swap into the module, and the same over shards."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from cloudtrain.entrypoints.trainer.ema import Ema

# Two ranks train a sharded model and a whole copy on the same batches, each with an average. The script prints the
# distance of the averages, whether the swap is visible and ends bit for bit, and whether copy_ loads values.
SHARDED = """
import copy, json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from cloudtrain.entrypoints.trainer.ema import Ema

rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
whole = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
spread = copy.deepcopy(whole)
fully_shard(spread[0])
fully_shard(spread)  # the root holds the last layer, and keeps it gathered after a forward pass without a backward
ddp = nn.parallel.DistributedDataParallel(whole)
pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1), Ema(m, 0.9)) for m in (ddp, spread)]

def train(steps):
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(8, 5)
        for model, optimizer, ema in pairs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(step + 1)

def full(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]

def away(first, second):
    return max((a - b).abs().max().item() for a, b in zip(full(first), full(second), strict=True))

x = torch.ones(2, 5)
train(range(3))
ema = pairs[1][2]
with torch.no_grad():
    before = spread(x)  # leaves the root gathered
    with ema.swapped():
        inside = [p.detach().clone() for p in full(spread.state_dict().values())]
        averaged = spread(x)  # and again
    after = spread(x)
    with pairs[0][2].swapped():
        plain = whole(x)
train(range(3, 6))
tensors = ema.tensors()
saved = {name: t.full_tensor() + 1 for name, t in tensors.items()}
apart = away(pairs[0][2].tensors().values(), tensors.values())
for name, t in tensors.items():
    t.copy_(distribute_tensor(saved[name], t.device_mesh, t.placements))
found = {
    "names": list(tensors),
    "sharded": all(isinstance(t, DTensor) for t in tensors.values()),
    "apart": apart,
    "trained apart": away(whole.parameters(), list(spread.state_dict().values())),
    "loan": (averaged - before).abs().max().item(),
    "loan apart": (averaged - plain).abs().max().item(),
    "is back": torch.equal(before, after),
    "is loaded": all(torch.equal(t.full_tensor(), saved[name]) for name, t in ema.tensors().items()),
}
if rank == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)
"""


def stepped(model: nn.Module, step: int) -> None:
    """Change the weights."""
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_average_is_the_recursion_written_out() -> None:
    """After each step, average = decay average + (1 - decay) weights; the decay rises to the given decay."""
    model = nn.Linear(2, 2)
    ema, wanted = Ema(model, 0.3), model.weight.detach().clone()
    for step, decay in ((1, 2 / 11), (2, 3 / 12), (3, 0.3), (4, 0.3)):
        stepped(model, step)
        ema.update(step)
        wanted = decay * wanted + (1 - decay) * model.weight.detach()
        assert ema.decay(step) == decay
        torch.testing.assert_close(ema.tensors()["weight"], wanted)


def test_swap_ends_bit_for_bit() -> None:
    """Inside, the module has the average and its own buffers; afterwards, even after an error, its own weights."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ema = Ema(model, 0.9)
    stepped(model, 1)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    with contextlib.suppress(KeyError), ema.swapped():
        assert torch.equal(model[0].weight, ema.tensors()["0.weight"])
        assert torch.equal(model[1].running_mean, trained["1.running_mean"])
        raise KeyError
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert set(ema.tensors()) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_frozen_parameters_are_left_out() -> None:
    """Frozen parameters need no average; tied weights have a single average."""
    model = nn.Module()
    model.first, model.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    model.second.weight = model.first.weight
    model.second.bias.requires_grad = False
    assert list(Ema(model, 0.9).tensors()) == ["first.weight"]


def test_low_precision_is_averaged_in_fp32() -> None:
    """A step of 0.001 is lost in bf16; the swap rounds, and afterwards weights and average are unchanged."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
        ema = Ema(model, 0.999)
        model.weight.fill_(2.0)
    ema.update(10**6)
    (average,) = ema.tensors().values()
    assert average.item() == pytest.approx(1.001)
    with ema.swapped():
        assert model.weight.item() == 1.0
    assert model.weight.item() == 2.0
    assert average.item() == pytest.approx(1.001)


def test_reset_restarts_at_the_weights() -> None:
    """After a load of weights without an average, the average starts at the weights."""
    model = nn.Linear(2, 2)
    ema = Ema(model, 0.9)
    held = ema.tensors()["weight"]
    stepped(model, 1)
    ema.reset()
    assert torch.equal(held, model.weight)


def test_names_omit_wrappers() -> None:
    """Parameters of compiled and of checkpointed modules keep the names of the plain module."""
    compiled = nn.Module()  # like torch.compile, which would affect further tests in this process
    compiled._orig_mod = nn.Linear(2, 2)
    model = nn.Sequential(compiled, checkpoint_wrapper(nn.Linear(2, 2)))
    assert list(Ema(model, 0.9).tensors()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.slow
def test_average_over_shards_is_the_same(tmp_path: Path) -> None:
    """The averages over FSDP2's shards and over ddp are equal, swapped in and out despite forward passes in between."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(2)
    ]
    output = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found = json.loads(output[0])
    assert found["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert (found["sharded"], found["is back"], found["is loaded"]) == (True, True, True)
    assert max(found["apart"], found["loan apart"], found["trained apart"]) <= 1e-6 < 1e-3 < found["loan"]

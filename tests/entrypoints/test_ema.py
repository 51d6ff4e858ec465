"""The average of the weights: its value, and its temporary swap into the module; test_strategies.py has shards."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from cloudtrain.entrypoints.trainer.ema import Ema


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
        torch.testing.assert_close(ema.averages["weight"], wanted)


def test_swap_ends_bit_for_bit() -> None:
    """Inside, the module has the average and its own buffers; afterwards, even after an error, its own weights."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ema = Ema(model, 0.9)
    stepped(model, 1)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    with contextlib.suppress(KeyError), ema.swapped():
        assert torch.equal(model[0].weight, ema.averages["0.weight"])
        assert torch.equal(model[1].running_mean, trained["1.running_mean"])
        raise KeyError
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert set(ema.averages) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_frozen_parameters_are_left_out() -> None:
    """Frozen parameters need no average; tied weights have a single average."""
    model = nn.Module()
    model.first, model.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    model.second.weight = model.first.weight
    model.second.bias.requires_grad = False
    assert list(Ema(model, 0.9).averages) == ["first.weight"]


def test_low_precision_is_averaged_in_fp32() -> None:
    """A step of 0.001 is lost in bf16; the swap rounds, and afterwards weights and average are unchanged."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
        ema = Ema(model, 0.999)
        model.weight.fill_(2.0)
    ema.update(10**6)
    (average,) = ema.averages.values()
    assert average.item() == pytest.approx(1.001)
    with ema.swapped():
        assert model.weight.item() == 1.0
    assert model.weight.item() == 2.0
    assert average.item() == pytest.approx(1.001)


def test_reset_restarts_at_the_weights() -> None:
    """After a load of weights without an average, the average starts at the weights."""
    model = nn.Linear(2, 2)
    ema = Ema(model, 0.9)
    held = ema.averages["weight"]
    stepped(model, 1)
    ema.reset()
    assert torch.equal(held, model.weight)


def test_names_omit_wrappers() -> None:
    """Parameters of compiled and of checkpointed modules keep the names of the plain module."""
    compiled = nn.Module()  # like torch.compile, which would affect further tests in this process
    compiled._orig_mod = nn.Linear(2, 2)
    model = nn.Sequential(compiled, checkpoint_wrapper(nn.Linear(2, 2)))
    assert list(Ema(model, 0.9).averages) == ["0.weight", "0.bias", "1.weight", "1.bias"]

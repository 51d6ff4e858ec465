"""What fsdp wraps, how a wrong checkpoint is explained, and optimizer state by name. The runs are in test_train.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cloudtrain.entrypoints import strategy
from cloudtrain.entrypoints.settings import TaskError


def transformer() -> nn.Module:
    """Two layers, each with a Sequential of its own, in a ModuleList; an embedding beside it."""
    model = nn.Module()
    model.embed = nn.Embedding(4, 4)
    model.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 4))}) for _ in range(2))
    return model


def test_default_blocks_are_the_outermost_layers() -> None:
    """Each child of the outermost list that can run forward is a block; what lies inside one is not."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(nn.Sequential(inner, nn.ReLU()), nn.ReLU(), nn.Linear(2, 2))
    assert strategy.default_blocks(model) == [model[0], model[2]]


def test_default_blocks_look_through_containers_without_forward() -> None:
    """A ModuleDict in a ModuleList cannot be gathered as one, so its parts are taken."""
    model = transformer()
    found = strategy.default_blocks(model)
    assert [type(block) for block in found] == [nn.Linear, nn.Linear]


def test_clip_returns_the_norm_before() -> None:
    """The gradient is scaled to the norm, and what it was is returned."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert strategy.clip([parameter], 1.0).item() == 5.0
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_difference_names_the_keys() -> None:
    """Missing, left over and reshaped keys are each named."""
    model = nn.Linear(2, 3)
    assert strategy._difference(model, model.state_dict()) is None
    found = strategy._difference(model, {"weight": torch.zeros(3, 4), "scale": torch.zeros(1)})
    assert found == "it lacks bias; it has but this model lacks scale; the shape differs of weight (3, 4), here (3, 2)"


def test_finite_sees_one_bad_element() -> None:
    """One nan in one parameter is enough."""
    model = nn.Linear(2, 3)
    assert strategy.finite(model)
    with torch.no_grad():
        model.bias[1] = float("nan")
    assert not strategy.finite(model)


def test_optimizer_state_survives_another_order_of_parameters() -> None:
    """State under names loads into an optimizer that holds the same parameters in another order."""
    model = nn.Linear(2, 3)
    first = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    first.step()
    second = torch.optim.AdamW([model.bias, model.weight])
    second.load_state_dict(strategy._by_position(model, second, strategy._by_name(model, first)))
    for parameter in model.parameters():
        assert torch.equal(second.state[parameter]["exp_avg"], first.state[parameter]["exp_avg"])


@pytest.mark.parametrize(("name", "precision"), [("zero", "fp32"), ("ddp", "fp8")])
def test_unknown_strategy_or_precision_is_a_task_error(name: str, precision: str) -> None:
    """Before any process group is needed, the message lists what there is."""
    with pytest.raises(TaskError, match="there are"):
        strategy.wrap(name, nn.Linear(1, 1), torch.device("cpu"), precision, None)


def test_model_without_parameters_is_a_task_error() -> None:
    """There is nothing to train, and no strategy could wrap it."""
    with pytest.raises(TaskError, match="nothing to train"):
        strategy.wrap("ddp", nn.ReLU(), torch.device("cpu"), "fp32", None)

"""Learning-rate schedules by value, and the optimizers' names."""

from __future__ import annotations

import pytest
import torch

from cloudtrain.entrypoints import optim
from cloudtrain.entrypoints.settings import Optimizer, Schedule, TaskError


def test_warm_up_is_linear_and_wastes_no_step() -> None:
    """The first step has 1/n of the rate and step n the whole."""
    schedule = Schedule("constant", warmup_steps=4)
    assert [optim.lr_factor(schedule, step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_ends_at_the_lowest_rate() -> None:
    """After the warm-up: 1 at first, the mean half way, min_lr_ratio at the end and beyond."""
    schedule = Schedule("cosine", warmup_steps=2, min_lr_ratio=0.1)
    found = [optim.lr_factor(schedule, step, 12) for step in (2, 7, 12, 50)]
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_linear_falls_evenly() -> None:
    """Without warm-up, equal steps down from 1."""
    assert [optim.lr_factor(Schedule("linear"), step, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_unknown_names_are_task_errors() -> None:
    """The message lists what there is."""
    with pytest.raises(TaskError, match="adamw, sgd"):
        optim.build(Optimizer("adam"), [torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(TaskError, match="constant, cosine, linear"):
        optim.lr_factor(Schedule("step"), 0, 1)


def test_set_lr_keeps_the_groups_apart() -> None:
    """Each group moves by the same factor from its own base."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.01)]
    optimizer = torch.optim.SGD(groups)
    assert optim.set_lr(optimizer, [0.1, 0.01], 0.5) == 0.05
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]

"""Schedules and scaling by value, LARS and LAMB against their papers' formulas."""

import copy
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import optim, report
from cloudtrain.entrypoints.trainer.settings import OptimizerSettings, ScheduleSettings


@pytest.mark.parametrize(
    ("schedule", "start", "factors"),
    [
        # the first step has 1/n of the rate and step n the whole
        (ScheduleSettings("constant", warmup_steps=4), 0.0, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 5: 1.0}),
        # from a start above 0 the first step has exactly that rate, and the first after the warm-up the whole
        (ScheduleSettings("constant", warmup_steps=4), 0.2, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1.0}),
        # 1 after the warm-up, the mean half way, min_lr_ratio at the end and beyond
        (ScheduleSettings("cosine", warmup_steps=2, min_lr_ratio=0.1), 0.0, {2: 1.0, 7: 0.55, 12: 0.1, 50: 0.1}),
        (ScheduleSettings("linear"), 0.0, {0: 1.0, 3: 0.75, 6: 0.5, 9: 0.25, 12: 0.0}),
        # from 1/25 to 1 in 30 % of the steps, then to 0; half way of each the mean
        (ScheduleSettings("one-cycle"), 0.0, {0: 0.04, 2: 0.52, 4: 1.0, 8: 0.5, 12: 0.0}),
        (
            ScheduleSettings("one-cycle", warmup_steps=2, min_lr_ratio=0.2),
            0.1,
            {0: 0.1, 1: 0.55, 2: 1.0, 7: 0.6, 12: 0.2},
        ),
        # from a milestone on; never below min_lr_ratio; absolute steps, with a warm-up too
        (ScheduleSettings("step", 2, 0.05, (4, 6, 9)), 0.0, {0: 0.5, 3: 1.0, 4: 0.1, 5: 0.1, 6: 0.05, 11: 0.05}),
    ],
)
def test_rate_follows_the_schedule(schedule: ScheduleSettings, start: float, factors: dict[int, float]) -> None:
    """Twelve steps of warm-up and fall."""
    found = {step: optim.lr_factor(schedule, step, 12, start=start) for step in factors}
    assert found == pytest.approx(factors, rel=1e-12)


def test_plateau_has_the_factor_of_its_falls() -> None:
    """At any step; `test_rate_resumes_exactly` has the evaluations."""
    assert optim.lr_factor(ScheduleSettings("plateau", gamma=0.5), 7, 12, falls=3) == 0.125


@pytest.mark.parametrize("returned", [None, "x", -0.1, float("nan"), torch.ones(2)])
def test_own_schedule_must_return_a_factor(returned: Any) -> None:
    """The message has the step and the value."""
    with pytest.raises(TaskError, match=r"schedule\(3, 12, params\) returned .*; return the factor on lr"):
        optim.own_factor(lambda *_: returned, 3, 12, {})
    for kind in (float, torch.tensor, np.float32, np.array):
        assert optim.own_factor(lambda step, steps, _, kind=kind: kind(step / steps), 3, 12, {}) == 0.25


def test_set_lr_keeps_the_groups_apart() -> None:
    """Each group moves by the same factor from its own base."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.01)]
    optimizer = torch.optim.SGD(groups)
    assert optim.set_lr(optimizer.param_groups, [0.1, 0.01], 0.5) == 0.05
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]


@pytest.mark.parametrize(("rule", "lr"), [("none", 0.1), ("linear", 1.6), ("sqrt", 0.4)])
def test_rate_is_scaled_by_the_rule(rule: str, lr: float) -> None:
    """Sixteen base batches: 16 times the rate, or 4 times, both in the function and in the optimizer."""
    assert optim.scaled_lr(0.1, 4096, 256, rule) == pytest.approx(lr)
    settings = OptimizerSettings("sgd", lr=0.1, lr_scaling=rule, base_batch_size=256)
    optimizer = optim.build(settings, [nn.Parameter(torch.zeros(1))], 4096)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)


def test_warm_up_of_a_rate_scaled_up_starts_at_the_unscaled_one() -> None:
    """An unscaled rate, or a rate scaled down, warms up from 0; scaling up without a warm-up is an error."""
    schedule = ScheduleSettings(warmup_steps=10)
    settings = OptimizerSettings("sgd", lr=0.1, lr_scaling="linear", base_batch_size=256)
    assert optim.warmup_start(settings, schedule, 1024) == 0.25
    assert optim.warmup_start(settings, schedule, 256) == optim.warmup_start(settings, schedule, 64) == 0.0
    with pytest.raises(TaskError, match=r"lr 0\.1 to 0\.4 for 1024 samples.*set schedule\.warmup_steps"):
        optim.warmup_start(settings, ScheduleSettings(), 1024)
    assert optim.warmup_start(settings, ScheduleSettings(), 128) == 0.0
    assert optim.warmup_start(OptimizerSettings("sgd"), ScheduleSettings(), 1024) == 0.0


def test_build_passes_every_setting_on() -> None:
    """Each optimizer has the values of the settings."""
    parameters = [nn.Parameter(torch.zeros(1))]
    wanted = {"lr": 0.3, "momentum": 0.8, "betas": (0.7, 0.95), "eps": 1e-5}
    wanted |= {"weight_decay": 0.2, "trust_coefficient": 0.5}
    for name in optim.OPTIMIZERS:
        (group,) = optim.build(OptimizerSettings(name, **wanted), parameters).param_groups
        assert {key: group[key] for key in wanted if key in group} == {k: v for k, v in wanted.items() if k in group}
    assert group["lr"] == 0.3


def run(optimizer_of: Any, steps: int = 4) -> nn.Module:
    """Return a small model after the steps; its gradients do not depend on the optimizer's own arithmetic."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class PlainLars(torch.optim.Optimizer):
    """Algorithm 1 of You et al. 2017, line by line; biases without ratio and decay."""

    def step(self) -> None:  # type: ignore[override]
        """Take one step with rate 0.1, momentum 0.9, decay 0.01 and trust coefficient 0.02."""
        for weights in self.param_groups[0]["params"]:
            gradient, ratio, decay = weights.grad, 1.0, 0.0
            if weights.ndim > 1:
                decay = 0.01
                ratio = 0.02 * weights.norm() / (gradient.norm() + decay * weights.norm())
            velocity = self.state[weights].get("v", torch.zeros_like(weights))
            self.state[weights]["v"] = velocity = 0.9 * velocity + 0.1 * ratio * (gradient + decay * weights)
            weights.data -= velocity.detach()


class PlainLamb(torch.optim.Optimizer):
    """Algorithm 2 of You et al. 2020, line by line; biases without ratio and decay."""

    def step(self) -> None:  # type: ignore[override]
        """Take one step with rate 0.1, betas 0.8 and 0.9, eps 1e-6 and decay 0.01."""
        for weights in self.param_groups[0]["params"]:
            state = self.state[weights]
            t = state["t"] = state.get("t", 0) + 1
            mean = state["m"] = 0.8 * state.get("m", 0.0) + 0.2 * weights.grad
            square = state["s"] = 0.9 * state.get("s", 0.0) + 0.1 * weights.grad**2
            update = mean / (1 - 0.8**t) / ((square / (1 - 0.9**t)).sqrt() + 1e-6)
            ratio = 1.0
            if weights.ndim > 1:
                update = update + 0.01 * weights
                ratio = weights.norm() / update.norm()
            weights.data -= (0.1 * ratio * update).detach()


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        (OptimizerSettings("lars", 0.1, momentum=0.9, weight_decay=0.01, trust_coefficient=0.02), PlainLars),
        (OptimizerSettings("lamb", 0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.01), PlainLamb),
    ],
    ids=["lars", "lamb"],
)
def test_layerwise_optimizers_follow_their_papers(settings: OptimizerSettings, plain: Any) -> None:
    """Four steps in fp64 agree with the formulas written out."""
    own, written_out = run(lambda p: optim.build(settings, p)), run(lambda p: plain(p, {}))
    for found, wanted in zip(own.parameters(), written_out.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(optim.OPTIMIZERS))
def test_state_survives_saving_bit_for_bit(name: str) -> None:
    """Two steps, a save, a load into a fresh optimizer, and two steps equal four steps."""
    settings = OptimizerSettings(name, lr=0.05, momentum=0.9, weight_decay=0.01)
    torch.manual_seed(1)
    first = nn.Linear(4, 3)
    second = copy.deepcopy(first)
    gradients = [[torch.randn_like(p) for p in first.parameters()] for _ in range(4)]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: list[list[torch.Tensor]]) -> None:
        for gradient in steps:
            for parameter, value in zip(model.parameters(), gradient, strict=True):
                parameter.grad = value.clone()
            optimizer.step()

    train(first, optim.build(settings, first.parameters()), gradients)
    half = optim.build(settings, second.parameters())
    train(second, half, gradients[:2])
    rest = optim.build(settings, second.parameters())
    rest.load_state_dict(copy.deepcopy(half.state_dict()))
    train(second, rest, gradients[2:])
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_zero_weights_and_zero_gradients_stay_finite(name: str) -> None:
    """A layer of zeros moves at the plain rate; a layer without a gradient, or with a zero gradient, stays."""
    settings = OptimizerSettings(name, lr=0.1)
    zero, still, unused = (nn.Parameter(value) for value in (torch.zeros(2, 2), torch.ones(2, 2), torch.ones(2, 2)))
    optimizer = optim.build(settings, [zero, still, unused])
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    optimizer.step()
    torch.testing.assert_close(zero.detach(), torch.full((2, 2), -0.1))
    assert torch.equal(still, torch.ones(2, 2))
    assert torch.equal(unused, torch.ones(2, 2))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_groups_keep_their_own_settings(name: str) -> None:
    """A group at rate 0 stays, the other group moves."""
    pair = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    groups: Any = [{"params": pair[:1], "lr": 0.0}, {"params": pair[1:]}]
    optimizer = optim.OPTIMIZERS[name](OptimizerSettings(name), 0.1, groups, False)
    (pair[0] + pair[1]).square().sum().backward()
    optimizer.step()
    assert torch.equal(pair[0], torch.ones(2, 2))
    assert not torch.equal(pair[1], torch.ones(2, 2))


def test_sparse_gradients_are_refused() -> None:
    """The message gives the alternative."""
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optim.build(OptimizerSettings("lamb"), table.parameters()).step()


@pytest.mark.parametrize(
    ("trained", "frozen", "shown", "told"),
    [
        (torch.float32, torch.float32, "", ""),
        (torch.bfloat16, torch.bfloat16, ", weights bf16", "bf16, so sgd loses each update below 1/256 of a weight"),
        (torch.float16, torch.float32, ", weights fp16 and fp32", "fp16, so sgd loses each update below 1/2048 of a"),
        (torch.float32, torch.bfloat16, ", weights bf16 and fp32", ""),
    ],
)
def test_weights_below_fp32_are_shown(
    capsys: pytest.CaptureFixture[str], trained: torch.dtype, frozen: torch.dtype, shown: str, told: str
) -> None:
    """The start line names the types; a built-in optimizer on trained weights of 16 bits gets a warning."""
    layers = nn.Linear(2, 2).to(trained), nn.Linear(2, 2).to(frozen).requires_grad_(False)
    named = types.SimpleNamespace
    training = named(optimizer=named(name="sgd"))
    for optimizer, wanted in ((None, told), (print, "")):
        job: Any = named(strategy=named(module=nn.Sequential(*layers)), task=named(optimizer=optimizer))
        job.place, job.spec = named(is_head=True), named(training=training)
        assert report._weights(job) == shown
        printed = capsys.readouterr().out
        assert (wanted in printed, bool(wanted)) == (True, bool(printed))

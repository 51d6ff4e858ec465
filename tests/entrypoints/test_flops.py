"""Operations counted on real micro-batches, without any effect on the results; peaks by torch's device names."""

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cloudtrain.entrypoints.trainer import metrics


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count despite modules that earlier tests in this process have compiled."""
    monkeypatch.setattr(metrics, "_is_compiled", lambda: False)


class Attention(nn.Module):
    """One head of attention without projections."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attention of x to itself."""
        return F.scaled_dot_product_attention(x, x, x)


def convolutional() -> nn.Module:
    """Return a small network with all modules that could show an effect: batch norm, dropout, in-place steps."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4 * 36, 5),
    )


def test_matrix_products_are_counted_by_hand() -> None:
    """Two operations a multiply-add: forward, and backward for weights and inputs, except the first input."""
    model = nn.Sequential(nn.Linear(10, 20, bias=False), nn.ReLU(), nn.Linear(20, 5, bias=False))
    with metrics.FlopCounter() as counter:
        model(torch.randn(8, 10)).sum().backward()
    first, second = 2 * 8 * 10 * 20, 2 * 8 * 20 * 5
    assert counter.total == (first + second) + (first + 2 * second)


def test_attention_is_counted_on_the_cpu_too() -> None:
    """Forward: two products of T x T x D a head and sample; backward: five, as two are recomputed."""
    x = torch.randn(2, 3, 16, 8, requires_grad=True)
    with metrics.FlopCounter() as counter:
        Attention()(x).sum().backward()
    assert counter.total == (2 + 5) * 2 * (2 * 3) * 16 * 16 * 8


@pytest.mark.parametrize(
    "shape_and_model",
    [((6, 3, 6, 6), convolutional), ((2, 3, 16, 8), lambda: nn.Sequential(nn.Linear(8, 8), Attention()))],
    ids=["convolution", "attention"],
)
def test_counting_changes_no_result(shape_and_model: tuple[tuple[int, ...], Callable[[], nn.Module]]) -> None:
    """Loss, gradients, buffers and the random state afterwards are the same bits as without the counter."""
    shape, make = shape_and_model
    torch.manual_seed(0)
    plain = make()
    counted = copy.deepcopy(plain)
    x = torch.randn(shape)
    found = []
    for model, context in ((plain, torch.enable_grad()), (counted, metrics.FlopCounter())):
        torch.manual_seed(1)
        with context:
            loss = model(x).square().mean()
            loss.backward()
        state = itertools.chain(model.state_dict().values(), (p.grad for p in model.parameters()))
        found.append([loss.detach(), torch.get_rng_state(), *state])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert isinstance(context, metrics.FlopCounter)
    assert context.total


def test_recomputation_is_not_counted() -> None:
    """Activation checkpointing makes the step longer, not the model bigger."""
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    totals = []
    for forward in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        with metrics.FlopCounter() as counter:
            forward(x).sum().backward()
        totals.append(counter.total)
    assert totals == [2 * 3 * 2 * 4 * 8 * 8] * 2


# An error here would be silent: the module would run uncompiled.
COMPILED = """
import torch
from cloudtrain.entrypoints.trainer import metrics
calls = 0
def backend(graph, _):
    def run(*args):
        global calls
        calls += 1
        return graph(*args)
    return run
with metrics.FlopCounter() as before:
    torch.ones(2, 2) @ torch.ones(2, 2)
model = torch.compile(torch.nn.Linear(2, 2), backend=backend)
for _ in range(3):
    with metrics.FlopCounter() as counter:
        model(torch.ones(1, 2))
assert (before.total, counter.total, calls) == (16, None, 3)
"""


@pytest.mark.slow
@pytest.mark.soak
def test_compiled_modules_stay_compiled() -> None:
    """After a call of torch.compile, nothing is counted, and every call runs the compiled code."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


def test_total_equals_torchs_own_counter() -> None:
    """On a model with every kind of operation; torch's counter does not count attention on the CPU."""
    x = torch.randn(6, 3, 6, 6)
    model = convolutional()
    totals = []
    for counter in (metrics.FlopCounter(), FlopCounterMode(display=False)):
        with counter:
            model(x).square().mean().backward()
        totals.append(counter.total if isinstance(counter, metrics.FlopCounter) else counter.get_total_flops())
    assert totals[0] == totals[1]


def test_failing_formula_gives_no_total() -> None:
    """The model runs on, and the total is unknown, not wrong; without any known operation it is None, not 0."""
    with metrics.FlopCounter() as counter:
        counter._formulas[torch.ops.aten.mm] = lambda *_, **__: 1 // 0
        assert torch.equal(torch.ones(2, 3) @ torch.ones(3, 2), torch.full((2, 2), 3.0))
    assert counter.total is None
    with metrics.FlopCounter() as counter:
        torch.ones(3) * 2
    assert counter.total is None


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        *(("Tesla V100-SXM2-16GB", "fp16", 125.0), ("Tesla V100-PCIE-32GB", "fp16", 112.0)),
        *(("Tesla V100-SXM2-16GB", "bf16", None), ("Tesla T4", "fp32", 8.1), ("NVIDIA A10G", "bf16", 70.0)),
        *(("NVIDIA A10", "bf16", 125.0), ("NVIDIA L4", "bf16", 121.0), ("NVIDIA L40S", "bf16", 362.0)),
        *(("NVIDIA A100-SXM4-40GB", "tf32", 156.0), ("NVIDIA A100 80GB PCIe", "bf16", 312.0)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200", "bf16", 989.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("NVIDIA H200", "fp8", None),
    ],
)
def test_peaks_go_by_the_device_name(name: str, precision: str, peak: float | None) -> None:
    """Different boards are distinguished, and a board outside the table is unknown."""
    assert metrics.peak_tflops(name, precision) == peak


def test_fp32_may_mean_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """If matrix products may use TF32, the peak is TF32's; a GPU without TF32 keeps its own; a CPU has no peak."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert metrics.device_peak_tflops(device, "fp32") == 67.0
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert metrics.device_peak_tflops(device, "fp32") == 495.0
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    assert metrics.device_peak_tflops(device, "fp32") == 8.1
    assert metrics.device_peak_tflops(torch.device("cpu"), "fp32") is None

"""Pipelines: cuts, schedules, and stale weights beside their definition, trained by `on_rank`."""

import functools
import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from trainerruns import on_ranks

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data
from cloudtrain.entrypoints.trainer.settings import ParallelSettings, TrainingSettings
from cloudtrain.entrypoints.trainer.strategies import blocks as blocks_of
from cloudtrain.entrypoints.trainer.strategies import cut, schedules
from cloudtrain.entrypoints.trainer.strategies.pipeline import Feed
from cloudtrain.entrypoints.trainer.strategies.wrap import wrap

CPU = torch.device("cpu")
STAGES, STEPS, EMPTY_AFTER, SIZE = 3, 8, 4, 8  # the pipeline is empty after 4 and after 8 steps
CASES = {f"{weights} {count}": (weights, count) for weights in ("stash", "latest") for count in (1, 2)}


class Linear(nn.Module):
    """A linear map and a tanh, whose output is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        return torch.tanh(F.linear(x, self.weight)).t().contiguous().t()


def model() -> nn.Sequential:
    """Return a block for each stage, with the same weights at each call."""
    torch.manual_seed(1)
    return nn.Sequential(*(Linear() for _ in range(STAGES)))


def batch(number: int) -> torch.Tensor:
    """Return the inputs of a micro-batch of the run."""
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number))


def loss_of(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return how far the outputs are from the inputs, turned round."""
    return F.mse_loss(module(inputs), inputs.flip(1))


# ------------------------------------------------------------------------------------------------ cuts and schedules


def slowest(times: list[float], starts: list[int]) -> float:
    """Return the time of the slowest piece."""
    return max(sum(times[first:end]) for first, end in itertools.pairwise([*starts, len(times)]))


def test_balanced_cut_is_the_best_of_all() -> None:
    """Of 200 random models, no contiguous cut has a faster slowest piece."""
    draw = random.Random(3)
    for _ in range(200):
        times = [draw.random() for _ in range(draw.randint(1, 9))]
        pieces = draw.randint(1, len(times))
        starts = schedules.balanced(times, pieces)
        others = ([0, *later] for later in itertools.combinations(range(1, len(times)), pieces - 1))
        assert len(starts) == pieces
        assert slowest(times, starts) == pytest.approx(min(slowest(times, other) for other in others))


def simulated(order: list[schedules.PassOrder], times: list[float]) -> float:
    """Return the share of a step in which the stages wait; a backward pass takes twice a forward pass."""
    stages, chunks, count = len(order), order[0].chunks, order[0].count
    passes: list[list[tuple[bool, int, int]]] = []
    for own in order:
        begun, listed = 0, []
        for number in range(own.passes):
            while begun < min(number + own.ahead + 1, own.passes):
                listed.append((True, *own.forward(begun)))
                begun += 1
            listed.append((False, *own.backward(number)))
        passes.append(listed)
    ended: dict[tuple[bool, int, int], float] = {}  # by direction, piece and micro-batch
    clocks = [0.0] * stages
    while any(passes):
        for stage, listed in enumerate(passes):
            while listed:
                is_forward, chunk, number = listed[0]
                piece = chunk * stages + stage
                needs = (is_forward, piece + (-1 if is_forward else 1), number)
                is_first = needs[1] in (-1, stages * chunks)
                before = (True, piece, number) if is_first and not is_forward else needs
                if before not in ended and not (is_first and is_forward):
                    break
                clocks[stage] = max(clocks[stage], ended.get(before, 0.0)) + times[stage] / chunks * (2 - is_forward)
                ended[is_forward, piece, number] = clocks[stage]
                listed.pop(0)
    return 1 - 3 * count * sum(times) / (stages * max(clocks))


@pytest.mark.parametrize(("stages", "count"), [(2, 8), (4, 8), (4, 16)])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_stages_wait_as_the_formula_says(schedule: str, chunks: int, stages: int, count: int) -> None:
    """The passes of equal stages, on a virtual clock, wait (p - 1) / (v m + p - 1) of a step."""
    order = [schedules.PassOrder(schedule, stages, chunks, stage, count) for stage in range(stages)]
    found = simulated(order, [1.0] * stages)
    assert found == pytest.approx((stages - 1) / (chunks * count + stages - 1))
    assert found == pytest.approx(schedules.idle_share(schedule, [1.0] * stages, chunks, count))


@pytest.mark.parametrize("times", [[8.0, 5.0], [3.0, 4.0, 2.0, 4.0], [1.0, 1.0, 1.0, 6.0]])
def test_formula_bounds_the_wait_of_unequal_stages(times: list[float]) -> None:
    """With 16 micro-batches a step takes 0 to 17 % less than the formula's bound."""
    order = [schedules.PassOrder("1f1b", len(times), 1, stage, 16) for stage in range(len(times))]
    busy = sum(times) / len(times)
    step, bound = (
        busy / (1 - share) for share in (simulated(order, times), schedules.idle_share("1f1b", times, 1, 16))
    )
    assert 0.83 * bound <= step <= bound * (1 + 1e-9)


class Slow(nn.Module):
    """A block whose forward pass takes this time of a clock, with a counter."""

    def __init__(self, duration_ms: int = 0, clock_ms: Counter[str] | None = None) -> None:
        super().__init__()
        self.duration_ms, self.clock_ms = duration_ms, Counter() if clock_ms is None else clock_ms
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input, scaled."""
        self.calls += 1
        self.clock_ms["now"] += self.duration_ms
        return x * self.weight


def test_blocks_are_timed_on_their_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block's time is found; code behind the blocks counts for the last; no value of the model changes."""
    clock_ms = Counter[str]()
    monkeypatch.setattr(cut, "now_s", lambda _device: clock_ms["now"])
    module = nn.Sequential(*(Slow(each, clock_ms) for each in (5, 20, 5)))

    def run(called: nn.Module, _device: torch.device) -> torch.Tensor:
        found: torch.Tensor = called(torch.ones(2)).sum()
        clock_ms["now"] += 10
        return found

    times = cut.block_times(module, list(module), run, CPU, recomputes=False)
    assert times == [5, 20, 35]
    assert cut.block_times(module, list(module), run, CPU, recomputes=True) == [10, 40, 40]
    assert all(block.calls == 0 and block.weight.grad is None for block in module)
    assert cut.cut(ParallelSettings(pipeline=2, cut="timed"), 3, times) == [0, 2]


def test_interleaved_needs_micro_batches_for_all_stages() -> None:
    """The refusal names the numbers, and the settings to change."""
    layout = ParallelSettings(pipeline=2, schedule="interleaved", chunks=2)
    settings = TrainingSettings(global_batch_size=3, max_steps=1, parallel=layout)
    with pytest.raises(TaskError, match=r"needs a multiple of 2 micro-batches a step, and there are 3"):
        wrap(settings, model(), CPU, data.Split(3, 1, 1, 3))


def traced(module: nn.Module) -> cut.Trace:
    """Return the trace of a module of blocks, with all children of a Sequential."""
    return cut.trace(
        module, blocks_of.default_blocks(module, whole=True), lambda called: called(torch.ones(2, 4)).sum()
    )


def test_children_without_parameters_are_blocks_of_a_sequential() -> None:
    """An activation function between two layers is computed by one stage, and breaks no chain."""
    found = traced(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)))
    assert [type(block) for block in found.blocks] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [output.needs_gradient for output in found.outputs] == [True] * 3


class Skipped(nn.Module):
    """A block whose layer a traced pass leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first layer's output."""
        return self.first(x)


def test_parameter_that_the_trace_skips_stays_in_its_block() -> None:
    """Stochastic depth may skip a layer in the traced pass; the stage of its block keeps the layer."""
    module = nn.Sequential(Skipped(), Skipped())
    cut.keep_stage(module, traced(module), [0, 1], 2, 1, CPU)
    assert [name for name, _ in module.named_parameters()] == [
        *("1.first.weight", "1.first.bias", "1.layer.weight", "1.layer.bias")
    ]


def test_trace_finds_changed_buffers_and_outputs_changed_in_place() -> None:
    """Buffers are named, so that schedules can refuse them; a change between two blocks is refused at once."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Slow())
    assert set(traced(module).written) == {"1.num_batches_tracked", "2.calls"}
    assert module[1].num_batches_tracked == module[2].calls == 0

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x).relu_())

    with pytest.raises(TaskError, match=r"the output of layers\.0 is changed in place before layers\.1"):
        traced(Changing())


# ------------------------------------------------------------------------------------------------------ stale weights


class _Stale(torch.autograd.Function):
    """A linear map whose backward pass uses other weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        ctx.save_for_backward(x, later)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of x and of the weight."""
        x, later = ctx.saved_tensors
        return gradients[0] @ later, gradients[0].T @ x, None


def stale_losses(weights: str, count: int) -> list[float]:
    """Return the losses of PipeDream's rule, by its definition.

    Stage s runs p - 1 - s forward passes ahead. So the forward pass of micro-batch i, counted since the pipeline was
    empty, has seen the updates before micro-batch i - (p - 1 - s), and its backward pass the updates before i.
    """
    parts = [[block.weight.detach()] for block in model()]  # type: ignore[union-attr]  # all versions of a stage
    moving = [torch.zeros(SIZE, SIZE) for _ in range(STAGES)]
    losses = []
    for step in range(STEPS):
        base, begin = step // EMPTY_AFTER * EMPTY_AFTER, step % EMPTY_AFTER * count
        total, sums = 0.0, [torch.zeros(SIZE, SIZE) for _ in range(STAGES)]
        for number in range(begin, begin + count):
            x = inputs = batch(base * count + number)
            used = []
            for stage in range(STAGES):
                at = base + max(0, number - (STAGES - 1 - stage)) // count
                used.append(parts[stage][at].clone().requires_grad_())
                later = parts[stage][step] if weights == "latest" else used[-1]
                x = torch.tanh(_Stale.apply(x, used[-1], later))
            loss = F.mse_loss(x, inputs.flip(1))
            total += loss.item()
            for stage, gradient in enumerate(torch.autograd.grad(loss / count, used)):
                sums[stage] += gradient
        for stage in range(STAGES):
            moving[stage] = 0.9 * moving[stage] + sums[stage]
            parts[stage].append(parts[stage][-1] - 0.1 * moving[stage])
        losses.append(total / count)
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the first of three ranks found in all cases."""
    found: dict[str, Any] = on_ranks(__file__, STAGES, tmp_path_factory.mktemp("pipeline"))[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_stale_weights_follow_their_definition(trained: dict[str, Any], case: str) -> None:
    """Three stages without a flush between steps: the losses of PipeDream's rule, with and without stashed weights."""
    assert trained[case]["losses"] == pytest.approx(stale_losses(*CASES[case]), rel=1e-6)


def test_stashed_and_latest_weights_differ(trained: dict[str, Any]) -> None:
    """The two rules give other losses, so the test above can tell them apart."""
    assert trained["stash 1"]["losses"] != pytest.approx(trained["latest 1"]["losses"], rel=1e-4)


def test_staleness_is_measured(trained: dict[str, Any]) -> None:
    """The first stage's passes are two updates apart at most, with an update a micro-batch; the pipeline empties."""
    # Micro-batches 0 to 3 since the pipeline was empty: their forward passes saw 0, 0, 0, 1 updates.
    assert trained["stash 1"]["staleness"] == [2, pytest.approx((0 + 1 + 2 + 2) / 4)]
    assert trained["stash 2"]["staleness"][0] == 1


def train(weights: str, count: int) -> dict[str, Any]:
    """Train on this rank's stage; return the losses and the staleness of the first stage."""
    layout = ParallelSettings(pipeline=STAGES, schedule="async", weights=weights)
    settings = TrainingSettings(global_batch_size=4 * count, micro_batch_size=4, max_steps=STEPS, parallel=layout)
    split = data.split_batch(settings.global_batch_size, 4, 1)
    spread = wrap(settings, model(), CPU, split, probe=lambda module, _: loss_of(module, batch(0)))
    moving = torch.optim.SGD(spread.module.parameters(), lr=0.1, momentum=0.9)
    assert spread.walk is not None
    batches = map(batch, range(STEPS * count))
    losses = []
    for step in range(STEPS):
        feed = Feed(
            owned=split.owned(0),
            batch=functools.partial(next, batches),
            seed=lambda _virtual, _steps: None,
            loss=loss_of,
            backward=lambda loss: (loss / count).backward(),
            between=lambda: None,
            steps_left=EMPTY_AFTER - 1 - step % EMPTY_AFTER,
        )
        total = spread.walk(feed)
        spread.finish()
        moving.step()
        moving.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    assert spread.stage_times is not None
    times = spread.stage_times()
    return {"losses": losses, "staleness": [times.most_staleness, times.mean_staleness], "waited_s": times.waited_s}


def on_rank() -> dict[str, Any]:
    """Return this rank's results of all cases."""
    return {name: train(*case) for name, case in CASES.items()}

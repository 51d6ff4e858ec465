"""The parts of a step's time and the figures derived from them, by a clock that the test controls."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cloudtrain.entrypoints import format
from cloudtrain.entrypoints.trainer import metrics
from cloudtrain.entrypoints.trainer.metrics import ThroughputMeter


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that the meter reads."""
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def batches(clock: Clock, seconds: float) -> Iterator[int]:
    """Yield batches, each after a wait."""
    for number in range(100):
        clock.now_s += seconds
        yield number


def run(meter: ThroughputMeter, clock: Clock, steps: int, data_s: float = 0.5, compute_s: float = 1.5) -> None:
    """Take steps of two micro-batches each."""
    source = batches(clock, data_s / 2)
    for _ in range(steps):
        meter.wait_for(source)
        meter.wait_for(source)
        clock.now_s += compute_s
        meter.tick()


def test_step_is_split_into_its_parts(clock: Clock) -> None:
    """Waiting for data, ddp's figure for communication, and the rest; no time is counted twice or carried over."""
    meter = ThroughputMeter(32, communication=lambda: 0.25)
    run(meter, clock, 4)
    meter.measure()
    run(meter, clock, 2)
    speed = meter.measure()
    assert (speed.step_s, speed.data_s, speed.communication_s, speed.compute_s) == (2.0, 0.5, 0.25, 1.25)
    assert speed.samples_per_s == 16.0
    assert meter.step_s == 2.0


def test_checkpoints_come_on_top(clock: Clock) -> None:
    """Neither a save nor an evaluation makes a step slower; only the save counts as checkpoint time."""
    meter = ThroughputMeter(32)
    run(meter, clock, 2)
    clock.now_s += 7.0
    meter.add_checkpoint(3.0)
    meter.skip(4.0)
    speed = meter.measure()
    assert (speed.step_s, speed.checkpoint_s) == (2.0, 1.5)
    run(meter, clock, 2)
    assert meter.measure().checkpoint_s == 0.0


def test_time_left_includes_the_pauses(clock: Clock) -> None:
    """Ten more steps of 2 s, each with the average pause of 1 s so far."""
    meter = ThroughputMeter(32)
    run(meter, clock, 4)
    clock.now_s += 4.0
    meter.skip(4.0)
    meter.measure()
    assert meter.eta_s(10) == 30.0


def test_first_step_gives_a_figure_at_once(clock: Clock) -> None:
    """The deadline's margin needs a figure before the first log line; later the figure changes with log lines only."""
    meter = ThroughputMeter(32)
    run(meter, clock, 1)
    assert meter.step_s == 2.0
    run(meter, clock, 1, compute_s=9.5)
    assert meter.step_s == 2.0
    assert meter.measure().samples_per_s == pytest.approx(32 / 10)


def test_first_step_is_in_no_mean(clock: Clock) -> None:
    """The first step compiles for a minute and waits for data workers; the remaining time excludes that step."""
    meter = ThroughputMeter(32)
    run(meter, clock, 1, data_s=20.0, compute_s=60.0)
    run(meter, clock, 4)
    speed = meter.measure()
    assert (speed.step_s, speed.data_s, meter.eta_s(10)) == (2.0, 0.5, 20.0)
    run(meter, clock, 2)
    assert meter.measure().step_s == 2.0


def test_unknown_figures_are_left_out(clock: Clock) -> None:
    """An event has only known figures."""
    meter = ThroughputMeter(32, peak_tflops=10.0)
    meter.flops_per_step = 0.0  # no operation was known: no utilisation instead of 0 %
    run(meter, clock, 1)
    assert set(meter.measure().fields()) == {
        *("step_s", "data_s", "compute_s", "checkpoint_s", "samples_per_s", "memory_bytes"),
    }


def test_rates_and_utilisation_follow(clock: Clock) -> None:
    """32 samples of 100 tokens in 2 s; 8e12 operations on two devices of 4 TFLOPS that could do 16e12."""
    meter = ThroughputMeter(32, tokens_per_sample=100, ranks=2, peak_tflops=4.0)
    meter.flops_per_step = 8e12
    run(meter, clock, 1)
    speed = meter.measure()
    assert (speed.tokens_per_s, speed.mfu) == (1600.0, 0.5)
    assert speed.text() == "16 samples/s 1.6k tokens/s mfu 50% waiting 25% for data"


def test_communication_is_at_most_the_rest(clock: Clock) -> None:
    """A sample of a slow step does not make the rest negative."""
    meter = ThroughputMeter(32, communication=lambda: 60.0)
    run(meter, clock, 1)
    speed = meter.measure()
    assert (speed.communication_s, speed.compute_s) == (1.5, 0.0)


def test_communication_of_ddp_is_known_from_the_second_step() -> None:
    """ddp's clocks are read under their private names; a model without ddp has no communication."""
    assert metrics.ddp_communication(nn.Linear(1, 1), 1)() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
        read = metrics.ddp_communication(model, 1)
        found = []
        for _ in range(3):
            model(torch.ones(8, 64)).sum().backward()
            found.append(read())
        del model, read
    finally:
        dist.destroy_process_group()
    assert found[0] is None
    assert all(value is not None and 0.0 <= value < 10.0 for value in found[1:])


def test_peak_memory_is_of_this_process_alone() -> None:
    """A process started by a big process does not inherit its peak, unlike with getrusage."""
    block = bytearray(b"x") * 200_000_000
    code = "from cloudtrain.entrypoints.trainer.metrics import peak_memory; import torch\n"
    code += "print(peak_memory(torch.device('cpu')))"
    small = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert 50e6 < small < metrics.peak_memory(torch.device("cpu"))
    assert len(block) < metrics.peak_memory(torch.device("cpu"))


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        *((format.quantity, 0.1234, "0.123"), (format.quantity, 999.6, "1k"), (format.quantity, 8140, "8.14k")),
        *((format.quantity, 12.3e6, "12.3M"), (format.quantity, 2e12, "2T"), (format.span, -3.0, "0s")),
        *((format.span, 45.2, "45s"), (format.span, 725.0, "12m 5s")),
        *((format.span, 12000.0, "3h 20m"), (format.span, 187200.0, "2d 4h")),
    ],
)
def test_numbers_are_short(show: Callable[[float], str], value: float, text: str) -> None:
    """Numbers have three digits, spans two units."""
    assert show(value) == text

"""The machine time that asha needs for the result of random search: `python benchmarks/sweep_money.py [SEEDS]`.

The trials are real trainings of a small network on the UCI digits with 15 % wrong labels, each trained only as far as
the search asks; as in the product, a pause changes no training. The driver of sweeps runs on a simulated clock: an
epoch takes 1, the start of a segment START, on a machine with four slots. Random search trains twenty trials, asha may
use a third of the time that this has cost, and both draw the same values. A sweep is billed until its end. `inf`: no
trial has finished.
"""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from report import Report
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from cloudtrain.entrypoints.contract import JobSpec
from cloudtrain.entrypoints.sweep import packed
from cloudtrain.entrypoints.sweep.journal import Journal
from cloudtrain.entrypoints.sweep.search import Segment, rungs
from cloudtrain.entrypoints.sweep.segments import SegmentEnd

EPOCHS, SLOTS, BATCH = 81, 4, 64
START = 0.025 * EPOCHS  # of a segment, in epochs
ALLOWED = 1.12 * 20 * (EPOCHS + START) / SLOTS  # of machine time: twenty whole trainings, by the driver's margin
SHARE = 1 / 3  # of the machine time of random search, for asha
WRONG = 0.15  # share of wrong training labels
SPACE = {
    "lr": {"log": [1e-3, 1.0]},
    "momentum": {"uniform": [0.0, 0.98]},
    "decay": {"log": [1e-6, 1e-1]},
    "dropout": {"uniform": [0.0, 0.7]},
    "scale": {"log": [0.1, 10.0]},
    "smoothing": {"uniform": [0.0, 0.3]},
}


def _data() -> tuple[torch.Tensor, ...]:
    """Return images and labels for training and evaluation."""
    digits, draw = load_digits(), torch.Generator().manual_seed(0)
    images = torch.from_numpy(digits.data).float().div(16)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=draw)
    held, rest = order[:500], order[500:]
    wrong = torch.rand(len(rest), generator=draw) < WRONG
    noisy = torch.where(wrong, torch.randint(0, 10, (len(rest),), generator=draw), labels[rest])
    return images[rest], noisy, images[held], labels[held]


class _Trial:
    """A training that continues where it paused."""

    def __init__(self, values: dict[str, Any], data: tuple[torch.Tensor, ...], seed: int) -> None:
        self.values, self.data, self.epoch = values, data, 0
        self.draw = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(values["dropout"]), nn.Linear(64, 10))
        with torch.no_grad():
            for each in self.model.parameters():
                each.mul_(values["scale"])
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), values["lr"], values["momentum"], weight_decay=values["decay"]
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, EPOCHS)

    def train(self, until: int) -> float:
        """Train to the epoch; return the loss on the held-back images."""
        images, labels, held, true = self.data
        self.model.train()
        while self.epoch < until:
            torch.manual_seed(self.epoch)
            for index in torch.randperm(len(labels), generator=self.draw).split(BATCH):
                smoothing = self.values["smoothing"]
                loss = F.cross_entropy(self.model(images[index]), labels[index], label_smoothing=smoothing)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.schedule.step()
            self.epoch += 1
        self.model.eval()
        with torch.no_grad():
            return float(F.cross_entropy(self.model(held), true))


@dataclass
class _Machine:
    """The driver's only node, and its clock in the place of the module `time`."""

    data: tuple[torch.Tensor, ...]
    slots: int = SLOTS
    place: str = ""
    now: float = 0.0
    used: float = 0.0  # slot time of all segments
    trials: dict[int, _Trial] = field(default_factory=dict)
    running: list[tuple[float, Segment]] = field(default_factory=list)
    has_ended: bool = False  # at the last look
    best: float = math.inf  # the loss of the best finished trial

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        if not self.has_ended:  # else the driver first fills the slots
            self.now = min((end for end, _ in self.running), default=self.now)

    def start(self, segment: Segment) -> None:
        took = START + segment.until_step - segment.from_step
        self.running.append((self.now + took, segment))
        self.used += took

    def look(self) -> list[SegmentEnd]:
        due = [segment for end, segment in self.running if end <= self.now]
        self.running, self.has_ended = [each for each in self.running if each[0] > self.now], bool(due)
        return [self._end(segment) for segment in due]

    def finish(self, *_: Any) -> None: ...

    def end(self) -> None: ...

    def _end(self, segment: Segment) -> SegmentEnd:
        until = segment.until_step
        trial = self.trials.setdefault(segment.trial, _Trial(dict(segment.values), self.data, segment.trial))
        loss = trial.train(until)
        self.best = min(self.best, loss) if until == EPOCHS else self.best
        return SegmentEnd(*segment.key, "paused", until, loss, start_s=START, step_s=1.0)


def _swept(
    algorithm: str, steps: tuple[int, ...], allowed: float, data: tuple[torch.Tensor, ...], seed: int
) -> _Machine:
    search = {"algorithm": algorithm, "space": SPACE, "trials": 1000, "parallel": SLOTS, "rungs": steps, "seed": seed}
    sweep = {"search": search, "slots": 1, "instances": 1, "nproc_per_node": SLOTS, "until": "rung"}
    spec = {"run": {"kind": "sweep", "target": "task.py"}, "training": {"epochs": EPOCHS}, "sweep": sweep}
    machine = _Machine(data)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(packed, "time", machine),
        mock.patch.object(packed.events, "emit"),
    ):
        packed._Driver(JobSpec.load(spec), Journal(Path(folder)), [machine], allowed).drive()  # type: ignore[list-item]
    assert machine.now <= allowed
    return machine


def run(seeds: int = 10) -> Report:
    """Compare asha with random search for each seed."""
    torch.set_num_threads(1)
    report, data = Report(f"sweeps: asha for the result of random search, {seeds} seeds"), _data()
    machines = []
    for seed in range(seeds):
        random = _swept("random", (EPOCHS,), ALLOWED, data, seed)
        machines.append((random, _swept("asha", rungs(1, 3, EPOCHS), random.now * SHARE, data, seed)))
    for seed, (random, asha) in enumerate(machines):
        words = f"random {random.best:.4f} for {random.now:.0f}, asha {asha.best:.4f} for {asha.now:.0f}"
        report.timing(f"seed {seed}", words, "asha <= random", ok=asha.best <= random.best)
    count = sum(asha.best <= random.best for random, asha in machines)
    report.count("seeds in which asha is as good as random for a third of the machine time", count, seeds)
    billed, used = (
        sum(each / random.now / SHARE for each, (random, _) in zip(times, machines, strict=True)) / seeds
        for times in ([asha.now for _, asha in machines], [asha.used / SLOTS for _, asha in machines])
    )
    report.timing("asha: billed, and slots in use, of the allowed time", f"{billed:.0%}, {used:.0%}", "90 %, 90 %")
    return report


if __name__ == "__main__":
    run(*map(int, sys.argv[1:])).show()

"""The money that asha needs for the result of random search: `python benchmarks/sweep_money.py [SEEDS]`.

The trials are real trainings of a small network on the UCI digits with 15 % wrong labels, each trained only as far as
the search asks. The clock is simulated: an epoch costs 1, the start of a segment START, four trials run at once. Random
search has the money of twenty whole trainings, asha has a third of this money, and both draw the same values.
"""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from report import Report
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from cloudtrain.entrypoints.sweep.search import Allowance, Search, decide, rungs
from cloudtrain.entrypoints.sweep.space import dimensions

EPOCHS, PARALLEL, BATCH = 81, 4, 64
START = 0.025 * EPOCHS  # of a segment, in epochs
BUDGET = 20 * (EPOCHS + START)  # twenty whole trainings
SHARE = 1 / 3  # of the money of random search, for asha
WRONG = 0.15  # share of wrong training labels
SPACE = dimensions(
    {
        "lr": {"log": [1e-3, 1.0]},
        "momentum": {"uniform": [0.0, 0.98]},
        "decay": {"log": [1e-6, 1e-1]},
        "dropout": {"uniform": [0.0, 0.7]},
        "scale": {"log": [0.1, 10.0]},
        "smoothing": {"uniform": [0.0, 0.3]},
    }
)


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
        torch.manual_seed(self.epoch)
        while self.epoch < until:
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
class _Sweep:
    """A search on the simulated clock, with a budget in epochs; `finished` has the loss of each trial at its end."""

    search: Search
    data: tuple[torch.Tensor, ...]
    budget: float
    trials: dict[int, _Trial] = field(default_factory=dict)
    finished: list[float] = field(default_factory=list)

    def run(self) -> float:
        """Run to the end of the search or of the budget; return the spent money."""
        results: dict[tuple[int, int], float | None] = {}
        running: list[tuple[float, tuple[int, int], float, int]] = []
        spent = held = now = 0.0
        while True:
            left = Allowance(self.budget - spent - held, START, 1.0)
            for segment in decide(self.search, results, [key for _, key, _, _ in running], left):
                cost = START + segment.until_step - segment.from_step
                heapq.heappush(running, (now + cost, segment.key, cost, segment.until_step))
                held += cost
                if segment.trial not in self.trials:
                    self.trials[segment.trial] = _Trial(dict(segment.values), self.data, segment.trial)
            if not running:
                assert spent <= self.budget
                return spent
            now, key, cost, until = heapq.heappop(running)
            spent, held = spent + cost, held - cost
            results[key] = self.trials[key[0]].train(until)
            if until == EPOCHS:
                self.finished.append(results[key] or 0.0)


def run(seeds: int = 10) -> Report:
    """Compare asha with random search for each seed."""
    torch.set_num_threads(1)
    report, data = Report(f"sweeps: asha for the result of random search, {seeds} seeds"), _data()
    count = 0
    for seed in range(seeds):
        whole = _Sweep(Search("random", SPACE, 1000, PARALLEL, (EPOCHS,), seed=seed), data, BUDGET)
        asha = _Sweep(Search("asha", SPACE, 1000, PARALLEL, rungs(1, 3, EPOCHS), seed=seed), data, BUDGET * SHARE)
        spent, asha_spent = whole.run(), asha.run()
        is_reached = min(asha.finished) <= min(whole.finished)
        count += is_reached
        words = f"random {min(whole.finished):.4f} for {spent:.0f}, asha {min(asha.finished):.4f} for {asha_spent:.0f}"
        report.timing(f"seed {seed}", words, "asha <= random", ok=is_reached)
    report.count("seeds in which asha is as good as random for a third of the money", count, seeds)
    return report


if __name__ == "__main__":
    run(*map(int, sys.argv[1:])).show()

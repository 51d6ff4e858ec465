"""The accuracy of methods that send less: the trainer itself, four ranks, the digits of examples/digits.

A CNN of 38,282 parameters, SGD with momentum 0.9 and rate 0.05, 224 steps of 4 x 16 samples. Every method sees the same
samples in the same order. A method is a row: a name, settings of `training`, and the least mean accuracy. An image is
.0028 and seeds differ by .005, so three seeds decide nothing below .005.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import Report
from sandbox import fresh_folder

from trainer import contest

ROUNDS, RANKS, STEPS = 3, 4, 224  # a round is a seed
TASK = Path(__file__).with_name("methods_task.py")


@dataclass(frozen=True)
class Method:
    """A row: settings of `training` beside the common ones, and the least mean accuracy if there is a bar."""

    name: str
    training: dict[str, Any] = field(default_factory=dict)
    least: float | None = None


def _local(**settings: Any) -> dict[str, Any]:
    return {"strategy": "local", "local": settings}


def _async(**settings: Any) -> dict[str, Any]:
    return {"strategy": "async", "server": settings}


DILOCO = {"lr": 0.7, "momentum": 0.6}
METHODS = [
    Method("ddp"),
    Method("local 16", _local(period=16), 0.982),
    Method("local 16, state kept", _local(period=16, optimizer_state="keep")),
    Method("local 16, outer 0.7/0.6", _local(period=16, outer=DILOCO), 0.984),
    Method("local 16, outer 0.7/0.6, state averaged", _local(period=16, outer=DILOCO, optimizer_state="average")),
    Method("local 16 after 112 steps of ddp", _local(period=16, sync_steps=112)),
    Method("threshold 1 %", {"compression": "threshold"}, 0.969),
    Method("threshold 0.1 %", {"compression": "threshold", "compression_density": 0.001}),
    Method("top-k 10 %", {"compression": "topk", "compression_density": 0.1}),
    Method("top-k 1 %", {"compression": "topk"}),
    Method("powersgd", {"compression": "powersgd"}),
    Method("async", _async()),
    Method("async, softsync 2", _async(softsync=2)),
    Method("async, no scaling by staleness", _async(staleness="none")),
]


@dataclass(frozen=True)
class Result:
    """The end of a run: the accuracy on held-back images, the loss there, and the bytes that rank 0 sent a step."""

    accuracy: float
    loss: float
    bytes_sent: float


def run(rounds: int, repo: Path | None, say: Callable[[str], None]) -> Report:
    """Train with each method and seed; return the table."""
    table = Report(f"Methods that send less: mean of {rounds} seeds", ("method", "accuracy, loss, bytes", "least", ""))
    dense = 0.0
    with fresh_folder() as root:
        for method in METHODS:
            found = []
            for seed in range(1, rounds + 1):
                found.append(_train(method, seed, root, repo))
                say(f"{method.name}, seed {seed} of {rounds}: accuracy {found[-1].accuracy:.4f}")
            mean = statistics.mean(one.accuracy for one in found)
            spread = statistics.stdev(one.accuracy for one in found) if rounds > 1 else 0.0
            sent = statistics.mean(one.bytes_sent for one in found)
            dense = dense or sent
            loss = statistics.mean(one.loss for one in found)
            measured = f"{mean:.4f} +- {spread:.4f}, {loss:.3f}, {sent:,.0f} a step: 1/{dense / sent:.1f} of ddp's"
            bar = "" if method.least is None else f">= {method.least}"
            table.timing(method.name, measured, bar, ok=None if method.least is None else mean >= method.least)
    return table


def _train(method: Method, seed: int, root: Path, repo: Path | None) -> Result:
    """Return the result of a run in an empty folder."""
    model = contest.Model("methods", 16, STEPS)
    training = {
        "global_batch_size": 16 * RANKS,
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "seed": seed,
        "log_every": STEPS,
        **method.training,
    }
    spec = contest.spec_of(model, **training) | {"run": {"kind": "task", "target": str(TASK)}}
    folder = root / "run"
    shutil.rmtree(folder, ignore_errors=True)
    contest.launch(contest.OURS, spec, folder, ranks=RANKS, repo=repo)
    events = contest.events_of(folder / "output.txt")
    end = next(event for event in reversed(events) if event["e"] == "eval")["metrics"]
    sent = next(event["bytes_sent"] for event in reversed(events) if "bytes_sent" in event)
    return Result(end["accuracy"], end["loss"], sent)

"""`kill -9` of one worker in the middle of an epoch: training goes on by itself, with the same losses."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any

from report import Report
from sandbox import Sandbox, sandbox, wait_until

from cloudtrain.entrypoints import processes

ROUNDS = 3
STEPS, EVERY = 60, 10

# 2,048 samples in batches of 64: 32 steps an epoch. The pause makes a step long enough to be interrupted.
TASK = """\
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model(params):
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

def dataset(params, split):
    generator = torch.Generator().manual_seed(0 if split == "train" else 1)
    x = torch.randn(2048 if split == "train" else 256, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))

def loss(model, batch):
    time.sleep(0.03)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
CONFIG = f"""\
name: restart
task: task.py
resources: {{instances: 2}}
training: {{global_batch_size: 64, max_steps: {STEPS}, log_every: 1, optimizer: {{name: adamw, lr: 1e-2}}}}
checkpoint: {{every_steps: {EVERY}}}
"""


def run(rounds: int = ROUNDS) -> Report:
    """Train once undisturbed, then `rounds` times with a worker killed at a random step; compare every loss."""
    report = Report(f"kill -9 of one worker mid-epoch, {rounds} times: 2 instances, a checkpoint every {EVERY} steps")
    recoveries, lost = [], []
    succeeded = equal = restarts = left = 0
    with sandbox() as box:
        box.write(CONFIG, task=TASK)
        begin = time.perf_counter()
        box.call("submit")
        whole_s = time.perf_counter() - begin
        undisturbed = _losses(box)
        report.count("steps of the undisturbed run", len(undisturbed), STEPS)
        for round_ in range(rounds):
            kill_at = random.Random(round_).randrange(EVERY + 2, 30)
            recovery_s, steps = _interrupt(box, kill_at, rank=round_ % 2)
            status = json.loads(box.call("status", "last", "--json"))
            succeeded += status["state"] == "succeeded"
            restarts += status["restarts"]
            equal += _losses(box) == undisturbed
            recoveries.append(recovery_s)
            lost.append(steps)
        report.count("trained to the end without a person", succeeded, rounds)
        report.count("restarts", restarts, rounds)
        report.count("every step's loss equal, bit for bit", equal, rounds)
        box.call("submit", "-d")
        wait_until(lambda: _steps(box), 60)
        box.call("stop", "last", "-y")
        left = box.processes_left()
    report.count("processes left after stop", left, 0)
    report.count("lost more steps than since the last checkpoint", sum(steps > EVERY for steps in lost), 0)
    report.timing("from the kill to the next step", f"{statistics.median(recoveries):.1f} s (median)")
    report.timing("steps trained again", f"{statistics.median(lost):.0f} (median), at most {max(lost)}")
    report.timing("the whole run, undisturbed", f"{whole_s:.1f} s for {STEPS} steps")
    return report


def _interrupt(box: Sandbox, kill_at: int, rank: int) -> tuple[float, int]:
    """Submit, kill a rank at that step, wait for the end; return seconds to the next step, and the steps lost."""
    box.call("submit", "-d")
    wait_until(lambda: len(_steps(box)) >= kill_at, 120)
    before = len(_steps(box))
    for pid in box.processes(RANK=str(rank)):
        processes.kill(pid, 9)
    begin = time.perf_counter()
    done_before = len(_steps(box))
    wait_until(lambda: len(_steps(box)) > done_before, 120)
    seconds = time.perf_counter() - begin
    box.call("wait", "last")
    steps = [event["step"] for event in _steps(box)]
    again = sum(1 for at, step in enumerate(steps) if step in steps[:at])
    assert len(steps) >= before
    return seconds, again


def _steps(box: Sandbox) -> list[dict[str, Any]]:
    """Return rank 0's step events so far, as the log holds them; those of a torn last line are left out."""
    newest = max(box.home.glob("local/*/attempt-1"), key=lambda path: path.stat().st_ctime, default=None)
    if newest is None or not (newest / "node-0/log/rank-0.log").exists():
        return []
    lines = (newest / "node-0/log/rank-0.log").read_text().splitlines(keepends=True)
    events = [json.loads(line.rpartition("  ::ct ")[2]) for line in lines if "::ct {" in line and line.endswith("\n")]
    return [event for event in events if event["e"] == "step"]


def _losses(box: Sandbox) -> dict[int, float]:
    """Return the newest job's loss of each step; of a step that was trained twice both must agree."""
    losses: dict[int, float] = {}
    for event in _steps(box):
        if losses.setdefault(event["step"], event["loss"]) != event["loss"]:
            return {}
    return losses


if __name__ == "__main__":
    result = run()
    result.show()
    sys.exit(result.failed)

"""Faults of the trainer, counted: kills at random moments, damaged checkpoints, crooked clocks, signals, exits.

The trainer runs under plain torchrun, two ranks over gloo, as on any platform; `restart.py` has the same under our own
agents.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from report import Report
from sandbox import fresh_folder

from cloudtrain.entrypoints import events, processes

STEPS, EVERY = 200, 10

# Batch norm, dropout, noise in the data, loader processes: whatever could differ after a resume. A step of about 20 ms.
TASK = """\
import os, time
import torch
from torch import nn

skew_s = float(os.environ.get("SKEW_S", 0)) if os.environ.get("RANK") == "1" else 0.0
real_time = time.time
time.time = lambda: real_time() + skew_s

class Points:
    def __len__(self): return 331
    def __getitem__(self, index):
        return torch.arange(64.0).mul(index).sin() + 0.1 * torch.rand(64), index % 3

def dataset(params, split):
    return Points() if split == "train" else None

def model(params):
    return nn.Sequential(nn.Linear(64, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2),
                         nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))

def loss(model, batch):
    time.sleep(0.01)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def run(kills: int = 5, damages: int = 50, clocks: int = 2, exits: int = 3, signals: int = 2) -> Report:
    """Count them all."""
    report = Report(f"Faults of the trainer: 2 ranks, {STEPS} steps, a checkpoint every {EVERY} behind the training")
    with fresh_folder() as folder:
        whole = _train(folder / "whole")
        report.count("undisturbed run's exit code", whole[0], 0)
        losses = _losses(whole[1])
        _kills(report, folder / "kills", kills, losses)
        _damages(report, folder / "whole", damages)
        _clocks(report, folder, clocks)
        _signals(report, folder, signals, losses)
        _exits(report, folder, exits)
    return report


def _kills(report: Report, folder: Path, count: int, expected: dict[int, float]) -> None:
    """Kill a rank at a random moment, every third time inside a save; each start goes on from what is durable."""
    chance = random.Random(1)
    seen: dict[int, float] = {}
    killed = differing = too_many = during = 0
    durable = reached = 0  # the newest step whose checkpoint was announced; the newest that was trained
    again: list[int] = []
    while killed < count:
        process, lines = _start(folder)
        last = 0
        moment_s = chance.uniform(0.0, 1.5)
        begin_s = None
        for line in lines:
            event = events.parse(line.rstrip("\n"))[1] or {}
            if event.get("e") == "restart":
                too_many += event["step"] < durable
                again.append(reached - event["step"])
            if event.get("e") == "checkpoint" and "path" in event:
                durable = max(durable, event["step"])
            if event.get("e") == "step":
                last = reached = event["step"]
                differing += seen.setdefault(last, event["loss"]) != event["loss"] or expected[last] != event["loss"]
                if begin_s is None:
                    begin_s = time.perf_counter()
            if begin_s is not None and time.perf_counter() - begin_s > moment_s:
                is_saving = _save_begins(folder) if killed % 3 == 0 else False
                if _kill_a_rank(folder, chance):
                    killed += 1
                    during += is_saving
                    break
        _end(process, lines)
        if last >= STEPS:  # it got to the end: begin anew
            shutil.rmtree(folder)
            seen, durable, reached = {}, 0, 0
    code, found = _train(folder)
    differing += sum(expected[step] != loss for step, loss in _losses(found).items())
    report.count("killed at a random moment", killed, count)
    report.count("losses that differ from the undisturbed run's", differing, 0)
    report.count("resumes from before the last durable checkpoint", too_many, 0)
    report.count("trained to the end afterwards", code, 0)
    report.count("lost more than an interval and the save under way", sum(lost > 2 * EVERY for lost in again), 0)
    report.timing("steps trained again, at most", f"{max(again, default=0)} (interval {EVERY})")
    report.notes.append(f"kills while a checkpoint was being written: {during} of {killed}")


def _damages(report: Report, folder: Path, count: int) -> None:
    """Flip a bit, cut a file short or remove it; ask in one process which checkpoint would be taken."""
    script = Path(__file__).parent / "damage.py"
    done = subprocess.run(
        [sys.executable, script, folder / "checkpoints", str(count)], capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout) if done.returncode == 0 else {}
    report.count("damaged: bit flipped, cut short, or file gone", found.get("damaged"), count)
    report.count("found, said, and the older one taken", found.get("found"), count)


def _clocks(report: Report, folder: Path, count: int) -> None:
    """Let a deadline come while rank 1's clock is 5 s ahead."""

    def one(number: int) -> bool:
        place = folder / f"clock-{number}"
        deadline = {"CLOUDTRAIN_DEADLINE": f"{time.time() + 18:.0f}", "SKEW_S": "5"}
        code, found = _train(place, max_steps=100_000, **deadline)
        stopped = [event for event in found if event["e"] == "preempt"]
        same = code != 0 and len(stopped) == 1 and stopped[0]["reason"] == "deadline" and _is_whole(place, stopped[0])
        shutil.rmtree(place)
        return same

    with ThreadPoolExecutor(3) as three:  # they wait for their deadline most of the time
        same = sum(three.map(one, range(count)))
    report.count("deadline with one clock 5 s off: all stop at one step, saved", same, count)


def _signals(report: Report, folder: Path, count: int, expected: dict[int, float]) -> None:
    """SIGTERM to the whole process group, data loaders and all, as some platforms do."""
    good = 0
    for number in range(count):
        place = folder / f"signal-{number}"
        process, lines = _start(place)
        found = []
        for line in lines:
            event = events.parse(line.rstrip("\n"))[1]
            if event is None:
                continue
            found.append(event)
            if event["e"] == "step" and event["step"] == 20 + number:
                for pid in _workers(place):
                    os.killpg(pid, signal.SIGTERM)
        _end(process, lines)
        stopped = [event for event in found if event["e"] == "preempt"]
        right = all(expected[event["step"]] == event["loss"] for event in found if event["e"] == "step")
        good += len(stopped) == 1 and right and _is_whole(place, stopped[0])
        shutil.rmtree(place)
    report.count("SIGTERM to whole process groups: saved at one step", good, count)


def _exits(report: Report, folder: Path, count: int) -> None:
    """Finish, and leave: gloo's own teardown hangs or aborts one time in nine (torch 2.13)."""
    clean = 0
    for number in range(count):
        code, found = _train(folder / f"exit-{number}", max_steps=5)
        clean += code == 0 and found[-1]["e"] == "done"
        shutil.rmtree(folder / f"exit-{number}")
    report.count("finished jobs that left with code 0", clean, count)


def _is_whole(folder: Path, stopped: dict[str, Any]) -> bool:
    outcome = json.loads((folder / "outcome.json").read_text())
    return outcome["outcome"] == "saved" and Path(stopped["path"]).name == f"step-{stopped['step']:08d}"


def _train(folder: Path, max_steps: int = STEPS, **env: str) -> tuple[int, list[dict[str, Any]]]:
    """Train to the end; return the exit code and the events."""
    process, lines = _start(folder, max_steps, **env)
    found = [event for line in lines if (event := events.parse(line.rstrip("\n"))[1])]
    process.wait(120)
    return process.returncode, found


def _start(folder: Path, max_steps: int = STEPS, **env: str) -> tuple[subprocess.Popen[str], Iterator[str]]:
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK)
    spec = {
        "run": {"kind": "task", "target": "task.py"},
        "training": {
            "global_batch_size": 32,
            "micro_batch_size": 8,
            "max_steps": max_steps,
            "optimizer": {"name": "adamw", "lr": 0.003},
            "schedule": {"name": "cosine", "warmup_steps": 10},
            "log_every": 1,
            "num_workers": 1,
            "ema_decay": 0.99,
        },
        "checkpoint": {"every_steps": EVERY, "keep": 3},
        "timeout_s": 60,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--shutdown-timeout=60"]
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "cloudtrain.entrypoints.trainer.train"],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "CLOUDTRAIN_SPEC": "spec.json",
            "CLOUDTRAIN_CHECKPOINT_DIR": str(folder / "checkpoints"),
            "CLOUDTRAIN_RESULT_DIR": str(folder),
            **env,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout


def _workers(folder: Path) -> list[int]:
    """Return the pids of the two ranks: torchrun starts each in a session of its own."""
    found = processes.with_environment(CLOUDTRAIN_CHECKPOINT_DIR=str(folder / "checkpoints"))
    return [pid for pid in found if os.getsid(pid) == pid and b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]


def _save_begins(folder: Path) -> bool:
    """Wait until a checkpoint is being written."""
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        if any((folder / "checkpoints").glob("*.tmp")):
            return True
    return False


def _kill_a_rank(folder: Path, chance: random.Random) -> bool:
    pids = _workers(folder)
    if len(pids) != 2:
        return False
    os.kill(chance.choice(pids), signal.SIGKILL)
    return True


def _end(process: subprocess.Popen[str], lines: Iterator[str]) -> None:
    """Read the rest, so that nobody waits for a full pipe, and see it end."""
    guard = threading.Timer(90, process.kill)
    guard.start()
    for _ in lines:
        pass
    process.wait(120)
    guard.cancel()


def _losses(found: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in found if event["e"] == "step"}


if __name__ == "__main__":
    result = run()
    result.show()
    sys.exit(result.failed)

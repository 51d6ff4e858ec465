"""The nodes of a Slurm job: the step's tasks supervise torch on a real Slurm, from a hand-made attempt's folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wholejobs

from cloudtrain.launcher import backend_table
from cloudtrain.launcher.backend import Request
from doubles.slurm.attempts import SlurmAttempt
from doubles.slurm.handle import Slurm

CONFIG = f"""\
name: digits
backend: slurm
task: task.py
env: {{OMP_NUM_THREADS: "1"}}
resources: {{instances: 2}}
distributed: {{nproc_per_node: 1}}
training:
  strategy: ddp
  precision: fp32
  global_batch_size: 16
  max_steps: 60
  optimizer: {{name: adamw, lr: 1e-2}}
  log_every: 1
  seed: 3
checkpoint: {{every_steps: 10, keep: 3}}
limits: {{max_duration: 10m}}
slurm: {{cpus_per_node: 2, partition: spot, python: {sys.executable}}}
"""
Make = Callable[..., SlurmAttempt]


@pytest.fixture(autouse=True)
def _in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend_table.BUILT_IN, "slurm", "cloudtrain.backends.slurm.backend:SlurmBackend")


@pytest.fixture
def make(slurm: Slurm, render: Callable[..., Request], tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes an attempt's folder, from settings of the config and fields of the order."""
    made: list[SlurmAttempt] = []

    def attempt(*settings: str, **changes: Any) -> SlurmAttempt:
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "code/task.py").write_text(wholejobs.TASK)
        made.append(SlurmAttempt(slurm, render(CONFIG, *settings), tmp_path / "code", **changes))
        return made[-1]

    yield attempt
    for each in made:
        print(each.told())


def test_job_trains_and_ends(make: Make, slurm: Slurm) -> None:
    """Two nodes train; the job's end is known to Slurm and on the disk; no secret and no process is left."""
    attempt = make()
    number = attempt.submit()
    assert slurm.wait(number, "COMPLETED", "FAILED", timeout_s=90)["ExitCode"] == "0:0"
    verdict = attempt.exit()
    assert verdict is not None
    assert (verdict["state"], verdict["restarts"]) == ("succeeded", 0)
    assert len(attempt.steps()) == 60
    assert attempt.processes() == []
    assert (attempt.folder / "ended").read_text() == "0\n"
    assert "s3cret" not in (attempt.folder / "order.json").read_text()

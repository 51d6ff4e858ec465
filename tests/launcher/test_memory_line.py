"""The memory line of a plan: its words, the memory of GPUs, and the estimate that is kept."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.advice import memory
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.planning.prepare import Prepared, prepare
from cloudtrain.launcher.store import series
from cloudtrain.launcher.store.database import Database

GIB = 2**30
TASK = """
import os, pathlib, torch
from torch import nn
def model(params):
    with pathlib.Path(params["calls"]).open("a") as file: file.write("x")
    if "SECRET_X" in os.environ: raise ValueError("a key of this machine")
    return nn.Linear(1000, 1000)
def dataset(params, split): return [torch.zeros(1000)] * 8
def loss(model, batch): return model(batch).mean()
"""
CLOUD = """backend: sagemaker
sagemaker: {region: us-east-1, role: "arn:aws:iam::123456789012:role/x"}
"""


def found(own: float, *others: tuple[dict[str, Any], float], gpu: float | None = 80, **more: Any) -> dict[str, Any]:
    """Return an estimate; sizes in GiB."""
    layouts = [{"changes": changes, "bytes": size * GIB} for changes, size in [({}, own), *others]]
    return {"gpu_bytes": gpu and gpu * GIB, "layouts": layouts, "why": None, "is_cut": False, **more}


@pytest.mark.parametrize(
    ("estimate", "words"),
    [
        (found(31), "fits, about 31.0 GiB of 80.0 GiB per GPU"),
        (found(31, gpu=None), "about 31.0 GiB per rank"),
        (found(75), "may not fit, about 75.0 GiB of 80.0 GiB per GPU, and CUDA and NCCL need some more; no other"),
        (
            found(112, ({"strategy": "fsdp", "activation_checkpointing": True}, 38)),
            (
                "does not fit, about 112.0 GiB of 80.0 GiB per GPU; "
                "try strategy: fsdp, activation_checkpointing: true (38.0 GiB)"
            ),
        ),
        (found(112, is_cut=True), "no other layout of these ranks was found to fit in 30 s"),
        (
            found(31, ({"parallel.pipeline": 1}, 52)) | {"bubble": 0.12},
            "fits, about 31.0 GiB of 80.0 GiB per GPU; without parallel.pipeline 52.0 GiB: leave it out, it costs 12 %",
        ),
        (
            found(31, ({"parallel.tensor": 1}, 52)),
            "fits, about 31.0 GiB of 80.0 GiB per GPU; without parallel.tensor 52.0 GiB: leave it out, it costs time",
        ),
        (found(31, why="x"), "at least 31.0 GiB of 80.0 GiB per GPU, without activations: x"),
        (found(112, why="x"), "does not fit, about 112.0 GiB of 80.0 GiB per GPU, without activations: x"),
        ({"gpu_bytes": None, "layouts": [], "why": "x", "is_cut": False}, "not estimated: x"),
    ],
)
def test_line_says_whether_the_model_fits(estimate: dict[str, Any], words: str) -> None:
    """A tenth of a GPU's memory is left for what the estimate lacks; a remedy has its own figure."""
    line = memory.line(estimate)
    assert line.startswith("memory: ")
    assert words in line


@pytest.fixture
def planned(project: Callable[..., Path], home: Path) -> Callable[..., Prepared]:
    """Return a function that prepares a job with these lines in its config; a script, unless they name a task."""

    def plan(more: str = "", text: str = "") -> Prepared:
        folder = project(more, **({"script": "task.py", "text": text} if text else {}))
        file = folder / "cloudtrain.yaml"
        if text:
            file.write_text(file.read_text().replace("script:", "task:"))
        return prepare(configs.load(file), file, Path(), dry=True)

    return plan


@pytest.mark.parametrize(
    ("resources", "gib"),
    [("instance_type: ml.p4de.24xlarge", 80), ("accelerators: 'T4:4'", 16), ("instance_type: ml.m5.xlarge", None)],
)
def test_memory_of_a_gpu_is_in_the_price_tables(
    planned: Callable[..., Prepared], resources: str, gib: int | None
) -> None:
    """By the machine that the plan has chosen; a machine without GPUs has none."""
    assert memory.gpu_bytes(planned(f"{CLOUD}resources: {{{resources}}}\n")) == (gib and gib * GIB)


def test_estimate_is_kept_for_the_same_code_and_settings(planned: Callable[..., Prepared], tmp_path: Path) -> None:
    """The task runs once; a submit shows what a plan has kept, and runs no task."""
    calls = tmp_path / "calls"
    more = f"params: {{calls: {calls}}}\ntraining: {{global_batch_size: 8, max_steps: 1}}\n"
    prepared = planned(more, TASK)
    assert memory.of_plan(prepared, measures=False) is None
    assert not calls.exists()
    first = memory.of_plan(prepared)
    assert first["layouts"][0]["bytes"] == pytest.approx(16 * 1_001_000, rel=0.05)
    assert memory.of_plan(prepared) == memory.of_plan(prepared, measures=False) == first
    assert calls.read_text() == "x"
    memory.of_plan(planned(more.replace("8,", "4,"), TASK))
    assert calls.read_text() == "xx"


def test_plan_shows_the_estimate(
    project: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In words, and as JSON; a task that fails is no error of the plan. The task gets no key of this machine."""
    monkeypatch.setenv("SECRET_X", "s3cret")
    more = f"params: {{calls: {tmp_path / 'calls'}}}\ntraining: {{global_batch_size: 8, max_steps: 1}}\n"
    folder = project(more, "task.py", TASK)
    (folder / "cloudtrain.yaml").write_text(f"name: loop\ntask: task.py\n{more}")
    assert "memory: " not in cli.ok("plan", "--no-code", cwd=folder).stdout
    assert not (tmp_path / "calls").exists()
    done = cli.ok("plan", cwd=folder)
    assert "memory: about 15 MiB per rank" in done.stdout
    told = f"this runs code of {folder} on this machine"
    assert [told in each for each in (done.stderr, cli("plan", "--set", "seed=1", cwd=folder).stderr)] == [True, False]
    assert json.loads(cli("plan", "--json", cwd=folder).stdout)["memory"]["layouts"][0]["parameters"] == 1_001_000
    leak = "[torch.ones(1000) * i for i in range(9 if split == 'train' else 8)]"
    (folder / "task.py").write_text(TASK.replace("[torch.zeros(1000)] * 8", leak))
    assert (
        "warning: 8 of the 8 samples of the split 'eval' are also in the training split"
        in cli.ok("plan", cwd=folder).stdout
    )
    (folder / "task.py").write_text(TASK.replace("[torch.zeros(1000)]", "open('/nowhere')"))
    done = cli.ok("plan", cwd=folder)
    assert "memory: not estimated: FileNotFoundError: " in done.stdout
    (folder / "task.py").write_text(f"{TASK}\ndef optimizer(m, _): return torch.optim.LBFGS(m.parameters())\n")
    done = cli("plan", cwd=folder)
    assert (done.code, "LBFGS.step(closure) needs an argument" in done.stderr) == (3, True), done.stderr
    assert "at cloudtrain.yaml:2:7, task" in done.stderr


def test_script_has_a_lower_bound_from_its_last_run(planned: Callable[..., Prepared], seed: Callable[..., Job]) -> None:
    """Weights, gradients and AdamW's state: 16 bytes a parameter that the newest run of this name has reported."""
    prepared = planned()
    assert memory.of_plan(prepared) is None
    job = seed("loop-11111", State("succeeded"))
    series.append(Database(), job.id, [series.Point(1, "start", time.time(), 0, {"parameters": 2 * GIB})])
    estimate = memory.of_plan(prepared)
    assert estimate is not None
    assert memory.line(estimate).startswith("memory: at least 32.0 GiB per rank, without activations: ")

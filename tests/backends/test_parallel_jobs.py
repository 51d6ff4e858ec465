"""Whole jobs over four ranks: killed on one layout, resumed on another."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import wholejobs

pytestmark = pytest.mark.slow

# Kills rank 3, of the last stage, in step 13 of the first attempt if the job asks for that.
KILL = """
import os, signal
plain_loss, calls = loss, 0

def loss(model, batch):
    global calls
    calls += 1
    if os.environ.get("KILL") and calls == 50 and os.environ["RANK"] + os.environ["CLOUDTRAIN_ATTEMPT"] == "31":
        os.kill(os.getpid(), signal.SIGKILL)
    return plain_loss(model, batch)
"""
SMALL = (
    *("params.context=16", "params.layers=2", "params.heads=2", "params.width=16", "budget=null"),
    *("resources.instances=1", "resources.accelerators=null", "distributed.max_restarts=0", "retry=null"),
    *("training.global_batch_size=8", "training.micro_batch_size=2", "training.max_steps=20", "training.log_every=1"),
    *("training.eval_every=20", "training.eval_batches=1", "training.schedule.warmup_steps=5"),
    "checkpoint={every_steps: 5, blocking: true}",
)
ONE = "distributed.nproc_per_node=1", "env={OMP_NUM_THREADS: '1'}"
FOUR = "distributed.nproc_per_node=4", "env={OMP_NUM_THREADS: '1', KILL: 'yes'}"
STAGES = "training.strategy=ddp", "training.parallel={tensor: 2, pipeline: 2}"
SHARDS = "training.strategy=fsdp", "training.parallel=null"
MACHINES = {"local": (), "sagemaker": ("resources.instance_type=ml.m5.xlarge", "sagemaker.bucket=cloudtrain-tests")}


def options(*settings: str) -> list[str]:
    """Return the settings as options of a command."""
    return [part for setting in settings for part in ("--set", setting)]


@pytest.mark.soak  # the same trainer: test_job_resumes_on_another_layout of tests/entrypoints/test_train.py
@pytest.mark.parametrize("backend", ["local", "sagemaker"])
def test_killed_job_resumes_on_another_layout(
    backend: str, cli: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """charlm as tensor 2 x pipeline 2, kill -9 of a rank, then fsdp over four ranks: the losses of one rank."""
    if backend == "sagemaker":
        request.getfixturevalue("account")
    folder = tmp_path / "charlm"
    shutil.copytree(wholejobs.ROOT / "examples/charlm", folder)
    text = (folder / "task.py").read_text().replace("TEXT_BYTES = 1_000_000", "TEXT_BYTES = 20_000")
    (folder / "task.py").write_text(text + KILL)
    submit = ("submit", "--force", "-y", "--name")
    cli.ok(*submit, "whole", "--backend", "local", *options(*SMALL, *ONE), cwd=folder)
    more = options(*SMALL, *FOUR, *STAGES, *MACHINES[backend])
    killed = cli(*submit, "parts", "--backend", backend, *more, cwd=folder)
    assert "rank 3: killed by SIGKILL" in killed.stdout, killed.stdout + killed.stderr
    cli.ok("resume", "parts", "-y", *options(*SHARDS))
    assert wholejobs.losses(cli, "parts", 1, 2) == pytest.approx(wholejobs.losses(cli, "whole"), rel=1e-6)
    lines = cli("logs", "parts", "--json", "--raw", "--attempt", "2").stdout
    [restart] = wholejobs.events(lines, "restart")
    assert restart["step"] == 10
    assert [event["ranks"] for event in wholejobs.events(lines, "start")] == [4]

"""Whole jobs on SageMaker's stand-in: real containers, torchrun, gloo; trained, interrupted, stopped, followed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.aws.handle import ROLE, Aws

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TASK = """
import time, torch
def model(params): torch.manual_seed(0); return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
class Data(torch.utils.data.Dataset):
    def __len__(self): return 256
    def __getitem__(self, i):
        time.sleep(0.01)
        g = torch.Generator().manual_seed(i)
        x = torch.randn(8, generator=g)
        return x, x.sum(0, keepdim=True)
def dataset(params, split): return Data() if split == "train" else None
def loss(model, batch): return ((model(batch[0]) - batch[1]) ** 2).mean()
"""  # noqa: E501
CONFIG = f"""\
name: j
backend: sagemaker
task: task.py
env: {{OMP_NUM_THREADS: "1"}}
resources: {{instances: 2, instance_type: ml.g5.xlarge, spot: true}}
distributed: {{nproc_per_node: 1}}
training:
  strategy: ddp
  precision: fp32
  global_batch_size: 16
  max_steps: 100
  optimizer: {{name: adamw, lr: 1e-2}}
  log_every: 10
  seed: 3
checkpoint: {{every_steps: 10, keep: 3}}
limits: {{max_duration: 1h}}
sagemaker: {{role: "{ROLE}", bucket: cloudtrain-tests}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a project's folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "cloudtrain.yaml").write_text(CONFIG)
    return folder


def events(lines: str, name: str) -> list[dict[str, Any]]:
    """Return the events of the given name among lines of `logs --json`."""
    told = (json.loads(line).get("event") for line in lines.splitlines())
    return [event for event in told if event and event["e"] == name]


def weights(cli: Any, job: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the job's exported weights, fetched as a user would."""
    fetched = cli("artifacts", job, "-o", folder / f"{job}-output", "--json")
    assert fetched.code == 0, fetched.stderr
    [file] = [path for path in fetched.json["files"] if path.endswith("model.pt")]
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.soak  # the tutorial's test trains a whole task on SageMaker
def test_digits_example_reaches_its_accuracy(cli: Any, account: Aws, tmp_path: Path) -> None:
    """The README's example on two instances: 97 % of unseen samples, and the weights are fetched."""
    shutil.copytree(ROOT / "examples/digits", tmp_path / "digits")
    more = ("resources.accelerators=null", "budget=null", "sagemaker.region=us-east-1", "env={OMP_NUM_THREADS: '1'}")
    given = [part for setting in (*more, "sagemaker.bucket=cloudtrain-tests") for part in ("--set", setting)]
    command = ("submit", "--force", "-y", "--name", "digits", "--backend", "sagemaker", "--instances", "2", *given)
    done = cli(*command, "--instance-type", "ml.m5.xlarge", cwd=tmp_path / "digits", timeout_s=280)
    assert done.code == 0, done.stdout + done.stderr
    status = cli("status", "digits", "--json").json
    assert status["metrics"]["accuracy"] >= 0.97
    assert (status["step"], status["state"]) == (500, "succeeded")
    assert weights(cli, "digits", tmp_path)


def test_spot_interruption_changes_nothing(cli: Any, account: Aws, folder: Path, wait_until: Any) -> None:
    """Interrupted in mid-run, new machines resume from S3: equal weights bit for bit, and every step once."""
    assert cli("submit", "--force", "-y", "--name", "whole", cwd=folder).code == 0
    assert cli("submit", "--force", "-d", "-y", "--name", "broken", cwd=folder).code == 0
    wait_until(lambda: "step 30/100" in cli("logs", "broken").stdout, 100, 0.3)
    account.interrupt("broken-1")
    done = cli("logs", "-f", "broken", timeout_s=200)
    status = cli("status", "broken", "--json").json
    assert (done.code, status["state"], status["restarts"]) == (0, "succeeded", 1), done.stdout + done.stderr
    lines = cli("logs", "broken", "--json", "--raw").stdout
    [again] = events(lines, "restart")
    assert again["step"] >= 20
    one, other = weights(cli, "whole", folder), weights(cli, "broken", folder)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    undisturbed = {e["step"]: e["loss"] for e in events(cli("logs", "whole", "--json", "--raw").stdout, "step")}
    assert {e["step"]: e["loss"] for e in events(lines, "step")} == undisturbed
    assert len({e["step"] for e in events(lines, "step")}) == 10


def test_following_twice_shows_every_line_once(cli: Any, account: Aws, folder: Path) -> None:
    """After kill -9 of a submit with a failing, slow CloudWatch, the follower has all lines in order, and the code."""
    account.settings(log_lag_s=2.0)
    account.fault("GetLogEvents", "throttle", every=5)
    account.fault("GetLogEvents", "empty", every=7)
    account.fault("DescribeLogStreams", "500", every=3)
    (folder / "train.py").write_text(
        "import os, time\nfor n in range(3000):\n    print('line', os.environ['RANK'], n, flush=True)\n"
        "    time.sleep(0.001)\n"
    )
    text = CONFIG.replace("task: task.py", "script: train.py").replace("nproc_per_node: 1", "allow_alone: true")
    (folder / "cloudtrain.yaml").write_text(text[: text.index("training:")] + text[text.index("limits:") :])
    cli.watch("line 1 100", "submit", "--force", "-y", "--name", "lines", cwd=folder)
    done = cli("logs", "-f", "lines", timeout_s=200)
    for rank in (0, 1):
        numbers = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith(f"[r{rank}] line")]
        assert numbers == list(range(3000))
    assert done.code == 0


def test_killed_rank_restarts_inside_its_container(cli: Any, account: Aws, folder: Path) -> None:
    """A killed rank restarts inside its container, without a new submit."""
    kill = """\
import os, signal
calls = []
def loss(model, batch):
    calls.append(1)
    if os.environ["RANK"] == "1" and os.environ["CLOUDTRAIN_RESTART"] == "0" and len(calls) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    (folder / "task.py").write_text(TASK.replace("def loss(model, batch):", kill + "   "))
    done = cli("submit", "--force", "-y", "--name", "hurt", cwd=folder, timeout_s=200)
    status = cli("status", "hurt", "--json").json
    assert (done.code, status["state"], status["step"]) == (0, "succeeded", 100), done.stdout + done.stderr
    assert len(account.journal("CreateTrainingJob")) == 1
    [again] = events(cli("logs", "hurt", "--json", "--raw").stdout, "restart")
    assert (again["restarts"], again["step"] >= 10) == (1, True)


# Rank 0 alone saves, into its working directory; rank 1 is killed after the file exists long enough to be kept.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
saved, rank = Path("out/step.pt"), dist.get_rank()
print("found", saved.read_text() if saved.exists() else "nothing", sys.argv[1:], flush=True)
if not saved.exists():
    dist.barrier()
    if rank == 0:
        Path("snapshot.pt").write_text("rank 0")
        saved.write_text("rank 0")
    time.sleep(3)
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
print("snapshot", Path("snapshot.pt").read_text(), flush=True)
"""


@pytest.mark.usefixtures("account")
def test_kept_files_reach_all_containers_at_a_restart(cli: Any, folder: Path) -> None:
    """SageMaker shares no folder between running containers, so the nodes gather the files from each other."""
    (folder / "train.py").write_text(SCRIPT)
    config = CONFIG.partition("training:")[0].replace("task: task.py", "script: train.py").replace("spot: true", "")
    keep = 'keep: [out/, "snap*.pt"]\nresume_args: [--from, $CLOUDTRAIN_RESUME_PATH]\n'
    (folder / "cloudtrain.yaml").write_text(f"{config}{keep}limits: {CONFIG.partition('limits: ')[2]}")
    done = cli("submit", "-y", "--name", "kept", cwd=folder, timeout_s=200)
    assert done.code == 0, done.stdout + done.stderr
    shown = done.stdout
    assert (shown.count("found nothing"), shown.count("found rank 0 ['--from'")) == (2, 2), shown
    assert shown.count("snapshot rank 0") == 2

"""Whole jobs on Azure ML's stand-in: real containers, torchrun, gloo; trained, preempted, stopped, followed."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.azure.handle import ACCOUNT, CONTAINER, GROUP, REGION, SUBSCRIPTION, WORKSPACE, Azure

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WHERE = f"subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}, region: {REGION}"
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
backend: azureml
task: task.py
env: {{OMP_NUM_THREADS: "1"}}
resources: {{instances: 2, instance_type: Standard_NC4as_T4_v3, spot: true}}
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
retry: {{max_attempts: 3}}
azureml: {{{WHERE}}}
"""


@dataclass(frozen=True)
class Whole:
    """The result of an undisturbed run."""

    losses: dict[int, float]
    weights: dict[str, torch.Tensor]


_whole: list[Whole] = []


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


def losses(cli: Any, job: str, *attempts: int) -> dict[int, float]:
    """Return the losses by step, from the job's log."""
    found: dict[int, float] = {}
    for attempt in attempts or (1,):
        lines = cli("logs", job, "--json", "--raw", "--attempt", attempt).stdout
        found |= {event["step"]: event["loss"] for event in events(lines, "step")}
    return found


def weights(cli: Any, job: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the job's exported weights, fetched as a user would."""
    fetched = cli("artifacts", job, "-o", folder / f"{job}-output", "--json")
    assert fetched.code == 0, fetched.stderr
    [file] = [path for path in fetched.json["files"] if path.endswith("model.pt")]
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that the weights are the same, bit for bit."""
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def whole(cli: Any, azure_account: Azure, folder: Path) -> Whole:
    """Return the result of the same job without disturbance; run once for all tests."""
    if not _whole:
        assert cli("submit", "--force", "-y", "--name", "whole", cwd=folder).code == 0
        _whole.append(Whole(losses(cli, "whole"), weights(cli, "whole", folder)))
    return _whole[0]


def as_script(folder: Path, text: str) -> None:
    """Make the project's job a script."""
    (folder / "train.py").write_text(text)
    config = CONFIG.replace("task: task.py", "script: train.py\ndistributed: {allow_alone: true}", 1)
    config = config.replace("distributed: {nproc_per_node: 1}\n", "")
    (folder / "cloudtrain.yaml").write_text(config[: config.index("training:")] + config[config.index("limits:") :])


@pytest.mark.soak  # the tutorial's test trains a whole task on Azure ML
def test_digits_example_reaches_its_accuracy(cli: Any, azure_account: Azure, tmp_path: Path) -> None:
    """The README's example on two instances: 97 % of unseen samples, and the weights are fetched."""
    shutil.copytree(ROOT / "examples/digits", tmp_path / "digits")
    where = ("subscription", SUBSCRIPTION), ("resource_group", GROUP), ("workspace", WORKSPACE)
    more = ("resources.accelerators=null", "resources.spot=false", "budget=null", "env={OMP_NUM_THREADS: '1'}")
    settings = [*more, *(f"azureml.{key}={value}" for key, value in where)]
    given = [part for setting in settings for part in ("--set", setting)]
    command = ("submit", "--force", "-y", "--name", "digits", "--backend", "azureml", "--instances", "2", *given)
    done = cli(*command, "--instance-type", "Standard_D4s_v5", cwd=tmp_path / "digits", timeout_s=280)
    assert done.code == 0, done.stdout + done.stderr
    status = cli("status", "digits", "--json").json
    assert status["metrics"]["accuracy"] >= 0.97
    assert (status["step"], status["state"]) == (500, "succeeded")
    assert weights(cli, "digits", tmp_path)
    assert azure_account.unserved() == []


def test_preemption_that_restarts_changes_nothing(
    cli: Any, azure_account: Azure, folder: Path, wait_until: Any, whole: Whole
) -> None:
    """Preempted in mid-run, the run restarts on new machines with new log files: the weights are the same."""
    azure_account.settings(restart_logs="replace")
    process = cli.start("submit", "--force", "-y", "--name", "broken", cwd=folder)
    wait_until(lambda: "step 30/100" in cli("logs", "broken").stdout, 100, 0.3)
    azure_account.preempt("broken-1")
    shown = process.communicate(timeout=200)[0]
    assert process.returncode == 0, shown
    status = cli("status", "broken", "--json").json
    assert (status["state"], status["attempt"]) == ("succeeded", 1)
    assert "step 10/100" in shown  # lines of the last second before a file was replaced are lost
    assert "step 100/100" in shown
    assert_equal(weights(cli, "broken", folder), whole.weights)
    assert losses(cli, "broken").items() <= whole.losses.items()
    assert azure_account.jobs()[-1] == "broken-1"


def test_preemption_that_fails_is_retried(
    cli: Any, azure_account: Azure, folder: Path, wait_until: Any, whole: Whole
) -> None:
    """A follower resends a run that ended in PreemptionError: one job, and the same weights."""
    process = cli.start("submit", "--force", "-y", "--name", "broken", cwd=folder)
    wait_until(lambda: "broken-1" in azure_account.jobs(), 60, 0.1)
    other = cli.start("wait", "broken")
    wait_until(lambda: "step 30/100" in cli("logs", "broken").stdout, 100, 0.3)
    azure_account.preempt("broken-1", "fail")
    shown, said = process.communicate(timeout=200)
    waited = other.communicate(timeout=60)[1]
    assert (process.returncode, other.returncode) == (0, 0), shown + said + waited
    status = cli("status", "broken", "--json").json
    assert (status["state"], status["attempt"], status["step"]) == ("succeeded", 2, 100)
    assert "preempted; attempt 2 of at most 3 begins" in said + waited
    assert azure_account.jobs()[-2:] == ["broken-1", "broken-2"]
    [again] = events(cli("logs", "broken", "--json", "--raw").stdout, "restart")
    assert again["step"] >= 20
    assert losses(cli, "broken", 1, 2).items() <= whole.losses.items()  # a line may be lost with its machine
    assert_equal(weights(cli, "broken", folder), whole.weights)


def test_without_a_mount_checkpoints_go_to_blob_storage(
    cli: Any, azure_account: Azure, folder: Path, wait_until: Any, whole: Whole
) -> None:
    """Each node has its own disk, which a preemption removes: the job resumes from the copy, bit for bit."""
    mirror = f"checkpoint.mirror=https://{ACCOUNT}.blob.core.windows.net/{CONTAINER}/mirror"
    given = ("--set", mirror, "--set", "azureml.identity=managed")
    assert cli("submit", "--force", "-d", "-y", "--name", "broken", *given, cwd=folder).code == 0
    wait_until(lambda: "step 40/100" in cli("logs", "broken").stdout, 100, 0.3)
    azure_account.preempt("broken-1")
    done = cli("logs", "-f", "broken", timeout_s=200)
    assert done.code == 0, done.stdout + done.stderr
    assert events(cli("logs", "broken", "--json", "--raw").stdout, "restart")[-1]["step"] >= 10
    assert_equal(weights(cli, "broken", folder), whole.weights)
    assert [name for name in azure_account.blobs() if "jobs/broken/checkpoints/" in name] == []


def test_following_twice_shows_every_line_once(cli: Any, azure_account: Azure, folder: Path) -> None:
    """After kill -9 of a submit under all faults of Azure, the next follower has all lines in order, and the code."""
    azure_account.fault("run.details", "throttle", every=5)
    azure_account.fault("run.details", "500", every=7)
    azure_account.fault("blob.get", "500", every=6)
    azure_account.fault("blob.get", "drop", every=7)
    azure_account.fault("blob.get", "cut", every=9)
    azure_account.fault("run.details", "drop", every=11)
    as_script(
        folder,
        "import os, time\nfor n in range(3000):\n    print('line', os.environ['RANK'], n, flush=True)\n"
        "    time.sleep(0.001)\n",
    )
    cli.watch("line 1 100", "submit", "--force", "-y", "--name", "lines", cwd=folder)
    azure_account.fault("blob.get", "sas_expired")
    azure_account.fault("run.details", "expired")
    done = cli("logs", "-f", "lines", timeout_s=200)
    for rank in (0, 1):
        numbers = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith(f"[r{rank}] line")]
        assert numbers == list(range(3000))
    assert done.code == 0


def test_failure_of_node_1_is_shown_at_once(cli: Any, azure_account: Azure, folder: Path) -> None:
    """Node 1 alone fails, after a silence: its traceback is shown within 5 s, and is the cause."""
    as_script(
        folder,
        "import os, sys, time\nprint('ready', flush=True)\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(12)\n    print('failing', time.time(), flush=True)\n"
        "    raise ValueError('boom of node one')\ntime.sleep(120)\n",
    )
    process = cli.start("submit", "--force", "-y", "--name", "hurt", cwd=folder)
    seen_s = 0.0
    failed_s = 0.0
    for line in process.stdout:
        failed_s = float(line.split()[-1]) if "failing" in line else failed_s
        if "boom of node one" in line and not seen_s:
            seen_s = time.time()
    said = process.communicate()[1]
    assert 0 < seen_s - failed_s < 5.0
    assert "error       rank 1: ValueError: boom of node one" in said
    assert process.returncode == 1


def test_files_can_be_fetched_during_the_run(cli: Any, azure_account: Azure, folder: Path) -> None:
    """The files so far can be fetched, even without a storage key."""
    azure_account.settings(datastore_credentials="none")
    as_script(
        folder,
        "import os, time\nfrom pathlib import Path\n"
        "Path(os.environ['CLOUDTRAIN_OUTPUT_DIR'], 'early.txt').write_text('so far')\n"
        "print('written', flush=True)\ntime.sleep(120)\n",
    )
    assert cli("submit", "--force", "-d", "-y", "--name", "early", cwd=folder).code == 0
    cli.watch("written", "logs", "-f", "early")
    fetched = cli("artifacts", "early", "-o", folder / "out", "--json")
    assert [Path(path).read_text() for path in fetched.json["files"] if path.endswith("early.txt")] == ["so far"]
    assert cli("stop", "early", "-y").code == 0

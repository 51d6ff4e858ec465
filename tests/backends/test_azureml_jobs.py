"""Whole jobs on Azure ML's stand-in: real containers, torchrun, gloo; trained, preempted, failed, fetched."""

import time
from pathlib import Path
from typing import Any

import pytest
import wholejobs

from doubles.azure.handle import Azure
from doubles.azure.names import ACCOUNT, CONTAINER, GROUP, REGION, SUBSCRIPTION, WORKSPACE
from doubles.waiting import until

pytestmark = pytest.mark.slow

CONFIG = wholejobs.config_of(
    "azureml",
    "Standard_NC4as_T4_v3",
    f"subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}, region: {REGION}",
    "distributed: {nproc_per_node: 1}\nretry: {max_attempts: 3}\n",
)


@pytest.mark.soak  # the test below trains a whole task on Azure ML
def test_digits_example_reaches_its_accuracy(cli: Any, azure_account: Azure, tmp_path: Path) -> None:
    """The README's example on two instances: 97 % of unseen samples, and the weights are fetched."""
    where = ("subscription", SUBSCRIPTION), ("resource_group", GROUP), ("workspace", WORKSPACE)
    wholejobs.train_digits(
        cli, tmp_path, "azureml", "Standard_D4s_v5", *(f"azureml.{key}={value}" for key, value in where)
    )
    assert azure_account.unserved() == []


@pytest.mark.soak  # new log files: test_azureml_logs.py; a loss that changes nothing: the jobs of the other clouds
def test_preemption_that_restarts_changes_nothing(
    cli: Any, azure_account: Azure, folder: Path, whole: wholejobs.Results
) -> None:
    """Preempted in mid-run, the run restarts on new machines with new log files: the weights are the same."""
    azure_account.settings(restart_logs="replace")
    process = cli.start("submit", "--force", "-y", "--name", "broken", cwd=folder)
    until(lambda: "broken-1" in azure_account.jobs(), 60, 0.1)
    cli.watch("step 30/100", "logs", "-f", "broken")
    azure_account.preempt("broken-1")
    shown = process.communicate(timeout=200)[0]
    assert process.returncode == 0, shown
    status = cli("status", "broken", "--json").json
    assert (status["state"], status["attempt"]) == ("succeeded", 1)
    assert "step 10/100" in shown  # lines of the last second before a file was replaced are lost
    assert "step 100/100" in shown
    wholejobs.assert_equal(wholejobs.weights(cli, "broken", folder), whole.weights)
    assert wholejobs.losses(cli, "broken").items() <= whole.losses.items()
    assert azure_account.jobs()[-1] == "broken-1"


@pytest.mark.soak  # retries on Azure ML: test_azureml_send.py
def test_preemption_that_fails_is_retried(
    cli: Any, azure_account: Azure, folder: Path, whole: wholejobs.Results
) -> None:
    """A follower resends a run that ended in PreemptionError: one job, and the same weights."""
    process = cli.start("submit", "--force", "-y", "--name", "broken", cwd=folder)
    until(lambda: "broken-1" in azure_account.jobs(), 60, 0.1)
    other = cli.start("wait", "broken")
    cli.watch("step 30/100", "logs", "-f", "broken")
    azure_account.preempt("broken-1", "fail")
    shown, said = process.communicate(timeout=200)
    waited = other.communicate(timeout=60)[1]
    assert (process.returncode, other.returncode) == (0, 0), shown + said + waited
    status = cli("status", "broken", "--json").json
    assert (status["state"], status["attempt"], status["step"]) == ("succeeded", 2, 100)
    assert "preempted; attempt 2 of at most 3 begins" in said + waited
    assert azure_account.jobs()[-2:] == ["broken-1", "broken-2"]
    [again] = wholejobs.events(cli("logs", "broken", "--json", "--raw").stdout, "restart")
    assert again["step"] >= 20
    assert wholejobs.losses(cli, "broken", 1, 2).items() <= whole.losses.items()  # a line may be lost with its machine
    wholejobs.assert_equal(wholejobs.weights(cli, "broken", folder), whole.weights)


@pytest.mark.soak  # a mirror: tests/entrypoints/test_stores_contract.py
def test_without_a_mount_checkpoints_go_to_blob_storage(
    cli: Any, azure_account: Azure, folder: Path, whole: wholejobs.Results
) -> None:
    """Each node has its own disk, which a preemption removes: the job resumes from the copy, bit for bit."""
    mirror = f"checkpoint.mirror=https://{ACCOUNT}.blob.core.windows.net/{CONTAINER}/mirror"
    given = ("--set", mirror, "--set", "azureml.identity=managed")
    assert cli("submit", "--force", "-d", "-y", "--name", "broken", *given, cwd=folder).code == 0
    cli.watch("step 40/100", "logs", "-f", "broken")
    azure_account.preempt("broken-1")
    cli.ok("logs", "-f", "broken", timeout_s=200)
    assert wholejobs.events(cli("logs", "broken", "--json", "--raw").stdout, "restart")[-1]["step"] >= 10
    wholejobs.assert_equal(wholejobs.weights(cli, "broken", folder), whole.weights)
    assert [name for name in azure_account.blobs() if "jobs/broken/checkpoints/" in name] == []


@pytest.mark.soak
def test_failure_of_node_1_is_shown_at_once(cli: Any, azure_account: Azure, folder: Path) -> None:
    """Node 1 alone fails, after a silence: its traceback is shown within 10 s, and is the cause."""
    wholejobs.as_script(
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
    assert 0 < seen_s - failed_s < 10.0
    assert "error       rank 1: ValueError: boom of node one" in said
    assert process.returncode == 1


@pytest.mark.soak  # the same files after the run: the contract's test
def test_files_can_be_fetched_during_the_run(cli: Any, azure_account: Azure, folder: Path) -> None:
    """The files so far can be fetched, even without a storage key."""
    azure_account.settings(datastore_credentials="none")
    wholejobs.as_script(
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

"""Containers that start after their attempt was given up: nothing runs, and the later attempt is untouched."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from wholejobs import SETTINGS, STAND_INS

from doubles.aws.handle import Aws
from doubles.azure.handle import Azure
from doubles.killed import KILLED

pytestmark = pytest.mark.slow

ALONE = "distributed: {allow_alone: true}\n"
SUBMIT = ("submit", "-d", "-y", "--name", "one")
BUCKET = "sagemaker-us-east-1-123456789012"
# What a late container of attempt 1 says; SageMaker starts none without the order.
WORDS = {"sagemaker": "", "azureml": "attempt 2 of this job has replaced attempt 1", "vertex": "was withdrawn"}
# Saves once, and runs until a stop request.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "saved-by-" + os.environ["CLOUDTRAIN_ATTEMPT"]).write_text("x")
print("ran attempt", os.environ["CLOUDTRAIN_ATTEMPT"], flush=True)
while True: time.sleep(0.05)
"""


@dataclass(frozen=True)
class Cloud:
    """A stand-in, with its jobs and the objects of its store."""

    name: str
    double: Any

    def objects(self, part: str = "") -> list[str]:
        """Return the names of the job's objects with the part."""
        if self.name == "sagemaker":
            found = self.double.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", ())
            names = [each["Key"] for each in found]
        else:
            names = self.double.blobs() if self.name == "azureml" else self.double.objects()
        return [name for name in names if "/one/" in name and part in name]

    def claim(self) -> dict[str, int] | None:
        """Return the claim."""
        name = next(iter(self.objects("/.claim")), None)
        if name is None:
            return None
        if self.name == "sagemaker":
            data = self.double.client("s3").get_object(Bucket=BUCKET, Key=name)["Body"].read()
        else:
            data = self.double.blob(name) if self.name == "azureml" else self.double.object(name)
        told: dict[str, int] = json.loads(data)
        return told

    def put_claim(self, newest: int) -> None:
        """Raise the claim, as the launcher of a later attempt does."""
        data = json.dumps({"newest": newest, "started": 0})
        if self.name == "sagemaker":
            self.double.client("s3").put_object(Bucket=BUCKET, Key="cloudtrain/jobs/one/.claim", Body=data.encode())
        elif self.name == "azureml":
            self.double.put_blob("cloudtrain/jobs/one/checkpoints/.claim", data)
        else:
            self.double.put_object("cloudtrain/jobs/one/.claim", data)

    def log(self, attempt: int) -> str:
        """Return the lines of the attempt's containers."""
        name = f"one-{attempt}"
        if self.name == "sagemaker":
            return "\n".join(self.double.lines(name))
        if self.name == "azureml":
            return "".join(self.double.log(name, f"user_logs/std_log_process_{node}.txt") for node in (0, 1))
        return str(self.double.log(name))


@pytest.fixture(params=["sagemaker", "azureml", "vertex"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """Return a cloud whose next job gets no machines."""
    double = request.getfixturevalue(STAND_INS[request.param])
    double.apply(monkeypatch)
    double.capacity("pending", count=1)
    return Cloud(request.param, double)


@pytest.fixture
def folder(cloud: Cloud, project: Callable[..., Path]) -> Path:
    """Return a project on two instances."""
    return project(SETTINGS[cloud.name] + ALONE, script="train.py", text=SCRIPT)


def given_up(cli: Any, folder: Path) -> None:
    """Submit a job that gets no machines, and stop it."""
    cli.ok(*SUBMIT, cwd=folder)
    cli.ok("stop", "one", "-y")
    assert cli("wait", "one").code == 9


def test_late_container_runs_nothing_beside_the_next_attempt(cli: Any, cloud: Cloud, folder: Path) -> None:
    """The machines of attempt 1 come while attempt 2 trains: no rank, no file, no line; attempt 2 goes on and saves."""
    given_up(cli, folder)
    cli.ok("resume", "-d", "-y", "one")
    cli.watch("ran attempt 2", "logs", "-f", "one", count=2)
    assert cloud.claim() == {"newest": 2, "started": 2}
    cloud.double.begin_late("one-1")
    assert cloud.double.wait_late()[0]["status"] in ("Failed", "JOB_STATE_FAILED")
    assert (WORDS[cloud.name] in cloud.log(1), "ran attempt" in cloud.log(1)) == (True, False)
    assert not cloud.objects("saved-by-1")
    assert (cloud.claim(), cli("status", "one", "--json").json["state"]) == ({"newest": 2, "started": 2}, "running")
    cli.ok("stop", "one", "-y")
    assert cli("wait", "one").code == 9
    assert cloud.objects("saved-by-2")
    assert not cloud.objects("saved-by-1")


def test_attempt_without_the_newest_claim_is_superseded(cli: Any, cloud: Cloud, folder: Path) -> None:
    """The containers end before the ranks start, on both nodes; state, cause, words and exit code say so; no retry."""
    given_up(cli, folder)
    cloud.put_claim(3)
    done = cli("resume", "-y", "one")
    status = cli("status", "one", "--json").json
    assert (done.code, status["state"], status["reason"], status["attempt"]) == (1, "failed", "superseded", 2)
    assert status["error"]["kind"] == "superseded"
    words = "attempt 3 of this job has replaced attempt 2, whose machines came too late: nothing was run"
    assert words in status["error"]["message"]
    assert words in cli("status", "one").stdout
    assert (words in cloud.log(2), "ran attempt" in cloud.log(2)) == (True, False)
    assert not cloud.objects("saved-by")
    assert cloud.claim() == {"newest": 3, "started": 0}


def test_claim_is_read_by_the_mount_without_a_right_on_the_store(
    cli: Any, azure: Azure, project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without an identity reads the claim in its mounted checkpoint folder; the log says why."""
    azure.apply(monkeypatch)
    azure.capacity("pending", count=1)
    settings = SETTINGS["azureml"].replace(", identity: managed", "")
    folder, cloud = project(settings + ALONE, script="train.py", text=SCRIPT), Cloud("azureml", azure)
    given_up(cli, folder)
    cloud.put_claim(3)
    assert cli("resume", "-y", "one").code == 1
    assert cli("status", "one", "--json").json["reason"] == "superseded"
    assert "the claim of the job's newest attempt cannot be taken: " in cloud.log(2)
    assert not cloud.objects("saved-by")


def test_launcher_without_an_answer_of_the_store_sends_nothing(
    cli: Any, account: Aws, project: Callable[..., Path]
) -> None:
    """No answer: the next attempt is not sent. A refusal: a note says that only SageMaker's word counts."""
    account.settings(execute=False)
    folder = project(SETTINGS["sagemaker"] + ALONE, script="train.py", text=SCRIPT)
    cli.ok(*SUBMIT, cwd=folder)
    cli.ok("stop", "one", "-y")
    account.fault("PutObject", "drop")
    done = cli("resume", "-d", "-y", "one")
    assert (done.code, "nothing was sent" in done.stderr) == (7, True), done.stderr
    assert cli("status", "one", "--json").json["attempt"] == 1
    account.clear_faults()
    account.fault("PutObject", "error", code="AccessDenied", status=403, count=1)
    assert "warning: if one-1 starts late, nothing refuses it: " in cli.ok("resume", "-d", "-y", "one").stderr
    assert len(account.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]) == 2


STEPS = (
    ("cloudtrain.launcher.jobs.submit:_supersede", "before"),
    ("cloudtrain.backends.job_folder:JobFolder.supersede", "after"),
    ("cloudtrain.launcher.jobs.submit:_supersede", "after"),
    ("cloudtrain.launcher.store.registry:Registry.mark_sent", "before"),
)


@pytest.mark.soak
@pytest.mark.parametrize(("step", "when"), STEPS)
def test_resume_killed_at_a_step_leaves_one_live_attempt(
    cli: Any, cloud: Cloud, folder: Path, step: str, when: str
) -> None:
    """After `kill -9` and another resume, one attempt trains; containers of each earlier attempt run nothing."""
    given_up(cli, folder)
    command = [sys.executable, "-c", KILLED, step, when, "resume", "-d", "-y", "one"]
    dying = subprocess.run(command, cwd=folder, env=cli.environment(), stderr=subprocess.PIPE, text=True, check=False)
    assert dying.returncode == -signal.SIGKILL, dying.stderr
    number = cli("status", "one", "--json").json
    if number["state"] not in ("pending", "running"):
        cli.ok("resume", "-d", "-y", "one")
    newest = cli("status", "one", "--json").json["attempt"]
    cli.watch(f"ran attempt {newest}", "logs", "-f", "one", count=2)
    cloud.double.begin_late("one-1")
    cloud.double.wait_late()
    assert "ran attempt" not in cloud.log(1)
    assert cloud.claim() == {"newest": newest, "started": newest}
    assert cloud.double.most_live() == 1
    cli.ok("stop", "one", "-y")
    assert {name.rpartition("-")[2] for name in cloud.objects("saved-by")} == {str(newest)}

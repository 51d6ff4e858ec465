"""The search for machines across two clouds, on the stand-ins of both: SageMaker has none, Vertex AI trains."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wholejobs import TRAINING

from doubles.aws.handle import ROLE, Aws
from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT, REGION
from doubles.waiting import until

STORE = "cloudtrain-tests"
CONFIG = f"""\
name: j
backend: sagemaker
script: loop.py
resources: {{instance_type: ml.m5.xlarge}}
limits: {{max_duration: 1h}}
budget: {{limit: 20 USD}}
capacity:
  try:
  - {{}}
  - {{backend: vertex, resources.instance_type: n1-standard-4}}
  limits: {{rounds: 1}}
sagemaker: {{role: "{ROLE}", bucket: {STORE}, price_per_hour: 2}}
vertex: {{project: {PROJECT}, location: {REGION}, staging_bucket: {BUCKET}, price_per_hour: 1}}
"""
SCRIPT = """\
import os, sys
from pathlib import Path
Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "saved-by-" + os.environ["CLOUDTRAIN_ATTEMPT"]).write_text("x")
print("ran attempt", os.environ["CLOUDTRAIN_ATTEMPT"], flush=True)
sys.exit(os.environ["CLOUDTRAIN_ATTEMPT"] == os.environ.get("FAILS"))
"""
SUBMIT = ("submit", "-y", "--name", "one")
PASSED = "passed over since the first save, for it cannot read the checkpoints: candidate 1 ("


@pytest.fixture
def clouds(account: Aws, google_project: Google, folder: Path) -> Iterator[tuple[Aws, Google]]:
    """Return both clouds; the project's script saves a file and ends."""
    (folder / "loop.py").write_text(SCRIPT)
    return account, google_project


def names(clouds: tuple[Aws, Google]) -> tuple[list[str], list[str]]:
    """Return the names of the jobs of each cloud."""
    aws, google = clouds
    found = aws.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    return [each["TrainingJobName"] for each in found], [each["display_name"] for each in google.jobs()]


def objects(aws: Aws) -> dict[str, str]:
    """Return the job's objects in the store of the first cloud, by the end of their names."""
    client = aws.client("s3")
    found = client.list_objects_v2(Bucket=STORE, Prefix="cloudtrain/jobs/one/").get("Contents", ())
    keys = [each["Key"] for each in found]
    return {
        key.rpartition("/")[2]: client.get_object(Bucket=STORE, Key=key)["Body"].read().decode(errors="replace")
        for key in keys
    }


def status(cli: Any) -> dict[str, Any]:
    """Return the job."""
    found: dict[str, Any] = cli.ok("status", "one", "--json").json
    return found


def test_refused_job_trains_on_the_other_cloud(cli: Any, folder: Path, clouds: tuple[Aws, Google]) -> None:
    """A refusal keeps the attempt's number; state, log, cost and files are the other cloud's."""
    clouds[0].capacity("no_quota")
    assert cli(*SUBMIT, cwd=folder).code == 0
    assert names(clouds) == ([], ["one-1"])
    found = status(cli)
    assert (found["backend"], found["state"], found["attempt"]) == ("vertex", "succeeded", 1)
    assert [(each["backend"], each["state"]) for each in found["tries"]] == [
        ("sagemaker", "refused"),
        ("vertex", "succeeded"),
    ]
    assert "ran attempt 1" in cli.ok("logs", "one").stdout
    assert 0 < cli.ok("cost", "one", "--json").json["spend_usd"] < 0.1
    files = cli.ok("artifacts", "one", "--json", cwd=folder).json["files"]
    assert [Path(each).name for each in files] == ["saved-by-1"]
    assert cli.ok("resume", "one", "--update-config", "--dry-run", "--json", cwd=folder).json["backend"] == "vertex"


def test_failed_candidate_stays_with_its_own_cloud(cli: Any, folder: Path, clouds: tuple[Aws, Google]) -> None:
    """The earlier attempt's late start is refused by its own store, and `rm` cleans both stores."""
    aws, google = clouds
    aws.capacity("failed")
    assert cli(*SUBMIT, cwd=folder).code == 0
    assert names(clouds) == (["one-1"], ["one-2"])
    assert json.loads(objects(aws)[".claim"])["newest"] == 2
    aws.begin_late("one-1")
    assert aws.wait_late()[0]["status"] == "Failed"
    assert not [name for name in objects(aws) if name.startswith("saved-by")]
    assert "ran attempt 2" not in cli.ok("logs", "one", "--attempt", "1").stdout
    assert "ran attempt 2" in cli.ok("logs", "one").stdout
    removed = cli.ok("rm", "--everywhere", "-y", "one")
    assert f"s3://{STORE}/cloudtrain/jobs/one" in removed.stdout + removed.stderr
    assert not objects(aws)
    assert not [name for name in google.objects() if "/one/" in name]


def test_resume_refuses_late_starts_before_an_attempt_that_was_never_sent(
    cli: Any, folder: Path, clouds: tuple[Aws, Google]
) -> None:
    """Attempt 2 ends the search with the other cloud's refusal; attempt 3 tells the store of attempt 1 as well."""
    aws, google = clouds
    aws.capacity("failed")
    google.settings(denied=("jobs.create",), execute=False)
    done = cli(*SUBMIT, cwd=folder)
    found = status(cli)
    assert (done.code, found["attempt"], found["phase"], names(clouds)) == (4, 2, "never_sent", (["one-1"], []))
    google.settings(denied=())
    cli.ok("resume", "-d", "-y", "one")
    assert names(clouds) == (["one-1"], ["one-3"])
    assert json.loads(objects(aws)[".claim"])["newest"] == 3


@pytest.mark.parametrize("lost", ["before", "after"])
def test_lost_answer_of_the_first_cloud_sends_nothing_to_the_other(
    cli: Any, folder: Path, clouds: tuple[Aws, Google], lost: str
) -> None:
    """The other cloud has a job only after the first has told that its job exists and has ended."""
    clouds[0].capacity("failed", lost=lost, count=9)  # botocore asks again
    assert cli(*SUBMIT, "-d", cwd=folder).code == (7 if lost == "before" else 0)
    assert names(clouds)[1] == []
    cli.ok("advance")
    assert names(clouds) == (([], []) if lost == "before" else (["one-1"], ["one-2"]))
    assert status(cli)["phase"] == ("never_sent" if lost == "before" else "sent")


@pytest.mark.parametrize("lost", ["before", "after"])
def test_lost_answer_of_the_second_cloud_is_asked_there(
    cli: Any, folder: Path, clouds: tuple[Aws, Google], lost: str
) -> None:
    """The next command looks for the moved job where it was sent: it runs once."""
    clouds[0].capacity("no_quota")
    clouds[1].capacity("machines", lost=lost, count=1)
    cli(*SUBMIT, "-d", cwd=folder)
    until(lambda: (cli("advance"), status(cli)["phase"])[1] == "sent")
    assert names(clouds) == ([], ["one-1"])
    assert cli("wait", "one").code == 0
    assert status(cli)["backend"] == "vertex"


def test_saved_job_stays_where_its_checkpoints_are(cli: Any, folder: Path, clouds: tuple[Aws, Google]) -> None:
    """After a save the other cloud is passed over, though the first refuses; `status` says so."""
    assert cli(*SUBMIT, "--set", "env.FAILS='1'", cwd=folder).code == 1
    assert status(cli)["resumable"]
    clouds[0].capacity("no_quota")
    done = cli("resume", "-y", "one")
    assert (done.code, names(clouds)) == (5, (["one-1"], [])), done.stderr
    assert PASSED in cli.ok("status", "one").stdout


def test_plan_names_the_stores_of_checkpoints(cli: Any, folder: Path, clouds: tuple[Aws, Google]) -> None:
    """The plan says which candidates are passed over after the first save, and who copies."""
    told = cli.ok("plan", cwd=folder)
    words = " ".join((told.stdout + told.stderr).split())
    assert f"only within a store of checkpoints: 0 (sagemaker {STORE}); 1 (vertex {BUCKET}); cloudtrain copies" in words


def test_saved_job_moves_to_a_cloud_that_reads_its_mirror(cli: Any, folder: Path, clouds: tuple[Aws, Google]) -> None:
    """With one mirror for all candidates a job moves after its save; the price of the transfer is said to be open."""
    aws, google = clouds
    training = TRAINING.replace("every_steps: 10", f"every_steps: 10, mirror: 's3://{STORE}/m'")
    text = CONFIG.replace("script: loop.py", f"task: task.py\n{training}")
    (folder / "cloudtrain.yaml").write_text(text)
    aws.settings(execute=False)
    google.settings(execute=False)
    done = cli.ok(*SUBMIT, "-d", cwd=folder)
    words = " ".join(done.stderr.split())
    assert (
        f"candidates 0, 1 read checkpoints in s3://{STORE}/m: the price of the transfer (egress) is not known" in words
    )
    place = aws.describe("one-1")["CheckpointConfig"]["S3Uri"].removeprefix(f"s3://{STORE}/").rstrip("/")
    aws.client("s3").put_object(Bucket=STORE, Key=f"{place}/step-5-aaaa/manifest.json", Body=b"{}")
    aws.end("one-1", "Failed")
    assert cli("wait", "one").code == 1
    assert status(cli)["resumable"]
    aws.capacity("no_quota")
    done = cli("resume", "-d", "-y", "one")
    assert names(clouds) == (["one-1"], ["one-2"]), done.stderr
    assert PASSED not in cli.ok("status", "one").stdout

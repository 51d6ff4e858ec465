"""The search for machines across two clouds, on the stand-ins of both: SageMaker has none, Vertex AI trains."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.aws.handle import ROLE, Aws
from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT, REGION

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
    assert [Path(each).name for each in cli.ok("artifacts", "one", "--json", cwd=folder).json["files"]] == [
        "saved-by-1"
    ]


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


@pytest.mark.parametrize("lost", ["before", "after"])
def test_lost_answer_moves_only_after_the_search(cli: Any, folder: Path, clouds: tuple[Aws, Google], lost: str) -> None:
    """Nothing is sent to the other cloud before the first has said whether the job exists, and that the job ended."""
    aws, _ = clouds
    aws.capacity("failed", lost=lost, count=9)  # botocore asks again
    done = cli(*SUBMIT, "-d", cwd=folder)
    print(done.stderr, names(clouds))
    cli("advance")
    print(names(clouds), status(cli)["tries"])
    cli("advance")
    print(names(clouds), status(cli))
    assert 0


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

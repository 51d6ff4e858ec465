"""What a cloud's place has: refusals, jobs without machines, lost answers, and containers that start late."""

from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from doubles import sandbox
from doubles.aws.handle import Aws
from doubles.azure.handle import Azure
from doubles.conftest import request_of
from doubles.google.client import job_body
from doubles.google.handle import Google
from doubles.google.names import REGION

FLEX = {"strategy": "FLEX_START", "maxWaitDuration": "1s"}
SPOT = {
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60},
}
PENDING_LIMIT = {"StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxPendingTimeInSeconds": 1800}}


def create(aws: Aws, name: str, machine: str = "ml.m5.xlarge", region: str = "us-east-1", **more: Any) -> None:
    """Create a training job."""
    asked = request_of(name, **more)
    asked["ResourceConfig"]["InstanceType"] = machine
    asked["AlgorithmSpecification"]["TrainingImage"] = f"123456789012.dkr.ecr.{region}.amazonaws.com/pytorch:2.13-cpu"
    aws.client("sagemaker", region=region).create_training_job(**asked)


def test_row_holds_for_its_region_machine_and_price(aws: Aws) -> None:
    """The first row that fits a create decides, as often as its count says; another place has machines."""
    aws.settings(execute=False)
    bucket = aws.bucket()
    for name in "abcd":
        aws.client("s3").put_object(Bucket=bucket, Key=f"{name}/code/run.sh", Body=b"true")
    aws.capacity("no_quota", region="us-east-1", machine="ml.m5.*", spot=False, count=1)
    with pytest.raises(ClientError, match=r"ResourceLimitExceeded.*ml\.m5\.xlarge for training job usage' is 0"):
        create(aws, "a")
    create(aws, "b", region="us-west-2")
    create(aws, "c", machine="ml.c5.xlarge")
    create(aws, "d", **SPOT)
    create(aws, "a")
    assert aws.most_live() == 4
    with pytest.raises(ValueError, match="`has` is one of"):
        aws.capacity("nonsense")


def test_sagemaker_job_gets_no_machines(aws: Aws) -> None:
    """The job fails without a start and without a bill, waits, or loses its spot machines before the start."""
    aws.settings(execute=False)
    for has, name, more in (("failed", "f", {}), ("pending", "p", PENDING_LIMIT), ("taken", "t", SPOT)):
        aws.clear_capacity()
        aws.capacity(has)
        create(aws, name, **more)
    told = aws.wait("f")
    assert told["FailureReason"].startswith("CapacityError: Unable to provision requested ML compute capacity")
    assert not {"TrainingStartTime", "BillableTimeInSeconds"} & set(told)
    aws.wait("p", "Pending")
    told = aws.wait("t", "Starting")
    statuses = [one["Status"] for one in told["SecondaryStatusTransitions"]]
    assert statuses == ["Starting", "Interrupted", "Starting"]
    aws.client("sagemaker").stop_training_job(TrainingJobName="p")
    assert aws.wait("p")["TrainingJobStatus"] == "Stopped"
    aws.clear_capacity()
    aws.capacity("no_stock")
    with pytest.raises(ClientError, match="CapacityError"):
        create(aws, "n")


@pytest.mark.parametrize("lost", ["before", "after"])
def test_answer_of_a_create_is_lost(aws: Aws, lost: str) -> None:
    """A connection that breaks off before the create leaves no job, and after the create a job."""
    aws.settings(execute=False)
    aws.capacity("pending", lost=lost, count=1)
    with pytest.raises(BotoCoreError):
        create(aws, "a")
    jobs = aws.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    assert [one["TrainingJobName"] for one in jobs] == (["a"] if lost == "after" else [])


def test_azure_job_gets_no_machines(azure: Azure) -> None:
    """Azure refuses for want of quota; the queue has no limit; a cluster's allocation fails; spot is taken."""
    azure.settings(execute=False)
    outcomes = {}
    for has in ("no_quota", "no_stock", "failed", "pending", "taken"):
        azure.clear_capacity()
        azure.capacity(has)
        if has.startswith("no_"):
            with pytest.raises(AssertionError, match="QuotaExceeded" if has == "no_quota" else "AllocationFailed"):
                azure.submit(has.replace("_", "-"), "true")
            continue
        azure.submit(has, "true")
        told = azure.wait(has, "Queued" if has == "pending" else "Failed")
        outcomes[has] = (told["error"] or {}).get("code")
        assert told["started"] is None
    assert outcomes == {"failed": "AllocationFailed", "pending": None, "taken": "PreemptionError"}
    assert len(azure.jobs()) == 3


def settled(google: Google, job: str) -> dict[str, Any]:
    """Wait until the job is queued or has ended; return the job."""
    wanted = ("JOB_STATE_QUEUED", *google.ENDS)
    return google.until(lambda: google.job(job), lambda told: told["state"] in wanted, str, 30)


def test_google_job_gets_no_machines(google: Google) -> None:
    """Vertex AI refuses with 429, ends with code 8, queues for quota, and ends a flex start after its wait."""
    google.settings(execute=False)
    outcomes: dict[str, Any] = {}
    for has in ("no_quota", "no_stock", "failed", "pending", "taken"):
        google.clear_capacity()
        google.capacity(has, region=REGION)
        if has.startswith("no_"):
            outcomes[has] = google.call("POST", "/customJobs", job_body(has, "true")).status
            continue
        job = google.submit(has, "true")
        told = settled(google, job)
        outcomes[has] = (told["error"] or {}).get("code")
        assert told["started"] is None
    assert outcomes == {"no_quota": 429, "no_stock": 429, "failed": 8, "pending": None, "taken": 14}
    google.clear_capacity()
    google.capacity("pending")
    flex = google.submit("flex", "true", scheduling=FLEX)
    assert settled(google, flex)["error"]["code"] == 8


@pytest.mark.skipif(sandbox.mode() == "none", reason="this machine lets us make no namespaces")
def test_container_starts_after_the_told_end(
    aws: Aws, azure: Azure, google: Google, submit: Callable[..., str]
) -> None:
    """After a cancel and the told end, the containers run all the same; the told end does not change."""
    for double in (aws, azure, google):
        double.capacity("late")
    job = submit("echo ran late")
    aws.wait(job, "Pending")
    aws.client("sagemaker").stop_training_job(TrainingJobName=job)
    assert aws.wait(job)["TrainingJobStatus"] == "Stopped"
    assert aws.wait_late()[0]["status"] == "Completed"
    assert (aws.lines(job), aws.describe(job)["TrainingJobStatus"]) == (["ran late"], "Stopped")
    azure.submit("job", "echo ran late")
    azure.wait("job", "Queued")
    assert azure.call("POST", "/jobs/job/cancel").status == 202
    assert azure.wait("job")["status"] == "Canceled"
    assert azure.wait_late()[0]["status"] == "Completed"
    assert (azure.log("job"), azure.job("job")["status"]) == ("ran late\n", "Canceled")
    number = google.submit("job", "echo", "ran late")
    google.wait(number, "QUEUED")
    assert google.call("POST", f"/customJobs/{number}:cancel", {}).status == 200
    google.wait(number, "CANCELLED")
    assert google.wait_late()[0]["status"] == "JOB_STATE_SUCCEEDED"
    assert (google.log(number), google.job(number)["state"]) == ("ran late\n", "JOB_STATE_CANCELLED")

"""The refusals of AWS's stand-in, and its descriptions of jobs."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from doubles.aws import validate
from doubles.aws.handle import ROLE, Aws
from doubles.aws.wire import AwsError
from doubles.conftest import channel, request_of

Submit = Callable[..., str]
Change = Callable[[dict[str, Any]], Any]

CAPTURED = Path(__file__).resolve().parents[1] / "backends/captured"

BROKEN: dict[str, tuple[Change, str]] = {
    "name": (
        lambda it: it.update(TrainingJobName="a_b"),
        "at 'trainingJobName' failed to satisfy constraint: Member m",
    ),
    "long name": (lambda it: it.update(TrainingJobName="a" * 64), "pattern: [a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"),
    "type": (lambda it: it["ResourceConfig"].update(InstanceType="ml.nope"), "satisfy enum value set: [ml.m4.xlarge"),
    "count": (lambda it: it["ResourceConfig"].update(InstanceCount=-1), "value greater than or equal to 0"),
    "text": (lambda it: it["ResourceConfig"].update(InstanceCount="2"), "STRING_VALUE can not be converted to Integer"),
    "missing": (lambda it: it.pop("RoleArn"), "Value null at 'roleArn' failed to satisfy constraint"),
    "role": (lambda it: it.update(RoleArn="arn:aws:iam::1:role/x"), "'roleArn' failed"),
    "unknown": (lambda it: it.update(Priority=1), "Unknown member 'Priority'"),
    "inner": (lambda it: it["ResourceConfig"].update(Spot=True), "Unknown member 'Spot' at 'resourceConfig'"),
    "environment": (lambda it: it.update(Environment={"A": "x" * 513}), "length less than or equal to 512"),
    "newline": (lambda it: it["AlgorithmSpecification"].update(ContainerArguments=["a\nb"]), "expression pattern: .*"),
    "tag": (lambda it: it.update(Tags=[{"Key": "a#", "Value": ""}]), "'tags.1.member.key' failed"),
    "no wait": (lambda it: it.update(EnableManagedSpotTraining=True), "MaxWaitTimeInSeconds is required"),
    "short wait": (
        lambda it: it.update(
            EnableManagedSpotTraining=True, StoppingCondition={"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 59}
        ),
        "MaxWaitTimeInSeconds must be greater",
    ),
    "wait alone": (lambda it: it["StoppingCondition"].update(MaxWaitTimeInSeconds=90), "only supported with"),
    "29 days": (lambda it: it["StoppingCondition"].update(MaxRuntimeInSeconds=29 * 86_400), "less than or equal to"),
    "groups": (
        lambda it: it["ResourceConfig"].update(
            InstanceGroups=[{"InstanceGroupName": "g", "InstanceType": "ml.m5.xlarge", "InstanceCount": 1}]
        ),
        "InstanceGroups cannot be specified with",
    ),
    "no disk": (lambda it: it["ResourceConfig"].pop("VolumeSizeInGB"), "VolumeSizeInGB is required"),
    "preferences": (
        lambda it: it["ResourceConfig"].update(InstancePreferences=[{"InstanceType": "ml.m5.xlarge"}]),
        "InstancePreferences cannot be specified with InstanceType",
    ),
    "count of some": (
        lambda it: _prefer(it, {"InstanceType": "ml.m5.xlarge", "InstanceCount": 1}, {"InstanceType": "ml.c5.xlarge"}),
        "InstanceCount must be set once",
    ),
    "preferred twice": (
        lambda it: _prefer(it, *[{"InstanceType": "ml.m5.xlarge"}] * 2, InstanceCount=1),
        "InstancePreferences must have unique instance types",
    ),
    "six preferences": (
        lambda it: _prefer(it, *({"InstanceType": f"ml.m5.{size}xlarge"} for size in ("", 2, 4, 8, 12, 16))),
        "length less than or equal to 5",
    ),
    "no type": (lambda it: it["ResourceConfig"].pop("InstanceType"), "InstanceType is required"),
    "channels": (lambda it: it["InputDataConfig"].append(channel("code", "s3://b/x")), "must have unique names"),
    "two tags": (lambda it: it.update(Tags=[{"Key": "a", "Value": ""}] * 2), "Duplicate tag keys"),
    "aws tag": (lambda it: it.update(Tags=[{"Key": "aws:x", "Value": ""}]), "reserved for system use"),
    "no image": (lambda it: it["AlgorithmSpecification"].pop("TrainingImage"), "either TrainingImage or AlgorithmName"),
    "Docker Hub": (lambda it: _set_image(it, "pytorch/pytorch:2.8.0"), "Invalid training image"),
    "no image name": (
        lambda it: _set_image(it, "123456789012.dkr.ecr.us-east-1.amazonaws.com/A"),
        "Invalid training im",
    ),
    "private": (
        lambda it: _set_image(it, "nvcr.io/nvidia/pytorch:25.05-py3"),
        "TrainingRepositoryAccessMode set to VPC",
    ),
    "region": (
        lambda it: _set_image(it, "123456789012.dkr.ecr.eu-west-1.amazonaws.com/x:1"),
        "Invalid DNS suffix 'amazonaws.com' for region 'eu-west-1' in training image",
    ),
}


def _prefer(request: dict[str, Any], *preferences: dict[str, Any], **more: Any) -> None:
    request["ResourceConfig"] = {"VolumeSizeInGB": 30, "InstancePreferences": list(preferences), **more}


def _set_image(request: dict[str, Any], image: str) -> None:
    request["AlgorithmSpecification"]["TrainingImage"] = image


def refusal(request: dict[str, Any], region: str | None = None) -> AwsError | None:
    """Return the stand-in's error for the request, or None."""
    try:
        validate.check("sagemaker", "CreateTrainingJob", request)
        validate.check_rules(request, region)
    except AwsError as error:
        return error
    return None


@pytest.mark.parametrize("case", BROKEN)
def test_broken_request_is_refused(case: str) -> None:
    """The limits of the vendor's model and the rules between fields hold."""
    change, words = BROKEN[case]
    request = json.loads(json.dumps(request_of("job")))
    change(request)
    error = refusal(request, "us-east-1")
    assert error.code == ("SerializationException" if case == "text" else "ValidationException")
    assert words in error.message


@pytest.mark.parametrize("path", sorted(CAPTURED.glob("sagemaker_*.json")), ids=lambda path: path.stem)
def test_recorded_requests_of_the_vendor_are_accepted(path: Path) -> None:
    """Requests recorded from SageMaker's own SDKs pass the checks."""
    request = json.loads(path.read_text())
    if path.stem == "sagemaker_v2_everything":  # the SDK sends the key; machines with local disks do not accept a key
        assert "VolumeKmsKeyId is not supported for ml.p4d.24xlarge" in str(refusal(request))
        del request["ResourceConfig"]["VolumeKmsKeyId"]
    assert refusal(request) is None


def test_tags_accept_letters_of_all_languages() -> None:
    """The model's Java character classes match letters of all languages."""
    assert refusal(request_of("job", Tags=[{"Key": "Größe/名前", "Value": "a b+c"}])) is None


def test_refused_job_does_not_exist(aws: Aws) -> None:
    """boto3 raises AWS's code, and the refused job does not exist."""
    with pytest.raises(ClientError, match=r"ValidationException.*trainingJobName"):
        aws.client("sagemaker").create_training_job(**request_of("a_b"))
    assert aws.client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []
    with pytest.raises(ClientError, match=r"ValidationException.*Requested resource not found\."):
        aws.describe("a-b")
    assert aws.journal("DescribeTrainingJob")[0]["outcome"] == "ValidationException"


def test_role_must_exist_and_trust_sagemaker(aws: Aws, submit: Submit) -> None:
    """The role is checked as soon as the account has any role."""
    aws.role("other", principal="ec2.amazonaws.com")
    with pytest.raises(ClientError, match="Could not assume role arn:aws:iam::123456789012:role/cloudtrain"):
        submit("true")
    with pytest.raises(ClientError, match="Could not assume role"):
        submit("true", RoleArn="arn:aws:iam::123456789012:role/other")
    assert aws.role() == ROLE
    submit("true")


def test_stop_of_ended_job_is_refused(aws: Aws, submit: Submit) -> None:
    """Stopping an ended job or an unknown job is an error."""
    aws.wait(submit("true"))
    client = aws.client("sagemaker")
    with pytest.raises(ClientError, match=r"ValidationException.*in status Completed"):
        client.stop_training_job(TrainingJobName="job")
    with pytest.raises(ClientError, match="Requested resource not found"):
        client.stop_training_job(TrainingJobName="nothing")


def test_two_hundred_concurrent_creations_make_each_job_once(aws: Aws) -> None:
    """Every name gets exactly one job; jobs are listed page by page, and found by status."""
    aws.settings(execute=False)
    aws.bucket()
    aws.client("s3").put_object(Bucket="cloudtrain-tests", Key="code/run.sh", Body=b"true")
    client = aws.client("sagemaker")
    channels = [channel("code", "s3://cloudtrain-tests/code/")]

    def create(number: int) -> str:
        try:
            client.create_training_job(**request_of(f"job-{number // 2}", InputDataConfig=channels))
            return "made"
        except ClientError as error:
            return str(error.response["Error"]["Code"])

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(create, range(200)))
    assert (outcomes.count("made"), outcomes.count("ResourceInUse")) == (100, 100)
    pages = client.get_paginator("list_training_jobs").paginate(StatusEquals="InProgress")
    assert len({job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]}) == 100
    with pytest.raises(ClientError, match="the stand-in's list knows no"):
        client.list_training_jobs(NameContains="JOB-9")


def test_description_repeats_the_request(aws: Aws, submit: Submit) -> None:
    """The description has every field of the request but its tags, and times and seconds after the job's end."""
    aws.settings(execute=False)
    more = {"Environment": {"A": "b"}, "RetryStrategy": {"MaximumRetryAttempts": 2}, "HyperParameters": {"lr": "1"}}
    submit("true", Tags=[{"Key": "cloudtrain:job", "Value": "x"}], **more)
    asked, told = request_of("job", **more), aws.wait("job", "Training")
    assert {key: told[key] for key in asked} == asked
    assert "Tags" not in told
    assert not {"BillableTimeInSeconds", "TrainingTimeInSeconds", "TrainingEndTime", "FailureReason"} & set(told)
    aws.end("job", "Failed", failure_reason="AlgorithmError: , exit code: 1")
    told = aws.wait("job")
    assert told["FailureReason"] == "AlgorithmError: , exit code: 1"
    assert {"BillableTimeInSeconds", "TrainingTimeInSeconds", "TrainingStartTime", "TrainingEndTime"} <= set(told)

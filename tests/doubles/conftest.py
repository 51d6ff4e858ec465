"""Fixtures and requests for the tests of the stand-ins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doubles.aws.handle import ROLE, Aws

Request = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests of the stand-ins to `make soak`, and to CI where a stand-in changed."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.soak)


def request_of(name: str, **more: Any) -> Request:
    """Return a request for CreateTrainingJob: one instance runs run.sh of the channel `code`."""
    return {
        "TrainingJobName": name,
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cpu",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["/bin/sh", "/opt/ml/input/data/code/run.sh"],
        },
        "InputDataConfig": [channel("code", f"s3://cloudtrain-tests/{name}/code/")],
        "OutputDataConfig": {"S3OutputPath": "s3://cloudtrain-tests/out"},
        "ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        **more,
    }


def channel(name: str, uri: str, **more: str) -> Request:
    """Return an input channel."""
    return {"ChannelName": name, "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri, **more}}}


@pytest.fixture
def submit(aws: Aws) -> Callable[..., str]:
    """Return a function that uploads a shell script, creates a job for the script, and returns the job's name."""
    bucket = aws.bucket()

    def create(script: str, name: str = "job", instances: int = 1, **more: Any) -> str:
        aws.client("s3").put_object(Bucket=bucket, Key=f"{name}/code/run.sh", Body=script.encode())
        request = request_of(name, **more)
        request["ResourceConfig"]["InstanceCount"] = instances
        aws.client("sagemaker").create_training_job(**request)
        return name

    return create


@pytest.fixture
def stored(aws: Aws) -> Callable[[str], dict[str, bytes]]:
    """Return a function that returns the objects below a prefix of the tests' bucket."""
    s3 = aws.client("s3")

    def read(prefix: str) -> dict[str, bytes]:
        found = s3.list_objects_v2(Bucket="cloudtrain-tests", Prefix=prefix).get("Contents", [])
        return {item["Key"]: s3.get_object(Bucket="cloudtrain-tests", Key=item["Key"])["Body"].read() for item in found}

    return read

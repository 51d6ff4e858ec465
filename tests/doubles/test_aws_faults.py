"""AWS's stand-in injects faults on request."""

from collections.abc import Callable

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, HTTPClientError

from doubles.aws.handle import Aws

Submit = Callable[..., str]
BROKEN_CONNECTION = (HTTPClientError, EndpointConnectionError)


def test_s3_call_with_lost_answer_is_executed(aws: Aws) -> None:
    """The fault also holds for moto's services."""
    bucket = aws.bucket()
    aws.fault("PutObject", "lost", count=1)
    with pytest.raises(BROKEN_CONNECTION):
        aws.client("s3").put_object(Bucket=bucket, Key="k", Body=b"v")
    assert aws.client("s3").get_object(Bucket=bucket, Key="k")["Body"].read() == b"v"


def test_expired_credentials_are_refused_until_replaced(aws: Aws) -> None:
    """All calls with the old credentials fail, and calls with new credentials succeed."""
    aws.fault("*", "expired")
    for _ in range(2):
        with pytest.raises(ClientError, match="ExpiredTokenException"):
            aws.client("sagemaker").list_training_jobs()
    with pytest.raises(ClientError, match=r"ExpiredToken\b"):
        aws.client("sts").get_caller_identity()
    aws.client("sagemaker", access_key="AKIAUSER00000000000B").list_training_jobs()


def test_reset_removes_all_state(aws: Aws, submit: Submit) -> None:
    """Reset removes jobs, buckets, roles, settings, faults and recorded calls."""
    aws.role()
    aws.settings(log_lag_s=9)
    aws.wait(submit("while :; do sleep 1; done"), "Training")
    aws.fault("*", "throttle")
    aws.reset()
    assert aws.journal() == []
    assert aws.control("settings", method="GET")["log_lag_s"] == 0
    assert aws.client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []
    assert aws.client("s3").list_buckets()["Buckets"] == []
    assert aws.client("iam").list_roles()["Roles"] == []

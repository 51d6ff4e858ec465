"""The stand-in from a test's side: start it, call it with boto3, control it."""

import functools
import json
import os
from dataclasses import dataclass
from typing import Any

from doubles.kit import handle

REGION = "us-east-1"
ROLE = "arn:aws:iam::123456789012:role/cloudtrain"
ENDS = ("Completed", "Failed", "Stopped")


@dataclass(frozen=True)
class Aws(handle.Handle):
    """A running stand-in."""

    NAME = "aws"
    ENDS = ENDS

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables by which boto3 and `aws` find the stand-in, without the machine's settings."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIAUSER00000000000A",
            "AWS_SECRET_ACCESS_KEY": "user-secret",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_PAGER": "",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def client(self, service: str, access_key: str = "AKIAUSER00000000000A", region: str = REGION) -> Any:
        """Return boto3's client without retries; equal arguments give the same client."""
        return _client(self.url, service, access_key, region)

    def quota(self, name: str, value: float) -> None:
        """Set a quota by its name, as in `ml.m5.xlarge for training job usage`."""
        self.control("quotas", {name: value})

    def interrupt(self, job: str) -> None:
        """Take the job's spot machines away."""
        self.control(f"jobs/{job}/interrupt", {})

    def end(self, job: str, status: str = "Completed", **details: Any) -> None:
        """End the job with a status; details: failure_reason, training_s, billable_s."""
        self.control(f"jobs/{job}/end", {"status": status, **details})

    def write_logs(self, group: str, stream: str, **details: Any) -> None:
        """Append many lines at once: messages, or count and text; timestamp in milliseconds, region."""
        self.control("logs", {"group": group, "stream": stream, **details})

    def bucket(self, name: str = "cloudtrain-tests") -> str:
        """Make a bucket; return its name."""
        self.client("s3").create_bucket(Bucket=name)
        return name

    def role(self, name: str = "cloudtrain", principal: str = "sagemaker.amazonaws.com") -> str:
        """Make a role that the service may assume; return the role's ARN. From then on a job's role must exist."""
        statement = {"Effect": "Allow", "Principal": {"Service": principal}, "Action": "sts:AssumeRole"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        return self.client("iam").create_role(RoleName=name, AssumeRolePolicyDocument=policy)["Role"]["Arn"]

    def describe(self, job: str) -> dict[str, Any]:
        """Return DescribeTrainingJob's answer."""
        return self.client("sagemaker").describe_training_job(TrainingJobName=job)

    def wait(self, job: str, *statuses: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait for one of the statuses, primary or secondary (default: any end); return the description."""
        wanted = statuses or ENDS
        return self.until(
            lambda: self.describe(job),
            lambda told: told["TrainingJobStatus"] in wanted or told["SecondaryStatus"] in wanted,
            lambda told: f"{job} is {told['SecondaryStatus']}, not one of {wanted}",
            timeout_s,
        )

    def lines(self, job: str, host: str = "algo-") -> list[str]:
        """Return the job's lines until now, stream after stream."""
        client, group = self.client("logs"), "/aws/sagemaker/TrainingJobs"
        pages = client.get_paginator("describe_log_streams").paginate(
            logGroupName=group, logStreamNamePrefix=f"{job}/{host}"
        )
        found: list[str] = []
        for stream in (stream["logStreamName"] for page in pages for stream in page["logStreams"]):
            token: dict[str, str] = {}
            while True:
                page = client.get_log_events(logGroupName=group, logStreamName=stream, startFromHead=True, **token)
                found += [event["message"] for event in page["events"]]
                if token.get("nextToken") == page["nextForwardToken"]:
                    break
                token = {"nextToken": page["nextForwardToken"]}
        return found


@functools.lru_cache(maxsize=64)
def _client(url: str, service: str, access_key: str, region: str) -> Any:
    import boto3
    from botocore.config import Config

    session = boto3.session.Session(access_key, "user-secret", region_name=region)
    config = Config(retries={"total_max_attempts": 1}, proxies={}, connect_timeout=5, read_timeout=30)
    return session.client(service, endpoint_url=url, config=config)

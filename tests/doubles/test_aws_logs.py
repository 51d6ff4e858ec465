"""CloudWatch Logs on AWS's stand-in: tokens, pages, lag, and many events quickly."""

import time
from typing import Any

import pytest
from botocore.exceptions import ClientError

from doubles.aws.handle import Aws

GROUP = "/aws/sagemaker/TrainingJobs"


def get(aws: Aws, stream: str = "s", **more: Any) -> dict[str, Any]:
    """Return a page of the stream from its head."""
    page: dict[str, Any] = aws.client("logs").get_log_events(
        logGroupName=GROUP, logStreamName=stream, **{"startFromHead": True, **more}
    )
    return page


def texts(page: dict[str, Any]) -> list[str]:
    """Return a page's messages."""
    return [event["message"] for event in page["events"]]


def test_group_and_stream_are_unknown_before_the_first_line(aws: Aws) -> None:
    """Both the group and the stream are unknown before their first line."""
    with pytest.raises(ClientError, match=r"ResourceNotFoundException.*log group does not exist"):
        get(aws)
    with pytest.raises(ClientError, match="ResourceNotFoundException"):
        aws.client("logs").describe_log_streams(logGroupName=GROUP)
    aws.write_logs(GROUP, "other", count=1)
    with pytest.raises(ClientError, match=r"ResourceNotFoundException.*log stream does not exist"):
        get(aws)


def test_empty_page_is_not_the_end(aws: Aws) -> None:
    """An empty page has a new token for the same position."""
    aws.write_logs(GROUP, "s", messages=["a", "b"])
    aws.fault("GetLogEvents", "empty", every=2)
    token: dict[str, str] = {}
    seen, pages = [], 0
    while True:
        page, pages = get(aws, limit=1, **token), pages + 1
        seen += texts(page)
        if page["nextForwardToken"] == token.get("nextToken"):
            break
        token = {"nextToken": page["nextForwardToken"]}
    assert seen == ["a", "b"]
    assert pages >= 5


def test_lagging_events_appear_later_in_their_order(aws: Aws) -> None:
    """A token from before the events appear stays valid afterwards."""
    aws.write_logs(GROUP, "s", messages=["a"])
    aws.settings(log_lag_s=0.5)
    aws.write_logs(GROUP, "s", messages=["b"])
    aws.settings(log_lag_s=0)
    aws.write_logs(GROUP, "s", messages=["c"])
    page = get(aws)
    assert texts(page) == ["a"]
    time.sleep(0.6)
    assert texts(get(aws, nextToken=page["nextForwardToken"])) == ["b", "c"]


def test_page_holds_a_megabyte(aws: Aws) -> None:
    """A page has as many events as fit into a megabyte by CloudWatch's count."""
    aws.write_logs(GROUP, "s", count=20, text="x" * 100_000)
    assert len(get(aws)["events"]) == 10


def test_streams_are_described_in_pages_of_fifty(aws: Aws) -> None:
    """Streams are listed by name; an unknown order is refused."""
    for number in range(60):
        aws.write_logs(GROUP, f"job-{number:02}", count=1)
    client = aws.client("logs")
    pages = list(client.get_paginator("describe_log_streams").paginate(logGroupName=GROUP, logStreamNamePrefix="job-"))
    assert [len(page["logStreams"]) for page in pages] == [50, 10]
    with pytest.raises(ClientError, match="InvalidParameterException"):
        client.describe_log_streams(logGroupName=GROUP, orderBy="LastEventTime")


def test_page_is_limited_to_a_time(aws: Aws) -> None:
    """The answer has the events from the start time on; the latest events and an end time are not served."""
    for number in range(3):
        aws.write_logs(GROUP, "s", messages=[f"loss {number}"], timestamp=1000 + number)
    assert texts(get(aws, startTime=1001)) == ["loss 1", "loss 2"]
    for more in ({"endTime": 1002}, {"startFromHead": False}):
        with pytest.raises(ClientError, match=r"InvalidParameterException.*stand-in"):
            get(aws, **more)


def test_bad_token_and_limit_are_refused(aws: Aws) -> None:
    """An invalid token and a too large limit raise CloudWatch's errors."""
    aws.write_logs(GROUP, "s", count=1)
    with pytest.raises(ClientError, match=r"InvalidParameterException.*nextToken is invalid"):
        get(aws, nextToken="f/0/s")
    with pytest.raises(ClientError, match=r"InvalidParameterException.*less than or equal to 10000"):
        get(aws, limit=10_001)

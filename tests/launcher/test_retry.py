"""Rules for the end of an attempt that earns a retry, and a guard against a double send."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import retry
from cloudtrain.launcher.store.registry import Registry

ASKED = {"max_attempts": 3, "on": ["preempted", "node_failure"]}
PREEMPTED = State("failed", "preempted", resumable=True)


@pytest.mark.parametrize(
    ("state", "asked", "number", "is_due"),
    [
        (PREEMPTED, ASKED, 1, True),
        (PREEMPTED, ASKED, 2, True),
        (PREEMPTED, ASKED, 3, False),
        (PREEMPTED, {**ASKED, "max_attempts": 1}, 1, False),
        (PREEMPTED, None, 1, False),
        (PREEMPTED, {**ASKED, "on": ["error"]}, 1, False),
        (State("failed", "error"), ASKED, 1, False),
        (State("failed", "error"), {**ASKED, "on": ["error"]}, 1, True),
        (State("stopped", "user", resumable=True), ASKED, 1, False),
        (State("stopped", "preempted"), ASKED, 1, True),
        (State("running"), ASKED, 1, False),
        (State("succeeded"), ASKED, 1, False),
    ],
    ids=str,
)
def test_retry_is_due_by_a_configured_fault(
    state: State, asked: dict[str, Any] | None, number: int, is_due: bool, make_job: Callable[..., Job]
) -> None:
    """A fault named in the config earns a retry while attempts are left; a user's stop or a running job does not."""
    config, ref = {"retry": asked} if asked else {}, {"folder": "/x", "nodes": 2}
    assert retry.is_due(make_job("j-1", number, config=config, state=state, phase="sent", ref=ref)) is is_due


def test_unsent_attempt_or_a_platform_with_retries_gets_no_retry(make_job: Callable[..., Job]) -> None:
    """A refused submit would be refused again; SageMaker's own retries are part of the request."""
    config = {"retry": {**ASKED, "on": ["error"]}}
    assert not retry.is_due(make_job("j-1", config=config, state=State("failed", "error")))
    place = {
        "region": "eu-west-1",
        "profile": None,
        "endpoints": {},
        "checkpoint_uri": "s3://b/c",
        "output_uri": "s3://b/o",
    }
    ref = {**place, "name": "j-1-1", "nodes": 2, "nproc_per_node": 1, "limit_reason": "time_limit"}
    ref |= {"secrets_prefix": "", "secrets": []}
    sent = {"state": PREEMPTED, "phase": "sent", "ref": ref}
    assert not retry.is_due(make_job("j-1", config={"retry": ASKED}, backend="sagemaker", **sent))


def test_obstacle_to_a_retry_is_reported(
    seed: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the submitted code is gone, a single message reports the missing retry, and the job keeps its end."""
    monkeypatch.setattr(retry, "OTHERS_S", 0.0)
    job = seed("j-1", PREEMPTED)
    config = {"name": "j", "script": "x.py", "retry": ASKED}
    bundle = {"sha256": "0", "path": "/nowhere/0.tar.gz", "bytes": 1, "files": 1, "code_bytes": 1, "largest": []}
    assert retry.send_if_due(Registry(), replace(job, config=config, bundle=bundle)) is None
    said = capsys.readouterr().err
    assert "attempt 2 of at most 3 begins" in said
    assert "no retry: the code as it was submitted is no longer here" in said
    assert Registry().find("j-1").attempt.number == 1

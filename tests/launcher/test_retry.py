"""Rules for the end of an attempt that earns a retry, and a guard against a double send."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import CapacityError, CloudtrainError, UnreachableError, UsageError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.jobs import retry, submit
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job
from doubles.signatures import MakeJob

ASKED = {"max_attempts": 3, "on": ["preempted", "node_failure"]}
PREEMPTED = State("failed", "preempted", resumable=True)
NO_MACHINES, STOPPED = State("failed", "no_machines"), State("stopped", "user", resumable=True)


@pytest.mark.parametrize(
    ("state", "asked", "before", "is_due"),
    [
        (PREEMPTED, ASKED, [], True),
        (PREEMPTED, ASKED, [PREEMPTED], True),
        (PREEMPTED, ASKED, [PREEMPTED, State("failed", "error")], False),
        (PREEMPTED, ASKED, [PREEMPTED, NO_MACHINES, STOPPED, NO_MACHINES], True),
        (PREEMPTED, ASKED, [NO_MACHINES, PREEMPTED, STOPPED, PREEMPTED], False),
        (replace(PREEMPTED, joined_s={"2": 9.0, "3": 9.0}), ASKED, [], True),
        (replace(PREEMPTED, joined_s={"2": 9.0, "3": 40.0}), ASKED, [], False),
        (PREEMPTED, ASKED, [replace(STOPPED, joined_s={"2": 9.0}), PREEMPTED], False),
        (NO_MACHINES, ASKED, [], False),
        (NO_MACHINES, {**ASKED, "on": ["error"]}, [], False),
        (PREEMPTED, {**ASKED, "max_attempts": 1}, [], False),
        (PREEMPTED, None, [], False),
        (PREEMPTED, {**ASKED, "on": ["error"]}, [], False),
        (State("failed", "error"), ASKED, [], False),
        (State("failed", "error"), {**ASKED, "on": ["error"]}, [], True),
        (STOPPED, ASKED, [], False),
        (State("stopped", "preempted"), ASKED, [], True),
        (State("running"), ASKED, [], False),
        (State("succeeded"), ASKED, [], False),
    ],
    ids=str,
)
def test_retry_is_due_by_a_configured_fault(
    state: State, asked: dict[str, Any] | None, before: list[State], is_due: bool
) -> None:
    """A fault named in the config earns a retry while attempts are left; only ends by a fault use up attempts.

    Spares that joined at two times began two attempts inside one.
    """
    config, ref = {"retry": asked} if asked else {}, {"folder": "/x", "nodes": 2}
    sent = {"config": config, "phase": "sent", "ref": ref}
    jobs = [make_job("j-1", number, state=each, **sent) for number, each in enumerate([*before, state], start=1)]
    assert retry.is_due(jobs[-1], [job.attempt for job in jobs]) is is_due


def test_unsent_attempt_or_a_platform_with_retries_gets_no_retry() -> None:
    """A refused submit would be refused again; SageMaker's own retries are part of the request."""
    config = {"retry": {**ASKED, "on": ["error"]}}
    job = make_job("j-1", config=config, state=State("failed", "error"))
    assert not retry.is_due(job, [job.attempt])
    place = {"region": "eu-west-1", "profile": None, "endpoints": {}}
    place |= {"checkpoint_uri": "s3://bucket/c", "output_uri": "s3://b/o"}
    ref = {**place, "name": "j-1-1", "nodes": 2, "nproc_per_node": 1, "limit_reason": "time_limit"}
    ref |= {"secrets_prefix": "", "secrets": []}
    sent = {"state": PREEMPTED, "phase": "sent", "ref": ref}
    job = make_job("j-1", config={"retry": ASKED}, backend="sagemaker", **sent)
    assert not retry.is_due(job, [job.attempt])


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (["step-00000050"], None),
        (["step-00000025"], "step 50 was saved, and is not found now: the next attempt starts from step 25"),
        ([], "step 50 was saved, and is not found now: the next attempt starts from the beginning"),
    ],
    ids=["newest", "older", "none"],
)
def test_start_from_an_older_step_is_known_before_the_send(
    seed: MakeJob, registry: Registry, left: list[str], message: str | None
) -> None:
    """By the files that are there now, though the last poll has seen a checkpoint; the nodes read a mirror."""
    job = seed("lost", replace(PREEMPTED, ended_s=1.0))
    registry.set_state(job.attempt, PREEMPTED, {"checkpoint_step": 50, "checkpoint": "step-00000050", "saved_s": 1.0})
    folder = Path((job.attempt.ref or {})["checkpoint_dir"])
    shutil.rmtree(folder)
    for name in left:
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").write_text("x")
    job = registry.find("lost")
    older = retry.older_start(registry, job, JobConfig(name="lost"))
    assert (older and (older.message, older.is_zero, older.is_open)) == (message and (message, not left, not left))
    mirrored = JobConfig.model_validate({"name": "lost", "checkpoint": {"mirror": "s3://b/a"}})
    assert retry.older_start(registry, job, mirrored) is None


def test_loss_that_a_user_may_prevent_needs_consent() -> None:
    """A save that is gone for ever is no question; on a silent host it is, and `from_older` agrees."""
    retry.require_newest(retry.OlderStart("step 50 is gone", is_zero=False, is_open=False), "hint", from_older=False)
    older = retry.OlderStart("step 50 is on h0 (no answer)", is_zero=False, is_open=True)
    with pytest.raises(UsageError, match="step 50 is on h0"):
        retry.require_newest(older, "hint", from_older=False)
    retry.require_newest(older, "hint", from_older=True)


def test_bucket_that_cannot_be_read_is_no_empty_bucket() -> None:
    """The address without a listener is named; an empty answer would mean a start from step 0."""
    place = {"region": "eu-west-1", "profile": None, "endpoints": {"s3": "http://127.0.0.1:9"}}
    ref = {**place, "checkpoint_uri": "s3://bucket/c", "output_uri": "s3://b/o", "name": "j-1-1", "nodes": 2}
    ref |= {"nproc_per_node": 1, "limit_reason": "time_limit", "secrets_prefix": "", "secrets": []}
    backend = backends.load("sagemaker")
    assert isinstance(backend, backends.HasCheckpoints)
    files = backend.saved([ref], JobConfig(name="j"))
    assert (files.is_any, files.away.startswith("in s3://bucket/c (")) == (False, True)


def test_obstacle_to_a_retry_is_reported(
    seed: MakeJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("most_s", [600.0, 8.0])
def test_follower_tries_again_while_the_hosts_of_a_retry_are_not_ready(
    seed: MakeJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, most_s: float
) -> None:
    """The follower of a job waits for hosts, and for no longer than its patience."""
    now, sent = [0.0], seed("sent", PREEMPTED)
    obstacles = iter([CapacityError("h4 is held"), UnreachableError("h4 does not answer"), None])

    def prepare(*args: Any, **kwargs: Any) -> Any:
        if (obstacle := next(obstacles)) is not None:
            raise obstacle
        return SimpleNamespace(config=None)

    monkeypatch.setattr(retry, "is_due", lambda job, attempts: True)
    monkeypatch.setattr(retry, "prepare_next", prepare)
    monkeypatch.setattr(retry, "older_start", lambda *args: None)
    monkeypatch.setattr(retry, "_of_another", lambda *args: None)
    monkeypatch.setattr(submit, "resend", lambda *args, **kwargs: sent)
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(retry, "time", clock)
    assert retry.send_patiently(Registry(), seed("j-1", PREEMPTED), most_s) == (sent if most_s > 100 else None)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("no retry")]
    assert said == ["no retry yet: h4 is held", f"no retry{' yet' if most_s > 100 else ''}: h4 does not answer"]


@pytest.mark.parametrize(
    ("error", "was_queued", "is_known", "number"),
    [
        (CapacityError("h4 is held"), False, False, 1),
        (UnreachableError("h4 does not answer"), False, False, 1),
        (UsageError("no such option"), False, False, 2),
        (CapacityError("h4 is held"), False, True, 2),  # the platform may know the attempt's name
        (CapacityError("h4 is held"), True, False, 2),  # sent from the line
    ],
)
def test_resume_that_was_refused_for_now_leaves_no_attempt(
    seed: MakeJob, error: CloudtrainError, was_queued: bool, is_known: bool, number: int
) -> None:
    """The newest attempt is the one before: a retry stays due, and `retry.max_attempts` counts no refusal."""
    job, registry = seed("j-1", PREEMPTED), Registry()
    second = replace(job.attempt, number=2, phase="intent", ref=None, state=State("pending"))
    second.submitter["queued"] = was_queued
    registry.add_attempt(second, job.config, job.bundle)
    submit._close(registry, second, error, is_known=is_known)
    left = registry.find("j-1").attempt
    assert (left.number, left.state.state) == (number, "failed")
    assert (left.phase == "never_sent") is (number == 2)


ABORTED = {"rank": 0, "kind": "signal", "signal": "SIGABRT", "message": "killed by SIGABRT", "step": 10}


@pytest.mark.parametrize(
    ("before", "now", "goes_on"),
    [
        (ABORTED, {**ABORTED, "rank": 1}, False),
        (ABORTED, {**ABORTED, "step": 20}, True),
        ({**ABORTED, "signal": "SIGKILL"}, {**ABORTED, "signal": "SIGKILL"}, False),
        ({**ABORTED, "signal": "SIGTERM"}, {**ABORTED, "signal": "SIGTERM"}, True),
        ({**ABORTED, "step": None, "early": True}, {**ABORTED, "step": None, "early": True}, False),
        (None, ABORTED, True),
        (None, {**ABORTED, "again": True}, False),
    ],
)
def test_fault_that_comes_again_at_the_same_step_earns_no_third_start(
    before: dict[str, Any] | None, now: dict[str, Any], goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts, of two attempts or of the last, ended with the same sign: the code is at fault."""
    states = [State("failed", "node_failure", error=error) for error in (before, now)]
    ref = {"folder": "/x", "nodes": 2}
    jobs = [
        make_job("j-1", number, config={"retry": ASKED}, state=state, phase="sent", ref=ref)
        for number, state in enumerate(states, start=1)
    ]
    said: list[str] = []
    monkeypatch.setattr(retry, "say", said.append)
    monkeypatch.setattr(Registry, "attempts", lambda self, job: [each.attempt for each in jobs])
    sent: list[int] = []

    def prepare(*args: Any, **kwargs: Any) -> None:
        sent.append(1)
        raise UsageError("enough")

    monkeypatch.setattr(retry, "prepare_next", prepare)
    monkeypatch.setattr(retry, "_of_another", lambda *args: None)
    monkeypatch.setattr(Registry, "find", lambda self, key: jobs[-1])
    assert retry.send_if_due(Registry(), jobs[-1]) is None
    assert bool(sent) is goes_on
    assert ("ended in the same way" in said[0]) is not goes_on

"""Vertex AI's description of a custom job in our terms: states, reasons, causes, billed seconds; and the stop."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.vertex import api, status
from cloudtrain.launcher.job import State
from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT, REGION, rfc3339
from doubles.waiting import until

BEGIN_S = 1_000_000.0
ERROR = {"state": "failed", "reason": "error", "rank": 3, "kind": "error", "type": "ValueError", "message": "boom"}
SAVED = {"state": "stopped", "reason": "budget", "kind": None, "resumable": True}
DONE = {"state": "succeeded", "reason": None, "kind": None, "resumable": False}
SIGNALLED = {"state": "stopped", "reason": "preempted", "kind": None, "resumable": True}
LOST = {"state": "failed", "reason": "node_failure", "kind": "lost", "message": "node 1 is gone", "restarts": 2}
EXITED = "The replica workerpool0-0 exited with a non-zero status of {}. To find out more, please check the logs: url"
TAKEN = "The machine of replica workerpool0-0 was preempted."
FULL = "Resources are insufficient in region: us-central1. Please try a different region."


def told(state: str | None, ended: float | None = None, **more: Any) -> State:
    """Return the state, at second 100, of a job that began at 0; its limit is an hour."""
    details = {key: more.pop(key) for key in ("account", "limit_s", "is_spot", "has_checkpoint") if key in more}
    error = more.pop("error", None)
    job: dict[str, Any] = {"startTime": rfc3339(BEGIN_S), **more}
    if state is not None:
        job["state"] = f"JOB_STATE_{state}"
    if ended is not None:
        job["endTime"] = rfc3339(BEGIN_S + ended)
    if error is not None:
        job["error"] = {"code": error[0], "message": error[1]}
    asked = {"account": None, "limit_s": 3600.0, "is_spot": False, "has_checkpoint": None, **details}
    return status.state_of(job, limit_reason="budget", now_s=BEGIN_S + 100, **asked)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        *((name, "pending") for name in ("QUEUED", "PENDING")),
        *((name, "running") for name in ("RUNNING", "UPDATING", "PAUSED", "SOMETHING_NEW", None)),
        ("CANCELLING", "stopping"),
    ],
)
def test_active_job_has_a_state(name: str | None, state: str) -> None:
    """An unknown state counts as running, if the job has begun."""
    found = told(name)
    assert (found.state, found.ended_s, found.billed_s) == (state, None, pytest.approx(100))
    before = told(name, startTime=None)
    assert before.billed_s == 0.0
    assert told("SOMETHING_NEW", startTime=None).state == "pending"


def test_reason_of_a_wait_is_shown() -> None:
    """Google's own words come first."""
    assert told("QUEUED", startTime=None).detail == "queued: the project's quota has no room for it yet"
    assert told("PENDING", startTime=None).detail == "waiting for machines"
    assert told("PENDING", startTime=None, error=(8, "no L4 yet")).detail == "no L4 yet"
    assert told("RUNNING").detail is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"state": "SUCCEEDED"}, ("succeeded", None, False)),
        ({"state": "SUCCEEDED", "account": ERROR}, ("succeeded", None, False)),
        ({"state": "CANCELLED", "has_checkpoint": True}, ("stopped", "user", True)),
        ({"state": "CANCELLED", "has_checkpoint": True, "account": DONE}, ("succeeded", None, False)),
        ({"state": "CANCELLED", "ended": 3605, "account": DONE}, ("succeeded", None, False)),
        ({"state": "FAILED", "ended": 3605, "error": (4, "timed out"), "account": DONE}, ("succeeded", None, False)),
        ({"state": "FAILED", "error": (13, "Internal error."), "account": DONE}, ("failed", "node_failure", False)),
        ({"state": "CANCELLED", "account": SIGNALLED}, ("stopped", "user", True)),
        ({"state": "CANCELLED", "account": SAVED}, ("stopped", "budget", True)),
        ({"state": "CANCELLED", "ended": 3590}, ("stopped", "budget", False)),
        ({"state": "CANCELLED", "ended": 3605, "account": SIGNALLED}, ("stopped", "budget", True)),
        ({"state": "FAILED", "ended": 3605, "error": (4, "timed out")}, ("stopped", "budget", False)),
        ({"state": "FAILED", "ended": 3605, "account": SIGNALLED}, ("stopped", "budget", True)),
        ({"state": "FAILED", "ended": 3605, "account": ERROR}, ("failed", "error", False)),
        ({"state": "FAILED", "ended": 8, "limit_s": 10, "error": (3, EXITED.format(1))}, ("stopped", "budget", False)),
        ({"state": "FAILED", "ended": 3, "limit_s": 10, "error": (3, EXITED.format(1))}, ("failed", "error", False)),
        ({"state": "EXPIRED", "startTime": None}, ("failed", "no_machines", False)),
        ({"state": "FAILED", "error": (3, EXITED.format(1)), "account": ERROR}, ("failed", "error", False)),
        ({"state": "FAILED", "error": (3, EXITED.format(1)), "account": SAVED}, ("stopped", "budget", True)),
        ({"state": "FAILED", "error": (3, EXITED.format(137))}, ("failed", "node_failure", False)),
        ({"state": "FAILED", "error": (3, EXITED.format(143)), "account": LOST}, ("failed", "node_failure", False)),
        ({"state": "FAILED", "error": (13, "Internal error occurred.")}, ("failed", "node_failure", False)),
        ({"state": "FAILED", "error": (14, TAKEN), "has_checkpoint": True}, ("failed", "preempted", True)),
        ({"state": "FAILED", "error": (14, TAKEN), "account": SIGNALLED}, ("failed", "preempted", True)),
        ({"state": "FAILED", "error": (14, TAKEN), "account": ERROR}, ("failed", "error", False)),
        ({"state": "FAILED", "error": (8, FULL), "is_spot": True}, ("failed", "preempted", False)),
        ({"state": "FAILED", "error": (8, FULL), "is_spot": True, "account": ERROR}, ("failed", "error", False)),
        ({"state": "FAILED", "error": (3, EXITED.format(143)), "is_spot": True, "account": SIGNALLED}, None),
        (
            {"state": "FAILED", "error": (8, FULL), "is_spot": True, "startTime": None},
            ("failed", "no_machines", False),
        ),
        ({"state": "FAILED", "error": (8, FULL), "startTime": None}, ("failed", "no_machines", False)),
        ({"state": "FAILED", "error": (14, TAKEN), "startTime": None}, ("failed", "no_machines", False)),
        ({"state": "FAILED", "error": (13, "Internal error."), "startTime": None}, ("failed", "node_failure", False)),
        ({"state": "FAILED"}, ("failed", "error", False)),
        ({"state": "PARTIALLY_SUCCEEDED"}, ("failed", "error", False)),
        ({"state": "ENDED_IN_A_NEW_WAY"}, ("failed", "error", False)),
        ({"state": None}, ("failed", "error", False)),
    ],
    ids=str,
)
def test_ended_job_has_state_and_reason(given: dict[str, Any], expected: tuple[str, str | None, bool] | None) -> None:
    """The containers' own report counts before Google's words, but not against a preemption or the time limit."""
    found = told(**{"ended": 50, **given})
    assert (found.state, found.reason, found.resumable) == (expected or ("failed", "preempted", True))
    assert found.ended_s == pytest.approx(BEGIN_S + given.get("ended", 50))
    if found.state == "failed":
        assert found.error["message"]


def test_first_failing_rank_is_named() -> None:
    """The exit report names the rank, while Google only gives the replica's exit code."""
    found = told("FAILED", 50, error=(3, EXITED.format(1)), account={**ERROR, "traceback": "train.py:7"})
    error = {"rank": 3, "kind": "error", "type": "ValueError", "message": "boom", "traceback": "train.py:7"}
    assert found.error == error
    error = {"rank": None, "kind": "platform", "message": EXITED.format(1)}
    assert told("FAILED", 50, error=(3, EXITED.format(1))).error == error
    assert told("FAILED", 50, error=(3, EXITED.format(143)), account=LOST).restarts == 2


def test_lack_of_machines_has_a_remedy() -> None:
    """The remedy equals the remedy of a submit refused for the same reason."""
    found = told("FAILED", 50, startTime=None, error=(8, FULL))
    assert found.error == {"rank": None, "kind": "capacity", "message": f"{FULL.rstrip('.')}; {api.NO_MACHINES}"}
    assert found.billed_s == 0.0


def test_billed_seconds() -> None:
    """The time from the first RUNNING to the end counts; the queue is free, and the time is never negative."""
    assert told("SUCCEEDED", 50.25, createTime=rfc3339(0)).billed_s == pytest.approx(50.25)
    assert told("RUNNING", startTime=rfc3339(BEGIN_S + 500)).billed_s == 0.0
    assert told("RUNNING", startTime="2026-10-01T00:00:00.123456789Z").started_s is not None
    assert told("CANCELLED", 50, startTime=None).billed_s == 0.0


CONFIG = f"""\
name: j
backend: vertex
script: loop.py
resources: {{instances: 2, instance_type: n1-standard-4, spot: true}}
limits: {{max_duration: 1h}}
vertex: {{project: {PROJECT}, location: {REGION}, staging_bucket: {BUCKET}}}
"""
SUBMIT = ("submit", "-d", "-y", "--force", "--name", "one")


@pytest.fixture
def folder(folder: Path, google_project: Google) -> Path:
    """Return a project's folder; its jobs run no containers."""
    google_project.settings(execute=False)
    return folder


def tell(google: Google, account: Any, node: int = 0, attempt: int = 1) -> None:
    """Write a container's exit report to its place."""
    data = account if isinstance(account, str) else json.dumps(account)
    google.put_object(f"cloudtrain/jobs/one/attempt-{attempt}/ended-{node}.json", data)


@pytest.fixture
def running(vertex: Any, folder: Path, google: Google) -> Google:
    """Return the project with the running job one-1, whose containers have written their last lines."""
    assert vertex(*SUBMIT, cwd=folder).code == 0
    google.begin("one-1")
    google.write_ends("one-1")
    return google


def test_states_of_a_job_are_shown(vertex: Any, folder: Path, google: Google) -> None:
    """The states of the service appear as the states of the command."""
    assert vertex(*SUBMIT, cwd=folder).code == 0
    seen = []
    for state in ("QUEUED", "PENDING", "RUNNING", "CANCELLING"):
        google.begin("one-1", f"JOB_STATE_{state}")
        seen.append(vertex("status", "one", "--json").json["state"])
    assert seen == ["pending", "pending", "running", "stopping"]


def test_failure_waits_for_the_containers_exit_report(vertex: Any, running: Google) -> None:
    """The report may be late; Google's exit code is not the cause. The report of any node counts."""
    running.end("one-1", "JOB_STATE_FAILED", (3, EXITED.format(1)))
    assert vertex("status", "one", "--json").json["state"] == "stopping"
    running.fault("storage.list", "403")
    assert vertex("status", "one", "--json").json["unreachable_since_s"] is not None
    running.clear_faults()
    tell(running, {**ERROR, "traceback": 'File "loop.py", line 1'}, node=1)
    found = vertex("status", "one", "--json").json
    assert (found["state"], found["reason"], found["error"]["rank"]) == ("failed", "error", 3)
    assert found["error"]["traceback"] == 'File "loop.py", line 1'
    assert ("boom" in vertex("status", "one").stdout, vertex("wait", "one").code) == (True, 1)


def test_missing_exit_report_is_awaited_only_for_a_limited_time(
    vertex: Any, running: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid report does not count either."""
    monkeypatch.setattr(status, "LATE_S", 0.0)
    tell(running, "no JSON")
    tell(running, "[1]", node=1)
    running.end("one-1", "JOB_STATE_FAILED", (3, EXITED.format(1)))
    found = vertex("status", "one", "--json").json
    assert (found["state"], found["error"]["message"]) == ("failed", EXITED.format(1))


@pytest.mark.parametrize(
    ("name", "is_resumable"),
    [("step-5/a", True), (".hidden", False), ("x.tmp", False), ("damaged-1/x.damaged-3", True), (None, False)],
)
def test_job_with_a_checkpoint_is_resumable(vertex: Any, running: Google, name: str | None, is_resumable: bool) -> None:
    """The checkpoints in the bucket decide, as the next attempt finds them, despite the report."""
    tell(running, {**SIGNALLED, "resumable": not is_resumable})
    if name is not None:
        running.put_object(f"cloudtrain/checkpoints/one/{name}", "x")
    running.end("one-1", "JOB_STATE_CANCELLED")
    found = vertex("status", "one", "--json").json
    assert (found["state"], found["reason"], found["resumable"]) == ("stopped", "user", is_resumable)


def saved(google: Google) -> None:
    """Write the exit report of a container after a stop request."""
    told = {"state": "stopped", "reason": "preempted", "resumable": False, "restarts": 0, "kind": None}
    google.put_object("cloudtrain/jobs/one/attempt-1/ended-0.json", json.dumps(told).encode())


def test_repeated_stop_is_no_error(vertex: Any, running: Google) -> None:
    """A stop is accepted for running, cancelled and ended jobs."""
    saved(running)
    running.settings(cancelling_s=0.5)
    assert [vertex("stop", "one", "-y").code for _ in range(3)] == [0, 0, 0]
    running.wait("one-1", "CANCELLED")
    assert (vertex("stop", "one").code, vertex("wait", "one").code) == (0, 9)
    assert vertex("status", "one", "--json").json["reason"] == "user"


def test_stop_of_a_finished_job_is_no_error(vertex: Any, running: Google) -> None:
    """A job that ended between two polls gives no message."""
    assert vertex("status", "one", "--json").json["state"] == "running"
    running.end("one-1")
    assert vertex("stop", "one").code == 0
    assert vertex("status", "one", "--json").json["state"] == "succeeded"


@pytest.mark.parametrize("kind", ["lost", "503", "drop"])
def test_stop_succeeds_despite_faults(vertex: Any, running: Google, kind: str) -> None:
    """The answer may be lost, or the first calls fail."""
    saved(running)
    running.fault("jobs.cancel", kind, count=2)
    assert vertex("stop", "one", "-y").code == 0
    running.wait("one-1", "CANCELLED")


def test_preempted_attempt_is_retried(cli: Any, folder: Path, google: Google) -> None:
    """With a config for retries and a follower, the retry has the same checkpoints, and its own label."""
    process = cli.start("submit", "-y", "--force", "--set", "retry.max_attempts=2", "--name", "one", cwd=folder)
    until(lambda: [job["display_name"] for job in google.jobs()] == ["one-1"], 60, 0.1)
    google.begin("one-1")
    tell(google, SIGNALLED)
    google.write_ends("one-1")
    google.end("one-1", "JOB_STATE_FAILED", (14, TAKEN))
    until(lambda: [job["display_name"] for job in google.jobs()] == ["one-1", "one-2"], 90, 0.1)
    google.begin("one-2")
    google.write_ends("one-2")
    google.end("one-2")
    said = process.communicate(timeout=90)[1]
    assert (process.returncode, "attempt 2 of at most 2 begins" in said) == (0, True), said
    first, second = (
        google.job(name)["body"]["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
        for name in ("one-1", "one-2")
    )
    assert (first[0], "attempt-2/order.json" in second[1]) == (second[0], True)


def test_poll_that_fails_changes_no_state(vertex: Any, folder: Path, google: Google) -> None:
    """Forbidden, missing or broken: the job keeps its state, and is shown as unreachable."""
    assert vertex(*SUBMIT, cwd=folder).code == 0
    google.begin("one-1")
    assert vertex("status", "one", "--json").json["state"] == "running"
    for kind in ("403", "404", "500", "drop", "cut", "400"):
        google.fault("jobs.get", kind)
        found = vertex("status", "one", "--json").json
        assert (found["state"], found["unreachable_since_s"] is not None) == ("running", True), kind
        google.clear_faults()
    assert vertex("status", "one", "--json").json["unreachable_since_s"] is None


def test_unlisted_duplicates_do_not_hide_the_job(vertex: Any, folder: Path, google: Google) -> None:
    """The job's own state is known, and shown."""
    google.fault("jobs.create", "lost", count=1)
    assert vertex(*SUBMIT, cwd=folder).code == 0
    google.begin("one-1")
    google.fault("jobs.list", "403")
    found = vertex("status", "one", "--json").json
    assert (found["state"], found["unreachable_since_s"]) == ("running", None)


def test_money_is_counted_from_the_start(vertex: Any, folder: Path, google: Google) -> None:
    """The job's own times count, during the run too."""
    assert vertex(*SUBMIT, cwd=folder).code == 0
    assert vertex("status", "one", "--json").json["spend_usd"] == 0
    google.begin("one-1")
    begin_s = time.time()
    first = vertex("status", "one", "--json").json["spend_usd"]
    assert first > 0
    hourly = vertex("submit", "--dry-run", "--json", cwd=folder).json["plan"]["hourly_usd"]
    assert first <= hourly * (time.time() - begin_s + 5) / 3600

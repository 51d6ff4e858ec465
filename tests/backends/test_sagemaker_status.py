"""SageMaker's description of a job in our terms: states, reasons, causes, and the billed seconds."""

from datetime import datetime, timezone
from typing import Any

import pytest

from cloudtrain.backends.sagemaker.status import is_over, state_of
from cloudtrain.entrypoints.container.container import account
from cloudtrain.entrypoints.contract import ExitReport
from cloudtrain.launcher.job import Attempt, State, exit_code
from cloudtrain.launcher.metering.meter import legs_of, spent_micro
from doubles.plans import plan_of


def at(seconds: float) -> datetime:
    """Return a time as boto3 returns times."""
    return datetime.fromtimestamp(1_000_000 + seconds, tz=timezone.utc)


def job(status: str, secondary: str, *moves: tuple[str, float, float | None], **more: Any) -> dict[str, Any]:
    """Return DescribeTrainingJob's answer; `moves` are (status, begin, end)."""
    transitions = [
        {"Status": name, "StartTime": at(begin), "StatusMessage": f"{name} it", **({"EndTime": at(end)} if end else {})}
        for name, begin, end in moves
    ]
    statuses = {"TrainingJobStatus": status, "SecondaryStatus": secondary}
    return {**statuses, "SecondaryStatusTransitions": transitions, **more}


def told(described: dict[str, Any], *, limit: str = "time_limit", saved: bool = True, now: float = 100) -> State:
    """Return the state at `now`."""
    return state_of(described, limit, has_checkpoint=saved, now_s=1_000_000 + now)


START, LOAD = ("Starting", 0, 10), ("Downloading", 10, 20)


@pytest.mark.parametrize(
    ("secondary", "moves", "expected"),
    [
        ("Starting", [("Starting", 0, None)], "pending"),
        ("Pending", [("Pending", 0, None)], "pending"),
        ("Downloading", [START, ("Downloading", 10, None)], "pending"),
        ("Training", [START, LOAD, ("Training", 20, None)], "running"),
        ("Uploading", [START, LOAD, ("Training", 20, 30), ("Uploading", 30, None)], "running"),
        ("Interrupted", [START, LOAD, ("Training", 20, 30), ("Interrupted", 30, None)], "running"),
        ("Starting", [START, LOAD, ("Training", 20, 30), ("Interrupted", 30, 40), ("Starting", 40, None)], "running"),
        ("SomethingNew", [START, LOAD, ("Training", 20, 30), ("SomethingNew", 30, None)], "running"),
        ("SomethingNew", [("SomethingNew", 0, None)], "running"),
    ],
)
def test_active_job_has_a_state(secondary: str, moves: list[Any], expected: str) -> None:
    """An unknown status counts as running, and never as an end."""
    described = job("InProgress", secondary, *moves)
    state = told(described)
    assert (is_over(described), state.state) == (False, expected)
    assert (state.detail is None) == (secondary == "Training")


def test_restart_on_new_machines_is_counted_and_reported() -> None:
    """Spot machines were taken back, and new machines came."""
    moves = [START, ("Training", 20, 30), ("Interrupted", 30, 40), ("Starting", 40, 50), ("Training", 50, None)]
    assert told(job("InProgress", "Training", *moves)).restarts == 1
    waiting = told(job("InProgress", "Interrupted", *moves[:3], EnableManagedSpotTraining=True))
    assert waiting.detail == "the spot machines were taken back; Interrupted: Interrupted it"


def test_spend_counts_billed_seconds() -> None:
    """Before the end the transitions count, without the waits; then SageMaker's own number."""
    moves = [START, LOAD, ("Training", 20, 30), ("Interrupted", 30, 60), ("Starting", 60, 70), ("Training", 70, None)]
    running = told(job("InProgress", "Training", *moves), now=100)
    assert running.billed_s == 10 + 10 + 30
    done = told(job("Completed", "Completed", *moves, BillableTimeInSeconds=37, TrainingTimeInSeconds=90))
    assert done.billed_s == 37
    warm: dict[str, Any] = {"ResourceConfig": {"KeepAlivePeriodInSeconds": 600}, "BillableTimeInSeconds": 37}
    assert told(job("Completed", "Completed", *moves, **warm)).billed_s == 637
    pool = {"WarmPoolStatus": {"ResourceRetainedBillableTimeInSeconds": 90}}
    assert told(job("Completed", "Completed", *moves, **warm, **pool)).billed_s == 127
    attempt = Attempt("j", 1, "sent", plan_of(hourly_usd=36.0), {}, 0.0, {}, state=done)
    assert spent_micro(legs_of([attempt]), 0.0) == 370_000


@pytest.mark.parametrize(
    ("secondary", "limit", "reason", "code"),
    [
        ("Stopped", "budget", "user", 9),
        ("MaxRuntimeExceeded", "budget", "budget", 6),
        ("MaxRuntimeExceeded", "time_limit", "time_limit", 1),
        ("MaxWaitTimeExceeded", "budget", "time_limit", 1),
    ],
)
def test_stopped_job_has_a_reason(secondary: str, limit: str, reason: str, code: int) -> None:
    """The secondary status names the cause of the stop; the limit of our plan has its own name."""
    state = told(job("Stopped", secondary, START, LOAD, ("Training", 20, 50), TrainingEndTime=at(50)), limit=limit)
    assert (state.state, state.reason, state.resumable, exit_code(state)) == ("stopped", reason, True, code)
    assert state.ended_s == 1_000_050


@pytest.mark.parametrize(
    ("secondary", "limit_s", "end", "code"),
    [
        ("Stopped", 1800, ("failed", "no_machines"), 5),
        ("MaxPendingTimeExceeded", 1800, ("failed", "no_machines"), 5),  # a name that AWS does not document
        ("MaxWaitTimeExceeded", None, ("failed", "no_machines"), 5),
        ("Stopped", 1801, ("stopped", "user"), 9),  # before the limit: no limit has stopped the job
        ("Stopped", None, ("stopped", "user"), 9),
    ],
)
def test_job_stopped_before_its_start(secondary: str, limit_s: int | None, end: tuple[str, str], code: int) -> None:
    """The end of a wait for machines is no user's stop, whatever SageMaker calls the end; a stop before it is."""
    stopping = {"MaxRuntimeInSeconds": 60} | ({"MaxPendingTimeInSeconds": limit_s} if limit_s else {})
    times = {"CreationTime": at(0), "LastModifiedTime": at(1800), "StoppingCondition": stopping}
    state = told(job("Stopped", secondary, ("Pending", 0, 1800), **times))
    assert ((state.state, state.reason), exit_code(state), state.billed_s) == (end, code, 0)


def test_lack_of_machines_after_a_start_is_a_fault() -> None:
    """Ranks have run: the job lost its machines, and the new start counts as a retry."""
    words = "CapacityError: Unable to provision requested ML compute capacity."
    lost = told(job("Failed", "Failed", START, LOAD, ("Training", 20, 30), FailureReason=words))
    assert (lost.reason, exit_code(lost)) == ("node_failure", 1)


def failure(**verdict: Any) -> str:
    """Return FailureReason as SageMaker makes one from the container's exit report."""
    return f"AlgorithmError: {account(ExitReport.load({'restarts': 2, **verdict}))[:1024]}, exit code: 70"


def test_failure_is_the_first_ranks_exception() -> None:
    """Our exit report is found unchanged among the platform's words."""
    error = {"rank": 3, "kind": "exception", "type": "ValueError", "message": "bad {x}", "traceback": "  line\nend"}
    words = failure(state="failed", reason="error", resumable=False, error=error)
    state = told(job("Failed", "Failed", START, FailureReason=words))
    assert (state.state, state.reason, state.restarts) == ("failed", "error", 2)
    assert state.error == error


def test_job_that_saved_at_its_own_deadline_is_stopped() -> None:
    """SageMaker reports a failure, because the container's exit code is not 0, although no failure occurred."""
    words = failure(state="stopped", reason="budget", resumable=True, error=None)
    state = told(job("Failed", "Failed", START, FailureReason=words), limit="budget")
    assert (state.state, state.reason, state.resumable, state.error) == ("stopped", "budget", True, None)
    assert exit_code(state) == 6


@pytest.mark.parametrize(
    ("words", "reason", "kind"),
    [
        ("InternalServerError: We encountered an internal error.", "node_failure", "InternalServerError"),
        ("CapacityError: Unable to provision requested ML compute capacity.", "no_machines", "capacity"),
        ("ClientError: Data download failed: no objects", "error", "ClientError"),
        ("AlgorithmError: ExecuteUserScriptError, exit code: 1", "error", "AlgorithmError"),
        ("AlgorithmError: half of an account  ::ct {\"e\":\"ended\",\"sta, exit code: 1", "error", "AlgorithmError"),
        ("", "error", "platform"),
    ],
)  # fmt: skip
def test_failure_without_an_exit_report_uses_the_platforms_words(words: str, reason: str, kind: str) -> None:
    """The platform's words are the cause; faults of its machines differ from faults of the job."""
    state = told(job("Failed", "Failed", START, FailureReason=words), saved=False)
    assert (state.reason, state.resumable) == (reason, False)
    assert (state.error["kind"], state.error["message"]) == (kind, words or "SageMaker gives no reason")

"""Azure's description of a run in our terms: states, reasons, causes, seconds and prices."""

from datetime import datetime, timezone
from typing import Any

import pytest

from cloudtrain.backends.azureml import status
from cloudtrain.backends.azureml.records import Workspace
from cloudtrain.backends.azureml.status import Details, root_of
from cloudtrain.launcher.job import Attempt, State
from cloudtrain.launcher.metering.meter import legs_of, spent_micro
from doubles.plans import plan_of

BEGIN_S = 1_000_000.0
ACCOUNT = {"state": "failed", "reason": "error", "rank": 3, "kind": "error", "type": "ValueError", "message": "boom"}
PREEMPTED = {
    "code": "UserError",
    "message": "AzureMLCompute job failed. PreemptionError: Nodes of this job got pre-empted. Check if the run has "
    "failed or restarted. Reason: Received pre-emption warning signal",
}


def at(seconds: float) -> str:
    """Return a time in the format of run history."""
    return datetime.fromtimestamp(BEGIN_S + seconds, tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f0Z")


def told(run_status: str, ended: float | None = None, **more: Any) -> State:
    """Return the state, at second 100, of a run that began at 0."""
    account, saved = more.pop("account", None), more.pop("saved", None)
    data = {"status": run_status, "startTimeUtc": at(0), "endTimeUtc": None if ended is None else at(ended), **more}
    return status.state_of(
        Details(run_status, data, {}, 0.0),
        account,
        limit_s=3600,
        limit_reason="budget",
        has_checkpoint=saved,
        idle_s=120.0,
        now_s=BEGIN_S + 100,
    )


@pytest.mark.parametrize(
    ("run_status", "state"),
    [
        *((name, "pending") for name in ("NotStarted", "Queued", "Provisioning", "Preparing", "Starting")),
        *((name, "running") for name in ("Running", "Finalizing", "NotResponding", "SomethingNew")),
        ("CancelRequested", "stopping"),
    ],
)
def test_active_run_has_a_state(run_status: str, state: str) -> None:
    """An unknown status counts as running, so no result is dropped because of a new status."""
    found = told(run_status)
    assert (found.state, found.ended_s, found.billed_s) == (state, None, pytest.approx(100))


BROKEN_NODE = {"error": {"code": "ServiceError", "message": "NodeFailure"}}
NO_NODES = {"error": {"code": "UserError", "innerError": {}, "message": "AllocationFailed: no capacity in the zone"}}
NO_IMAGE = {"error": {"code": "UserError", "message": "image not found"}}
SAVED = {"state": "stopped", "reason": "budget", "kind": None}
SIGNALLED = {"state": "stopped", "reason": "preempted", "kind": None}
QUEUE_IS_FULL = {"error": {"code": "UserError", "message": "ValueError: the PreemptibleQueue is full"}}
OUT_OF_TIME = {"reason": "time_limit", "resumable": True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"run_status": "Completed"}, ("succeeded", None, False)),
        ({"run_status": "Canceled", "saved": True}, ("stopped", "user", True)),
        ({"run_status": "Canceled", "ended": 3590, "saved": True}, ("stopped", "budget", True)),
        ({"run_status": "Canceled", "account": OUT_OF_TIME}, ("stopped", "time_limit", True)),
        ({"run_status": "Failed", "account": ACCOUNT}, ("failed", "error", False)),
        ({"run_status": "Failed", "account": {**ACCOUNT, "resumable": True}}, ("failed", "error", True)),
        ({"run_status": "Failed", "account": SAVED, "saved": True}, ("stopped", "budget", True)),
        ({"run_status": "Failed", "error": {"error": PREEMPTED}, "saved": True}, ("failed", "preempted", True)),
        ({"run_status": "Failed", "error": {"error": PREEMPTED}, "account": SAVED}, ("failed", "preempted", False)),
        ({"run_status": "Failed", "error": BROKEN_NODE}, ("failed", "node_failure", False)),
        ({"run_status": "Failed", "error": NO_IMAGE}, ("failed", "error", False)),
        ({"run_status": "Failed"}, ("failed", "error", False)),
        ({"run_status": "Failed", "error": NO_NODES, "startTimeUtc": None}, ("failed", "no_machines", False)),
        ({"run_status": "Failed", "error": NO_NODES}, ("failed", "error", False)),
        ({"run_status": "Failed", "error": PREEMPTED, "startTimeUtc": None}, ("failed", "no_machines", False)),
        ({"run_status": "Failed", "error": NO_IMAGE, "startTimeUtc": None}, ("failed", "error", False)),
        ({"run_status": "Failed", "error": BROKEN_NODE, "account": SIGNALLED}, ("failed", "node_failure", False)),
        ({"run_status": "Failed", "account": SIGNALLED, "saved": True}, ("stopped", "preempted", True)),
        ({"run_status": "Failed", "error": QUEUE_IS_FULL, "account": ACCOUNT}, ("failed", "error", False)),
    ],
    ids=str,
)
def test_ended_run_has_a_state_and_a_reason(given: dict[str, Any], expected: tuple[str, str | None, bool]) -> None:
    """The containers' own report counts before Azure's words, but not against a preemption."""
    found = told(**{"ended": 50, **given})
    assert (found.state, found.reason, found.resumable) == expected
    assert found.ended_s == pytest.approx(BEGIN_S + given.get("ended", 50))


def test_first_failing_rank_is_named() -> None:
    """The exit report names the rank, while Azure only gives the shell's exit code."""
    error = {"error": {"code": "UserError", "message": "Execution failed. User process 'bash' exited with status 70"}}
    found = told("Failed", 50, error=error, account=ACCOUNT)
    assert (found.error["rank"], found.error["type"], found.error["message"]) == (3, "ValueError", "boom")
    message = "Execution failed. User process 'bash' exited with status 70"
    assert told("Failed", 50, error=error).error == {"rank": None, "kind": "platform", "message": message}


def test_billed_seconds() -> None:
    """Azure's own number counts at the end, its times until then; a run without machines costs nothing."""
    assert told("Completed", 50, computeDuration="00:01:15.5000000").billed_s == 75.5
    assert told("Completed", 50, computeDuration="1.02:00:00").billed_s == 93_600
    assert told("Completed", 50).billed_s == pytest.approx(50)
    assert status.state_of(
        Details("Queued", {"status": "Queued"}, {}, 0.0), None, limit_s=1, limit_reason="budget", has_checkpoint=None
    ) == State("pending", detail="Queued", billed_s=0.0)


def test_idle_time_is_shown_apart() -> None:
    """The idle machines of a cluster cost money that is not part of the job's spend."""
    plan = plan_of(hourly_usd=36.0)
    attempt = Attempt("j", 1, "sent", plan, {}, 0.0, {}, {}, told("Completed", 50, computeDuration="00:01:40"))
    assert (spent_micro(legs_of([attempt]), 0.0), attempt.idle_usd) == (1_000_000, 1.2)
    unknown = Attempt("j", 1, "sent", plan_of(), {}, 0.0, {}, {}, told("Completed", 50))
    assert (spent_micro(legs_of([unknown]), 0.0), unknown.idle_usd) == (None, None)


def test_run_history_address_comes_from_the_job() -> None:
    """The host is the region's; a job without services has no address."""
    workspace = Workspace("s", "g", "w")
    services = {"Tracking": {"endpoint": "azureml://eastus.api.azureml.ms/mlflow/v1.0/subscriptions/s"}}
    assert root_of(workspace, services) == f"https://eastus.api.azureml.ms/history/v1.0{workspace.arm_id}"
    assert root_of(workspace, {}) is None

"""SageMaker's description of a job as our state: state, reason, cause, and billed seconds."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

from cloudtrain.launcher.backend import container_output
from cloudtrain.launcher.job import JobState, State, no_machines

# States before any process runs. A status outside all lists counts as running.
_WAITING = (
    *("Starting", "LaunchingMLInstances", "PreparingTrainingStack", "Pending"),
    *("DownloadingTrainingImage", "Downloading"),
)
_BETWEEN = ("Interrupted", "Restarting")
# Billed by the second, from the machines' download of the data to the upload of the results.
_BILLED = ("Downloading", "DownloadingTrainingImage", "Training", "Uploading", "Stopping")
_OVER: dict[str, JobState] = {"Completed": "succeeded", "Failed": "failed", "Stopped": "stopped", "Deleting": "failed"}
BILLABLE = "BillableTimeInSeconds"  # of each instance, reported after the end
_PREFIX = re.compile(r"^(\w+Error): ")
_NO_MACHINES = ("CapacityError", "InsufficientCapacityError")
_FAULTS = ("InternalServerError", *_NO_MACHINES)


def is_over(described: dict[str, Any]) -> bool:
    """Return whether the answer of DescribeTrainingJob describes an ended job."""
    return described["TrainingJobStatus"] in _OVER


def state_of(
    described: dict[str, Any], limit_reason: str, *, has_checkpoint: bool, now_s: float | None = None
) -> State:
    """Return the state. `limit_reason` is the origin of the job's time limit: time_limit or budget."""
    now_s = time.time() if now_s is None else now_s
    moves = described.get("SecondaryStatusTransitions", [])
    common: dict[str, Any] = {
        "started_s": _seconds(described.get("TrainingStartTime")),
        "restarts": _restarts(moves),
        "billed_s": _billed_s(described, moves, now_s),
        "billed_by": None if described.get(BILLABLE) is None else BILLABLE,
    }
    status = described["TrainingJobStatus"]
    if not is_over(described):
        return State(_running(described, status), detail=_detail(described, moves), **common)
    common["ended_s"] = _seconds(described.get("TrainingEndTime") or described.get("LastModifiedTime"))
    if status == "Completed":
        return State("succeeded", detail=_saving(described), **common)
    if status == "Stopped":
        return _stopped(described, limit_reason, common, has_checkpoint=has_checkpoint)
    return _failed(described, common, has_checkpoint=has_checkpoint)


def _running(described: dict[str, Any], status: str) -> JobState:
    if status == "Stopping":
        return "stopping"
    return "pending" if described.get("SecondaryStatus") in _WAITING and not _has_trained(described) else "running"


def _has_trained(described: dict[str, Any]) -> bool:
    return any(move["Status"] == "Training" for move in described.get("SecondaryStatusTransitions", []))


def _detail(described: dict[str, Any], moves: list[dict[str, Any]]) -> str | None:
    """Return a description of a state other than plain training."""
    now = described.get("SecondaryStatus", "")
    if now in ("Training", "Stopping", ""):
        return None
    words = str(moves[-1].get("StatusMessage") or "") if moves else ""
    is_spot = described.get("EnableManagedSpotTraining")
    lost = "the spot machines were taken back; " if is_spot else "the job started again on other machines; "
    again = lost if now in _BETWEEN or _restarts(moves) else ""
    return f"{again}{now}: {words}" if words else f"{again}{now}"


def _saving(described: dict[str, Any]) -> str | None:
    """Return the saving by spot machines, in words."""
    billed, took = described.get("BillableTimeInSeconds"), described.get("TrainingTimeInSeconds")
    if not billed or not took or billed >= took:
        return None
    return f"spot: {billed} s billed of {took} s, {1 - billed / took:.0%} saved"


def _stopped(described: dict[str, Any], limit_reason: str, common: dict[str, Any], *, has_checkpoint: bool) -> State:
    """Return the end by the secondary status; before any rank has run, a stop is a user's if the wait was not over.

    SageMaker does not say who stopped a job, and documents no secondary status for the end by MaxPendingTimeInSeconds.
    """
    now = described.get("SecondaryStatus") or "Stopped"
    is_spot = now == "MaxWaitTimeExceeded"
    created_s = _seconds(described.get("CreationTime"))
    most_s = described.get("StoppingCondition", {}).get("MaxPendingTimeInSeconds")
    waited_s = 0.0 if created_s is None or common["ended_s"] is None else common["ended_s"] - created_s
    is_late = now not in ("Stopped", "MaxRuntimeExceeded") or (most_s is not None and waited_s >= most_s)
    if is_late and not _has_trained(described):
        message = f"no {'spot ' * is_spot}machines within limits.max_wait"
        return no_machines(message, resumable=has_checkpoint, **common)
    reasons = {"MaxRuntimeExceeded": limit_reason, "MaxWaitTimeExceeded": "time_limit"}
    detail = "no spot machines within limits.max_wait" if is_spot else None
    return State("stopped", reasons.get(now, "user"), has_checkpoint, None, detail=detail, **common)


def _failed(described: dict[str, Any], common: dict[str, Any], *, has_checkpoint: bool) -> State:
    """Return the end by the container's exit report, else by SageMaker's reason."""
    words = str(described.get("FailureReason") or "SageMaker gives no reason")
    kind = _PREFIX.match(words)
    if kind is not None and kind[1] in _NO_MACHINES and not _has_trained(described):
        return no_machines(words, resumable=has_checkpoint, **common)
    report = container_output.report_in(words)
    common["restarts"] += container_output.restarts(report)
    return container_output.failed(
        report,
        words,
        is_fault=kind is not None and kind[1] in _FAULTS,
        is_resumable=has_checkpoint,
        kind=kind[1] if kind else "platform",
        **common,
    )


def _restarts(moves: list[dict[str, Any]]) -> int:
    """Return how often SageMaker has restarted the job on new machines."""
    return max(0, [move["Status"] for move in moves].count("Starting") - 1)


def _billed_s(described: dict[str, Any], moves: list[dict[str, Any]], now_s: float) -> float | None:
    """Return the billed seconds of each instance: SageMaker's number, or before the end the sum over transitions.

    Warm machines after the job count by SageMaker's number, else by the maximum.
    """
    if described.get(BILLABLE) is not None:
        most_s = described.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds") or 0
        warm_s = described.get("WarmPoolStatus", {}).get("ResourceRetainedBillableTimeInSeconds")
        return float(described[BILLABLE]) + float(most_s if warm_s is None else warm_s)
    total = 0.0
    for move in moves:
        if move["Status"] in _BILLED:
            begin_s, end_s = _seconds(move.get("StartTime")), _seconds(move.get("EndTime"))
            total += max(0.0, (now_s if end_s is None else end_s) - (begin_s or now_s))
    return total


def _seconds(when: datetime | None) -> float | None:
    return None if when is None else when.timestamp()

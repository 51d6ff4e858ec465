"""Vertex AI's description of a custom job as our state: state, reason, cause, and billed seconds."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from cloudtrain.launcher.backend import container_output as accounts
from cloudtrain.launcher.job import JobState, State, no_machines
from cloudtrain.launcher.text.times import seconds

from .api import NO_MACHINES

_RUNNING: dict[str, JobState] = {
    "JOB_STATE_QUEUED": "pending",
    "JOB_STATE_PENDING": "pending",
    "JOB_STATE_RUNNING": "running",
    "JOB_STATE_UPDATING": "running",
    "JOB_STATE_PAUSED": "running",
    "JOB_STATE_CANCELLING": "stopping",
}
_OVER = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
_DETAILS = {  # of a state other than plain training
    "JOB_STATE_QUEUED": "queued: the project's quota has no room for it yet",
    "JOB_STATE_PENDING": "waiting for machines",
    "JOB_STATE_PAUSED": "paused",
}
# google.rpc.Code: INVALID_ARGUMENT (3) is an error of the job's own code, the codes below are faults of the platform.
NOT_FOUND, RESOURCE_EXHAUSTED = 5, 8
_FAULT_CODES = (8, 10, 13, 14)  # RESOURCE_EXHAUSTED, ABORTED, INTERNAL, UNAVAILABLE
_PREEMPTED = re.compile(r"preempt", re.IGNORECASE)
_SIGNALLED = re.compile(r"non-zero status of (129|1[3-9]\d|2\d\d)|signal")
LATE_S = 20.0  # from a job's end until its containers' exit reports are surely in the bucket
LIMIT_MARGIN_S = 15.0
CUT_SHORT = "Vertex AI ended the job after all ranks had succeeded; the last files may not be copied"


def is_over(described: Mapping[str, Any]) -> bool:
    """Return whether the job has ended; a state that Google may add counts as ended if it has an end time."""
    state = str(described.get("state", ""))
    return state.removeprefix("JOB_STATE_") in _OVER or (state not in _RUNNING and bool(described.get("endTime")))


def awaiting(described: Mapping[str, Any]) -> State:
    """Return the state of a job that is over but has not reported its reason yet."""
    started_s, billed_s = _times(described, time.time())
    detail = "it has ended; waiting for the containers' exit report"
    return State("stopping", detail=detail, started_s=started_s, billed_s=billed_s)


def may_report_more(described: Mapping[str, Any], now_s: float) -> bool:
    """Return whether the containers' exit report of a failure may still arrive."""
    ended_s = seconds(described.get("endTime"))
    is_fresh = bool(described.get("startTime")) and ended_s is not None and abs(now_s - ended_s) < LATE_S
    return described.get("state") in ("JOB_STATE_FAILED", "JOB_STATE_CANCELLED") and is_fresh


def state_of(
    described: Mapping[str, Any],
    account: Mapping[str, Any] | None,
    *,
    limit_s: float,
    limit_reason: str,
    is_spot: bool,
    has_checkpoint: bool | None,
    now_s: float | None = None,
) -> State:
    """Return the state. `account` is the container's exit report; `limit_reason` the origin of the limit of `limit_s`.

    `has_checkpoint`: None if the bucket was not read; then the exit report decides.
    """
    name, now_s = str(described.get("state", "")), time.time() if now_s is None else now_s
    started_s, billed_s = _times(described, now_s)
    common: dict[str, Any] = {"started_s": started_s, "billed_s": billed_s, "restarts": accounts.restarts(account)}
    if not is_over(described):
        unknown: JobState = "pending" if started_s is None else "running"
        return State(_RUNNING.get(name, unknown), detail=_error(described)[1] or _DETAILS.get(name), **common)
    common["ended_s"] = seconds(described.get("endTime")) or now_s
    is_resumable = bool((account or {}).get("resumable")) if has_checkpoint is None else has_checkpoint
    if name.endswith("SUCCEEDED") and not name.endswith("PARTIALLY_SUCCEEDED"):
        return State("succeeded", **common)
    if name == "JOB_STATE_EXPIRED":
        return no_machines("no machines within limits.max_wait", resumable=is_resumable, **common)
    reason = (account or {}).get("reason")
    # At its time limit Vertex AI signals the containers, which report a preemption, and cancels or fails the job:
    # Google does not document which.
    is_out_of_time = billed_s >= limit_s - min(LIMIT_MARGIN_S, limit_s / 4) and reason in (None, "preempted")
    if (account or {}).get("state") == "succeeded" and (name == "JOB_STATE_CANCELLED" or is_out_of_time):
        return State("succeeded", detail=CUT_SHORT, **common)  # the end came while the containers copied files
    if name == "JOB_STATE_CANCELLED":
        why = limit_reason if is_out_of_time else reason if reason in ("time_limit", "budget") else "user"
        code, words = _error(described)
        return State("stopped", why, is_resumable, detail=words if code == NOT_FOUND else None, **common)
    if is_out_of_time:
        return State("stopped", limit_reason, is_resumable, detail=_error(described)[1] or None, **common)
    return _failed(described, account, is_resumable, common, is_spot=is_spot)


def _failed(
    described: Mapping[str, Any],
    account: Mapping[str, Any] | None,
    is_resumable: bool,
    common: dict[str, Any],
    *,
    is_spot: bool,
) -> State:
    code, words = _error(described)
    words = words or f"Vertex AI says {described.get('state')}, and not why"
    is_preempted = bool(_PREEMPTED.search(words))
    if common["started_s"] is None and (code == RESOURCE_EXHAUSTED or is_preempted):
        return no_machines(f"{words.rstrip('.')}; {NO_MACHINES}", resumable=is_resumable, **common)
    reason = (account or {}).get("reason")
    # A spot job whose reclaimed machines are not replaced fails with a lack of machines.
    is_taken = is_preempted or (is_spot and (code == RESOURCE_EXHAUSTED or reason == "preempted"))
    if is_taken and reason in (None, "preempted", "node_failure"):
        error = {"rank": None, "kind": "preempted", "message": words}
        return State("failed", "preempted", is_resumable, error, **common)
    is_fault = code in _FAULT_CODES or bool(_SIGNALLED.search(words))
    return accounts.failed(account, words, is_fault=is_fault, is_resumable=is_resumable, **common)


def _times(described: Mapping[str, Any], now_s: float) -> tuple[float | None, float]:
    """Return the start time, and the billed seconds.

    Vertex AI does not bill the queue. The start time is set once, at the first RUNNING, so the span includes restarts.
    """
    started_s, ended_s = seconds(described.get("startTime")), seconds(described.get("endTime"))
    return started_s, 0.0 if started_s is None else max(0.0, (ended_s or now_s) - started_s)


def _error(described: Mapping[str, Any]) -> tuple[int, str]:
    """Return the error's code (google.rpc.Code) and its message in one line, "" if the job has no error."""
    error = described.get("error") or {}
    return int(error.get("code") or 0), " ".join(str(error.get("message") or "").split())

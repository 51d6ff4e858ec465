"""Azure's description of a run as our state: state, reason, cause, and billed seconds."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from cloudtrain.launcher.backend import exit_report as accounts
from cloudtrain.launcher.job import JobState, State
from cloudtrain.launcher.text.times import seconds

from .status_history import OVER, WAITING, Details

_OVER: dict[str, JobState] = {"Completed": "succeeded", "Failed": "failed", "Canceled": "stopped"}
# The machines exist and are billed; the image is being copied to them.
_STARTING = ("Preparing", "Starting")
_PREEMPTED = re.compile(r"\bPreemptionError\b")
_FAULTS = re.compile(r"NodeFailure|NodeLost|UnusableNode|ServiceError|SystemError|InternalServerError", re.IGNORECASE)
_SPAN = re.compile(r"(?:(\d+)\.)?(\d+):(\d+):(\d+(?:\.\d+)?)")
COMPUTE_DURATION = "computeDuration"  # how long the job had its nodes, reported after the end
LATE_S = 20.0  # from a run's end until its containers' last lines are surely in their files
LIMIT_MARGIN_S = 15.0  # between the limit and the start time in Azure's answer


def state_of(
    details: Details,
    account: Mapping[str, Any] | None,
    *,
    limit_s: float,
    limit_reason: str,
    has_checkpoint: bool | None,
    idle_s: float = 0.0,
    now_s: float | None = None,
) -> State:
    """Return the state. `account` is the container's exit report; `limit_reason` the origin of the limit of `limit_s`.

    `has_checkpoint`: None if the storage was not read; then the exit report decides.
    """
    data = details.data
    started_s = seconds(data.get("startTimeUtc"))
    common: dict[str, Any] = {"started_s": started_s, "billed_s": _billed_s(data, now_s), "idle_s": idle_s or None}
    if not details.is_over:
        return State(_running(details.status), detail=_detail(details), **common)
    common["ended_s"] = seconds(data.get("endTimeUtc")) or started_s or time.time()
    common["billed_by"] = COMPUTE_DURATION if _SPAN.fullmatch(str(data.get(COMPUTE_DURATION) or "")) else None
    account = account or {}
    is_resumable = bool(account.get("resumable")) if has_checkpoint is None else has_checkpoint
    common["restarts"] = accounts.restarts(account)
    words = _words(data)
    if details.status == "Completed":
        return State("succeeded", **common)
    if _is_preempted(data) and account.get("kind") != "error":
        error = {"rank": None, "kind": "preempted", "message": words}
        return State("failed", "preempted", is_resumable, error, **common)
    if details.status == "Canceled":
        return State("stopped", _why_stopped(common, account, limit_s, limit_reason), is_resumable, **common)
    return accounts.failed(account, words, is_fault=bool(_FAULTS.search(words)), is_resumable=is_resumable, **common)


def may_report_more(details: Details) -> bool:
    """Return whether the containers' exit report of a failure may still arrive: files are written late."""
    has_run = bool(details.data.get("startTimeUtc")) and bool(details.log_files)
    return has_run and details.status == "Failed" and not _is_preempted(details.data) and is_fresh(details, LATE_S)


def is_fresh(details: Details, most_s: float) -> bool:
    """Return whether the run has ended in the last `most_s` seconds, by Azure's clock."""
    ended_s = seconds(details.data.get("endTimeUtc"))
    return ended_s is not None and abs(time.time() - ended_s) < most_s


def awaiting(details: Details, url: str | None) -> State:
    """Return the state of a run that is over but has not reported its reason yet."""
    started_s, detail = seconds(details.data.get("startTimeUtc")), "it has ended; waiting for the exit report"
    return State("stopping", detail=detail, started_s=started_s, billed_s=_billed_s(details.data, None), url=url)


def _is_preempted(data: Mapping[str, Any]) -> bool:
    return bool(_PREEMPTED.search(f"{_error(data).get('code', '')} {_words(data)}"))


def machine_of(data: Mapping[str, Any]) -> tuple[str, str]:
    """Return the machines' type and region; each is empty if the answer lacks the field."""
    compute = data.get("compute") or {}
    return str(compute.get("vmSize") or ""), str(compute.get("region") or "")


def _running(status: str) -> JobState:
    if status in ("CancelRequested", "Canceling"):
        return "stopping"
    return "pending" if status in WAITING or status in _STARTING else "running"


def _detail(details: Details) -> str | None:
    """Return Azure's warning and status, or a description of a state other than plain training."""
    warnings = details.data.get("warnings") or ()
    words = next((str(each.get("message")) for each in warnings if each.get("message")), "")
    if details.status in ("Running", "CancelRequested", *OVER):
        return words or None
    return f"{details.status}: {words}" if words else details.status


def _why_stopped(times: Mapping[str, Any], account: Mapping[str, Any], limit_s: float, limit_reason: str) -> str:
    if account.get("reason") in ("time_limit", "budget"):
        return str(account["reason"])
    begun, ended = times.get("started_s"), times["ended_s"]
    is_out_of_time = begun is not None and ended - begun >= limit_s - LIMIT_MARGIN_S
    return limit_reason if is_out_of_time else "user"


def _billed_s(data: Mapping[str, Any], now_s: float | None) -> float | None:
    """Return the seconds for which the job had its machines: Azure's own number, or the run's times before the end."""
    span = _SPAN.fullmatch(str(data.get(COMPUTE_DURATION) or ""))
    if span is not None and data.get("endTimeUtc"):
        days, hours, minutes, rest = span.groups()
        return int(days or 0) * 86_400 + int(hours) * 3600 + int(minutes) * 60 + float(rest)
    begun = seconds(data.get("startTimeUtc"))
    if begun is None:
        return 0.0
    end = seconds(data.get("endTimeUtc")) or (time.time() if now_s is None else now_s)
    return max(0.0, end - begun)


def _error(data: Mapping[str, Any]) -> Mapping[str, Any]:
    details = data.get("error") or {}
    inner: Mapping[str, Any] = details.get("error") or details
    return inner


def _words(data: Mapping[str, Any]) -> str:
    """Return the cause in one line, from Azure's message or code."""
    details = _error(data)
    words = str(details.get("message") or details.get("code") or "Azure gives no reason")
    return " ".join(words.split())

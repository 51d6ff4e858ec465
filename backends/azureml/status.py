"""A run in Azure's run history, and as our state: status, reason, cause, billed seconds, each log's address.

One answer (`details`) has all fields, with a fresh address for every log file; the address needs no further permission.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudtrain.launcher.backend import container_output as accounts
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.job import JobState, State, no_machines
from cloudtrain.launcher.text.times import seconds

from ..http import object_in
from . import api
from .api import Azure, AzureAccess
from .records import Workspace

OVER = ("Completed", "Failed", "Canceled")
# Until machines have the image. A status outside both lists is a status of a running run.
WAITING = ("NotStarted", "Unapproved", "Queued", "Scheduled", "Provisioning", "Pausing", "Paused", "Resuming")
# The machines exist and are billed; the image is being copied to them.
_STARTING = ("Preparing", "Starting")
_PREEMPTED = re.compile(r"\bPreemptionError\b")
_NO_MACHINES = re.compile(r"AllocationFailed|InsufficientCapacity|SkuNotAvailable|NotEnoughCores", re.IGNORECASE)
_FAULTS = re.compile(r"NodeFailure|NodeLost|UnusableNode|ServiceError|SystemError|InternalServerError", re.IGNORECASE)
_SPAN = re.compile(r"(?:(\d+)\.)?(\d+):(\d+):(\d+(?:\.\d+)?)")
COMPUTE_DURATION = "computeDuration"  # how long the job had its nodes, reported after the end
LATE_S = 20.0  # from a run's end until its containers' last lines are surely in their files
LIMIT_MARGIN_S = 15.0  # between the limit and the start time in Azure's answer


@dataclass(frozen=True)
class Details:
    """The answer: `log_files` maps names to addresses; `answered_s` is the time of the answer (time.monotonic)."""

    status: str
    data: Mapping[str, Any]
    log_files: Mapping[str, str]
    answered_s: float

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.status in OVER


def root_of(workspace: Workspace, services: Mapping[str, Any]) -> str | None:
    """Return the URL of the workspace's run history, from the services in the job's own answer."""
    endpoint = ((services or {}).get("Tracking") or {}).get("endpoint") or ""
    host = endpoint.partition("://")[2].partition("/")[0]
    return f"https://{host}/history/v1.0{workspace.arm_id}" if host else None


class RunHistory(Azure):
    """The process's connections to Azure, with the run history's newest answers, by job."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Details] = {}
        self._last_line_s: dict[str, float] = {}

    def details(self, workspace: Workspace, root: str, name: str, fresh_s: float = 0.0) -> Details:
        """Return the run history's answer, at most `fresh_s` seconds old. Raises UnreachableError."""
        held = self.known.get(name)
        if held is not None and time.monotonic() - held.answered_s < fresh_s:
            return held
        with api.polls(f"ask for {name}"):
            try:
                answer = AzureAccess(workspace, self).call("GET", f"{root}/runs/{name}/details")
            except api.AbsentError as error:
                message = f"Azure ML does not know {name} in the workspace {workspace.name}"
                raise UnreachableError(message, hint="was it deleted, or is this another account?") from error
            data = object_in(answer)
        try:
            found = Details(str(data["status"]), data, dict(data.get("logFiles") or {}), time.monotonic())
        except (ValueError, KeyError, TypeError) as error:
            raise UnreachableError(f"cannot ask for {name}: the run history's answer cannot be parsed") from error
        self.known[name] = found
        return found

    def heard(self, name: str) -> None:
        """Note that a line of the job has arrived."""
        self._last_line_s[name] = time.monotonic()

    def quiet_s(self, name: str) -> float:
        """Return the seconds since the job's last line, or since the first question for them."""
        now_s = time.monotonic()
        return now_s - self._last_line_s.setdefault(name, now_s)


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
        is_waiting = details.status in (*WAITING, *_STARTING)
        is_stopping = details.status in ("CancelRequested", "Canceling")
        state: JobState = "stopping" if is_stopping else "pending" if is_waiting else "running"
        return State(state, detail=_detail(details), **common)
    common["ended_s"] = seconds(data.get("endTimeUtc")) or started_s or time.time()
    common["billed_by"] = COMPUTE_DURATION if _SPAN.fullmatch(str(data.get(COMPUTE_DURATION) or "")) else None
    account = account or {}
    is_resumable = bool(account.get("resumable")) if has_checkpoint is None else has_checkpoint
    common["restarts"] = accounts.restarts(account)
    words = _words(data)
    if details.status == "Completed":
        return State("succeeded", **common)
    lacks_machines = _is_preempted(data) or bool(_NO_MACHINES.search(f"{_error(data).get('code', '')} {words}"))
    if lacks_machines and started_s is None and details.status == "Failed":
        return no_machines(words, resumable=is_resumable, **common)
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

"""A run as Azure's run history tells it: status, times, cause, and where each node's log is to be read.

One answer (`details`) says all of it, with a fresh address for every log file, which needs no further permission.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudtrain.backends.azureml import rest
from cloudtrain.backends.azureml.workspace import Workspace
from cloudtrain.launcher.errors import UnreachableError

__all__ = ["OVER", "WAITING", "Details", "details", "known", "root_of"]

OVER = ("Completed", "Failed", "Canceled")
# Until machines are there and the image is on them. A status that is not known here is of a run that runs.
WAITING = ("NotStarted", "Unapproved", "Queued", "Scheduled", "Provisioning", "Pausing", "Paused", "Resuming")


@dataclass(frozen=True)
class Details:
    """The answer: `log_files` are names and addresses; `told_s` is when it came (time.monotonic)."""

    status: str
    data: Mapping[str, Any]
    log_files: Mapping[str, str]
    told_s: float

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.status in OVER


_known: dict[str, Details] = {}


def root_of(workspace: Workspace, services: Mapping[str, Any]) -> str | None:
    """Return where the workspace's run history is, from what the job's own answer says of its services."""
    endpoint = ((services or {}).get("Tracking") or {}).get("endpoint") or ""
    host = endpoint.partition("://")[2].partition("/")[0]
    return f"https://{host}/history/v1.0{workspace.arm_id}" if host else None


def details(workspace: Workspace, root: str, name: str, *, fresh_s: float = 0.0) -> Details:
    """Return what the run history says now, or has said in the last `fresh_s` seconds. Raises UnreachableError."""
    held = _known.get(name)
    if held is not None and time.monotonic() - held.told_s < fresh_s:
        return held
    with rest.polls(f"ask for {name}"):
        try:
            audience = f"https://{rest.hosts(workspace.cloud)[0]}"
            answer = rest.call("GET", f"{root}/runs/{name}/details", cloud=workspace.cloud, audience=audience)
        except rest.AzureError as error:
            if not rest.is_absent(error):
                raise
            message = f"Azure ML does not know {name} in the workspace {workspace.name}"
            raise UnreachableError(message, hint="was it deleted, or is this another account?") from error
        data = rest.object_in(answer)
    try:
        told = Details(str(data["status"]), data, dict(data.get("logFiles") or {}), time.monotonic())
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(f"cannot ask for {name}: the run history's answer makes no sense") from error
    _known[name] = told
    return told


def known(name: str) -> Details | None:
    """Return the newest answer that this process has had, None without one."""
    return _known.get(name)

"""A run in Azure's run history: status, times, cause, and the address of each node's log.

One answer (`details`) has all fields, with a fresh address for every log file; the address needs no further permission.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudtrain.launcher.errors import UnreachableError

from ..http import object_in
from . import api
from .api import Azure, AzureAccess
from .records import Workspace

OVER = ("Completed", "Failed", "Canceled")
# Until machines have the image. A status outside both lists is a status of a running run.
WAITING = ("NotStarted", "Unapproved", "Queued", "Scheduled", "Provisioning", "Pausing", "Paused", "Resuming")


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
        self._known: dict[str, Details] = {}
        self._last_line_s: dict[str, float] = {}

    def details(self, workspace: Workspace, root: str, name: str, *, fresh_s: float = 0.0) -> Details:
        """Return the run history's answer, at most `fresh_s` seconds old. Raises UnreachableError."""
        held = self._known.get(name)
        if held is not None and time.monotonic() - held.answered_s < fresh_s:
            return held
        with api.polls(f"ask for {name}"):
            try:
                answer = AzureAccess(workspace, self).call("GET", f"{root}/runs/{name}/details")
            except api.AzureError as error:
                if not api.is_absent(error):
                    raise
                message = f"Azure ML does not know {name} in the workspace {workspace.name}"
                raise UnreachableError(message, hint="was it deleted, or is this another account?") from error
            data = object_in(answer)
        try:
            found = Details(str(data["status"]), data, dict(data.get("logFiles") or {}), time.monotonic())
        except (ValueError, KeyError, TypeError) as error:
            raise UnreachableError(f"cannot ask for {name}: the run history's answer cannot be parsed") from error
        self._known[name] = found
        return found

    def known(self, name: str) -> Details | None:
        """Return the newest answer in this process, or None."""
        return self._known.get(name)

    def heard(self, name: str) -> None:
        """Note that a line of the job has arrived."""
        self._last_line_s[name] = time.monotonic()

    def quiet_s(self, name: str) -> float:
        """Return the seconds since the job's last line, or since the first question for them."""
        now_s = time.monotonic()
        return now_s - self._last_line_s.setdefault(name, now_s)

"""The end of a job by its containers' exit report, the event `ended` of entrypoints/container/container.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cloudtrain.entrypoints import events

from ..job import JobState, State
from ..text import sanitize


def report_in(words: str) -> dict[str, Any] | None:
    """Return the exit report in a platform's message, which may add text around the report; None without a report."""
    if events.MARK not in words:
        return None
    text = re.sub(r", exit code: -?\d+\s*$", "", words)
    _, fields = events.parse(text[: text.rfind("}") + 1])
    return fields if fields is not None and fields["e"] == "ended" else None


def restarts(report: Mapping[str, Any] | None) -> int:
    """Return the number of restarts in the exit report; 0 without a report."""
    return sanitize.count((report or {}).get("restarts")) or 0


def failed(
    report: Mapping[str, Any] | None,
    words: str,
    *,
    is_fault: bool,
    is_resumable: bool,
    kind: str = "platform",
    **common: Any,
) -> State:
    """Return the end state by the exit report; without a report, by the platform's `words` and `kind`.

    `is_fault`: the platform reports a failed machine or service. A report with the reason `preempted` is then ignored,
    because the failure caused the preemption. A report of success is ignored, because the failure came later.
    `common` are state fields that depend on neither source.
    """
    is_earlier = report is not None and report.get("state") == "succeeded"
    if report and not is_earlier and not (is_fault and report.get("reason") == "preempted"):
        error = {key: report.get(key) for key in ("rank", "kind", "type", "message", "traceback")}
        error |= {"lines": report["lines"]} if report.get("lines") else {}
        state: JobState = "stopped" if report.get("state") == "stopped" else "failed"
        is_plain = state == "stopped" and report.get("kind") is None
        return State(state, report.get("reason"), is_resumable, None if is_plain else error, **common)
    error = {"rank": None, "kind": kind, "message": words}
    return State("failed", "node_failure" if is_fault else "error", is_resumable, error, **common)

"""Parses a container's output: the prefixes of container/log_relay.py, and the container's own events.

A job ends by its containers' exit report, the event `ended` of entrypoints/container/container.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.contract import sign_fields

from ..job import JobState, State
from ..text import sanitize
from ..text.times import seconds

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ")
_TAG = re.compile(r"\[(\d+)\] ")
_OWN = ("end", "ended")  # events of container/container.py for readers of the log's end, not its lines


class ContainerLine(NamedTuple):
    """A line. `rank` is None for a line of the node itself, `time_s` is None without a time stamp.

    `own`: the fields of an event by which the container reports its own end; `text` is then the whole line.
    """

    text: str
    rank: int | None = None
    time_s: float | None = None
    own: dict[str, Any] | None = None


def parse(raw: str, *, stamped: bool) -> ContainerLine:
    """Return the line without its prefixes. `stamped`: the log relay was set to add a time stamp to each line."""
    stamp = _STAMP.match(raw) if stamped else None
    text = raw[stamp.end() :] if stamp else raw
    time_s = seconds(stamp[1]) if stamp else None
    tag = _TAG.match(text)
    if tag:
        return ContainerLine(text[tag.end() :], int(tag[1]), time_s)
    if stamp is None and events.MARK in text:  # a line with a stamp comes through the log relay, not from the container
        fields = events.parse(text)[1]
        if fields is not None and fields["e"] in _OWN:
            return ContainerLine(text, own=fields)
    return ContainerLine(text, time_s=time_s)


def last_word(lines: Sequence[str], event: str, *, stamped: bool) -> dict[str, Any] | None:
    """Return the container's own event `event` at the end of the log, or None.

    Only blank lines and the container's own events may follow: otherwise the event is from an earlier container.
    """
    for line in reversed(lines):
        own = parse(line, stamped=stamped).own if line.strip() else {"e": None}
        if own is None or own["e"] == event:
            return own
    return None


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
        error |= sign_fields(report) | ({"lines": report["lines"]} if report.get("lines") else {})
        state: JobState = "stopped" if report.get("state") == "stopped" else "failed"
        is_plain = state == "stopped" and report.get("kind") is None
        return State(state, report.get("reason"), is_resumable, None if is_plain else error, **common)
    error = {"rank": None, "kind": kind, "message": words}
    return State("failed", "node_failure" if is_fault else "error", is_resumable, error, **common)

"""How a job has ended by its containers' own account, the event `ended` of entrypoints/container/container.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cloudtrain.entrypoints import events
from cloudtrain.launcher.job import JobState, State
from cloudtrain.launcher.store import sanitize

__all__ = ["failed", "restarts", "told_in"]


def told_in(words: str) -> dict[str, Any] | None:
    """Return the account that a platform has passed on, with words of its own around it; None where there is none."""
    if events.MARK not in words:
        return None
    text = re.sub(r", exit code: -?\d+\s*$", "", words)
    _, fields = events.parse(text[: text.rfind("}") + 1])
    return fields if fields is not None and fields["e"] == "ended" else None


def restarts(told: Mapping[str, Any] | None) -> int:
    """Return how often the containers have begun anew by themselves."""
    return sanitize.count((told or {}).get("restarts")) or 0


def failed(
    told: Mapping[str, Any] | None,
    words: str,
    *,
    is_fault: bool,
    is_resumable: bool,
    kind: str = "platform",
    **common: Any,
) -> State:
    """Return the end that the account tells, else what the platform says: in `words`, of that `kind`.

    `is_fault`: by the platform's words a machine or the service has failed, which is also why a container was told to
    make room. `common` are fields of the state that hang on neither.
    """
    if told and not (is_fault and told.get("reason") == "preempted"):
        error = {key: told.get(key) for key in ("rank", "kind", "type", "message", "traceback")}
        error |= {"lines": told["lines"]} if told.get("lines") else {}
        state: JobState = "stopped" if told.get("state") == "stopped" else "failed"
        is_plain = state == "stopped" and told.get("kind") is None
        return State(state, told.get("reason"), is_resumable, None if is_plain else error, **common)
    error = {"rank": None, "kind": kind, "message": words}
    return State("failed", "node_failure" if is_fault else "error", is_resumable, error, **common)

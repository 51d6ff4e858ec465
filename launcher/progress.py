"""How far a job is, folded from its event lines; what any backend's logs carry, a script's too if it prints them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from cloudtrain.entrypoints import events

__all__ = ["finite", "fold", "shown"]

_FROM_STEP = ("step", "max_steps", "loss", "lr", "samples_per_s", "eta_s", "epoch")


def fold(progress: dict[str, Any], lines: Iterable[str]) -> dict[str, Any]:
    """Return the progress after these lines of rank 0. JSON: a loss that is not finite becomes text."""
    now = dict(progress)
    for line in lines:
        if events.MARK not in line:
            continue
        _, event = events.parse(line)
        if event is None:
            continue
        kind = event["e"]
        if kind in ("start", "step", "done"):
            now |= {key: finite(event[key]) for key in _FROM_STEP if key in event}
        elif kind == "checkpoint" and "path" in event:
            now["checkpoint_step"] = event.get("step")
        if kind in ("eval", "done") and isinstance(event.get("metrics"), dict):
            now["metrics"] = {key: finite(value) for key, value in event["metrics"].items()}
        if isinstance(event.get("diagnosis"), dict):
            now["diagnosis"] = finite(event["diagnosis"])
    return now


def shown(progress: dict[str, Any]) -> str:
    """Return the progress in a few words: `step 120/2000 loss 1.234`."""
    if "step" not in progress:
        return ""
    of = f"/{progress['max_steps']}" if progress.get("max_steps") else ""
    loss = progress.get("loss")
    text = f"step {progress['step']}{of}"
    if loss is None:
        return text
    return f"{text} loss {loss:.4g}" if isinstance(loss, float | int) else f"{text} loss {loss}"


def finite(value: Any) -> Any:
    """Return the value with every number that JSON cannot hold as text: `nan`, `inf`."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

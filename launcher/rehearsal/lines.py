"""The output of a rehearsed start's ranks so far: their log files, read as they grow."""

from __future__ import annotations

import contextlib
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import events

__all__ = ["Account"]

SETTLE_S = 2.0  # after this time a save begun with a step is durable, or its event is being written
_RANK_LOG = re.compile(r"rank-(\d+)\.log")


@dataclass
class Account:
    """The events of rank 0, and the ranks with a log: boot has started these ranks after the rendezvous."""

    folders: tuple[Path, ...]  # of the nodes' agents
    steps: dict[int, float | None] = field(default_factory=dict)  # step -> loss, None if a script reports no loss
    events: list[dict[str, Any]] = field(default_factory=list)  # events except steps
    ranks: set[int] = field(default_factory=set)
    _read: dict[Path, int] = field(default_factory=dict)
    _reported_s: float = 0.0  # when the newest step was reported, by the monotonic clock

    def look(self) -> None:
        """Read new lines."""
        for folder in self.folders:
            for path in folder.glob("log/rank-*.log"):
                match = _RANK_LOG.fullmatch(path.name)
                if match is None:
                    continue
                self.ranks.add(int(match[1]))
                if int(match[1]) == 0:
                    self._take(path)

    def first(self, name: str) -> dict[str, Any] | None:
        """Return the first event of the given name."""
        return next((event for event in self.events if event["e"] == name), None)

    @property
    def last_step(self) -> int | None:
        """Return the last reported step, None before the first."""
        return max(self.steps, default=None)

    def is_settled(self) -> bool:
        """Return whether a checkpoint is durable, or no step was reported for SETTLE_S."""
        return any(event["e"] == "checkpoint" and "step" in event for event in self.events) or self._idle_s() > SETTLE_S

    @property
    def odd_steps(self) -> list[int]:
        """Return the steps with a loss that is not finite."""
        return sorted(step for step, loss in self.steps.items() if loss is not None and not math.isfinite(loss))

    def _idle_s(self) -> float:
        return time.monotonic() - self._reported_s

    def _take(self, path: Path) -> None:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                event = events.parse(line)[1] if events.MARK in line else None
                if event is not None:
                    self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        step, loss = event.get("step"), event.get("loss")
        if event["e"] == "step" and isinstance(step, int):
            self._reported_s = time.monotonic()
            self.steps[step] = float(loss) if isinstance(loss, (int, float)) else self.steps.get(step)
        else:
            self.events.append(event)

"""When to stop or save: what each rank noticed, agreed by all of them at an optimizer step.

A platform's SIGTERM reaches one node first, or one alone; a clock is read a little differently on each. So nobody acts
on what it saw by itself: a sum of six numbers over all ranks, begun before the step's last backward pass and read after
the optimizer's step, makes them all act at the same step. The loss to log rides along.

It costs 0.45 ms of CPU a rank (2 ranks on 2 busy cores, gloo's threads woken and put to sleep), a quarter of a tiny
model's step. So steps shorter than _EVERY_S share one: rank 0 says in each sum how many steps on the next one is.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

__all__ = ["Agreement", "Verdict"]

_EVERY_S = 0.05  # between agreements of short steps; longer steps have one each
_SPARE_S = 5.0  # the deadline's margin beyond a save and two steps: the last log lines, and leaving


@dataclass(frozen=True)
class Verdict:
    """What all ranks hold true: why to stop, if so; whether a timed save is due; the loss summed over ranks."""

    stop: str | None
    save: bool
    loss: float


class Agreement:
    """Holds this rank's signals and rank 0's clocks. Made before anything slow: it takes SIGTERM and SIGUSR1."""

    def __init__(self, deadline_s: float | None) -> None:
        self._deadline_s = deadline_s
        self._seen: set[int] = set()
        self._votes = torch.zeros(6, dtype=torch.float64)
        self._work: dist.Work | None = None
        self._left = 1  # steps until the next agreement, the same on all ranks
        self._keeps_time = False
        self._every_s: float | None = None
        self._saved_s = time.monotonic()
        self.save_s = 0.0  # how long a save takes: measured, or guessed from the model's size before the first
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._seen.add(number)

    def start(self, rank: int, every_s: float | None, save_s: float) -> None:
        """Begin the clocks, once the process group is there; rank 0's are the ones that count."""
        self._keeps_time = rank == 0
        self._every_s = every_s
        self._saved_s = time.monotonic()
        self.save_s = save_s

    def saved(self, seconds: float) -> None:
        """Note a save that ended just now and how long it took."""
        self._saved_s = time.monotonic()
        self.save_s = seconds

    def is_due(self, must: bool = False) -> bool:
        """Count one step; return whether the ranks agree in it. All ranks call it alike, so all get the same answer."""
        self._left -= 1
        return must or self._left <= 0

    def begin(self, step_s: float, loss: float = 0.0) -> None:
        """Send what this rank knows. Collective; `finish` follows."""
        # SIGTERM, SIGUSR1, deadline, timed save, loss, steps until the next agreement
        votes = [float(signal.SIGTERM in self._seen), float(signal.SIGUSR1 in self._seen), 0.0, 0.0, loss, 0.0]
        if self._keeps_time:
            margin_s = 1.5 * self.save_s + 2 * step_s + _SPARE_S
            votes[2] = float(self._deadline_s is not None and time.time() > self._deadline_s - margin_s)
            votes[3] = float(self._every_s is not None and time.monotonic() - self._saved_s > self._every_s)
            votes[5] = float(max(1, int(_EVERY_S / step_s))) if step_s else 1.0
        self._votes = torch.tensor(votes, dtype=torch.float64)
        self._work = dist.all_reduce(self._votes, async_op=True)

    def finish(self) -> Verdict:
        """Return what the ranks agreed on since `begin`; nothing, where none was due."""
        if self._work is None:
            return Verdict(None, False, 0.0)
        self._work.wait()
        self._work = None
        term, usr1, deadline, save, loss, left = self._votes.tolist()
        self._left = int(left)
        stop = "sigterm" if term else "sigusr1" if usr1 else "deadline" if deadline else None
        return Verdict(stop, bool(save), loss)

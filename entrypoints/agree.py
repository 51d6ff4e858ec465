"""When to stop or save: what each rank noticed, agreed by all of them at the same micro-batch.

A platform's SIGTERM reaches one node first, or one alone; a clock is read a little differently on each. So nobody acts
on what it saw by itself: a sum of eight numbers over all ranks, begun before a backward pass and read after it, makes
them all act at once. The loss to log rides along.

It costs 0.45 ms of CPU a rank (2 ranks on 2 busy cores, gloo's threads woken and put to sleep), a quarter of a tiny
model's step. So micro-batches shorter than _EVERY_S share one: rank 0 says in each sum how many on the next one is.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

__all__ = ["Agreement", "Verdict", "margin_s"]

_EVERY_S = 0.25  # between agreements of short micro-batches; longer ones have one each
_ASKED_EVERY_S = 1.0  # between looks for a file that asks for a save
_MOST = 1000  # polls without an agreement, and steps without a log line, whatever the clock says
_LINE_S = 2.0  # between log lines, where the user has not said how many steps
_SPARE_S = 5.0  # the deadline's margin beyond a save and two steps: the last log lines, and leaving


@dataclass(frozen=True)
class Verdict:
    """What all ranks hold true: why to stop; whether a save is due, or one has failed; the loss summed over ranks.

    `log_every`: the steps between log lines from here on, 0 where nothing was agreed.
    """

    stop: str | None = None
    save: bool = False
    failed: bool = False
    loss: float = 0.0
    log_every: int = 0


NOTHING = Verdict()


class Agreement:
    """Holds this rank's signals and rank 0's clocks. Made before anything slow: it takes SIGTERM and SIGUSR1."""

    def __init__(
        self, deadline_s: float | None, group: dist.ProcessGroup | None = None, *, is_alone: bool = False
    ) -> None:
        """`deadline_s`: the job's end on the monotonic clock. `group` makes the sums, by default all ranks.

        With `is_alone` the rank decides without a group.
        """
        self._deadline_s = deadline_s
        self._group = group
        self._is_alone = is_alone
        self._seen: set[int] = set()
        self._votes = torch.zeros(8, dtype=torch.float64)
        self._work: dist.Work | None = None
        self._has_begun = False
        self._left = 1  # polls until the next agreement, the same on all ranks
        self._keeps_time = False
        self._every_s: float | None = None
        self._ask_file: Path | None = None
        self._looked_s = 0.0
        self._save_waits = False
        self._saved_s = time.monotonic()
        self._save_s = 0.0  # how long a save takes: measured, or guessed from the model's size before the first
        self._upload_s = 0.0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._seen.add(number)

    def start(
        self, rank: int, every_s: float | None, save_s: float, ask_file: Path | None = None, upload_s: float = 0.0
    ) -> None:
        """Begin the clocks, once the process group is there; rank 0's count. `ask_file`, once there, asks to save.

        `save_s` and `upload_s` are guesses, which hold until the first save and the first upload have been timed.
        """
        self._keeps_time = rank == 0
        self._every_s = every_s
        self._ask_file = ask_file
        self._saved_s = time.monotonic()
        self._save_s = save_s
        if self._deadline_s is not None:  # a guess must not eat the time it is to protect
            most_s = max(0.0, 0.1 * (self._deadline_s - time.monotonic()))
            self._save_s, self._upload_s = min(save_s, most_s), min(upload_s, most_s)

    def hurry(self) -> None:
        """Have the next poll agree, however long the ones before took; all ranks call it."""
        self._left = 1

    @property
    def is_told_to_stop(self) -> bool:
        """Whether this rank has had a signal; the others may not."""
        return bool(self._seen)

    def saving(self) -> None:
        """Note that a save begins: the time to the next one counts from here."""
        self._saved_s = time.monotonic()
        self._save_waits = False
        if self._keeps_time and self._ask_file is not None:
            with contextlib.suppress(OSError):
                self._ask_file.unlink(missing_ok=True)

    def saved(self, seconds: float) -> None:
        """Note how long a save took until it was durable."""
        self._save_s = seconds

    def uploaded(self, seconds: float) -> None:
        """Note how long it took until a checkpoint was in the mirror too."""
        self._upload_s = seconds

    def uploading(self, seconds: float) -> None:
        """Note how long an upload under way has taken: at least as long will the last one."""
        self._upload_s = max(self._upload_s, seconds)

    def is_due(self, must: bool = False) -> bool:
        """Count one poll; return whether the ranks agree in it. All ranks call it alike, so all get the same answer."""
        self._left -= 1
        return must or self._left <= 0

    def begin(
        self, step_s: float, polls: int = 1, *, loss: float = 0.0, failed: bool = False, saving: bool = False
    ) -> None:
        """Send what this rank knows; collective, and `finish` follows.

        `step_s` is how long an optimizer step takes, with so many `polls`; `failed`: a save of this rank has;
        `saving`: one is under way, for which the one at the deadline would have to wait.
        """
        # SIGTERM, SIGUSR1, deadline, save, failed save, loss, polls until the next agreement, steps between log lines
        votes = [float(signal.SIGTERM in self._seen), float(signal.SIGUSR1 in self._seen), 0.0, 0.0, float(failed)]
        votes += [loss, 0.0, 0.0]
        if self._keeps_time:
            margin = margin_s(self._save_s, self._upload_s, step_s, saving=saving)
            votes[2] = float(self._deadline_s is not None and time.monotonic() > self._deadline_s - margin)
            votes[3] = float(self._save_is_due())
            votes[6] = float(min(max(1, int(_EVERY_S * polls / step_s)), _MOST)) if step_s else 1.0
            votes[7] = float(_log_every(step_s))
        self._votes = torch.tensor(votes, dtype=torch.float64)
        self._has_begun = True
        if not self._is_alone:
            self._work = dist.all_reduce(self._votes, group=self._group, async_op=True)

    def finish(self) -> Verdict:
        """Return what the ranks agreed on since `begin`; nothing, where none was due."""
        if not self._has_begun:
            return Verdict(save=True) if self._save_waits else NOTHING
        if self._work is not None:
            self._work.wait()
        self._work, self._has_begun = None, False
        term, usr1, deadline, save, failed, loss, left, log_every = self._votes.tolist()
        self._left = int(left)
        self._save_waits = self._save_waits or bool(save)  # agreed inside a step, it waits for the step's end
        stop = "sigterm" if term else "sigusr1" if usr1 else "deadline" if deadline else None
        return Verdict(stop, self._save_waits, bool(failed), loss, int(log_every))

    def _save_is_due(self) -> bool:
        now_s = time.monotonic()
        if self._every_s is not None and now_s - self._saved_s > self._every_s:
            return True
        if self._ask_file is None or now_s - self._looked_s < _ASKED_EVERY_S:
            return False
        self._looked_s = now_s
        try:
            return self._ask_file.exists()
        except OSError:  # a share that stumbles
            return False


def margin_s(save_s: float, upload_s: float, step_s: float, *, saving: bool = False) -> float:
    """Return how long before the end the job has to stop, by the times that its last save, upload and step took.

    An upload may be under way, too, for which the last one waits.
    """
    return (2.5 if saving else 1.5) * save_s + 2.5 * upload_s + 2 * step_s + _SPARE_S


def _log_every(step_s: float) -> int:
    """Return a round number of steps that take about _LINE_S: 1, 2, 5, 10, 20, ..."""
    wanted = _LINE_S / step_s if step_s else 10.0  # nothing is known before the first step
    size = 1
    while size * 10 <= wanted and size < _MOST:
        size *= 10
    return size * max(digit for digit in (1, 2, 5) if digit * size <= max(wanted, 1.0))

"""When to stop or save: the observations of all ranks, agreed at the same micro-batch.

A platform's SIGTERM reaches one node first, or only one; clocks differ a little between nodes. So no rank acts alone: a
sum of ten numbers over all ranks, begun before a backward pass and read after the pass, makes all act at once. The
sum also carries the loss.

A sum costs 0.45 ms of CPU per rank (2 ranks on 2 busy cores, gloo's threads woken and put to sleep), a quarter of a
tiny model's step. So micro-batches shorter than _EVERY_S share a sum: each sum carries rank 0's distance to the next
sum.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_EVERY_S = 0.25  # between agreements of short micro-batches; each longer micro-batch has an agreement
_ASKED_EVERY_S = 1.0  # between checks for a file that asks for a save
_MOST = 1000  # polls without an agreement, and steps without a log line, independent of the clock
_LINE_S = 2.0  # between log lines, if the user has set no number of steps
_SPARE_S = 5.0  # the deadline's margin beyond a save and two steps: the last log lines, and leaving


@dataclass(frozen=True)
class Agreed:
    """The agreement of all ranks: why to stop; whether a save is due, or has failed; the loss summed over ranks.

    `log_every`: the steps between log lines from now on, 0 without an agreement. `count`: the count of a loss that is a
    sum with a count. `pairs`: the ranks with such a loss, None without an agreement.
    """

    stop: str | None = None
    save: bool = False
    failed: bool = False
    loss: float = 0.0
    log_every: int = 0
    count: float = 0.0
    pairs: int | None = None


NOTHING = Agreed()


class Agreement:
    """Holds this rank's signals and rank 0's clocks. Create before any slow work: handles SIGTERM and SIGUSR1."""

    def __init__(
        self, deadline_s: float | None, group: dist.ProcessGroup | None = None, *, is_alone: bool = False
    ) -> None:
        """`deadline_s`: the job's end on the monotonic clock. `group` computes the sums, by default all ranks.

        With `is_alone` the rank decides without a group.
        """
        self._deadline_s = deadline_s
        self._group = group
        self._is_alone = is_alone
        self._seen: set[int] = set()
        self._votes: torch.Tensor | None = None  # from `begin` to `finish`
        self._work: dist.Work | None = None
        self._left = 1  # polls until the next agreement, the same on all ranks
        self._keeps_time = False
        self._every_s: float | None = None
        self._spacing_s = _EVERY_S
        self._ask_file: Path | None = None
        self._looked_s = 0.0
        self._save_waits = False
        self._saved_s = time.monotonic()
        self.save_s = 0.0  # of a save, until durable: measured, or before the first guessed from the model's size
        self.upload_s = 0.0  # of the last upload, or of the one in progress if that takes longer
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: self._seen.add(number))

    def start(
        self,
        rank: int,
        every_s: float | None,
        save_s: float,
        ask_file: Path | None = None,
        upload_s: float = 0.0,
        spacing_s: float = _EVERY_S,
    ) -> None:
        """Start the clocks, after the process group; rank 0's clocks count. A file at `ask_file` requests a save.

        `save_s` and `upload_s` are guesses, valid until the first save and the first upload have been timed.
        `spacing_s` is the time between agreements of short micro-batches.
        """
        self._spacing_s = spacing_s
        self._keeps_time = rank == 0
        self._every_s = every_s
        self._ask_file = ask_file
        self._saved_s = time.monotonic()
        self.save_s = save_s
        if self._deadline_s is not None:  # a guess must not use up the protected time
            most_s = max(0.0, 0.1 * (self._deadline_s - time.monotonic()))
            self.save_s, self.upload_s = min(save_s, most_s), min(upload_s, most_s)

    def hurry(self) -> None:
        """Make the next poll an agreement, independent of earlier durations; all ranks call it."""
        self._left = 1

    @property
    def is_told_to_stop(self) -> bool:
        """Whether this rank has received a signal; the other ranks may not have."""
        return bool(self._seen)

    def saving(self) -> None:
        """Record that a save begins: the time to the next save counts from now."""
        self._saved_s = time.monotonic()
        self._save_waits = False
        if self._keeps_time and self._ask_file is not None:
            with contextlib.suppress(OSError):
                self._ask_file.unlink(missing_ok=True)

    def is_due(self, must: bool = False) -> bool:
        """Count a poll; return whether the ranks agree in the poll. All ranks call it alike and get the same answer."""
        self._left -= 1
        return must or self._left <= 0

    def begin(
        self,
        step_s: float,
        polls: int = 1,
        *,
        loss: float = 0.0,
        failed: bool = False,
        saving: bool = False,
        count: float = 0.0,
        pairs: bool = False,
    ) -> None:
        """Send this rank's observations; collective, and `finish` follows.

        `step_s` is the duration of an optimizer step with `polls` polls; `failed`: a save of this rank has failed;
        `saving`: a save is in progress, and the save at the deadline would have to wait. `count`, `pairs`: see
        Agreed.
        """
        # SIGTERM, SIGUSR1, deadline, save, failed save, loss, polls until the next agreement, steps between log lines,
        # count, pairs
        votes = [float(signal.SIGTERM in self._seen), float(signal.SIGUSR1 in self._seen), 0.0, 0.0, float(failed)]
        votes += [loss, 0.0, 0.0, count, float(pairs)]
        if self._keeps_time:
            margin = margin_s(self.save_s, self.upload_s, step_s, saving=saving)
            votes[2] = float(self._deadline_s is not None and time.monotonic() > self._deadline_s - margin)
            votes[3] = float(self._save_is_due())
            votes[6] = float(min(max(1, int(self._spacing_s * polls / step_s)), _MOST)) if step_s else 1.0
            votes[7] = float(_log_every(step_s))
        self._votes = torch.tensor(votes, dtype=torch.float64)
        if not self._is_alone:
            self._work = dist.all_reduce(self._votes, group=self._group, async_op=True)

    def finish(self) -> Agreed:
        """Return the ranks' agreement since `begin`; NOTHING if no agreement was due."""
        if self._votes is None:
            return Agreed(save=True) if self._save_waits else NOTHING
        if self._work is not None:
            self._work.wait()
        term, usr1, deadline, save, failed, loss, left, log_every, count, pairs = self._votes.tolist()
        self._work = self._votes = None
        self._left = int(left)
        self._save_waits = self._save_waits or bool(save)  # a save agreed inside a step waits for the step's end
        stop = "sigterm" if term else "sigusr1" if usr1 else "deadline" if deadline else None
        return Agreed(stop, self._save_waits, bool(failed), loss, int(log_every), count, round(pairs))

    def _save_is_due(self) -> bool:
        now_s = time.monotonic()
        if self._every_s is not None and now_s - self._saved_s > self._every_s:
            return True
        if self._ask_file is None or now_s - self._looked_s < _ASKED_EVERY_S:
            return False
        self._looked_s = now_s
        try:
            return self._ask_file.exists()
        except OSError:  # a temporary failure of the share
            return False


def margin_s(save_s: float, upload_s: float, step_s: float, *, saving: bool = False) -> float:
    """Return how long before the end the job must stop, from the durations of the last save, upload and step.

    An upload may also be in progress, which the last upload waits for.
    """
    return (2.5 if saving else 1.5) * save_s + 2.5 * upload_s + 2 * step_s + _SPARE_S


def _log_every(step_s: float) -> int:
    """Return a round number of steps that take about _LINE_S: 1, 2, 5, 10, 20, ..."""
    wanted = _LINE_S / step_s if step_s else 10.0  # the duration is unknown before the first step
    size = 1
    while size * 10 <= wanted and size < _MOST:
        size *= 10
    return size * max(digit for digit in (1, 2, 5) if digit * size <= max(wanted, 1.0))

"""The schedules of a pipeline: the order of a stage's forward and backward passes, and the time that stages wait.

A model is cut into stages x chunks pieces; piece n is chunk n // stages of stage n % stages. Passes are numbered
through a step; pass i of a chunk's micro-batch follows from i alone.

    gpipe        all forward passes first (Huang et al. 2019)
    1f1b         keeps at most a micro-batch for each later stage (Narayanan et al. 2019, PipeDream-Flush)
    interleaved  several chunks a stage, which shortens the wait (Narayanan et al. 2021, section 2.2)
    async        1f1b that starts the next step's forward passes with older weights (PipeDream)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

SCHEDULES = ("1f1b", "gpipe", "interleaved", "async")


@dataclass(frozen=True)
class PassOrder:
    """The order of the passes of stage `stage` of `stages`, for `count` micro-batches a step."""

    schedule: str
    stages: int
    chunks: int
    stage: int
    count: int

    @property
    def passes(self) -> int:
        """The forward passes of a step."""
        return self.count * self.chunks

    @property
    def ahead(self) -> int:
        """The number of forward passes that a backward pass is behind, at most."""
        later = self.stages - 1 - self.stage
        if self.schedule == "gpipe":
            return self.passes - 1
        return 2 * later + (self.chunks - 1) * self.stages if self.chunks > 1 else later

    def forward(self, number: int) -> tuple[int, int]:
        """Return the chunk and the micro-batch of a forward pass: rounds of `stages` micro-batches, chunk by chunk."""
        round_, rest = divmod(number, self.stages * self.chunks)
        return rest // self.stages, round_ * self.stages + rest % self.stages

    def backward(self, number: int) -> tuple[int, int]:
        """Return the chunk and the micro-batch of a backward pass: as forward, with the last chunk first."""
        chunk, micro_batch = self.forward(number)
        return self.chunks - 1 - chunk, micro_batch


def idle_share(schedule: str, times: Sequence[float], chunks: int, micro_batches: int) -> float:
    """Return the share of a step in which the stages wait, from the time of a micro-batch in each stage.

    A step takes m + (p - 1) / v times the slowest stage's time: exact for equal stages (Narayanan et al. 2021, section
    2.2), an upper bound for others. `async` does not wait at the ends of steps.
    """
    filling = 0.0 if schedule == "async" else (len(times) - 1) / chunks
    return 1 - micro_batches * sum(times) / len(times) / ((micro_batches + filling) * max(times))


def balanced(times: Sequence[float], pieces: int) -> list[int]:
    """Return the first block of each piece, such that the slowest piece takes the least time. Exact, in O(pieces n^2).

    Every piece has a block at least.
    """
    sums = [0.0, *itertools.accumulate(times)]
    # best[end]: the slowest piece's time, and the starts, for the blocks before `end` in the pieces so far
    best = {end: (sums[end], [0]) for end in range(1, len(times) + 1)}
    for _ in range(pieces - 1):
        best = {
            end: min(
                (max(slowest, sums[end] - sums[cut]), [*starts, cut])
                for cut, (slowest, starts) in best.items()
                if cut < end
            )
            for end in range(min(best) + 1, len(times) + 1)
        }
    return best[len(times)][1]

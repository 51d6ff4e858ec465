"""The expected step time of methods that send less or wait less, from a measured step. Standard library only.

Times: a ring all-reduce of P bytes takes 2 (N - 1) / N x P / B on N ranks with B bytes a second; an all-gather of codes
(N - 1) x code / B. So compression by c gains 2 c / N over a ring, and the gain ends at many ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PERIOD, DENSITY = 16, 0.01  # the defaults of `local` and `compression_density`
_CODE_BYTES = 2  # of an entry that is sent: 15 bits of gap and a sign
_CODE_S = 4.4e-9  # of each gradient element: 44 ms for 10 M on one core, benchmarks/trainer/codes.py
_UNEVEN = 1.2  # times the median rank
_NOTABLE = 0.05  # of the step: a smaller saving is none


@dataclass(frozen=True)
class MeasuredStep:
    """A step of ddp: seconds without the network, bytes of all gradients, and the network's bytes a second for a rank.

    `rank_s`: the seconds of each rank without the network, if they were measured apart. `states`: the tensors that the
    optimizer keeps for a weight, which `local` averages too.
    """

    compute_s: float
    gradient_bytes: float
    bandwidth: float
    states: int = 2
    rank_s: tuple[float, ...] = ()

    def ring_s(self, ranks: int) -> float:
        """Return the seconds of an all-reduce of all gradients."""
        return 2 * (ranks - 1) / ranks * self.gradient_bytes / self.bandwidth


@dataclass(frozen=True)
class ExpectedStep:
    """A method by its settings, and the expected seconds of its step."""

    settings: str
    step_s: float


def expected_steps(found: MeasuredStep, ranks: int) -> list[ExpectedStep]:
    """Return the expected steps, the shortest first; with ddp as `strategy: ddp`.

    Uneven ranks add async, which does not wait for the slowest rank: its steps are the ranks' mean rate.
    """
    compute_s, ring_s = found.compute_s, found.ring_s(ranks)
    codes = found.gradient_bytes / 4 * DENSITY * _CODE_BYTES * (ranks - 1) / found.bandwidth
    steps = [
        ExpectedStep("strategy: ddp", compute_s + ring_s),
        ExpectedStep("compression: bf16", compute_s + ring_s / 2),
        ExpectedStep(
            f"compression: threshold, {100 * DENSITY:g} %", compute_s + codes + found.gradient_bytes / 4 * _CODE_S
        ),
        ExpectedStep(f"strategy: local, period {PERIOD}", compute_s + ring_s * (1 + found.states) / PERIOD),
    ]
    if found.rank_s and max(found.rank_s) > _UNEVEN * statistics.median(found.rank_s):
        mean_s = len(found.rank_s) / sum(1 / seconds for seconds in found.rank_s)
        steps.append(ExpectedStep("strategy: async", max(mean_s, found.gradient_bytes * 2 / found.bandwidth)))
    return sorted(steps, key=lambda step: step.step_s)


def in_words(found: MeasuredStep, ranks: int, steps: Sequence[ExpectedStep]) -> str:
    """Return the savings beside ddp: `at 0.94 Gbit/s: strategy: local, period 16 saves 41 % of a step; ...`."""
    base_s = next(step.step_s for step in steps if step.settings == "strategy: ddp")
    saved = [(step.settings, 1 - step.step_s / base_s) for step in steps if step.settings != "strategy: ddp"]
    good = [f"{name} saves {100 * share:.0f} %" for name, share in saved if share >= _NOTABLE]
    bad = [name for name, share in saved if share < _NOTABLE]
    rest = [f"{', '.join(bad)} save{'s' if len(bad) == 1 else ''} nothing"] if bad else []
    return f"at {found.bandwidth * 8 / 1e9:.2g} Gbit/s and {ranks} ranks: {'; '.join([*good, *rest])}"

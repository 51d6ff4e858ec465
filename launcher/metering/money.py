"""The money of a job, a sweep, a project or a month: the only place where what is left is computed, and written."""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.entrypoints.format import dollars, most


@dataclass(frozen=True)
class Money:
    """Sums in micro-dollars; `held_micro` is the most that running attempts may cost beyond `spent_micro`.

    None is an unknown sum; a `limit_micro` of None is no limit.
    """

    spent_micro: int | None
    held_micro: int | None
    limit_micro: int | None
    projected_micro: int | None

    @property
    def left_micro(self) -> int | None:
        """The limit minus spent and held money, at least 0; None without a limit, or if a sum is unknown."""
        if self.limit_micro is None or self.spent_micro is None or self.held_micro is None:
            return None
        return max(0, self.limit_micro - self.spent_micro - self.held_micro)

    @property
    def percent(self) -> int | None:
        """The spent part of the limit, rounded down, as alerts count; None without a limit, or if unknown."""
        return None if self.spent_micro is None or not self.limit_micro else 100 * self.spent_micro // self.limit_micro

    @property
    def words(self) -> str:
        """`1.23 USD of 10.00 USD, 12 %`, or only the spent money if no limit is set."""
        share = "" if self.percent is None else f", {self.percent} %"
        limit = "" if self.limit_micro is None else f" of {dollars(self.limit_micro)}"
        return f"{most(self.spent_micro)}{limit}{share}"

"""The plan of an attempt: numbers only, decided before anything is sent (planning/planner.py)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Batch", "Plan"]


@dataclass(frozen=True)
class Batch:
    """How one optimizer step's samples are split: global = micro x ranks x accumulation."""

    global_size: int
    micro_size: int
    accumulation: int


@dataclass(frozen=True)
class Plan:
    """Money in US dollars, or in whole micro-dollars in fields with `micro`; times in seconds after the start.

    `cap_s` is enforced by the backend, because of `cap_reason` (time_limit or budget). The job's own clock begins
    later, and ends the job at `own_limit_s`; at `deadline_s` by the same clock, the job saves and leaves, unless
    `deadline_s` is `own_limit_s`. `price_micro` is the price of an instance for an hour, `hourly_usd` the price of all
    instances; the cost is at most `uncertainty` times as high. `worst_case_micro` is for this attempt, with all
    `attempts` (starts by the platform), and with `tail_s` billed after each cap; `useful_s` is the shortest cap that is
    worth its money. `budget_micro` is the job's, of which `spent_micro` was spent before; `unpriced_budget_micro` is a
    budget that does not apply, because the user's own machines have no price. `saves`: cloudtrain saves the job's state
    at a stop; without `saves` a script only gets SIGTERM, and the files of the config's `keep` stay if `keeps`.
    """

    instances: int
    nproc_per_node: int
    ranks: int
    gpus_per_instance: int
    hourly_usd: float | None
    price_source: str
    cap_s: int
    cap_reason: str
    deadline_s: int
    worst_case_usd: float | None
    batch: Batch | None
    machine: str = ""
    price_micro: int | None = None
    uncertainty: float = 1.0
    price_as_of: str | None = None
    own_limit_s: int = 0
    tail_s: int = 0
    useful_s: int | None = None
    unit_s: int = 1
    minimum_bill_s: int = 0
    attempts: int = 1
    worst_case_micro: int | None = None
    budget_micro: int | None = None
    spent_micro: int = 0
    on_limit: str | None = None
    alert_micro: tuple[int, ...] = ()
    unpriced_budget_micro: int | None = None
    saves: bool = True
    keeps: bool = False
    is_spot_price: bool = False

    def dump(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

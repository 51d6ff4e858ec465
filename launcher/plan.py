"""The plan of an attempt: numbers only, decided before anything is sent (planning/planner.py)."""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.entrypoints.records import Record


@dataclass(frozen=True)
class Batch(Record, checks=True):
    """How one optimizer step's samples are split: global = micro x ranks / (tensor x pipeline) x accumulation.

    The ranks that hold one copy of the model, `tensor` times `pipeline`, compute the same samples. `bubble` is the
    share of a step in which a stage of a pipeline waits, for stages of equal time.
    """

    global_size: int
    micro_size: int
    accumulation: int
    tensor: int = 1
    pipeline: int = 1
    bubble: float = 0.0

    def data_ranks(self, ranks: int) -> int:
        """Return how many copies of the model so many ranks hold."""
        return ranks // (self.tensor * self.pipeline)

    def fits(self, ranks: int) -> bool:
        """Return whether so many ranks share the micro-batches evenly."""
        copies, rest = divmod(ranks, self.tensor * self.pipeline)
        return not rest and copies > 0 and self.global_size // self.micro_size % copies == 0


@dataclass(frozen=True, kw_only=True)
class Plan(Record, checks=True):
    """Money in US dollars, or in whole micro-dollars in fields with `micro`; times in seconds after the start.

    `cap_s` is enforced by the backend, because of `cap_reason` (time_limit or budget). The job's own clock begins
    later, and ends the job at `own_limit_s`; at `deadline_s` by the same clock, the job saves and leaves, unless
    `deadline_s` is `own_limit_s`. `price_micro` is the price of an instance for an hour, `hourly_usd` the price of all
    instances; the cost is at most `uncertainty` times as high. `worst_case_micro` is for this attempt, with all
    `attempts` (starts by the platform), and with `tail_s` billed after each cap; `useful_s` is the shortest cap that is
    worth its money. `budget_micro` is the job's, of which `spent_micro` was spent before; `unpriced_budget_micro` is a
    budget that does not apply, because the user's own machines have no price. `saves`: cloudtrain saves the job's state
    at a stop; without `saves` a script only gets SIGTERM, and the files of the config's `keep` stay if `keeps`.
    A node of a packed sweep has one rank, which starts `slots` trials of `slot_ranks` ranks each.
    """

    instances: int
    nproc_per_node: int
    ranks: int
    gpus_per_instance: int = 0
    hourly_usd: float | None = None
    price_source: str = ""
    cap_s: int
    cap_reason: str = ""
    deadline_s: int = 0
    worst_case_usd: float | None = None
    batch: Batch | None = None
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
    slots: int = 0
    slot_ranks: int = 0

    @property
    def devices_per_node(self) -> int:
        """The number of processes that train on a node at once."""
        return self.slots * self.slot_ranks or self.nproc_per_node

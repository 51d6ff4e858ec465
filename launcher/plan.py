"""The plan of an attempt: numbers only, decided before anything is sent (planning/planner.py); and a job's runtime."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloudtrain.entrypoints.records import Record
from cloudtrain.entrypoints.terms import CostRate, Terms

UNKNOWN_MICRO = -1  # in place of an amount


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
class Plan(Record, checks=True, optional="saved_step faults is_unlisted"):
    """The numbers of an attempt: money in micro-dollars (`micro`) or US dollars, times in seconds after the start."""

    instances: int
    nproc_per_node: int
    ranks: int
    gpus_per_instance: int = 0
    machine: str = ""
    batch: Batch | None = None

    price_micro: int | None = None
    """The price of an instance for an hour."""
    hourly_usd: float | None = None
    """The price of all instances for an hour."""
    uncertainty: float = 1.0
    """The cost is at most so many times as high."""
    price_source: str = ""
    price_as_of: str | None = None
    is_spot_price: bool = False
    is_unlisted: bool = False
    """Under an owner's limit: only the config's `price_per_hour` knows the price of the vendor's machine."""
    terms: Terms = field(default_factory=Terms)

    cap_s: int
    """The time after which the backend ends the job."""
    cap_reason: str = ""
    """time_limit or budget."""
    own_limit_s: int = 0
    """The end by the job's own clock, which begins later."""
    deadline_s: int = 0
    """When the job saves and leaves, by its own clock; without a save if the same as `own_limit_s`."""

    worst_case_micro: int | None = None
    """Of this attempt, with all starts by the platform and the time billed after each cap."""
    worst_case_usd: float | None = None
    hold_micro: int | None = None
    """Of a job with several candidates: what is reserved in place of the worst case, the dearest candidate's worst case
    and the fee of a late start; UNKNOWN_MICRO if a candidate has no price; else None."""
    budget_micro: int | None = None
    """The job's budget, of which `spent_micro` was spent before."""
    spent_micro: int = 0
    on_limit: str | None = None
    alert_micro: tuple[int, ...] = ()
    unpriced_budget_micro: int | None = None
    """A budget that does not apply, because the user's own machines have no price."""

    saves: bool = True
    """cloudtrain saves the job's state at a stop; otherwise a script only gets `stop_signal`."""
    stop_signal: str = "SIGTERM"
    keeps: bool = False
    """The files of the config's `keep` stay."""
    slots: int = 0
    """The trials at once on a node of a sweep, which has one rank; 1 for a trial of several nodes."""
    slot_ranks: int = 0
    """The ranks of a trial on a node."""
    slot_instances: int = 1
    """The nodes of a trial."""

    saved_step: int | None = None
    """The newest step that earlier attempts have saved, from which this attempt must not start earlier in silence."""
    faults: int = 0
    """How many attempts of `retry.max_attempts` earlier attempts have used up."""

    @property
    def rate(self) -> CostRate | None:
        """The price of time; None if unknown."""
        return None if self.price_micro is None else CostRate(self.instances, self.price_micro, self.uncertainty)

    @property
    def lists_machines(self) -> bool:
        """Whether the platform chooses among several machines; the price is the dearest machine's."""
        return "," in self.machine

    @property
    def most_micro(self) -> int | None:
        """What may be billed at worst, and is reserved: the worst case of the dearest candidate."""
        held_micro = self.worst_case_micro if self.hold_micro is None else self.hold_micro
        return None if held_micro == UNKNOWN_MICRO else held_micro

    @property
    def devices_per_node(self) -> int:
        """The number of processes that train on a node at once."""
        return self.slots * self.slot_ranks or self.nproc_per_node


@dataclass(frozen=True)
class Runtime:
    """The image, environment or interpreter of a job, with the facts of the name (planning/images.py)."""

    name: str
    how: str
    """The owner, and the way to the nodes."""
    key: str = "image"
    """The config's key."""
    python: tuple[int, ...] | None = None
    torch: tuple[tuple[int, ...], ...] = ()
    """The version of today, then of older builds with the name; empty if unknown."""
    cuda: str | None = None
    compiler: str | None = None
    """C or C++ (which implies C); empty without a compiler, None if unknown."""
    is_sure: bool = False
    """The form of the name is in the table of vendors' names."""

"""What a job will be before anything is sent: ranks, batch split, cap and worst-case bill."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.errors import BudgetError, ConfigError, Fault

if TYPE_CHECKING:
    from cloudtrain.launcher.backend import Capacity
    from cloudtrain.launcher.config.schema import Config

__all__ = ["STOP_TAIL_S", "Batch", "Plan", "make"]

LEAST_RUN_S = 60  # shorter than a start: the money would be gone before the first step
STOP_TAIL_S = 120  # between the save and the cap: what SageMaker leaves between SIGTERM and the kill


@dataclass(frozen=True)
class Batch:
    """How one optimizer step's samples are split: global = micro x ranks x accumulation."""

    global_size: int
    micro_size: int
    accumulation: int


@dataclass(frozen=True)
class Plan:
    """Money in US dollars, times in seconds after the start.

    `cap_s` is what the backend enforces by itself, because of `cap_reason` (time_limit or budget); from `deadline_s`
    on the job saves and leaves.
    `hourly_usd` is for all instances together.
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

    def dump(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the plan for people."""
        from cloudtrain.launcher.units import format_duration

        device = "GPU" if self.gpus_per_instance else "CPU"
        instances = f"{self.instances} instance{'s' if self.instances != 1 else ''}"
        ranks = f"{self.ranks} rank{'s' if self.ranks != 1 else ''}"
        lines = [f"{instances} x {self.nproc_per_node} = {ranks} ({device})"]
        if self.batch is not None:
            b = self.batch
            split = f"{b.micro_size} x {ranks} x {b.accumulation} accumulated"
            lines.append(f"global batch {b.global_size} = {split}")
        why = ", what the budget buys" if self.cap_reason == "budget" else ""
        lines.append(
            f"at most {format_duration(self.cap_s)}{why}; after {format_duration(self.deadline_s)} it saves and stops"
        )
        if self.hourly_usd is None:
            lines.append(f"price unknown: {self.price_source}")
        elif self.hourly_usd == 0:
            lines.append(f"no cost: {self.price_source}")
        else:
            lines.append(
                f"{self.hourly_usd:.2f} USD an hour ({self.price_source}), at worst {self.worst_case_usd:.2f} USD"
            )
        return lines


def make(config: Config, capacity: Capacity, spent_usd: float = 0.0) -> Plan:
    """Return the plan of the next attempt, after earlier ones have cost `spent_usd`.

    Raises ConfigError where the batch cannot be split over the ranks or a budget has no price to count with;
    BudgetError where the money left buys less than LEAST_RUN_S.
    """
    instances = config.resources.instances
    wanted = config.distributed.nproc_per_node
    nproc = max(1, capacity.gpus) if wanted == "auto" else int(wanted)
    hourly = None if capacity.hourly_usd is None else round(capacity.hourly_usd * instances, 6)
    if capacity.gpus and nproc > capacity.gpus:
        message = f"{nproc} ranks on an instance with {capacity.gpus} GPUs: each needs one of its own"
        raise ConfigError([Fault(message, key="distributed.nproc_per_node", hint="leave it at `auto`")])
    cap_s, cap_reason = _cap(config, hourly, spent_usd, capacity)
    return Plan(
        instances=instances,
        nproc_per_node=nproc,
        ranks=instances * nproc,
        gpus_per_instance=capacity.gpus,
        hourly_usd=hourly,
        price_source=capacity.price_source,
        cap_s=cap_s,
        cap_reason=cap_reason,
        deadline_s=max(cap_s - STOP_TAIL_S, cap_s * 3 // 4),
        worst_case_usd=None if hourly is None else round(hourly * (cap_s + capacity.idle_s) / 3600, 6),
        batch=_split(config, instances * nproc) if config.task else None,
    )


def _cap(config: Config, hourly_usd: float | None, spent_usd: float, capacity: Capacity) -> tuple[int, str]:
    """Return the seconds that the job may run, and whether time or money sets them: only a time limit holds alone."""
    idle_s = capacity.idle_s
    longest_s = config.limits.max_duration
    budget = config.budget
    if budget is None or budget.on_limit == "alert" or hourly_usd == 0:
        return longest_s, "time_limit"
    if hourly_usd is None:
        message = f"a budget needs a price: {capacity.price_source}"
        raise ConfigError([Fault(message, key="budget.limit", hint=f"set {config.backend}.price_per_hour")])
    left_usd = budget.limit / 1e6 - spent_usd
    affordable_s = int(left_usd / hourly_usd * 3600) - idle_s
    if affordable_s < LEAST_RUN_S:
        needed = spent_usd + hourly_usd * (LEAST_RUN_S + idle_s) / 3600
        raise BudgetError(
            f"the budget's last {max(left_usd, 0):.2f} USD buy {max(affordable_s, 0)} s at {hourly_usd:.2f} USD/h",
            where="budget.limit",
            hint=f"a run of {LEAST_RUN_S} s needs at least {needed:.2f} USD, or fewer instances",
        )
    return (affordable_s, "budget") if affordable_s < longest_s else (longest_s, "time_limit")


def _split(config: Config, ranks: int) -> Batch | None:
    training = config.training
    if training is None:
        return None
    size = training.global_batch_size
    micro = training.micro_batch_size or max(1, size // ranks)
    if size % (micro * ranks):
        step = micro * ranks
        below, above = size // step * step, (size // step + 1) * step
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            [
                Fault(
                    f"a global batch of {size} cannot be split over {ranks} ranks in micro-batches of {micro}",
                    key="training.global_batch_size",
                    hint=f"use {near}, or another micro_batch_size: global = micro x ranks x accumulation",
                )
            ]
        )
    return Batch(size, micro, size // (micro * ranks))

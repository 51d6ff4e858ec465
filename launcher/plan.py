"""What a job will be before anything is sent: ranks, batch split, cap and worst-case bill."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.errors import ConfigError, Fault

if TYPE_CHECKING:
    from cloudtrain.launcher.backend import Capacity
    from cloudtrain.launcher.schema import Config

__all__ = ["STOP_TAIL_S", "Batch", "Plan", "make"]

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

    `cap_s` is what the backend enforces by itself; from `deadline_s` on the job saves and leaves.
    `hourly_usd` is for all instances together.
    """

    instances: int
    nproc_per_node: int
    ranks: int
    gpus_per_instance: int
    hourly_usd: float | None
    price_source: str
    cap_s: int
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
        s = "" if self.instances == 1 else "s"
        lines = [f"{self.instances} instance{s} x {self.nproc_per_node} = {self.ranks} ranks ({device})"]
        if self.batch is not None:
            b = self.batch
            split = f"{b.micro_size} x {self.ranks} ranks x {b.accumulation} accumulated"
            lines.append(f"global batch {b.global_size} = {split}")
        lines.append(f"at most {format_duration(self.cap_s)}, then it saves and stops")
        if self.hourly_usd is None:
            lines.append("price unknown")
        elif self.hourly_usd == 0:
            lines.append(f"no cost: {self.price_source}")
        else:
            lines.append(
                f"{self.hourly_usd:.2f} USD an hour ({self.price_source}), at worst {self.worst_case_usd:.2f} USD"
            )
        return lines


def make(config: Config, capacity: Capacity) -> Plan:
    """Return the plan. Raises ConfigError where the batch cannot be split over the ranks."""
    instances = config.resources.instances
    wanted = config.distributed.nproc_per_node
    nproc = max(1, capacity.gpus) if wanted == "auto" else int(wanted)
    cap_s = config.limits.max_duration
    hourly = None if capacity.hourly_usd is None else round(capacity.hourly_usd * instances, 6)
    return Plan(
        instances=instances,
        nproc_per_node=nproc,
        ranks=instances * nproc,
        gpus_per_instance=capacity.gpus,
        hourly_usd=hourly,
        price_source=capacity.price_source,
        cap_s=cap_s,
        deadline_s=max(cap_s - STOP_TAIL_S, cap_s * 3 // 4),
        worst_case_usd=None if hourly is None else round(hourly * cap_s / 3600, 6),
        batch=_split(config, instances * nproc) if config.task else None,
    )


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

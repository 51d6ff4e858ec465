"""The config block of the backend, and the partitions of the scheduler."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from cloudtrain.launcher.config.kinds import Money, Section, Text

__all__ = ["PARTITIONS", "Partition", "Processes"]


@dataclass(frozen=True)
class Partition:
    """A group of equal nodes: the number of nodes, and the price of a node for an hour in micro-dollars."""

    nodes: int
    price_micro: int


PARTITIONS = {"small": Partition(2, 50_000), "large": Partition(8, 200_000)}


class Processes(Section):
    """A small scheduler on this machine."""

    partition: Literal["small", "large"] = Field(
        "small", description="Group of nodes that runs the job: 2 small nodes, or 8 large nodes.", examples=["large"]
    )
    python: Text | None = Field(
        None, description="Interpreter that runs the job. Default: cloudtrain's own.", examples=["/opt/venv/bin/python"]
    )
    price_per_hour: Money | None = Field(
        None, description="Price of a node for an hour, in US dollars; beats the partition's.", examples=["0.10 USD"]
    )

"""A job's requirements for its hosts, and the facts that the hosts report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Facts", "HostRequirements"]

Facts = Mapping[str, Mapping[str, Any]]  # host -> the report of survey.facts


@dataclass(frozen=True)
class HostRequirements:
    """The job's requirements for each host: `ranks`, and `gpus` (0: none).

    `ranks_are_chosen`: the config sets the number of ranks, so idle GPUs may be intended. `gpu_model`: the config's
    name. `has_own_torch`: the job's environment brings torch.
    """

    ranks: int
    gpus: int
    ranks_are_chosen: bool = False
    allow_busy: bool = False
    gpu_model: str | None = None
    has_own_torch: bool = False

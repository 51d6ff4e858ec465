"""What a job wants of its hosts, and what they have told of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Facts", "Wish"]

Facts = Mapping[str, Mapping[str, Any]]  # host -> what survey.facts told of it


@dataclass(frozen=True)
class Wish:
    """What the job wants of each host: `ranks`, and `gpus` (0: none).

    `ranks_are_chosen`: the config says how many ranks, so that leaving GPUs idle may be meant. `gpu_model` as the
    config calls it. `has_own_torch`: what the job runs in brings one.
    """

    ranks: int
    gpus: int
    ranks_are_chosen: bool = False
    allow_busy: bool = False
    gpu_model: str | None = None
    has_own_torch: bool = False

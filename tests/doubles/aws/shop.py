"""The account's registered models, endpoints and schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Params = dict[str, Any]


@dataclass
class Shop:
    """The models, endpoints and schedules of the account, by name."""

    groups: dict[str, Params] = field(default_factory=dict)
    packages: dict[str, list[Params]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    models: dict[str, Params] = field(default_factory=dict)
    configs: dict[str, Params] = field(default_factory=dict)
    endpoints: dict[str, Params] = field(default_factory=dict)
    schedules: dict[str, Params] = field(default_factory=dict)

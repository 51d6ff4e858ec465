"""A vendor's answer for a machine type: a price, or the reason why no price was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cloudtrain.launcher.prices.rate import Kind, Rate

__all__ = ["Key", "Quote"]


class Key(NamedTuple):
    """The identity of a price."""

    backend: str
    instance_type: str
    region: str
    kind: Kind


@dataclass(frozen=True)
class Quote:
    """A price read from the vendor, or the `reason` for its absence. `key.instance_type` is "" for a whole list."""

    key: Key
    rate: Rate | None
    reason: str = ""

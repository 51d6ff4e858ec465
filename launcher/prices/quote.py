"""What a vendor's price list has answered for one machine type: a price, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cloudtrain.launcher.prices.rate import Kind, Rate

__all__ = ["Key", "Quote"]


class Key(NamedTuple):
    """What a price is of."""

    backend: str
    instance_type: str
    region: str
    kind: Kind


@dataclass(frozen=True)
class Quote:
    """A price read from the vendor, else `reason`: why it could not be. `key.instance_type` is "" for a whole list."""

    key: Key
    rate: Rate | None
    reason: str = ""

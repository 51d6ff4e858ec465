"""The clouds' machine types with accelerators and what they cost: instances.csv, each price with source and date.

Prices are of one machine and an hour, in US dollars, on demand and spot. What is not known is None, never 0.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["Machine", "by_accelerators", "by_type"]


@dataclass(frozen=True)
class Machine:
    """A machine type of a backend. `as_of` is the date of its prices; `is_derived`: from other figures, by a rule.

    Of Vertex AI the spot prices are all derived, also where the one on demand is not.
    """

    instance_type: str
    accelerator: str
    count: int
    hourly_usd: float | None
    as_of: str
    is_derived: bool
    spot_hourly_usd: float | None = None

    @property
    def price_source(self) -> str:
        """The price's provenance in words: `list price of 2026-08-20`."""
        return f"{'derived from a' if self.is_derived else ''} list price of {self.as_of}".strip()


def by_type(backend: str, instance_type: str, region: str | None) -> Machine | None:
    """Return the type with its price in the region, without one where the region's is not known; None: no such type."""
    found = [row for row in _rows() if (row["backend"], row["instance_type"]) == (backend, instance_type)]
    here = next((row for row in found if row["region"] == region), None)
    return _machine(here or {**found[0], "usd_per_hour": "", "spot_usd_per_hour": ""}) if found else None


def by_accelerators(backend: str, wanted: str, region: str | None) -> list[Machine]:
    """Return the backend's types with these accelerators (`A100:8`), the cheapest first.

    A type without a price in the region stands where its price elsewhere puts it, one without any at the end.
    """
    name, _, count = wanted.partition(":")
    types = {
        row["instance_type"]: None
        for row in _rows()
        if row["backend"] == backend and _plain(row["accelerator"]) == _plain(name) and row["count"] == (count or "1")
    }
    machines = [machine for each in types if (machine := by_type(backend, each, region)) is not None]
    return sorted(machines, key=lambda machine: _somewhere_usd(backend, machine))


def _somewhere_usd(backend: str, machine: Machine) -> tuple[bool, float]:
    """Return a key to sort by: the price here, else the least in any other region, else the end."""
    if machine.hourly_usd is not None:
        return False, machine.hourly_usd
    rows = (row for row in _rows() if (row["backend"], row["instance_type"]) == (backend, machine.instance_type))
    found = [float(row["usd_per_hour"]) for row in rows if row["usd_per_hour"]]
    return not found, min(found, default=0.0)


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")


def _machine(row: dict[str, str]) -> Machine:
    return Machine(
        row["instance_type"],
        row["accelerator"],
        int(row["count"]),
        _usd(row["usd_per_hour"]),
        row["as_of"],
        is_derived=row["derived"] == "yes",
        spot_hourly_usd=_usd(row["spot_usd_per_hour"]),
    )


def _usd(text: str) -> float | None:
    return float(text) if text else None


@functools.lru_cache(maxsize=1)
def _rows() -> list[dict[str, str]]:
    text = files("cloudtrain.launcher").joinpath("instances.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))

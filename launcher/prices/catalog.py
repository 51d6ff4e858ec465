"""The clouds' machine types with accelerators and what they cost, each price with source and date.

The package's table is instances.csv; what the user has had read from the vendors (own.py) wins, row by row, where it is
not the older one. Prices are of one machine and an hour, in US dollars. What is not known is None, never 0.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import replace
from importlib.resources import files

from cloudtrain.launcher import home
from cloudtrain.launcher.prices.rate import Kind, Machine, Rate

__all__ = ["backends", "by_accelerators", "by_type", "plain", "rates", "rows", "types", "unpriced"]

TABLE = "instances.csv"


def by_type(backend: str, instance_type: str, region: str | None) -> Machine | None:
    """Return the type with its prices in the region, without one where the region's is not known; None: no such type.

    Raises ConfigError where the user's own prices cannot be read.
    """
    found = next((row for row in rows(backend) if row["instance_type"] == instance_type), None)
    if found is None:
        return None
    return Machine(instance_type, found["accelerator"], int(found["count"]), rates(backend, instance_type, region))


def rates(backend: str, instance_type: str, region: str | None) -> dict[Kind, Rate]:
    """Return what is known of the type's prices in the region, of types that are not in the table, too.

    Raises ConfigError where the user's own prices cannot be read.
    """
    if region is None:
        return {}
    found: dict[Kind, Rate] = {}
    for row in rows(backend):
        if (row["instance_type"], row["region"]) == (instance_type, region):
            found = _rates(row)
    own = _own(backend, instance_type, region)
    chosen = found | {kind: _newer(rate, found.get(kind)) for kind, rate in own.items()}
    on_demand, spot = chosen.get("on_demand"), chosen.get("spot")
    if on_demand and spot and on_demand.is_own and not spot.is_own and spot.usd >= on_demand.usd:
        del chosen["spot"]  # of a day on which the machine cost more
    return chosen


def _newer(own: Rate, listed: Rate | None) -> Rate:
    """Return the user's own price, but the table's where that was read later."""
    if listed is None or listed.day is None or (own.day is not None and own.day >= listed.day):
        return own
    return replace(listed, passed_over=own.as_of)


def by_accelerators(backend: str, wanted: str, region: str | None) -> list[Machine]:
    """Return the backend's types with these accelerators (`A100:8`), the cheapest first.

    A type without a price in the region stands where its price elsewhere puts it, one without any at the end.
    """
    name, _, count = wanted.partition(":")
    named = types(backend, name, int(count or 1))
    machines = [machine for each in named if (machine := by_type(backend, each, region)) is not None]
    return sorted(machines, key=lambda machine: _somewhere_usd(backend, machine))


def types(backend: str, accelerator: str | None = None, count: int | None = None) -> list[str]:
    """Return the table's types of the backend, each once, of one kind and number of accelerators where set."""
    found = {
        row["instance_type"]: None
        for row in rows(backend)
        if (accelerator is None or plain(row["accelerator"]) == plain(accelerator))
        and (count is None or row["count"] == str(count))
    }
    return list(found)


def unpriced(backend: str, name: str, where: str) -> str:
    """Return that the type has no price there, in which regions the table has one, and what to do."""
    found = {row["region"] for row in rows(backend) if row["instance_type"] == name and row["usd_per_hour"]} - {""}
    known = f" (known in {', '.join(sorted(found))})" if found else ""
    return f"no price of {name} in {where}{known}: cloudtrain prices refresh, or set {backend}.price_per_hour"


def backends() -> list[str]:
    """Return the backends that the table knows."""
    return list(dict.fromkeys(line.partition(",")[0] for line in _lines()[1:]))


def _somewhere_usd(backend: str, machine: Machine) -> tuple[bool, float]:
    """Return a key to sort by: the price here, else the least in any other region, else the end."""
    if machine.hourly_usd is not None:
        return False, machine.hourly_usd
    found = [
        float(row["usd_per_hour"])
        for row in rows(backend)
        if row["instance_type"] == machine.instance_type and row["usd_per_hour"]
    ]
    return not found, min(found, default=0.0)


def plain(name: str) -> str:
    """Return an accelerator's name as it is compared: `A100-80GB` and `a100 80gb` are one."""
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")


def _rates(row: dict[str, str]) -> dict[Kind, Rate]:
    found: dict[Kind, Rate] = {}
    is_derived = row["derived"] == "yes"
    if row["usd_per_hour"]:
        found["on_demand"] = Rate(float(row["usd_per_hour"]), row["as_of"], row["source"], is_derived)
    if row["spot_usd_per_hour"]:  # of Vertex AI all are derived, also where the one on demand is not
        is_derived = is_derived or row["backend"] == "vertex"
        found["spot"] = Rate(float(row["spot_usd_per_hour"]), row["as_of"], row["source"], is_derived)
    return found


def _own(backend: str, instance_type: str, region: str) -> dict[Kind, Rate]:
    """Return what the user has had read; most have no such file, and a plan is quicker without its reader."""
    try:
        if not (home.where() / home.PRICES).exists():
            return {}
    except (OSError, RuntimeError):  # who needs the home says it
        return {}
    from cloudtrain.launcher.prices import own

    return own.rates(backend, instance_type, region)


@functools.cache
def rows(backend: str) -> list[dict[str, str]]:
    """Return the table's rows of one backend: a plan asks for no more, and the others' lines need not be read."""
    lines = _lines()
    return list(csv.DictReader([lines[0], *(line for line in lines if line.startswith(f"{backend},"))]))


@functools.cache
def _lines() -> list[str]:
    return files("cloudtrain.launcher.prices").joinpath(TABLE).read_text(encoding="utf-8").splitlines()

"""Machine types with accelerators and their prices in the clouds, each price with its source and date.

A backend's table is instances.csv in the backend's package. A newer row that the user has read from a vendor (own.py)
takes precedence.
Prices are for one machine and one hour, in US dollars. An unknown price is None, never 0.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..backend_table import names, package_of, traits
from ..errors import ConfigError
from ..metering.rate import Kind, Machine, Rate
from ..store import agent_limit, home

if TYPE_CHECKING:
    from ..backend import Backend, Capacity
    from ..config.schema import JobConfig

TABLE = "instances.csv"
NO_GPUS = {"Trainium", "Trainium2"}  # in the tables for their prices; torch's DDP and FSDP do not run on them


def by_type(backend: str, instance_type: str, region: str | None) -> Machine | None:
    """Return the type, in any case of letters, with its prices; None if unknown. Raises ConfigError as `rates`."""
    name = spelled(instance_type, types(backend))
    found = next((row for row in rows(backend) if row["instance_type"] == name), None)
    if found is None:
        return None
    return Machine(name, found["accelerator"], int(found["count"]), rates(backend, name, region))


def spelled(name: str, known: Iterable[str]) -> str:
    """Return the known name that the name means, in its own spelling; a name that is not known stays as it is."""
    return next((each for each in known if is_type(name, each)), name)


def is_type(name: str, known: str) -> bool:
    """Return whether the name means the known type: in any case, and also without the vendor's `ml.` or `Standard_`."""
    words, whole = name.lower(), known.lower()
    return bool(name) and words in (whole, whole.partition(".")[2], whole.partition("_")[2])


def rates(backend: str, instance_type: str, region: str | None) -> dict[Kind, Rate]:
    """Return the known prices of the type, also of a type that the table lacks. Raises ConfigError as `own.rates`."""
    if region is None:
        return {}
    listed = (row for row in rows(backend) if (row["instance_type"], row["region"]) == (instance_type, region))
    found = next(map(_rates, listed), dict[Kind, Rate]())
    own = _own(backend, instance_type, region)
    if own and agent_limit.limits():  # an agent can write the file of the own prices
        own = {kind: rate for kind, rate in own.items() if kind in found and rate.usd >= found[kind].usd}
    chosen = found | {kind: _newer(rate, found.get(kind)) for kind, rate in own.items()}
    on_demand, spot = chosen.get("on_demand"), chosen.get("spot")
    if on_demand and spot and on_demand.is_own and not spot.is_own and spot.usd >= on_demand.usd:
        del chosen["spot"]  # from a day with a higher price on demand
    return chosen


def under_limit(backend: Backend, config: JobConfig, capacity: Capacity) -> tuple[Capacity, bool]:
    """Return the capacity, under a limit for agents from the table's price up, and whether only the config has one."""
    block: Any = getattr(config, config.backend, None)
    if getattr(block, "price_per_hour", None) is None or not agent_limit.limits():
        return capacity, False
    block = block.model_copy(update={"price_per_hour": None})
    listed = backend.capacity(config.model_copy(update={config.backend: block}))
    most = [(each.hourly_usd or 0.0) * each.uncertainty for each in (capacity, listed)]
    return (listed if most[1] > most[0] else capacity), listed.hourly_usd is None


def _newer(own: Rate, listed: Rate | None) -> Rate:
    """Return the user's own price, or the table's price if read later."""
    if listed is None or listed.day is None or (own.day is not None and own.day >= listed.day):
        return own
    return replace(listed, passed_over=own.as_of)


def by_accelerators(backend: str, wanted: str, region: str | None) -> list[Machine]:
    """Return the backend's types with these accelerators (`A100:8`), the cheapest in the region first."""
    name, _, count = wanted.partition(":")
    named = types(backend, name, int(count or 1))
    machines = [machine for each in named if (machine := by_type(backend, each, region)) is not None]
    return sorted(machines, key=lambda machine: _somewhere_usd(backend, machine))


def types(backend: str, accelerator: str | None = None, count: int | None = None) -> list[str]:
    """Return the backend's types in the table without duplicates, optionally of one accelerator and count."""
    listed = rows(backend) if accelerator is None else _rows_with(backend, accelerator)
    return list(dict.fromkeys(row["instance_type"] for row in listed if count is None or row["count"] == str(count)))


def own_type(backend: str, config: JobConfig | None, choose: Callable[[JobConfig], Machine]) -> list[str]:
    """Return the job's own type; an empty list if the config has no valid machine: the plan reports the fault."""
    if config is not None and config.backend == backend:
        with suppress(ConfigError):
            return [choose(config).instance_type]
    return []


def unknown(wanted: str) -> str:
    """Return a message with a similar name if no backend's table has the accelerator of `A100:8`, else empty text."""
    name = wanted.partition(":")[0]
    listed = {row["accelerator"] for backend in backends() for row in rows(backend)}
    # `(host for T4/P100)`: a machine for attached accelerators. `A100-80GB` is a kind of A100.
    names = {each for one in listed for each in one.removeprefix("(host for ").strip(")").split("/")}
    if {plain(name), plain(name.partition("-")[0])} & set(map(plain, names)):
        return ""
    close = get_close_matches(name.upper().replace("O", "0"), names, 1)  # `A1OO`: letters in place of zeros
    meant = f"; did you mean `{close[0].replace(' ', '-')}`?" if close else ""
    return f"no price list has an accelerator `{name}`{meant}"


def advice(backend: str, wanted: str) -> str:
    """Return the hint for accelerators without a machine: the counts in the table, else the kinds."""
    name = wanted.partition(":")[0]
    counts = {int(row["count"]) for row in _rows_with(backend, name)}
    if not counts:
        kinds = {row["accelerator"].replace(" ", "-") for row in rows(backend)} - NO_GPUS
        there = f"there are {', '.join(sorted(kinds))}; or name a machine by `instance_type`"
        return "; ".join(filter(None, [unknown(wanted), there])).replace("?;", "?")
    existing = ", ".join(f"{name}:{count}" for count in sorted(counts))
    return f"existing: {existing}; `cloudtrain prices --accelerators {name}` lists the machines"


def unpriced(backend: str, name: str, where: str) -> str:
    """Return text: the type has no price there, the regions with a price in the table, and advice."""
    found = {row["region"] for row in rows(backend) if row["instance_type"] == name and row["usd_per_hour"]} - {""}
    known = f" (known in {', '.join(sorted(found))})" if found else ""
    return f"no price of {name} in {where}{known}: cloudtrain prices refresh, or set {backend}.price_per_hour"


def unlisted(backend: str, own_micro: int | None, own_source: str, name: str, where: str) -> tuple[float | None, str]:
    """Return the config's own price in US dollars with its source, else None with the reason."""
    return (None, unpriced(backend, name, where)) if own_micro is None else (own_micro / 1e6, own_source)


def backends() -> list[str]:
    """Return the backends with a table."""
    return [name for name in names() if rows(name)]


def _somewhere_usd(backend: str, machine: Machine) -> tuple[bool, float]:
    """Return a sort key: the price in this region, else the lowest in any region, else last."""
    if machine.hourly_usd is not None:
        return False, machine.hourly_usd
    prices = [row["usd_per_hour"] for row in rows(backend) if row["instance_type"] == machine.instance_type]
    found = [float(price) for price in prices if price]
    return not found, min(found, default=0.0)


def _rows_with(backend: str, name: str) -> list[dict[str, str]]:
    return [row for row in rows(backend) if is_named(name, row["accelerator"], row["accelerator_memory_gib"])]


def is_named(name: str, accelerator: str, memory_gib: str) -> bool:
    """Return whether the name means the accelerator with this memory: `A100`, or `A100-80GB`."""
    return plain(name) in (plain(accelerator), plain(f"{accelerator} {memory_gib}GB"))


def plain(name: str) -> str:
    """Return the normalised accelerator name: `A100-80GB`, `a100 80gb` and Google's `nvidia-a100-80gb` are equal."""
    letters = "".join(each for each in name.lower() if each.isalnum())
    return letters.removeprefix("nvidia").removeprefix("tesla")


def _rates(row: dict[str, str]) -> dict[Kind, Rate]:
    found: dict[Kind, Rate] = {}
    columns: dict[Kind, str] = {"on_demand": "usd_per_hour", "spot": "spot_usd_per_hour"}
    for kind in [kind for kind, column in columns.items() if row[column]]:
        is_derived = row["derived"] == "yes" or (kind == "spot" and traits(row["backend"]).derives_spot_prices)
        found[kind] = Rate(float(row[columns[kind]]), row["as_of"], row["source"], is_derived)
    return found


def _own(backend: str, instance_type: str, region: str) -> dict[Kind, Rate]:
    """Return the user's own rates; without a file, the reader module is not imported, which is faster."""
    try:
        if not (home.where() / home.PRICES).exists():
            return {}
    except (OSError, RuntimeError):  # a caller that needs the home folder reports the error
        return {}
    from . import own

    return own.rates(backend, instance_type, region)


@functools.cache
def rows(backend: str) -> list[dict[str, str]]:
    """Return the rows of a backend's table; an empty list for a backend without a table."""
    package = package_of(backend)
    table = files(package).joinpath(TABLE) if package else None
    if table is None or not table.is_file():
        return []
    return list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))

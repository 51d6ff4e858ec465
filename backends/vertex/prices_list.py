"""A machine's price by Google's list of today: the sum of the parts, by the rules of prices.py.

The list is the Cloud Billing Catalog, readable with an API key or any sign-in. The catalogue has no price of a whole
machine. Cores, memory, accelerators and local disks have prices, each with a free-text description. Only the
description separates spot from on demand, and one card from another.
Source: cloudbilling.googleapis.com, v1; descriptions as seen on bills and in public price tables, 2025-08 to 2026-08.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.metering import rate as rating
from cloudtrain.launcher.metering.rate import Key, Quote, Rate
from cloudtrain.launcher.prices import catalog

from . import api, prices
from .api import Google, VertexAccess
from .machine import Kind, block_of, choose, label_of, project_of
from .prices import FEE, MONTH_H

WAYS: tuple[Kind, ...] = ("standard", "spot", "flex_start", "reservation")
SHOWN = 0.001  # differences between both rules below this share are not shown
SHARE = "fee, of Compute Engine's"  # Vertex's fee as a share of that price, instead of a fee from the list
_ATTACHED = re.compile(r"(\S+) \+ (\d+) x (\w+)")
COMPUTE_ENGINE = "6F81-5844-456A"
VERTEX = "C7E2-9256-1C43"
PAGE_SIZE = 5000  # the most SKUs on one page
MOST_PAGES = 100

Device = frozenset[str]  # the words for the billed part, as {"h100", "80gb"} or {"a3", "core"}; their order varies
Mode = Literal["standard", "spot", "flex_start", "own", "fee"]  # Compute Engine's three, and Vertex's two


class NotListed(LookupError):
    """Google lists no price for a part of the machine, or cloudtrain does not know the machine's parts."""


def quotes(google: Google, config: JobConfig | None, region: str, types: tuple[str, ...]) -> list[Quote]:
    """Return the prices of the types in the region; without `types`, of the table's types and the job's own.

    A type with attached accelerators has its name in plans: `n1-standard-8 + 2 x NVIDIA_TESLA_T4`. The spot, flex-start
    and reserved kinds without a price are left out. Raises CredentialError, UnreachableError if Google's list cannot be
    read, or ConfigError without a project.
    """
    block = block_of(config)
    project = project_of(block)
    if project is None:
        hint = "export GOOGLE_CLOUD_PROJECT, or set vertex.project: a login is asked for on its account"
        raise ConfigError("no Google Cloud project", key="vertex.project", hint=hint)
    found = listed(VertexAccess(project, region, tuple(sorted(block.endpoints.items())), google))
    own = catalog.own_type("vertex", config, lambda config: choose(config).machine)
    named = types or tuple(dict.fromkeys([*own, *catalog.types("vertex")]))
    asked = [(kind, of_machine(found, *_machine(name), kind)) for name in named for kind in WAYS]
    return [quote for kind, quote in asked if quote.rate is not None or kind == "standard"]


def listed(access: VertexAccess) -> Catalogue:
    """Return Google's list for the region. Raises CredentialError, UnreachableError, ConfigError."""
    with api.answers("read Google's price list", needs="a login; the Cloud Billing API must be enabled"):
        try:
            return catalogue(partial(api.get_json, access, "cloudbilling"), access.location)
        except ValueError as error:
            raise api.GoogleError(0, "", str(error)) from error


def of_machine(found: Catalogue, machine_type: str, accelerator: str | None, count: int, kind: Kind) -> Quote:
    """Return a machine's price for one kind of provisioning, or the reason for a missing price.

    The price is the sum by the more reliable rule; if the other rule gives more, the difference is the uncertainty.
    """
    key = Key("vertex", label_of(machine_type, accelerator, count), found.region, prices.rate_kind(kind))
    try:
        price = assemble(found, machine_type, kind, accelerator, count)
    except NotListed as error:
        return Quote(key, None, f"Google's list has no price of {key.instance_type}: {error}")
    other = f"; by {price.other_rule} {price.difference:+.1%}" if abs(price.difference) >= SHOWN else ""
    since = max(part.effective_time for part in price.parts)  # the latest of the parts
    source = f"Cloud Billing Catalog, {price.rule}, since {since[:10]}{other}"
    factor = round(max(1.0, (price.other_usd or 0.0) / price.total_usd), 4)
    is_derived = any(part.description.startswith(SHARE) for part in price.parts)
    rate = Rate(price.total_usd, rating.today().isoformat(), source, is_derived, is_own=True, factor=factor)
    return Quote(key, rate)


def _machine(name: str) -> tuple[str, str | None, int]:
    """Return the machine type, the attached accelerator and its count, for a name in plans."""
    attached = _ATTACHED.fullmatch(name)
    return (attached[1], attached[3], int(attached[2])) if attached else (name, None, 0)


@dataclass(frozen=True)
class Part:
    """A line of an hour's bill. `effective_time`: the time since when the price holds."""

    description: str
    quantity: float
    unit_usd: float
    effective_time: str

    @property
    def usd(self) -> float:
        """The price of the whole quantity, in USD an hour."""
        return self.quantity * self.unit_usd


@dataclass(frozen=True)
class Price:
    """An hour of one replica, without its boot disk, by `rule`.

    `other_usd` is the same price by `other_rule`, None if the catalogue lacks a price that the other rule needs.
    """

    parts: tuple[Part, ...]
    rule: str
    other_usd: float | None = None
    other_rule: str = ""

    @property
    def total_usd(self) -> float:
        """The sum of the parts."""
        return _total(self.parts)

    @property
    def difference(self) -> float:
        """How much more the other rule gives, as a share: 0.02 is 2 %."""
        return 0.0 if self.other_usd is None else self.other_usd / self.total_usd - 1


class Need(NamedTuple):
    """A quantity of a billed part, and the names under which the catalogue may list the part."""

    quantity: float
    names: tuple[str, ...]


_SSD = ("SSD backed Local Storage",)
# GiB of memory for a vCPU, for the families of machines without built-in accelerators and of G2 and G4.
_MEMORY = {
    **{f"n1-{size}": gib for size, gib in (("standard", 3.75), ("highmem", 6.5), ("highcpu", 0.9))},
    **{f"{one}-{size}": gib for one in ("n2", "e2") for size, gib in (("standard", 4), ("highmem", 8), ("highcpu", 1))},
    **{f"n4-{size}": gib for size, gib in (("standard", 4), ("highmem", 8), ("highcpu", 2))},
    "c2-standard": 4,
    "g2-standard": 4,
    "g4-standard": 3.75,
}
_CORES = {"a3plus": ("a3plus", "a3 mega"), "a3ultra": ("a3ultra", "a3 ultra"), "c2": ("c2", "compute optimized")}


class MachineResources(NamedTuple):
    """What a machine type has for each accelerator: vCPUs, GiB of memory, GiB of local SSD. `core`: its cores' name."""

    core: str
    accelerator: tuple[str, ...]
    vcpus: int
    memory_gib: float
    ssd_gib: int = 0


# Source: Compute Engine's pages of accelerator-optimized machines, by way of our price table's source, 2026-07.
_BUNDLES = {
    "a2-highgpu": MachineResources("a2", ("a100",), 12, 85),
    "a2-megagpu": MachineResources("a2", ("a100",), 6, 85),
    "a2-ultragpu": MachineResources("a2", ("a100 80gb",), 12, 170, 375),
    "a3-highgpu": MachineResources("a3", ("h100 80gb",), 26, 234, 750),
    "a3-megagpu": MachineResources("a3plus", ("h100 80gb mega", "h100 80gb plus"), 26, 234, 750),
    "a3-ultragpu": MachineResources("a3ultra", ("h200 141gb",), 28, 369, 1500),
    # A slice is the GPU with its cores, memory and disks.
    "a4-highgpu": MachineResources("", ("a4 b200 1 slice",), 0, 0),
}
_L4 = {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8}


def assemble(listed: Catalogue, machine_type: str, kind: Kind, accelerator: str | None = None, count: int = 0) -> Price:
    """Return Google's price for a machine, with `count` attached accelerators on an N1 machine.

    A STANDARD job is not billed for local disks (seen on a bill). Other kinds pay Compute Engine's price for local
    disks, without a fee. Raises NotListed.
    """
    needs, disks = _needs(machine_type, accelerator, count)
    found: list[Price] = []
    missing = ""
    for rule, parts in _ways(listed, kind, needs, disks):
        try:
            found.append(Price(tuple(parts()), rule))
        except NotListed as error:
            missing = str(error)
    if not found:
        raise NotListed(f"{machine_type}: {missing}")
    price, *others = found
    return replace(price, other_usd=others[0].total_usd, other_rule=others[0].rule) if others else price


def _total(parts: tuple[Part, ...]) -> float:
    return round(sum(part.usd for part in parts), 6)


def _ways(
    listed: Catalogue, kind: Kind, needs: list[Need], disks: list[Need]
) -> list[tuple[str, Callable[[], list[Part]]]]:
    """Return both rules for the price, the more reliable rule first."""

    def of(mode: Mode, wanted: list[Need]) -> list[Part]:
        return [_part(listed, mode, need) for need in wanted]

    def share() -> Part:
        on_demand = of("standard", needs)
        since = max(part.effective_time for part in on_demand)
        return Part(f"{SHARE} price on demand", FEE, _total(tuple(on_demand)), since)

    if kind == "standard":
        return [
            ("Vertex AI's own prices", lambda: of("own", needs)),
            (f"Compute Engine's x {1 + FEE:g}", lambda: [*of("standard", needs), share()]),
        ]
    mode: Mode = "standard" if kind == "reservation" else kind

    def machine() -> list[Part]:
        return [*of(mode, needs), *of(mode, disks)]

    return [
        ("Compute Engine's prices + Vertex AI's fee", lambda: [*machine(), *of("fee", needs)]),
        (f"Compute Engine's + {FEE:.0%} of on demand", lambda: [*machine(), share()]),
    ]


def _part(listed: Catalogue, mode: Mode, need: Need) -> Part:
    """Return the most expensive SKU among the names. Raises NotListed."""
    found = [sku for name in need.names if (sku := listed.skus.get((mode, device(name)))) is not None]
    if not found:
        what = {"own": "by Vertex AI", "fee": "by Vertex AI, as a fee"}.get(mode, f"by Compute Engine, {mode}")
        raise NotListed(f"Google lists no `{need.names[0]}` in {listed.region} ({what})")
    sku = max(found, key=lambda sku: sku.usd)
    return Part(sku.description, need.quantity, sku.usd, sku.since)


def _needs(machine_type: str, accelerator: str | None, count: int) -> tuple[list[Need], list[Need]]:
    """Return the billed parts of the machine, and its local disks. Raises NotListed if the machine is unknown."""
    family, _, size = machine_type.rpartition("-")
    if (bundle := _BUNDLES.get(family)) and re.fullmatch(r"\d+g", size):
        number = int(size[:-1])
        needs = [Need(number, bundle.accelerator)]
        if bundle.vcpus:
            needs += _host(bundle.core, number * bundle.vcpus, number * bundle.memory_gib)
        return needs, [Need(number * bundle.ssd_gib, _SSD)] if bundle.ssd_gib else []
    vcpus = int(size) if size.isdecimal() else 0
    is_part = (family == "g2-standard" and vcpus not in _L4) or (family == "g4-standard" and vcpus % 48)
    if family not in _MEMORY or not vcpus or is_part:
        raise NotListed(f"what {machine_type} is made of is not known here")
    needs = _host(family.partition("-")[0], vcpus, vcpus * _MEMORY[family])
    if family == "g2-standard":
        needs.append(Need(_L4[vcpus], ("l4",)))
    elif family == "g4-standard":
        needs.append(Need(vcpus // 48, ("rtx 6000 96gb", "rtx pro 6000", "rtx pro 6000 96gb")))
    elif accelerator is not None and count:
        needs.append(Need(count, (accelerator,)))
    return needs, []


def _host(core: str, vcpus: int, memory_gib: float) -> list[Need]:
    names = _CORES.get(core, (core,))
    return [
        Need(vcpus, tuple(f"{name} core" for name in names)),
        Need(memory_gib, tuple(f"{name} ram" for name in names)),
    ]


class Sku(NamedTuple):
    """The hourly price of one unit: a core, an accelerator, a GiB of memory or disk."""

    description: str
    usd: float
    since: str


@dataclass(frozen=True)
class Catalogue:
    """Google's prices for a region today."""

    region: str
    skus: Mapping[tuple[Mode, Device], Sku]


def catalogue(get: Callable[[str, dict[str, str]], Mapping[str, Any]], region: str) -> Catalogue:
    """Return the prices of the region's machines today, of both services and over all pages.

    `get` takes a path and its query and returns the JSON. Raises ValueError if an answer cannot be parsed.
    """
    skus: dict[tuple[Mode, Device], Sku] = {}
    for service in (COMPUTE_ENGINE, VERTEX):
        for raw in _pages(get, f"/v1/services/{service}/skus"):
            if region not in raw.get("serviceRegions", ()):
                continue
            try:
                key = _key(raw)
                sku = None if key is None else _sku(raw)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                message = f"a price of Google cannot be parsed: {raw.get('description')!r}: {error!r}"
                raise ValueError(message) from error
            # The highest of several prices: a price that is too low would break a budget.
            if key is not None and sku is not None and (key not in skus or skus[key].usd < sku.usd):
                skus[key] = sku
    return Catalogue(region, skus)


def _pages(get: Callable[[str, dict[str, str]], Mapping[str, Any]], path: str) -> Iterator[Mapping[str, Any]]:
    query = {"pageSize": str(PAGE_SIZE), "currencyCode": "USD"}
    for _ in range(MOST_PAGES):
        page = get(path, query)
        yield from page.get("skus", ())
        token = page.get("nextPageToken")
        if not token:
            return
        query = {**query, "pageToken": str(token)}
    raise ValueError(f"{path} has more than {MOST_PAGES} pages")


_PLACE = r"(?: running)?(?: in (?:(?! in | for ).)+)?"
_COMPUTE_ENGINE_NAME = re.compile(
    r"(?P<before>(?:Spot )?Preemptible |DWS Defined Duration )?(?P<device>.+?)"
    r"(?: attached to (?P<after>(?:Spot )?Preemptible|DWS Defined Duration) VMs)?" + _PLACE,
    re.IGNORECASE,
)
_VERTEX_NAME = re.compile(
    r"Vertex AI: Training/Pipelines (?P<fee>management fee )?on (?P<device>.+?)" + _PLACE, re.IGNORECASE
)
_PLAIN = {"nvidia", "tesla", "gpu", "predefined", "instance", "40gb"}  # words that only one of the two services uses


def device(text: str) -> Device:
    """Return the words that identify the billed part: for `NVIDIA_TESLA_T4`, {"t4"}."""
    return frozenset(re.findall(r"\w+", text.lower().replace("_", " "))) - _PLAIN


def _key(raw: Mapping[str, Any]) -> tuple[Mode, Device] | None:
    """Return the mode and device of a SKU, or None if the SKU is no price of a machine.

    The pattern matches the whole description from its first word: "E2 Instance Core running in" is also part of "Spot
    Preemptible E2 Instance Core running in", and a card's name is part of a larger card's. Unknown words (Reserved,
    Sole Tenancy, Commitment) stay in the device, which then equals no device of ours.
    """
    usage = raw["category"]["usageType"]
    if found := _VERTEX_NAME.fullmatch(raw["description"]):
        return ("fee" if found["fee"] else "own", device(found["device"])) if usage == "OnDemand" else None
    found = _COMPUTE_ENGINE_NAME.fullmatch(raw["description"])
    if found is None:
        return None
    way = (found["before"] or found["after"] or "").lower()
    # Google tags some spot prices as OnDemand, so the words decide.
    if usage != "OnDemand" and not (way and usage == "Preemptible"):
        return None
    mode: Mode = "flex_start" if way.startswith("dws") else "spot" if way else "standard"
    return mode, device(found["device"])


# The factor from the price of Google's unit to the price of our unit; all our units are GiB and hours.
_PER_UNIT = {"h": 1.0, "GiBy.h": 1.0, "GBy.h": 2**30 / 1e9, "GiBy.mo": 1 / MONTH_H, "GBy.mo": 2**30 / 1e9 / MONTH_H}


def _sku(raw: Mapping[str, Any]) -> Sku | None:
    """Return the SKU's price, or None if the unit has no use here or the price is zero."""
    if not raw.get("pricingInfo"):
        return None
    info = raw["pricingInfo"][-1]
    expression = info["pricingExpression"]
    factor = _PER_UNIT.get(expression["usageUnit"])
    if factor is None or not expression.get("tieredRates"):
        return None
    price = expression["tieredRates"][-1]["unitPrice"]  # a first tier may be free
    if price.get("currencyCode", "USD") != "USD":
        raise ValueError(f"in {price['currencyCode']}, not USD")
    usd = int(price.get("units") or 0) + int(price.get("nanos") or 0) / 1e9
    return Sku(raw["description"], usd * factor, str(info["effectiveTime"])) if usd > 0 else None

"""cloudbilling.googleapis.com: a price list with the traps of the real list.

Prices of A3 and H100 on demand and by flex start are from a real bill of August 2025, prices of N1 from the pricing
page of October 2026; all other figures, including all of spot and of europe-west4, are invented.
"""

import base64
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from doubles.google.errors import GoogleError, invalid
from doubles.kit.routing import Route
from doubles.wire import Answer, Request, json_answer

COMPUTE_ENGINE, VERTEX = "6F81-5844-456A", "C7E2-9256-1C43"
SERVICES = {"95FF-2EF5-5EA1": "Cloud Storage", COMPUTE_ENGINE: "Compute Engine", VERTEX: "Vertex AI"}
MAX_PAGE = 5000
MONTH_H = 730
FEE = 0.15

JSON = dict[str, Any]


@dataclass(frozen=True)
class BillingSettings:
    """The settings of the price list that a test may change."""

    sku_page_size: int = MAX_PAGE
    """Maximum rows of a page, even for a larger pageSize."""
    sku_currency: str = "USD"
    """Currency of all prices, independent of the query."""


class _Device(NamedTuple):
    """A separately billed part, in US dollars a unit, with the names of Compute Engine and of Vertex AI."""

    name: str
    words: str
    vertex_words: str
    on_demand: float
    spot: float
    flex: float | None = None
    unit: str = "h"


_DEVICES = {
    device.name: device
    for device in (
        _Device("h100", "Nvidia H100 80GB GPU", "NVIDIA H100 80GB", 9.79655057, 5.5, 4.200761),
        _Device("a3 core", "A3 Instance Core", "A3 Instance Core", 0.025498, 0.015, 0.010934),
        _Device("a3 ram", "A3 Instance Ram", "A3 Instance RAM", 0.00222035, 0.0013, 0.000952, "GiBy.h"),
        _Device("a100", "Nvidia Tesla A100 GPU", "NVIDIA Tesla A100", 3.0, 1.2, 1.5),
        _Device("a2 core", "A2 Instance Core", "A2 Instance Core", 0.03, 0.012, 0.015),
        _Device("a2 ram", "A2 Instance Ram", "A2 Instance RAM", 0.004, 0.0016, 0.002, "GiBy.h"),
        _Device("l4", "Nvidia L4 GPU", "NVIDIA L4", 0.6, 0.24, 0.3),
        _Device("g2 core", "G2 Instance Core", "G2 Instance Core", 0.025, 0.01, 0.0125),
        _Device("g2 ram", "G2 Instance Ram", "G2 Instance RAM", 0.003, 0.0012, 0.0015, "GiBy.h"),
        _Device("t4", "Nvidia Tesla T4 GPU", "NVIDIA Tesla T4", 0.4, 0.16),
        _Device("n1 core", "N1 Predefined Instance Core", "N1 Predefined Instance Core", 0.031611, 0.0066),
        _Device("n1 ram", "N1 Predefined Instance Ram", "N1 Predefined Instance Ram", 0.004237, 0.0009, None, "GiBy.h"),
        _Device("e2 core", "E2 Instance Core", "E2 Instance Core", 0.022, 0.007),
        _Device("e2 ram", "E2 Instance Ram", "E2 Instance Ram", 0.003, 0.001, None, "GiBy.h"),
    )
}
_LOCAL_SSD = _Device("ssd", "SSD backed Local Storage", "", 0.08, 0.04, 0.08, "GiBy.mo")
PD_SSD = 0.1955  # Vertex AI's, for a GiB and a month; on the bill
# Region -> factor of the prices, the place in Compute Engine's and in Vertex AI's names, Compute Engine's regions.
_REGIONS = {
    "us-central1": (1.0, "Americas", "Iowa", ["us-central1", "us-east1", "us-west1"]),
    "europe-west4": (1.1, "Netherlands", "Netherlands", ["europe-west4"]),
}

# Machine -> its parts and their numbers. Local disks: GiB.
MACHINES: dict[str, dict[str, float]] = {
    "a2-highgpu-1g": {"a100": 1, "a2 core": 12, "a2 ram": 85},
    "a2-highgpu-8g": {"a100": 8, "a2 core": 96, "a2 ram": 680},
    "a3-highgpu-1g": {"h100": 1, "a3 core": 26, "a3 ram": 234, "ssd": 750},
    "a3-highgpu-8g": {"h100": 8, "a3 core": 208, "a3 ram": 1872, "ssd": 6000},
    "g2-standard-4": {"l4": 1, "g2 core": 4, "g2 ram": 16},
    "g2-standard-12": {"l4": 1, "g2 core": 12, "g2 ram": 48},
    "n1-standard-4": {"n1 core": 4, "n1 ram": 15},
    "n1-standard-8": {"n1 core": 8, "n1 ram": 30},
    "e2-standard-4": {"e2 core": 4, "e2 ram": 16},
}


def hourly_usd(machine: str, kind: str = "STANDARD", region: str = "us-central1", t4: int = 0) -> float:
    """Return the hourly price of a replica, without its boot disk: kind is STANDARD, SPOT or FLEX_START.

    STANDARD includes the fee and bills no local disk. The price of the other kinds is Compute Engine's price plus the
    fee, which is a share of the price on demand. `t4`: accelerators attached to an N1 machine.
    """
    factor, total = _REGIONS[region][0], 0.0
    for name, count in {**MACHINES[machine], **({"t4": t4} if t4 else {})}.items():
        device = _DEVICES.get(name, _LOCAL_SSD)
        if kind == "STANDARD":
            total += 0 if name == "ssd" else count * _rounded(device.on_demand * factor * (1 + FEE))
            continue
        own = device.spot if kind == "SPOT" else device.flex
        if own is None:
            raise LookupError(f"no flex start of {name}")
        total += count * _rounded(own * factor) / (MONTH_H if name == "ssd" else 1)
        total += 0 if name == "ssd" else count * _rounded(device.on_demand * factor * FEE)
    return total


def _rounded(usd: float) -> float:
    """Return the price rounded to seven digits, as on the bill; lists have nanos."""
    return round(usd, 7)


@functools.cache
def _skus(service: str) -> list[JSON]:
    found: list[JSON] = []
    for region, (factor, place, vertex_place, regions) in _REGIONS.items():
        for device in _DEVICES.values():
            if service == COMPUTE_ENGINE:
                found += _compute_engine(device, factor, place, regions)
            elif service == VERTEX:
                found += _vertex(device, factor, vertex_place, region)
        if service == COMPUTE_ENGINE:
            found += _local_disks(factor, "" if region == "us-central1" else f" in {place}", regions)
        elif service == VERTEX:
            words = "Vertex AI: Training/Pipelines on SSD backed PD Capacity"
            name = words if region == "us-central1" else f"{words} in {vertex_place}"
            found.append(_sku(service, name, PD_SSD * factor, [region], "GiBy.mo"))
    return found


def _compute_engine(device: _Device, factor: float, place: str, regions: list[str]) -> list[JSON]:
    is_gpu = device.words.endswith("GPU")

    def sku(words: str, usd: float, usage: str = "OnDemand", **more: Any) -> JSON:
        return _sku(COMPUTE_ENGINE, words, usd * factor, regions, device.unit, usage, **more)

    where = f"running in {place}"
    spot = f"{device.words} attached to Spot Preemptible VMs {where}"
    spot = spot if is_gpu else f"Spot Preemptible {device.words} {where}"
    # Google tags some spot prices as on demand; only the description is reliable.
    tag = "OnDemand" if device.name == "l4" else "Preemptible"
    # A first tier may be free, and an earlier price comes first.
    found = [
        sku(spot, device.spot, tag),
        sku(f"{device.words} {where}", device.on_demand, gift=device.name.startswith("e2"), old=device.name == "a100"),
        sku(f"Commitment v1: {device.words} in {place} for 1 Year", device.on_demand * 0.63, "Commit1Yr"),
        sku(f"{device.words.replace('Instance', 'Sole Tenancy Instance')} Reserved {where}", device.on_demand * 1.1),
    ]
    if device.flex is not None:
        words = device.words.replace("Instance ", "")
        flex = f"{words} attached to DWS Defined Duration VMs" if is_gpu else f"DWS Defined Duration {words}"
        found.append(sku(f"{flex} {where}", device.flex))
    return found


def _local_disks(factor: float, where: str, regions: list[str]) -> list[JSON]:
    words, unit = _LOCAL_SSD.words, _LOCAL_SSD.unit
    kinds = [(words, _LOCAL_SSD.on_demand, "OnDemand")]
    kinds.append((f"{words} attached to Spot Preemptible VMs", _LOCAL_SSD.spot, "Preemptible"))
    kinds.append((f"DWS Defined Duration {words}", _LOCAL_SSD.flex or 0.0, "OnDemand"))
    return [_sku(COMPUTE_ENGINE, name + where, usd * factor, regions, unit, tag) for name, usd, tag in kinds]


def _vertex(device: _Device, factor: float, place: str, region: str) -> list[JSON]:
    def sku(words: str, share: float) -> JSON:
        return _sku(VERTEX, f"{words} {device.vertex_words} in {place}", share * factor, [region], device.unit)

    return [
        sku("Vertex AI: Training/Pipelines management fee on", device.on_demand * FEE),
        sku("Vertex AI: Training/Pipelines on", device.on_demand * (1 + FEE)),
        sku("Vertex AI: Online/Batch Prediction on", device.on_demand * 1.2),
    ]


def _sku(
    service: str,
    words: str,
    usd: float,
    regions: list[str],
    unit: str = "h",
    usage: str = "OnDemand",
    gift: bool = False,
    old: bool = False,
) -> JSON:
    identity = base64.b32encode(words.encode()).decode()[-12:].strip("=")
    identity = f"{sum(words.encode()) % 65536:04X}-{identity[:4]}-{identity[-4:]}"
    tiers = [(0, 0.0), (10, usd)] if gift else [(0, usd)]
    family = "Storage" if "SSD" in words else "Compute" if service == COMPUTE_ENGINE else "ApplicationServices"
    info = [_pricing(unit, [(0, usd * 1.5)], "2025-01-01T08:00:00Z")] if old else []
    return {
        "name": f"services/{service}/skus/{identity}",
        "skuId": identity,
        "description": words,
        "category": {
            "serviceDisplayName": SERVICES[service],
            "resourceFamily": family,
            "resourceGroup": "GPU" if "GPU" in words else "RAM" if "ram" in words.lower() else "CPU",
            "usageType": usage,
        },
        "serviceRegions": regions,
        "pricingInfo": [*info, _pricing(unit, tiers, "2026-10-01T07:00:00Z")],
        "serviceProviderName": "Google",
        "geoTaxonomy": {"type": "REGIONAL" if len(regions) == 1 else "MULTI_REGIONAL", "regions": regions},
    }


def _pricing(unit: str, tiers: Sequence[tuple[float, float]], since: str) -> JSON:
    rates = []
    for start, usd in tiers:
        units, nanos = divmod(round(_rounded(usd) * 1e9), 10**9)
        price = {"currencyCode": "USD", "units": str(units), "nanos": nanos}
        rates.append({"startUsageAmount": start, "unitPrice": price})
    words = {"h": "hour", "GiBy.h": "gibibyte hour", "GiBy.mo": "gibibyte month"}[unit]
    expression = {"usageUnit": unit, "displayQuantity": 1, "tieredRates": rates, "usageUnitDescription": words}
    expression |= {"baseUnit": "s" if unit == "h" else "By.s", "baseUnitConversionFactor": 3600}
    return {"effectiveTime": since, "summary": "", "pricingExpression": expression, "currencyConversionRate": 1}


def _page(world: Any, request: Request, found: list[JSON], name: str) -> Answer:
    try:
        asked = int(request.query.get("pageSize", 0))
        start = int(base64.urlsafe_b64decode(request.query.get("pageToken", "")) or 0)
    except ValueError:
        raise invalid("Request contains an invalid argument.") from None
    if not 0 <= asked <= MAX_PAGE:
        raise invalid(f"page_size must be at most {MAX_PAGE}.")
    end = start + min(asked or MAX_PAGE, world.settings.sku_page_size)
    token = base64.urlsafe_b64encode(str(end).encode()).decode() if end < len(found) else ""
    return json_answer({name: found[start:end], "nextPageToken": token})


def _list_skus(world: Any, request: Request, service: str) -> Answer:
    if service not in SERVICES:
        raise GoogleError("NOT_FOUND", f"Service services/{service} not found.")
    if request.query.get("currencyCode", "USD") != "USD":
        raise invalid("the stand-in knows US dollars alone")
    unknown = set(request.query) - {"currencyCode", "pageSize", "pageToken", "key", "alt", "prettyPrint", "fields"}
    if unknown:
        raise invalid(f"the stand-in's list of SKUs knows no {min(unknown)}")
    found = _skus(service)
    if (currency := world.settings.sku_currency) != "USD":
        found = json.loads(json.dumps(found).replace('"currencyCode": "USD"', f'"currencyCode": "{currency}"'))
    return _page(world, request, found, "skus")


ROUTES = [Route("GET", "/v1/services/(?P<service>[^/]+)/skus", "billing.skus", _list_skus)]

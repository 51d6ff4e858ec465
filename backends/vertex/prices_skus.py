"""Google's list of a region's machine prices today: the Cloud Billing Catalog, readable with an API key or any sign-in.

The catalogue has no price of a whole machine. Cores, memory, accelerators and local disks have prices, each with a
free-text description. Only the description separates spot from on demand, and one card from another.
Source: cloudbilling.googleapis.com, v1; descriptions as seen on bills and in public price tables, 2025-08 to 2026-08.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .prices import MONTH_H

COMPUTE_ENGINE = "6F81-5844-456A"
VERTEX = "C7E2-9256-1C43"
PAGE_SIZE = 5000  # the most SKUs on one page
MOST_PAGES = 100

Device = frozenset[str]  # the words for the billed part, as {"h100", "80gb"} or {"a3", "core"}; their order varies
Mode = Literal["standard", "spot", "flex_start", "own", "fee"]  # Compute Engine's three, and Vertex's two


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


def read(get: Callable[[str, dict[str, str]], Mapping[str, Any]], region: str) -> Catalogue:
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
                raise ValueError(
                    f"a price of Google cannot be parsed: {raw.get('description')!r}: {error!r}"
                ) from error
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

"""What Google lists for a region's machines today: the Cloud Billing Catalog, which an API key or any sign-in reads.

A machine has no price of its own there: cores, memory, accelerators and local disks have, each with a free-text
description. Only the descriptions tell spot from on demand, and one card from another.
Source: cloudbilling.googleapis.com, v1; descriptions as seen on bills and in public price tables, 2025-08 to 2026-08.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cloudtrain.backends.vertex.prices import MONTH_H

__all__ = ["Catalogue", "Mode", "Sku", "device", "read"]

COMPUTE_ENGINE = "6F81-5844-456A"
VERTEX = "C7E2-9256-1C43"
PAGE_SIZE = 5000  # the most that it gives at once
MOST_PAGES = 100

Device = frozenset[str]  # the words for what is billed, as {"h100", "80gb"} or {"a3", "core"}; their order varies
Mode = Literal["standard", "spot", "flex_start", "own", "fee"]  # Compute Engine's three, and Vertex's two


class Sku(NamedTuple):
    """What one unit costs an hour: a core, an accelerator, a GiB of memory or disk."""

    description: str
    usd: float
    since: str


@dataclass(frozen=True)
class Catalogue:
    """What Google lists for a region today."""

    region: str
    skus: Mapping[tuple[Mode, Device], Sku]


def read(get: Callable[[str, dict[str, str]], Mapping[str, Any]], region: str) -> Catalogue:
    """Return what the region's machines cost today, of both services and over all pages.

    `get` is given a path and its query and returns the JSON. Raises ValueError for an answer of no sense.
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
                raise ValueError(f"a price of Google's has no sense: {raw.get('description')!r}: {error!r}") from error
            # Of several the highest: too little would break a budget.
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
_PLAIN = {"nvidia", "tesla", "gpu", "predefined", "instance", "40gb"}  # what one service says and the other does not


def device(text: str) -> Device:
    """Return the words that tell what is billed from what is not: of `NVIDIA_TESLA_T4`, {"t4"}."""
    return frozenset(re.findall(r"\w+", text.lower().replace("_", " "))) - _PLAIN


def _key(raw: Mapping[str, Any]) -> tuple[Mode, Device] | None:
    """Return what a SKU is of; None for what is no price of a machine here.

    A description is read whole, from its first word: "E2 Instance Core running in" is part of "Spot Preemptible E2
    Instance Core running in", too, and a card's name part of a larger card's. Words that are not known (Reserved, Sole
    Tenancy, Commitment) stay in the device, which then is none of ours.
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


# What one unit of ours costs, of one of theirs: all are GiB and hours here.
_PER_UNIT = {"h": 1.0, "GiBy.h": 1.0, "GBy.h": 2**30 / 1e9, "GiBy.mo": 1 / MONTH_H, "GBy.mo": 2**30 / 1e9 / MONTH_H}


def _sku(raw: Mapping[str, Any]) -> Sku | None:
    """Return the price; None where it is in a unit of no use here, or nothing."""
    if not raw.get("pricingInfo"):
        return None
    info = raw["pricingInfo"][-1]
    expression = info["pricingExpression"]
    factor = _PER_UNIT.get(expression["usageUnit"])
    if factor is None or not expression.get("tieredRates"):
        return None
    price = expression["tieredRates"][-1]["unitPrice"]  # a first tier may be a gift
    if price.get("currencyCode", "USD") != "USD":
        raise ValueError(f"in {price['currencyCode']}, not USD")
    usd = int(price.get("units") or 0) + int(price.get("nanos") or 0) / 1e9
    return Sku(raw["description"], usd * factor, str(info["effectiveTime"])) if usd > 0 else None

"""prices.azure.com: a price list with invented numbers and the traps of the real list."""

import re
from collections.abc import Iterator
from typing import Any

from doubles.azure.errors import AzureError
from doubles.azure.world import World
from doubles.wire import Answer, Request, json_answer

SIZES = {  # US dollars an hour, invented
    "Standard_DS3_v2": 0.25,
    "Standard_D4s_v3": 0.2,
    "Standard_NC6s_v3": 3.0,
    "Standard_NC24ads_A100_v4": 3.5,
    "Standard_NC96ads_A100_v4": 14.0,
    "Standard_ND96asr_v4": 27.0,
    "Standard_ND96isr_H100_v5": 98.0,
}
REGIONS = {"eastus": 1.0, "westus2": 1.0, "westeurope": 1.25}
# Suffix of the meter -> share of the dedicated price.
_METERS = {"": 1.0, " Spot": 0.3, " Low Priority": 0.2}
_CLAUSE = re.compile(r"\s*(?:(\w+)\s+(eq|ne)\s+'((?:[^']|'')*)'|contains\((\w+),\s*'([^']*)'\))\s*")


def get(world: World, request: Request) -> Answer:
    """Return a page of the items that the filter lets through."""
    clauses = _clauses(request.query.get("$filter", ""))
    listed = ({**item, "currencyCode": world.settings.price_currency} for item in (*_items(), *_traps()))
    found = [item for item in listed if all(_holds(clause, item) for clause in clauses)]
    start, size = int(request.query.get("$skip", 0)), world.settings.price_page_size
    page = found[start : start + size]
    query = "&".join(f"{name}={value}" for name, value in request.query.items() if name != "$skip")
    more = f"https://prices.azure.com:443/api/retail/prices?{query}&$skip={start + size}".replace(" ", "%20")
    told = {"BillingCurrency": "USD", "CustomerEntityId": "Default", "CustomerEntityType": "Retail"}
    has_more = len(found) > start + size
    return json_answer({**told, "Items": page, "NextPageLink": more if has_more else None, "Count": len(page)})


def _clauses(text: str) -> list[re.Match[str]]:
    found = []
    for part in re.split(r"\s+and\s+", text) if text.strip() else []:
        clause = _CLAUSE.fullmatch(part)
        if clause is None:
            raise AzureError(400, "BadRequest", f"Invalid OData parameters supplied: {part}")
        found.append(clause)
    return found


def _holds(clause: re.Match[str], item: dict[str, Any]) -> bool:
    """Return whether the clause selects the item; values are case-sensitive since 2023-01-01-preview."""
    name = clause[1] or clause[4]
    key = "type" if name == "priceType" else name
    value = str(item.get(key, ""))
    if clause[4]:
        return clause[5] in value
    return (value == clause[3].replace("''", "'")) == (clause[2] == "eq")


def _items() -> Iterator[dict[str, Any]]:
    for size, dedicated in SIZES.items():
        family = re.sub(r"^Standard_", "", size).replace("_", " ")
        for region, factor in REGIONS.items():
            for system, surcharge in (("", 1.0), (" Windows", 1.7)):
                for word, part in _METERS.items():
                    price = round(dedicated * factor * surcharge * part, 6)
                    yield _item(size, family, region, system, word, price, "Consumption")
            yield _item(size, family, region, "", "", round(dedicated * factor * 5000, 2), "Reservation")


def _traps() -> Iterator[dict[str, Any]]:
    """Yield rows that other sizes lack: announced prices, duplicates, prices of zero, a spot price without a saving."""
    later, region = "2999-01-01T00:00:00Z", "eastus"

    def item(size: str, price: float, word: str = "", system: str = "", **more: Any) -> dict[str, Any]:
        family = size.removeprefix("Standard_").replace("_", " ")
        return {**_item(size, family, region, system, word, price, "Consumption"), **more}

    yield item("Standard_D8s_v5", 0.384)
    yield item("Standard_D8s_v5", 0.36, effectiveStartDate="2023-01-01T00:00:00Z")
    yield item("Standard_D8s_v5", 0.48, effectiveStartDate=later)
    yield item("Standard_D16s_v6", 0.8, effectiveStartDate=later)
    yield item("Standard_NC12s_v3", 6.0)
    yield item("Standard_NC12s_v3", 6.12)
    yield item("Standard_ND40rs_v2", 22.0)
    yield item("Standard_ND40rs_v2", 22.0, " Low Priority")
    yield item("Standard_F4s_v2", 0.17)
    yield item("Standard_F4s_v2", 0.0)
    yield item("Standard_F4s_v2", 9.0, productName="Fsv2 Series Cloud Services")
    yield item("Standard_F4s_v2", 9.0, productName="Fsv2 Series Dedicated Host")
    yield item("Standard_F4s_v2", 9.0, unitOfMeasure="1 Month")
    yield item("Standard_F4s_v2", 0.1, tierMinimumUnits=1000.0)
    yield item("Standard_F8s_v2", 0.34, system=" Windows")


def _item(size: str, family: str, region: str, system: str, word: str, price: float, kind: str) -> dict[str, Any]:
    more = {"reservationTerm": "1 Year"} if kind == "Reservation" else {}
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": price,
        "unitPrice": price,
        "armRegionName": region,
        "location": region.title(),
        "effectiveStartDate": "2026-01-01T00:00:00Z",
        "meterId": f"{size}-{region}{system}{word}".replace(" ", "-").lower(),
        "meterName": f"{family}{word}",
        "productId": "DZH318Z0",
        "skuId": "DZH318Z0/0000",
        "productName": f"Virtual Machines {family} Series{system}",
        "skuName": f"{family}{word}",
        "serviceName": "Virtual Machines",
        "serviceId": "DZH313Z7MMC8",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": kind,
        "isPrimaryMeterRegion": True,
        "armSkuName": size,
        **more,
    }

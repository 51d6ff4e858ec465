"""What Azure asks for a machine today: the public Retail Prices API, which needs no account.

One size in one region has many meters: Linux and Windows, dedicated, Spot and Low Priority. Azure ML's machines run
Linux; its spot ones (serverless Spot, low-priority clusters) are billed by the Low Priority meter.
Source: learn.microsoft.com, rest/api/cost-management/retail-prices/azure-retail-prices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cloudtrain.backends.azureml import rest

__all__ = ["Price", "of_machine"]

URL = "https://prices.azure.com/api/retail/prices"
VERSION = "2023-01-01-preview"
MOST_PAGES = 20


@dataclass(frozen=True)
class Price:
    """Dollars for one machine and an hour, None where there is no such meter; `as_of` is when they began to hold."""

    dedicated_usd: float | None
    low_priority_usd: float | None
    as_of: str


def of_machine(size: str, region: str) -> Price:
    """Return the prices of a machine size in a region. Raises AzureError, ValueError for an answer of no sense."""
    # Values are compared letter by letter: Standard_NC6s_v3 and eastus, as ARM writes them.
    wanted = {
        "serviceName": "Virtual Machines",
        "armSkuName": size,
        "armRegionName": region.lower().replace(" ", ""),
        "priceType": "Consumption",
    }
    terms = (f"{key} eq '{value.replace(chr(39), chr(39) * 2)}'" for key, value in wanted.items())
    meters = [meter for meter in _meters(" and ".join(terms)) if _is_hour_of_linux(meter)]
    dedicated = [meter for meter in meters if not _is(meter, "spot") and not _is(meter, "low priority")]
    low = [meter for meter in meters if _is(meter, "low priority")]
    newest = max((str(meter.get("effectiveStartDate", ""))[:10] for meter in (*dedicated, *low)), default="")
    return Price(_price(dedicated), _price(low), newest)


def _meters(terms: str) -> Iterator[Mapping[str, Any]]:
    """Yield all meters, over all pages."""
    url, params = URL, {"api-version": VERSION, "currencyCode": "USD", "$filter": terms}
    for _ in range(MOST_PAGES):
        told = rest.call("GET", url, params=params).json()
        yield from told["Items"]
        if not told.get("NextPageLink"):
            return
        url, params = str(told["NextPageLink"]), {}


def _is_hour_of_linux(meter: Mapping[str, Any]) -> bool:
    if float(meter["retailPrice"]) <= 0:  # of a plan that gives it away
        return False
    plain = "windows" not in str(meter.get("productName", "")).lower() and meter.get("unitOfMeasure") == "1 Hour"
    return plain and meter.get("type", "Consumption") == "Consumption" and meter.get("currencyCode", "USD") == "USD"


def _is(meter: Mapping[str, Any], word: str) -> bool:
    return word in f"{meter.get('meterName', '')} {meter.get('skuName', '')}".lower()


def _price(meters: list[Mapping[str, Any]]) -> float | None:
    """Return the price, of several the highest: what begins to hold later stands beside what holds now."""
    return max((float(meter["retailPrice"]) for meter in meters), default=None)

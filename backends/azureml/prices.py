"""Azure's price of a machine today: the public Retail Prices API, which needs no account.

One size in one region has many meters: Linux and Windows, dedicated, Spot and Low Priority. Azure ML's machines run
Linux; the Low Priority meter bills its spot machines (serverless Spot, low-priority clusters).
Source: learn.microsoft.com, rest/api/cost-management/retail-prices/azure-retail-prices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.metering import rate as rating
from cloudtrain.launcher.metering.rate import Key, Kind, Quote, Rate
from cloudtrain.launcher.prices import catalog

from ..http import object_in
from . import api
from .api import Azure
from .machine import choose

URL = "https://prices.azure.com/api/retail/prices"
VERSION = "2023-01-01-preview"
MOST_PAGES = 20
WORKERS = 4
# Words in the names of products for machines on which no job of ours runs.
OTHERS = ("windows", "cloud services", "dedicated host")

Meter = Mapping[str, Any]


def quotes(azure: Azure, config: JobConfig | None, region: str, types: tuple[str, ...]) -> list[Quote]:
    """Return the prices of the types in the region; without `types`, of the table's types and the job's own.

    Raises UnreachableError if Azure's list cannot be read.
    """
    named = types or tuple(dict.fromkeys([*catalog.types("azureml"), *catalog.own_type("azureml", config, choose)]))
    with api.answers(
        "read Azure's price list", needs="no role, because the list is public; ask the operator of the proxy"
    ):
        first = of_machine(azure, named[0], region)  # alone: if the service does not answer, one wait is enough
        with ThreadPoolExecutor(WORKERS) as pool:
            asked = [pool.submit(of_machine, azure, size, region) for size in named[1:]]
            try:
                return [*first, *(quote for one in asked for quote in one.result())]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def of_machine(azure: Azure, size: str, region: str) -> list[Quote]:
    """Return a machine size's on-demand price, or the reason for a missing price, and its spot price if any.

    Raises AzureError.
    """
    # The service compares values exactly: Standard_NC6s_v3 and eastus, in ARM's spelling.
    where = region.lower().replace(" ", "")
    wanted = {"serviceName": "Virtual Machines", "armSkuName": size, "armRegionName": where, "priceType": "Consumption"}
    terms = (f"{key} eq '{value.replace(chr(39), chr(39) * 2)}'" for key, value in wanted.items())
    try:
        meters = [meter for meter in _meters(azure, " and ".join(terms)) if _is_of_a_job(meter)]
        dedicated = [meter for meter in meters if not _is(meter, "spot") and not _is(meter, "low priority")]
        on_demand = _quote(Key("azureml", size, where, "on_demand"), dedicated)
        spot = _quote(Key("azureml", size, where, "spot"), [meter for meter in meters if _is(meter, "low priority")])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise api.AzureError(0, "", f"its price list has another form: {error!r}") from error
    # A spot price that is not below the on-demand price is a placeholder.
    has_spot = on_demand.rate is None or (spot.rate is not None and spot.rate.usd < on_demand.rate.usd)
    return [on_demand, spot] if spot.rate is not None and has_spot else [on_demand]


def _meters(azure: Azure, terms: str) -> Iterator[Meter]:
    """Yield all meters, over all pages."""
    url, params = URL, {"api-version": VERSION, "currencyCode": "USD", "$filter": terms}
    for _ in range(MOST_PAGES):
        answer = object_in(azure.call("GET", url, params=params))
        yield from answer["Items"]
        if not answer.get("NextPageLink"):
            return
        url, params = str(answer["NextPageLink"]), {}
    raise ValueError(f"more than {MOST_PAGES} pages")


def _is_of_a_job(meter: Meter) -> bool:
    if float(meter["retailPrice"]) <= 0:  # a meter of a plan with free hours
        return False
    product = str(meter.get("productName", "")).lower()
    is_hour = meter.get("unitOfMeasure") == "1 Hour" and float(meter.get("tierMinimumUnits") or 0) == 0
    return is_hour and meter.get("type", "Consumption") == "Consumption" and not any(one in product for one in OTHERS)


def _is(meter: Meter, word: str) -> bool:
    return word in f"{meter.get('meterName', '')} {meter.get('skuName', '')}".lower()


def _quote(key: Key, meters: Sequence[Meter]) -> Quote:
    """Return the present price; an announced higher price counts as uncertainty."""
    kind: Kind = key.kind
    words = f"{key.instance_type} in {key.region}"
    if not meters:
        return Quote(key, None, f"Azure lists no {words}")
    if others := {str(meter.get("currencyCode", "USD")) for meter in meters} - {"USD"}:
        return Quote(key, None, f"Azure lists {words} in {', '.join(sorted(others))}, not in USD")
    today = rating.today().isoformat()
    now = [meter for meter in meters if _since(meter) <= today]
    if not now:
        return Quote(key, None, f"Azure lists {words} only from {min(map(_since, meters))} on")
    since = max(map(_since, now))
    held = {float(meter["retailPrice"]) for meter in now if _since(meter) == since}
    if len(held) > 1:
        listed = " and ".join(f"{usd:g}" for usd in sorted(held))
        return Quote(key, None, f"Azure lists several prices of {words}: {listed} USD")
    usd = held.pop()
    later = max((float(meter["retailPrice"]) for meter in meters if _since(meter) > today), default=usd)
    source = f"Azure Retail Prices, {'Low Priority' if kind == 'spot' else 'Linux'}, since {since}"
    return Quote(key, Rate(usd, today, source, is_own=True, factor=round(max(1.0, later / usd), 4)))


def _since(meter: Meter) -> str:
    return str(meter.get("effectiveStartDate", ""))[:10]

"""AWS's prices of SageMaker's machines today: the Price List, by GetProducts or, without permission, the public file.

One machine type has a row for each use in SageMaker: training, hosting, notebooks, HyperPod clusters, spot training.
The prices are mostly equal, but differ for some types; only rows as `...Train:ml.g5.2xlarge` bill a job. EC2's price of
the same machine is 15 to 40 % lower, and is never used. GetProducts and the file give rows of one form.
Source: docs.aws.amazon.com/awsaccountbilling, "Price List API"; botocore's model of `pricing`, 2017-10-15.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from cloudtrain.entrypoints.stores.retries import tries
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import ConfigError, CredentialError, UnreachableError
from cloudtrain.launcher.metering import rate as rating
from cloudtrain.launcher.metering.rate import Key, Quote, Rate
from cloudtrain.launcher.prices import catalog

from . import api
from .api import AwsAccess, AwsClients
from .machine import block_of, choose

SERVICE = "AmazonSageMaker"
HOME = "us-east-1"  # few regions serve GetProducts, each for all regions
PAGE = 100  # the most rows on one page
BULK = "https://pricing.us-east-1.amazonaws.com"
TRIES, PAUSE_S, READ_S = 4, 0.25, 120.0
BUSY = (408, 429, 500, 502, 503, 504)

_USAGE = re.compile(r"(?:[A-Z0-9-]+-)?Train:(ml\.[a-z0-9-]+\.[a-z0-9]+)")


class PriceRow(NamedTuple):
    """One price of a machine type in USD an hour; if `usd` is None, `why` has the reason."""

    instance_type: str
    usd: float | None
    why: str
    since: str


def quotes(clients: AwsClients, config: JobConfig | None, region: str, types: tuple[str, ...]) -> list[Quote]:
    """Return the prices of the types in the region; without `types`, of all types with SageMaker training there.

    Raises UnreachableError if AWS's list cannot be read, ConfigError if the region has no prices.
    """
    block = block_of(config)
    access = AwsAccess(HOME, block.profile, tuple(sorted(block.endpoints.items())), clients)
    items, way = _items(access, region)
    found: dict[str, list[PriceRow]] = {}
    for item in items:
        for row in _rows(item, region):
            found.setdefault(row.instance_type, []).append(row)
    if not found:
        hint = "a region as in us-east-1, of AWS's own partition"
        raise ConfigError(f"AWS lists no training machine in {region}", where=way, hint=hint)
    named = types or tuple(sorted({*found, *catalog.own_type("sagemaker", config, choose)}))
    return [_quote(name, region, found.get(name, []), way) for name in named]


def _quote(name: str, region: str, rows: list[PriceRow], way: str) -> Quote:
    """Return the single price; several different prices, or only zero prices, count as no price."""
    key = Key("sagemaker", name, region, "on_demand")
    prices = {row.usd for row in rows if row.usd is not None}
    if len(prices) == 1:
        since = max(row.since for row in rows if row.usd is not None)
        source = f"AWS Price List, Training ({way}), since {since}"
        return Quote(key, Rate(prices.pop(), rating.today().isoformat(), source, is_own=True))
    if prices:
        listed = " and ".join(f"{usd:g}" for usd in sorted(prices))
        return Quote(key, None, f"AWS lists several prices of it for training: {listed} USD")
    why = next((row.why for row in rows), "")
    return Quote(key, None, why or f"AWS lists no {name} for training in {region}")


def _rows(item: Mapping[str, Any], region: str) -> Iterator[PriceRow]:
    """Yield the on-demand prices of a product, if the product is a training machine of this region.

    Raises UnreachableError if the row has an unexpected form.
    """
    try:
        product = item["product"]
        about = product["attributes"]
        used = _USAGE.fullmatch(str(about.get("usagetype", "")))
        component = about.get("platoinstancetype") or about.get("component")
        if used is None or component != "Training" or about.get("locationType") != "AWS Region":
            return
        if about.get("regionCode") != region:
            return
        for term in item["terms"].get("OnDemand", {}).values():
            since = str(term.get("effectiveDate", ""))[:10]
            for rate in term["priceDimensions"].values():
                yield PriceRow(used[1], *_usd(rate, since), since)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UnreachableError(f"a row of AWS's price list cannot be parsed: {error!r}") from error


def _usd(rate: Mapping[str, Any], since: str) -> tuple[float | None, str]:
    """Return the USD of an hour, else the reason for a missing price."""
    prices = rate["pricePerUnit"]
    if "USD" not in prices:
        return None, f"AWS lists it in {', '.join(prices) or 'no currency'}, not in USD"
    if rate.get("unit") != "Hrs":
        return None, f"AWS lists it by {rate.get('unit')}, not by the hour"
    if since > datetime.datetime.now(datetime.timezone.utc).date().isoformat():
        return None, f"AWS lists a price only from {since} on"
    usd = float(prices["USD"])
    return (usd, "") if usd > 0 else (None, "AWS lists it at 0 USD, which is a placeholder")


def _items(access: AwsAccess, region: str) -> tuple[list[Mapping[str, Any]], str]:
    """Return the region's rows, and the name of their source. Raises UnreachableError."""
    if find_spec("boto3") is not None:
        with contextlib.suppress(CredentialError):  # missing, expired, or without pricing:GetProducts
            return _products(access, region), "GetProducts"
    return _bulk(access, region), "public file"  # the same prices


def _products(access: AwsAccess, region: str) -> list[Mapping[str, Any]]:
    wanted = {"regionCode": region, "platoinstancetype": "Training", "locationType": "AWS Region"}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    with api.answers("read AWS's price list"):
        pages = (
            api.client(access, "pricing")
            .get_paginator("get_products")
            .paginate(ServiceCode=SERVICE, Filters=filters, PaginationConfig={"PageSize": PAGE})
        )
        texts = [text for page in pages for text in page["PriceList"]]
    try:
        return [json.loads(text) for text in texts]  # each row is JSON in a string
    except (ValueError, TypeError) as error:
        raise UnreachableError(f"a row of AWS's price list is not complete JSON: {error}") from error


def _bulk(access: AwsAccess, region: str) -> list[Mapping[str, Any]]:
    """Return the rows of the public file in GetProducts' form; the file keeps products and prices apart."""
    # botocore reads these variables too; a stand-in serves both.
    prices_list = os.environ.get("AWS_ENDPOINT_URL_PRICING") or os.environ.get("AWS_ENDPOINT_URL")
    base = (dict(access.endpoints).get("pricing") or prices_list or BULK).rstrip("/")
    index = _download(f"{base}/offers/v1.0/aws/{SERVICE}/current/region_index.json")
    try:
        there = index["regions"].get(region)
        if there is None:
            return []
        prices_list = _download(f"{base}{there['currentVersionUrl']}")
        prices = prices_list["terms"]["OnDemand"]
        return [
            {"product": product, "terms": {"OnDemand": prices.get(sku, {})}}
            for sku, product in prices_list["products"].items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreachableError(f"AWS's price file has another form: {error!r}") from error


def _download(url: str) -> Any:
    """Return the JSON at the address; retry if AWS is busy. Raises UnreachableError."""
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip", "User-Agent": "cloudtrain"})
    context = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
    for _ in tries(TRIES, 2 * PAUSE_S):
        try:
            with urllib.request.urlopen(request, timeout=READ_S, context=context) as answer:
                data = answer.read()
                data = gzip.decompress(data) if answer.headers.get("Content-Encoding") == "gzip" else data
                return json.loads(data)
        except urllib.error.HTTPError as error:
            words, is_busy = f"HTTP {error.code} {error.reason}", error.code in BUSY
        except (OSError, http.client.HTTPException, EOFError) as error:
            words, is_busy = f"{getattr(error, 'reason', None) or error}", True
        except ValueError as error:
            words, is_busy = f"not complete JSON: {error}", False
        if not is_busy:
            break
    raise UnreachableError(f"AWS's price file cannot be read: {words}", where=url)

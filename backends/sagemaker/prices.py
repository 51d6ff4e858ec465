"""What AWS asks for SageMaker's machines today: its Price List, by GetProducts or, without permission, its public file.

One machine type has a row for each thing that SageMaker does with it: training, hosting, notebooks, HyperPod clusters,
spot training. They mostly cost the same, and for some types do not; a job is billed by `...Train:ml.g5.2xlarge` alone.
EC2's price of the same machine is 15 to 40 % lower, and is never taken. Both ways give rows of one form.
Source: docs.aws.amazon.com/awsaccountbilling, "Price List API"; botocore's model of `pricing`, 2017-10-15.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.backends.sagemaker import aws
from cloudtrain.backends.sagemaker.aws import Access
from cloudtrain.backends.sagemaker.machine import block_of, choose, region_of
from cloudtrain.launcher.config.schema_backends import SageMaker
from cloudtrain.launcher.errors import ConfigError, CredentialError, UnreachableError
from cloudtrain.launcher.prices import rate as rating
from cloudtrain.launcher.prices.quote import Key, Quote
from cloudtrain.launcher.prices.rate import Rate

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import Config

__all__ = ["quotes", "region"]

SERVICE = "AmazonSageMaker"
HOME = "us-east-1"  # GetProducts is served in few regions, and tells of all
PAGE = 100  # the most that it gives at once
BULK = "https://pricing.us-east-1.amazonaws.com"
TRIES, PAUSE_S, READ_S = 4, 0.25, 120.0
BUSY = (408, 429, 500, 502, 503, 504)

_USAGE = re.compile(r"(?:[A-Z0-9-]+-)?Train:(ml\.[a-z0-9-]+\.[a-z0-9]+)")


class Row(NamedTuple):
    """One price of a machine type: dollars, else why it is none."""

    instance_type: str
    usd: float | None
    why: str
    since: str


def region(config: Config | None) -> str | None:
    """Return the region whose prices are of use. Raises ConfigError where AWS's config cannot be read."""
    return region_of(SageMaker() if config is None else block_of(config))


def quotes(config: Config | None, region: str, types: tuple[str, ...]) -> list[Quote]:
    """Return the prices of the types in the region, without any named: of all that SageMaker trains on there.

    Raises UnreachableError where AWS's list cannot be read, ConfigError where the region has none.
    """
    block = SageMaker() if config is None else block_of(config)
    access = Access(HOME, block.profile, tuple(sorted(block.endpoints.items())))
    items, way = _items(access, region)
    found: dict[str, list[Row]] = {}
    for item in items:
        for row in _rows(item, region):
            found.setdefault(row.instance_type, []).append(row)
    if not found:
        hint = "a region as in us-east-1, of AWS's own partition"
        raise ConfigError(f"AWS lists no training machine in {region}", where=way, hint=hint)
    named = types or tuple(sorted({*found, *_own(config)}))
    return [_quote(name, region, found.get(name, []), way) for name in named]


def _own(config: Config | None) -> list[str]:
    """Return the job's own type, where it has one, which is told of also where it is not listed."""
    if config is None or config.backend != "sagemaker":
        return []
    with suppress(ConfigError):
        return [choose(config).instance_type]
    return []


def _quote(name: str, region: str, rows: list[Row], way: str) -> Quote:
    """Return the one price; several that differ, or none above nothing, are no price."""
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


def _rows(item: Mapping[str, Any], region: str) -> Iterator[Row]:
    """Yield the prices on demand of a product, where it is a machine of this region that trains.

    Raises UnreachableError for one of another form.
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
                yield Row(used[1], *_usd(rate, since), since)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UnreachableError(f"a row of AWS's price list has no sense: {error!r}") from error


def _usd(rate: Mapping[str, Any], since: str) -> tuple[float | None, str]:
    """Return the dollars of an hour, else why there are none."""
    prices = rate["pricePerUnit"]
    if "USD" not in prices:
        return None, f"AWS lists it in {', '.join(prices) or 'no currency'}, not in USD"
    if rate.get("unit") != "Hrs":
        return None, f"AWS lists it by {rate.get('unit')}, not by the hour"
    if since > datetime.datetime.now(datetime.timezone.utc).date().isoformat():
        return None, f"AWS lists a price from {since} on alone"
    usd = float(prices["USD"])
    return (usd, "") if usd > 0 else (None, "AWS lists it at 0 USD, which holds a place")


def _items(access: Access, region: str) -> tuple[list[Mapping[str, Any]], str]:
    """Return the region's rows, and how they were read. Raises UnreachableError."""
    if find_spec("boto3") is None:
        return _bulk(access, region), "public file"
    try:
        return _products(access, region), "GetProducts"
    except CredentialError:  # no, expired, or without pricing:GetProducts: what the file says is the same
        return _bulk(access, region), "public file"


def _products(access: Access, region: str) -> list[Mapping[str, Any]]:
    wanted = {"regionCode": region, "platoinstancetype": "Training", "locationType": "AWS Region"}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    with aws.answers("read AWS's price list"):
        pages = (
            aws.client(access, "pricing")
            .get_paginator("get_products")
            .paginate(ServiceCode=SERVICE, Filters=filters, PaginationConfig={"PageSize": PAGE})
        )
        texts = [text for page in pages for text in page["PriceList"]]
    try:
        return [json.loads(text) for text in texts]  # each row is JSON in a string
    except (ValueError, TypeError) as error:
        raise UnreachableError(f"a row of AWS's price list is no whole JSON: {error}") from error


def _bulk(access: Access, region: str) -> list[Mapping[str, Any]]:
    """Return the rows of the public file, in GetProducts' form: products and prices lie apart there."""
    # botocore reads these variables too; a stand-in serves both.
    told = os.environ.get("AWS_ENDPOINT_URL_PRICING") or os.environ.get("AWS_ENDPOINT_URL")
    base = (dict(access.endpoints).get("pricing") or told or BULK).rstrip("/")
    index = _download(f"{base}/offers/v1.0/aws/{SERVICE}/current/region_index.json")
    try:
        there = index["regions"].get(region)
        if there is None:
            return []
        told = _download(f"{base}{there['currentVersionUrl']}")
        prices = told["terms"]["OnDemand"]
        return [
            {"product": product, "terms": {"OnDemand": prices.get(sku, {})}}
            for sku, product in told["products"].items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreachableError(f"AWS's price file has another form: {error!r}") from error


def _download(url: str) -> Any:
    """Return the JSON there, asked for again where AWS is busy. Raises UnreachableError."""
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip", "User-Agent": "cloudtrain"})
    context = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
    for number in range(1, TRIES + 1):
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
            words, is_busy = f"no whole JSON: {error}", False
        if not is_busy or number == TRIES:
            break
        time.sleep(PAUSE_S * 2**number)
    raise UnreachableError(f"AWS's price file cannot be read: {words}", where=url)

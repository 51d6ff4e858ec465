"""AWS's Price List: GetProducts and the public file, with invented figures and the traps of the real list.

Real (of 2026) are ml.g5.2xlarge's 1.515 (USE1-Train:ml.g5.2xlarge), ml.m5.large's 0.115, ml.p4d.24xlarge's 25.251286.
The rows have the form of GetProducts (one JSON string a row) and of the region files (products and terms apart).
"""

import hashlib
import json
from typing import Any

from doubles.aws import validate
from doubles.aws.wire import AwsError, Call
from doubles.aws.world import World

OFFERS = "/offers/v1.0/aws/"
JSON = dict[str, Any]
VERSION, PUBLISHED = "20261101000000", "2026-11-01T00:00:00Z"
PREFIX = {"us-east-1": "USE1", "eu-west-1": "EU", "us-west-2": "USW2"}
FACTOR = {"us-east-1": 1.0, "us-west-2": 1.0, "eu-west-1": 1.115}
# US dollars an hour of training, in us-east-1.
TRAINING = {
    "ml.m5.large": 0.115,
    "ml.m5.xlarge": 0.23,
    "ml.g4dn.xlarge": 0.7364,
    "ml.g5.xlarge": 1.408,
    "ml.g5.2xlarge": 1.515,
    "ml.g5.12xlarge": 7.09,
    "ml.p4d.24xlarge": 25.251286,
    "ml.p5.48xlarge": 63.296,
}
# SageMaker's other uses of a machine: platoinstancetype, part of the usage type, share of the training price.
_OTHERS = (
    ("Hosting", "Host:", 1.0),
    ("Notebook", "Notebk:", 1.0),
    ("Processing", "Processing:", 1.0),
    ("SpotTraining", "SpotTrain:", 0.3),
    ("Cluster", "Cluster:", 0.87),
    ("Cluster-Reserved", "ClusterReserved:", 0.0),
    ("Studio-JupyterLab", "Studio:JupyterLab-", 0.8),
    ("Training", "TrainingPlanInUse:", 0.0),  # paid for before
    ("FreeTraining", "FreeTrain:", 0.0),
)


def get_products(world: World, call: Call) -> JSON:
    """Return a page of rows, each as JSON in a string. Raises AwsError."""
    validate.check("pricing", call.operation, call.params)
    if call.operation != "GetProducts":
        raise AwsError("UnknownOperationException", f"the stand-in has no pricing:{call.operation}")
    if call.params["ServiceCode"] != "AmazonSageMaker":
        raise AwsError("NotFoundException", f"Service {call.params['ServiceCode']} could not be found")
    found = [row for row in _products(world) if all(_holds(one, row) for one in call.params.get("Filters", ()))]
    try:
        start = int(call.params.get("NextToken") or 0)
    except ValueError:
        raise AwsError("InvalidNextTokenException", "Invalid token") from None
    end = start + min(call.params.get("MaxResults", 100), world.settings.price_page_size)
    texts = [json.dumps(row) for row in found[start:end]]
    if world.settings.price_damage == "truncated":
        texts = [text[: len(text) // 2] for text in texts]
    return {"FormatVersion": "aws_v1", "PriceList": texts, **({"NextToken": str(end)} if end < len(found) else {})}


def file(world: World, path: str) -> bytes | None:
    """Return the public file at a path, or None for an unknown path."""
    service = f"{OFFERS}AmazonSageMaker/"
    regions = sorted(FACTOR)
    if path == f"{service}current/region_index.json":
        told: JSON = {"formatVersion": "v1.0", "publicationDate": PUBLISHED, "regions": {}}
        for region in regions:
            url = f"{service}{VERSION}/{region}/index.json"
            told["regions"][region] = {"regionCode": region, "currentVersionUrl": url}
        return json.dumps(told).encode()
    found = [region for region in regions if path == f"{service}{VERSION}/{region}/index.json"]
    if not found:
        return None
    rows = [row for row in _products(world) if row["product"]["attributes"]["regionCode"] == found[0]]
    data = json.dumps(
        {
            "formatVersion": "v1.0",
            "offerCode": "AmazonSageMaker",
            "version": VERSION,
            "publicationDate": PUBLISHED,
            "products": {row["product"]["sku"]: row["product"] for row in rows},
            "terms": {"OnDemand": {row["product"]["sku"]: row["terms"]["OnDemand"] for row in rows}},
        }
    ).encode()
    return data[: len(data) // 2] if world.settings.price_damage == "truncated" else data


def _holds(one: JSON, row: JSON) -> bool:
    """Return whether a filter lets the row through; values are compared whole and case-sensitively."""
    value = {"productFamily": row["product"]["productFamily"], **row["product"]["attributes"]}.get(one["Field"])
    if one["Type"] in ("TERM_MATCH", "EQUALS"):
        return bool(value == one["Value"])
    if one["Type"] == "CONTAINS":
        return one["Value"] in str(value)
    return (value in one["Value"].split(",")) == (one["Type"] == "ANY_OF")


def _products(world: World) -> list[JSON]:
    damage = world.settings.price_damage
    found = []
    for region, factor in FACTOR.items():
        for name, usd in TRAINING.items():
            price = round(usd * factor, 10)
            for kind, word, share in _OTHERS:
                found.append(_row(region, name, kind, word, price * share))
            found.append(_row(region, name, "Training", "Train:", price))
            found.append(_row(region, name, "Training", "Train:", price * 1.5, place="AWS Outposts"))
        # A row with price zero, an announced row that is not yet valid, and a type with two rows.
        found.append(_row(region, "ml.g9.xlarge", "Training", "Train:", 0.0))
        found.append(_row(region, "ml.g8.xlarge", "Training", "Train:", 2.0, since="2999-01-01T00:00:00Z"))
        found.append(_row(region, "ml.g7x.xlarge", "Training", "Train:", 3.0))
        found.append(_row(region, "ml.g7x.xlarge", "Training", "Train:", 3.5, place="AWS Region", salt="b"))
        found.append(_row(region, "ml.c9.large", "Training", "Train:", 4.0, unit="Quantity"))
    if damage == "currency":
        for row in found:
            for rate in _rates(row):
                rate["pricePerUnit"] = {"CNY": rate["pricePerUnit"]["USD"]}
    if damage == "form":
        for row in found:
            row["terms"]["OnDemand"] = {"X": {"priceDimensions": [1]}}
    return found


def _rates(row: JSON) -> list[JSON]:
    return [rate for term in row["terms"]["OnDemand"].values() for rate in term["priceDimensions"].values()]


def _row(
    region: str,
    name: str,
    kind: str,
    word: str,
    usd: float,
    *,
    place: str = "AWS Region",
    since: str = PUBLISHED,
    unit: str = "Hrs",
    salt: str = "",
) -> JSON:
    usage = f"{PREFIX[region]}-{word}{name}"
    sku = hashlib.sha256(f"{region} {usage} {place} {salt}".encode()).hexdigest()[:16].upper()
    about = {
        "servicecode": "AmazonSageMaker",
        "servicename": "Amazon SageMaker",
        "location": region,
        "locationType": place,
        "regionCode": region,
        "instanceName": name,
        "instanceType": f"{name}-{kind}",
        "platoinstancename": name,
        "platoinstancetype": kind,
        "component": kind,
        "usagetype": usage,
        "operation": "RunInstance",
        "vCpu": "8",
        "physicalGpu": "N/A",
    }
    rate = {
        "unit": unit,
        "endRange": "Inf",
        "beginRange": "0",
        "description": f"${usd:g} per {kind} {name} hour in {region}",
        "appliesTo": [],
        "rateCode": f"{sku}.JRTCKXETXF.6YS6EN2CT7",
        "pricePerUnit": {"USD": f"{usd:.10f}"},
    }
    term = {"priceDimensions": {rate["rateCode"]: rate}, "sku": sku, "effectiveDate": since, "termAttributes": {}}
    return {
        "product": {"productFamily": "ML Instance", "attributes": about, "sku": sku},
        "serviceCode": "AmazonSageMaker",
        "terms": {"OnDemand": {f"{sku}.JRTCKXETXF": term}},
        "version": VERSION,
        "publicationDate": PUBLISHED,
    }

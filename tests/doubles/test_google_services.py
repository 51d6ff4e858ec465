"""Secret Manager and the price list of Google's stand-in: versions, refusals, traps."""

import base64
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from doubles.google import billing, secretmanager
from doubles.google.billing import COMPUTE_ENGINE, VERTEX, BillingSettings
from doubles.google.errors import GoogleError
from doubles.google.names import NUMBER, PROJECT
from doubles.google.secretmanager import Secrets
from doubles.kit.routing import find
from doubles.wire import Request

SECRETS = f"/v1/projects/{PROJECT}/secrets"
NAME = f"projects/{NUMBER}/secrets/s"
SECRET = {"replication": {"automatic": {}}}
DATA = base64.b64encode(b"value").decode()


@dataclass
class World:
    """The part of the stand-in that these services use."""

    now_s: float = 1_795_000_000.0
    settings: BillingSettings = field(default_factory=BillingSettings)
    secrets: Secrets = field(init=False)

    def __post_init__(self) -> None:
        self.secrets = Secrets(lambda: self.now_s)

    def call(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        """Return the JSON of the answer. Raises GoogleError."""
        data = b"" if body is None else json.dumps(body).encode()
        request = Request(method, path, "", path, query, {}, data)
        found = find([*secretmanager.ROUTES, *billing.ROUTES], method, path)
        assert found is not None, f"{method} {path}"
        return json.loads(found[0].function(self, request, **found[1]).body)

    def code(self, method: str, path: str, body: Any = None, **query: str) -> str:
        """Return the code of the refusal."""
        with pytest.raises(GoogleError) as caught:
            self.call(method, path, body, **query)
        return caught.value.code


@pytest.fixture
def world() -> World:
    """Return a world without secrets."""
    return World()


def test_versions_count_up(world: World) -> None:
    """The latest version is the newest."""
    world.secrets.set("s", "1")
    world.secrets.set("s", "2")
    assert world.call("GET", f"{SECRETS}/s/versions/1:access")["payload"]["data"] == "MQ=="
    assert world.call("GET", f"{SECRETS}/s/versions/latest:access")["name"].endswith("/2")
    assert world.secrets.value("s") == "2"
    assert world.code("GET", f"{SECRETS}/s/versions/3:access") == "NOT_FOUND"


def test_secret_expires(world: World) -> None:
    """A secret expires after its ttl; before then the answer has the time."""
    made = world.call("POST", SECRETS, {**SECRET, "ttl": "3600s"}, secretId="s")
    assert (made["expireTime"][:19], "ttl" in made) == ("2026-11-18T12:06:40", False)
    world.now_s += 3599
    assert list(world.secrets.values()) == ["s"]
    world.now_s += 1
    assert world.code("POST", f"{SECRETS}/s:addVersion", {"payload": {"data": DATA}}) == "NOT_FOUND"
    assert world.secrets.values() == {}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        *(("s", {}), ("s", {"replication": {}}), ("s", {**SECRET, "label": {}})),
        *(("s", {**SECRET, "labels": {"Run": "1"}}), ("s", {**SECRET, "labels": {"run": "A"}})),
        *(("s", {**SECRET, "ttl": "1h"}), ("s", {**SECRET, "ttl": "0s"})),
        ("s", {**SECRET, "expireTime": "2027-01-01T00:00:00Z"}),
        ("s.t", SECRET),
        ("", SECRET),
    ],
)
def test_invalid_secret_is_refused(world: World, name: str, body: dict[str, Any]) -> None:
    """A field or value that the API does not accept is an error."""
    assert world.code("POST", SECRETS, body, secretId=name) == "INVALID_ARGUMENT"
    assert world.secrets.values() == {}


@pytest.mark.parametrize(
    "payload",
    [{}, {"data": ""}, {"data": "?"}, {"data": DATA, "dataCrc32c": "1"}, {"data": base64.b64encode(bytes(65537))}],
)
def test_invalid_value_is_refused(world: World, payload: dict[str, Any]) -> None:
    """An empty value, invalid base64, a wrong checksum and more than 64 KiB are errors."""
    world.secrets.set("s", "1")
    told = {key: value.decode() if isinstance(value, bytes) else value for key, value in payload.items()}
    assert world.code("POST", f"{SECRETS}/s:addVersion", {"payload": told}) == "INVALID_ARGUMENT"
    assert world.secrets.value("s") == "1"


def test_existing_name_is_refused(world: World) -> None:
    """A name exists once; another project is not accessible."""
    world.secrets.set("s", "1")
    assert world.code("POST", SECRETS, SECRET, secretId="s") == "ALREADY_EXISTS"
    assert world.code("DELETE", "/v1/projects/another/secrets/s") == "PERMISSION_DENIED"


def skus(world: World, service: str, region: str = "us-central1") -> dict[str, dict[str, Any]]:
    """Return all SKUs of a region by their descriptions, page after page."""
    found: list[dict[str, Any]] = []
    query = {"pageSize": "5000"}
    while True:
        page = world.call("GET", f"/v1/services/{service}/skus", **query)
        found += page["skus"]
        if not page["nextPageToken"]:
            return {sku["description"]: sku for sku in found if region in sku["serviceRegions"]}
        query["pageToken"] = page["nextPageToken"]


def usd(sku: dict[str, Any]) -> float:
    """Return a SKU's present price."""
    price = sku["pricingInfo"][-1]["pricingExpression"]["tieredRates"][-1]["unitPrice"]
    return int(price["units"]) + float(price["nanos"]) / 1e9


def test_price_list_has_the_traps_of_the_real_list(world: World) -> None:
    """The list has similar names, free tiers, earlier prices, commitments, and a spot price tagged as on demand."""
    found = skus(world, COMPUTE_ENGINE)
    core = found["E2 Instance Core running in Americas"]
    assert [name for name in found if "E2 Instance Core running in" in name and name != core["description"]]
    assert len(core["pricingInfo"][0]["pricingExpression"]["tieredRates"]) == 2
    assert usd(core) > 0
    dear = found["Nvidia Tesla A100 GPU running in Americas"]
    assert len(dear["pricingInfo"]) == 2
    assert {sku["category"]["usageType"] for sku in found.values()} == {"OnDemand", "Preemptible", "Commit1Yr"}
    tagged = found["Nvidia L4 GPU attached to Spot Preemptible VMs running in Americas"]
    assert tagged["category"]["usageType"] == "OnDemand"
    assert "Vertex AI: Online/Batch Prediction on NVIDIA L4 in Iowa" in skus(world, VERTEX)
    assert usd(skus(world, VERTEX, "europe-west4")["Vertex AI: Training/Pipelines on NVIDIA L4 in Netherlands"]) == (
        pytest.approx(0.6 * 1.1 * 1.15)
    )


def test_invalid_parameter_of_the_price_list_is_refused(world: World) -> None:
    """A page has at most 5,000 SKUs; an unknown parameter is no filter that finds all."""
    for query in ({"pageSize": "5001"}, {"pageToken": "x"}, {"currencyCode": "EUR"}, {"filter": "x"}):
        assert world.code("GET", f"/v1/services/{VERTEX}/skus", **query) == "INVALID_ARGUMENT"

"""AWS's Price List, over HTTP by the real SDK: the row that bills a training job, or the reason for no price."""

import pytest

from cloudtrain.backends.sagemaker import api as clients
from cloudtrain.backends.sagemaker import prices
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UnreachableError
from cloudtrain.launcher.metering.rate import Quote
from doubles.aws import pricelist
from doubles.aws.handle import REGION, Aws


@pytest.fixture(autouse=True)
def fresh_clients(account: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query without a pause, by clients of this test's own."""
    monkeypatch.setattr(prices, "PAUSE_S", 0.0)


@pytest.fixture(params=["GetProducts", "public file"])
def way(request: pytest.FixtureRequest, account: Aws) -> str:
    """Return the way to the list; without permission the way is the public file."""
    if request.param == "public file":
        message = "User is not authorized to perform: pricing:GetProducts"
        account.fault("pricing:GetProducts", "error", code="AccessDeniedException", message=message)
    return str(request.param)


def by_type(found: list[Quote]) -> dict[str, Quote]:
    """Return the quotes by their type."""
    assert all((quote.key.backend, quote.key.kind) == ("sagemaker", "on_demand") for quote in found)
    return {quote.key.instance_type: quote for quote in found}


def test_all_training_types_are_read(way: str, account: Aws) -> None:
    """The Training price counts, with or without GPUs: not hosting, spot, clusters, outposts or paid plans."""
    account.settings(price_page_size=7)
    found = by_type(prices.quotes(clients.AwsClients(), None, "eu-west-1", ()))
    read = {name: quote.rate.usd for name, quote in found.items() if quote.rate is not None}
    assert read == pytest.approx({name: usd * 1.115 for name, usd in pricelist.TRAINING.items()})
    rate = found["ml.m5.large"].rate
    assert (rate.is_own, rate.is_derived, rate.factor) == (True, False, 1.0)
    assert rate.source == f"AWS Price List, Training ({way}), since 2026-11-01"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ml.g9.xlarge", "at 0 USD"),
        ("ml.g8.xlarge", "only from 2999-01-01 on"),
        ("ml.g7x.xlarge", "several prices of it for training: 3 and 3.5 USD"),
        ("ml.c9.large", "by Quantity, not by the hour"),
        ("ml.x1.large", "lists no ml.x1.large for training in us-east-1"),
    ],
)
def test_missing_price_gives_a_reason(way: str, name: str, why: str) -> None:
    """An unclear price is never 0, and never an arbitrary choice."""
    (quote,) = prices.quotes(clients.AwsClients(), None, REGION, (name,))
    assert quote.rate is None
    assert why in quote.reason


def test_foreign_currency_is_no_price(way: str, account: Aws) -> None:
    """AWS's China partition has prices in CNY."""
    account.settings(price_damage="currency")
    (quote,) = prices.quotes(clients.AwsClients(), None, REGION, ("ml.m5.large",))
    assert (quote.rate, quote.reason) == (None, "AWS lists it in CNY, not in USD")


@pytest.mark.parametrize(
    ("damage", "said"), [("truncated", "not complete JSON"), ("form", "row of AWS's price list cannot be parsed")]
)
def test_damaged_answer_is_no_price(way: str, account: Aws, damage: str, said: str) -> None:
    """A truncated row, or a row in an unknown form, raises an error."""
    account.settings(price_damage=damage)
    with pytest.raises(UnreachableError, match=said):
        prices.quotes(clients.AwsClients(), None, REGION, ())


def test_region_without_prices_is_named(way: str) -> None:
    """A misspelt region is named in the error."""
    with pytest.raises(ConfigError, match="AWS lists no training machine in us-east-9"):
        prices.quotes(clients.AwsClients(), None, "us-east-9", ())


@pytest.mark.parametrize("kind", ["expired", "denied"])
def test_invalid_credentials_are_not_needed(account: Aws, kind: str) -> None:
    """The public file has the same price."""
    more = {"code": "AccessDeniedException", "message": "not authorized"} if kind == "denied" else {}
    account.fault("pricing:GetProducts", "error" if more else "expired", **more)
    (quote,) = prices.quotes(clients.AwsClients(), None, REGION, ("ml.g5.2xlarge",))
    assert (quote.rate.usd, "public file" in quote.rate.source) == (1.515, True)


def test_without_credentials_or_sdk_the_file_is_read(account: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the SDK, GetProducts is not called."""
    monkeypatch.setattr(prices, "find_spec", lambda name: None)
    (quote,) = prices.quotes(clients.AwsClients(), None, REGION, ("ml.m5.xlarge",))
    assert (quote.rate and quote.rate.usd) == 0.23
    assert account.journal("GetProducts") == []


@pytest.mark.parametrize("fault", [{"kind": "throttle"}, {"kind": "error", "code": "X", "status": 503}])
def test_busy_service_is_retried(account: Aws, fault: dict[str, object]) -> None:
    """After two refusals the answer arrives; permanent refusals raise an error."""
    account.fault("pricing:GetProducts", "expired")
    account.fault("pricing:GetFile", count=2, **fault)  # type: ignore[arg-type]
    (quote,) = prices.quotes(clients.AwsClients(), None, REGION, ("ml.m5.xlarge",))
    assert quote.rate is not None
    account.fault("pricing:GetFile", **fault)  # type: ignore[arg-type]
    with pytest.raises(UnreachableError, match="price file cannot be read: HTTP 503"):
        prices.quotes(clients.AwsClients(), None, REGION, ())


def test_unavailable_service_is_reported(account: Aws) -> None:
    """The message is a sentence for both ways."""
    account.fault("pricing:GetProducts", "500", count=1)
    assert prices.quotes(clients.AwsClients(), None, REGION, ("ml.m5.xlarge",))[0].rate is not None
    account.fault(["pricing:GetProducts", "pricing:GetFile"], "error", code="BadThing", message="no", status=400)
    with pytest.raises(CloudtrainError, match="cannot read AWS's price list: no"):
        prices.quotes(clients.AwsClients(), None, REGION, ())


def test_request_conforms_to_botocores_model(account: Aws) -> None:
    """The stand-in checks the request with botocore's model; the filters select only training, in one region."""
    prices.quotes(clients.AwsClients(), None, REGION, ("ml.m5.large",))
    asked = account.journal("GetProducts")[0]
    assert asked["region"] == "us-east-1"
    fields = {one["Field"]: one["Value"] for one in asked["params"]["Filters"]}
    assert fields == {"regionCode": REGION, "platoinstancetype": "Training", "locationType": "AWS Region"}
    assert asked["params"]["MaxResults"] == 100

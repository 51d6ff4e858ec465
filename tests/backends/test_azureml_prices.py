"""Azure's Retail Prices over HTTP: the meter of a size that bills a job, or the reason for no price."""

from typing import Any

import pytest

from cloudtrain.backends import http
from cloudtrain.backends.azureml import api, prices
from cloudtrain.launcher.config.schema import model
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.prices import catalog
from doubles.azure.handle import Azure


@pytest.fixture(autouse=True)
def no_pauses(azure_account: Azure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without pauses."""
    monkeypatch.setattr(http, "PAUSE_S", 0.0)


def asked(size: str, region: str = "eastus") -> dict[str, Any]:
    """Return the size's prices by kind: dollars, or the reason for no price."""
    found = prices.quotes(api.Azure(), None, region, (size,))
    return {quote.key.kind: quote.rate.usd if quote.rate else quote.reason for quote in found}


def test_linux_meter_is_the_price(azure_account: Azure) -> None:
    """Windows and Spot meters do not count, Low Priority counts apart; all pages, and regions by display name."""
    azure_account.settings(price_page_size=1)
    assert asked("Standard_NC6s_v3") == {"on_demand": 3.0, "spot": 0.6}
    (found, _) = prices.of_machine(api.Azure(), "Standard_NC6s_v3", "West Europe")
    assert found.key.region == "westeurope"
    assert (found.rate.usd, found.rate.source) == (3.75, "Azure Retail Prices, Linux, since 2026-01-01")


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("Standard_NC12s_v3", "several prices of Standard_NC12s_v3 in eastus: 6 and 6.12 USD"),
        ("Standard_D16s_v6", "only from 2999-01-01 on"),
        ("Standard_F8s_v2", "Azure lists no Standard_F8s_v2 in eastus"),  # only Windows
        ("standard_nc6s_v3", "Azure lists no standard_nc6s_v3 in eastus"),  # case matters
        ("it's", "Azure lists no it's in eastus"),
    ],
)
def test_missing_price_gives_a_reason(size: str, said: str) -> None:
    """An unclear price is never 0, and never an arbitrary choice."""
    found = asked(size)
    assert list(found) == ["on_demand"]
    assert said in found["on_demand"]


def test_special_and_zero_meters_are_skipped() -> None:
    """Cloud Services, dedicated hosts, monthly prices, tiers and zeros do not count."""
    assert asked("Standard_F4s_v2") == {"on_demand": 0.17}


def test_spot_price_without_a_saving_is_ignored() -> None:
    """A spot price equal to the normal price fills a gap in the list."""
    assert asked("Standard_ND40rs_v2") == {"on_demand": 22.0}


def test_announced_price_counts_as_uncertainty() -> None:
    """The present price counts; an announced rise becomes the factor of uncertainty."""
    (found,) = prices.of_machine(api.Azure(), "Standard_D8s_v5", "eastus")
    assert (found.rate.usd, found.rate.factor) == (0.384, 1.25)


def test_foreign_currency_is_no_price(azure_account: Azure) -> None:
    """Microsoft publishes prices in foreign currencies only for reference."""
    azure_account.settings(price_currency="EUR")
    assert "in EUR, not in USD" in asked("Standard_NC6s_v3")["on_demand"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"kind": "throttle", "retry_after": "0"}, "Too many requests"),
        ({"kind": "throttle", "retry_after": "600"}, "Too many requests"),
        ({"kind": "503", "retry_after": "0"}, "unable to receive"),
        ({"kind": "cut"}, "cannot read Azure's price list"),
        ({"kind": "drop"}, "cannot read Azure's price list"),
    ],
)
def test_unavailable_service_is_reported(azure_account: Azure, fault: dict[str, Any], said: str) -> None:
    """A single fault is retried; a permanent fault gives one sentence."""
    if fault.get("retry_after") != "600":
        azure_account.fault("prices", count=1, **fault)
        assert asked("Standard_D4s_v3")["on_demand"] == 0.2
    azure_account.fault("prices", **fault)
    with pytest.raises(UnreachableError, match=said):
        asked("Standard_D4s_v3")


def test_without_names_the_tables_types_are_priced() -> None:
    """All types are priced in parallel; a type that the stand-in does not list has a reason."""
    found = prices.quotes(api.Azure(), None, "eastus", ())
    assert {quote.key.instance_type for quote in found} == set(catalog.types("azureml"))
    assert {quote.key.instance_type for quote in found if quote.rate is not None} >= {"Standard_NC6s_v3"}
    assert all(quote.reason for quote in found if quote.rate is None)


def test_type_is_priced_despite_the_jobs_accelerator() -> None:
    """An accelerator unknown to Azure blocks no price; without names the table's types are priced."""
    job = {"name": "x", "backend": "azureml", "task": "task:make"}
    block = {"region": "eastus", "resource_group": "g", "workspace": "w"}
    block["subscription"] = "00000000-0000-0000-0000-000000000000"
    config = model().model_validate({**job, "resources": {"accelerators": "A10G:1"}, "azureml": block})
    (found, _) = prices.quotes(api.Azure(), config, "eastus", ("Standard_NC6s_v3",))
    assert found.rate is not None
    assert len(prices.quotes(api.Azure(), config, "eastus", ())) >= len(catalog.types("azureml"))

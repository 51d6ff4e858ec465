"""Azure's Retail Prices: of all meters of a size the one that bills a job, or why there is none; over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from cloudtrain.backends.azureml import prices, rest
from cloudtrain.launcher.config.schema import model
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.prices import catalog
from doubles.azure.handle import Azure


@pytest.fixture(autouse=True)
def fresh_session(azure_account: Azure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask by a connection of this test's own, without pauses, whatever another test's host has asked for."""
    monkeypatch.setattr(rest, "_sessions", [])
    monkeypatch.setattr(rest, "_not_before_s", {})
    monkeypatch.setattr(rest, "PAUSE_S", 0.0)


def asked(size: str, region: str = "eastus") -> dict[str, Any]:
    """Return the size's prices by the way of having it: dollars, or why there are none."""
    found = prices.quotes(None, region, (size,))
    return {quote.key.kind: quote.rate.usd if quote.rate else quote.reason for quote in found}


def test_linux_meter_is_the_price(azure_account: Azure) -> None:
    """No Windows twin, no Spot, and Low Priority apart; over all pages, in a region as people write it."""
    azure_account.settings(price_page_size=1)
    assert asked("Standard_NC6s_v3") == {"on_demand": 3.0, "spot": 0.6}
    (found, _) = prices.of_machine("Standard_NC6s_v3", "West Europe")
    assert found.key.region == "westeurope"
    assert found.rate is not None
    assert (found.rate.usd, found.rate.source) == (3.75, "Azure Retail Prices, Linux, since 2026-01-01")


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("Standard_NC12s_v3", "several prices of Standard_NC12s_v3 in eastus: 6 and 6.12 USD"),
        ("Standard_D16s_v6", "only from 2999-01-01 on"),
        ("Standard_F8s_v2", "Azure lists no Standard_F8s_v2 in eastus"),  # Windows alone
        ("standard_nc6s_v3", "Azure lists no standard_nc6s_v3 in eastus"),  # case counts
        ("it's", "Azure lists no it's in eastus"),
    ],
)
def test_what_is_no_price_says_why(size: str, said: str) -> None:
    """Never 0, and never one of two."""
    found = asked(size)
    assert list(found) == ["on_demand"]
    assert said in found["on_demand"]


def test_twins_and_gifts_are_passed_over() -> None:
    """Cloud Services, dedicated hosts, months, tiers and zeros."""
    assert asked("Standard_F4s_v2") == {"on_demand": 0.17}


def test_spot_that_saves_nothing_is_none() -> None:
    """It is a gap that somebody has filled in."""
    assert asked("Standard_ND40rs_v2") == {"on_demand": 22.0}


def test_announced_price_counts_as_uncertainty() -> None:
    """What holds now is the price; the rise that is coming is how much more it may cost."""
    (found,) = prices.of_machine("Standard_D8s_v5", "eastus")
    assert found.rate is not None
    assert (found.rate.usd, found.rate.factor) == (0.384, 1.25)


def test_other_currency_is_no_price(azure_account: Azure) -> None:
    """Which is for reference alone, as Microsoft says."""
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
def test_service_that_is_away_is_told(azure_account: Azure, fault: dict[str, Any], said: str) -> None:
    """Once is no matter; for ever is one sentence."""
    if fault.get("retry_after") != "600":
        azure_account.fault("prices", count=1, **fault)
        assert asked("Standard_D4s_v3")["on_demand"] == 0.2
    azure_account.fault("prices", **fault)
    with pytest.raises(UnreachableError, match=said):
        asked("Standard_D4s_v3")


def test_without_names_the_tables_types_are_read() -> None:
    """All of them, side by side; what the stand-in lists not is said of each."""
    found = prices.quotes(None, "eastus", ())
    assert {quote.key.instance_type for quote in found} == set(catalog.types("azureml"))
    assert {quote.key.instance_type for quote in found if quote.rate is not None} >= {"Standard_NC6s_v3"}
    assert all(quote.reason for quote in found if quote.rate is None)


def test_type_is_asked_for_whatever_the_job_takes() -> None:
    """An accelerator that is no Azure machine's stands in nobody's way; without names the table's types are read."""
    block = {"region": "eastus", "subscription": "s", "resource_group": "g", "workspace": "w"}
    config = model().model_validate(
        {
            "name": "x",
            "backend": "azureml",
            "task": "task:make",
            "resources": {"accelerators": "A10G:1"},
            "azureml": block,
        }
    )
    (found, _) = prices.quotes(config, "eastus", ("Standard_NC6s_v3",))
    assert found.rate is not None
    assert len(prices.quotes(config, "eastus", ())) >= len(catalog.types("azureml"))

"""Google's Cloud Billing Catalog by `prices refresh`: machines' sums, by two rules, over HTTP with a login."""

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.google import billing
from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT, REGION


@pytest.fixture(autouse=True)
def region(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the region by the variable of Google's own tools."""
    monkeypatch.setenv("GOOGLE_CLOUD_LOCATION", REGION)


def refreshed(vertex: Any, *more: str, code: int = 0) -> dict[tuple[str, str], Any]:
    """Return the prices that the command has read, by type and kind."""
    done = vertex("prices", "refresh", "--backend", "vertex", "--json", *more)
    assert done.code == code, done.stderr
    assert "itself failed" not in done.stderr
    return {(one["instance_type"], one["kind"]): one for one in done.json["prices"]}


def test_machines_are_summed_for_every_kind(vertex: Any, google: Google) -> None:
    """The sums equal the stand-in's, in units and billionths, for any page size; CPU types are included."""
    google.settings(sku_page_size=9)
    names = ["a3-highgpu-8g", "e2-standard-4", "n1-standard-8 + 2 x NVIDIA_TESLA_T4"]
    found = refreshed(vertex, *(f"--type={name}" for name in names))
    ways = {"on_demand": "STANDARD", "spot": "SPOT", "flex_start": "FLEX_START"}
    for (name, kind), one in found.items():
        if kind == "reservation":
            continue
        machine, _, attached = name.partition(" + ")
        own = billing.hourly_usd(machine, ways[kind], REGION, t4=2 if attached else 0)
        assert one["usd_per_hour"] == pytest.approx(own, abs=1e-6), name
    assert {name for name, kind in found if kind == "flex_start"} == {"a3-highgpu-8g"}
    assert "Vertex AI's own prices, since 2026-10-01" in found["a3-highgpu-8g", "on_demand"]["source"]
    assert found["a3-highgpu-8g", "spot"]["derived"] is False


def test_plan_uses_refreshed_prices(vertex: Any, google: Google, tmp_path: Path) -> None:
    """The table lacks T4s on n1-highmem-8; the plan uses the price of the requested kind."""
    (tmp_path / "loop.py").write_text("print('x')\n")
    block = {"project": PROJECT, "location": REGION, "staging_bucket": BUCKET, "machine_type": "n1-highmem-8"}
    config = {"name": "j", "backend": "vertex", "script": "loop.py", "vertex": block}
    config["resources"] = {"accelerators": "T4:2"}
    (tmp_path / "cloudtrain.yaml").write_text(json.dumps(config))
    before = vertex("plan", "--json", cwd=tmp_path).json
    done = vertex("prices", "refresh", cwd=tmp_path)
    assert (before["hourly_usd"], done.code) == (None, 0)
    assert "new" in done.stderr
    after = vertex("plan", "--json", cwd=tmp_path).json
    assert after["hourly_usd"] > 0.8
    assert (after["uncertainty"], "read from the vendor's list" in after["price_source"]) == (1.0, True)
    spot = vertex("plan", "--json", "--spot", cwd=tmp_path).json
    assert spot["hourly_usd"] < after["hourly_usd"]


@pytest.mark.parametrize(("name", "why"), [("x9-mega-8", "is not known here"), ("g4-standard-48", "lists no")])
def test_missing_price_gives_a_reason(vertex: Any, google: Google, name: str, why: str) -> None:
    """The machine has unknown parts, or Google does not list the machine."""
    found = refreshed(vertex, "--type", name, code=3)
    assert [one["usd_per_hour"] for one in found.values()] == [None]
    assert why in found[name, "on_demand"]["reason"]


@pytest.mark.parametrize(
    ("fault", "code", "why"),
    [
        *(("429", 7, "Quota exceeded"), ("503", 7, "unavailable"), ("cut", 7, "price list")),
        ("403", 4, "Cloud Billing API"),
    ],
)
def test_unreadable_list_is_reported(vertex: Any, google: Google, fault: str, code: int, why: str) -> None:
    """One row has the reason, and the exit code follows; a single busy answer is retried."""
    google.fault("billing.skus", fault)
    found = refreshed(vertex, code=code)
    assert why in found["", "on_demand"]["reason"]


def test_foreign_currency_is_no_price(vertex: Any, google: Google) -> None:
    """The rule holds for any account."""
    google.settings(sku_currency="EUR")
    assert "in EUR, not USD" in refreshed(vertex, code=7)["", "on_demand"]["reason"]


def test_expired_login_is_reported(vertex: Any, google: Google) -> None:
    """The reason has the remedy."""
    google.fault("billing.skus", "UNAUTHENTICATED")
    assert "gcloud auth" in refreshed(vertex, code=4)["", "on_demand"]["reason"]


def test_project_and_region_are_needed(vertex: Any, google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google needs the project that a login reads for."""
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT")
    reason = refreshed(vertex, "--region", REGION, code=3)["", "on_demand"]["reason"]
    assert "no Google Cloud project" in reason
    monkeypatch.delenv("GOOGLE_CLOUD_LOCATION")
    assert "no region" in refreshed(vertex, code=3)["", "on_demand"]["reason"]

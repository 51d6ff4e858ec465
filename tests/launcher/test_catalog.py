"""The table of machine types and prices, and the tool that makes the table from collected facts."""

import csv
import runpy
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.prices import catalog

ROWS = [row for backend in catalog.backends() for row in catalog.rows(backend)]
ATTACHED = [row for row in ROWS if " + " in row["instance_type"]]
VERTEX = [row for row in ROWS if row["backend"] == "vertex" and row["usd_per_hour"] and row not in ATTACHED]


def test_rows_of_the_table_are_sound() -> None:
    """Each price is above 0, has a source and a date, is marked as derived or not; a type has one row in a region."""
    for row in ROWS:
        assert row["source"]
        for price in (row["usd_per_hour"], row["spot_usd_per_hour"]):
            assert not price or (float(price) > 0 and row["as_of"] and row["derived"] in ("yes", "no")), row
    keys = [(row["backend"], row["instance_type"], row["region"]) for row in ROWS]
    assert len(set(keys)) == len(keys)


def test_spot_costs_less() -> None:
    """Azure has quoted spot prices; Vertex AI's have the full fee, 15 % of the on-demand price; SageMaker has none."""
    both = [row for row in ROWS if row["spot_usd_per_hour"] and row["usd_per_hour"]]
    assert {row["backend"] for row in both} == {"azureml", "vertex"}
    assert [row for row in both if float(row["spot_usd_per_hour"]) >= float(row["usd_per_hour"])] == []
    assert (len(VERTEX), len(ATTACHED)) == (90, 114)
    for row in VERTEX:
        on_demand = float(row["usd_per_hour"]) / 1.15
        infra = float(row["spot_usd_per_hour"]) - 0.15 * on_demand
        assert 0.2 < infra / on_demand < 0.65, row  # 1.15 x spot would leave 0.14 for the cheapest
    azure = catalog.by_type("azureml", "Standard_NC6s_v3", "eastus")
    aws = catalog.by_type("sagemaker", "ml.g5.12xlarge", "us-west-2")
    assert "spot" in azure.rates
    assert azure.hourly_usd is not None
    assert azure.rates["spot"].usd < azure.hourly_usd
    assert "spot" not in aws.rates


@pytest.mark.parametrize(
    ("instance_type", "infra", "infra_spot"),
    [("a3-highgpu-8g", 88.49, 50.609541), ("g2-standard-96", 8.00333, 4.499264), ("n1-standard-4", 0.189999, 0.06701)],
)
def test_vertex_price_is_compute_engines_with_the_fee(instance_type: str, infra: float, infra_spot: float) -> None:
    """The prices are Compute Engine's in us-central1, 2026-07."""
    machine = catalog.by_type("vertex", instance_type, "us-central1")
    assert machine.hourly_usd == pytest.approx(1.15 * infra, abs=1e-6)
    assert machine.rates["spot"].usd == pytest.approx(infra_spot + 0.15 * infra, abs=1e-6)


def test_attached_accelerators_have_a_price_each() -> None:
    """A machine with twice the T4s costs the same machine and twice the T4s, on demand and spot."""
    hosts = {(row["instance_type"], row["region"]): row for row in VERTEX}
    each: dict[tuple[str, str], list[float]] = {}
    for row in ATTACHED:
        host = hosts[row["instance_type"].partition(" + ")[0], row["region"]]
        prices = ("usd_per_hour", "spot_usd_per_hour")
        usd = [(float(row[key]) - float(host[key])) / int(row["count"]) for key in prices]
        assert usd == pytest.approx(each.setdefault((row["accelerator"], row["region"]), usd), abs=1e-5), row
        assert 0.15 < usd[1] / usd[0] < 0.65, row
        assert row["derived"] == "yes"
    assert each["T4", "us-central1"] == pytest.approx([1.15 * 0.35, 0.175 + 0.15 * 0.35], abs=1e-5)
    assert {name for name, _ in each} == {"T4", "V100", "P100", "P4"}


@pytest.mark.parametrize("family", ["a2-highgpu", "a2-ultragpu", "a3-highgpu", "g4-standard", "n1-standard"])
def test_vertex_price_grows_with_the_machine(family: str) -> None:
    """Twice the machine costs twice the price, on demand and spot."""
    for region in ("us-central1", "europe-west4"):
        rows = [row for row in VERTEX if row["instance_type"].startswith(family) and row["region"] == region]
        sizes = [int(row["instance_type"].rpartition("-")[2].removesuffix("g")) for row in rows]
        for column in ("usd_per_hour", "spot_usd_per_hour"):
            each = [float(row[column]) / size for row, size in zip(rows, sizes, strict=True)]
            assert len(each) >= 4
            assert each == pytest.approx([each[0]] * len(each), rel=1e-5)


def test_unknown_price_is_none() -> None:
    """A machine without a price, in a region or at all, has no rates; a machine without a row is None."""
    for instance_type, region in (("a2-highgpu-8g", "us-west9"), ("a2-highgpu-8g", None), ("a4-highgpu-8g", None)):
        machine = catalog.by_type("vertex", instance_type, region)
        assert (machine.count, machine.hourly_usd, "spot" in machine.rates) == (8, None, False)
    assert catalog.by_type("vertex", "a2-highgpu-3g", "us-central1") is None


def test_unknown_names_are_answered_with_known_ones() -> None:
    """Letters in place of zeros count as zeros; a type without a price names regions with a price, also of a slip."""
    for wanted, meant in (("A1OO:8", "A100"), ("h10:8", "H100"), ("RTX-PR-6000:1", "RTX-PRO-6000")):
        assert catalog.unknown(wanted).endswith(f"did you mean `{meant}`?"), wanted
    said = catalog.unpriced("sagemaker", "ml.g4dn.xlarge", "mars-1")
    assert said.startswith("no price of ml.g4dn.xlarge in mars-1 (known in ")
    assert "us-east-1" in said
    assert "known in" not in catalog.unpriced("sagemaker", "ml.none", "us-east-1")


def test_accelerators_are_found_by_their_name() -> None:
    """`H100:8` is a3, the cheaper type first; a host of T4s (n1) is found with its T4s only, the smallest first."""
    found = catalog.by_accelerators("vertex", "h100:8", "us-east4")
    assert [machine.instance_type for machine in found] == ["a3-highgpu-8g", "a3-megagpu-8g"]
    found = catalog.by_accelerators("vertex", "T4:1", "us-central1")
    assert [machine.instance_type for machine in found][:1] == ["n1-standard-4 + 1 x NVIDIA_TESLA_T4"]
    # 1.15 x (4 x 0.031611 + 15 x 0.004237 + 0.35), by Compute Engine's prices of cores, memory and the GPU.
    assert found[0].hourly_usd == pytest.approx(0.621, abs=1e-3)
    for backend, wanted, name in (
        ("sagemaker", "A100-80GB:8", "ml.p4de.24xlarge"),
        ("sagemaker", "A100-40GB:8", "ml.p4d.24xlarge"),
        ("azureml", "A100-80GB:8", "Standard_ND96amsr_A100_v4"),
        ("vertex", "A100-80GB:8", "a2-ultragpu-8g"),
    ):
        assert [each.instance_type for each in catalog.by_accelerators(backend, wanted, None)] == [name]
    found = catalog.by_accelerators("vertex", "L4", "us-central1")
    assert [machine.instance_type for machine in found][:2] == ["g2-standard-4", "g2-standard-8"]


ROOT = Path(__file__).resolve().parents[2]
HEAD = (
    "backend,instance_type,accelerator,accelerator_count,accelerator_memory_gib,vcpus,memory_gib,interconnect,region,"
    "on_demand_usd_per_hour,spot_usd_per_hour,infra_on_demand_usd_per_hour,infra_spot_usd_per_hour,derived,source,as_of,note"
)


@pytest.fixture(scope="module")
def tool() -> Any:
    """Return the tool's names."""
    return runpy.run_path(str(ROOT / "tools" / "price_table.py"))


def made(tool: Any, *lines: str) -> list[dict[str, str]]:
    """Return the rows for facts: type, own price, spot, infra price, infra spot, derived, source, date."""
    facts = [HEAD]
    for line in lines:
        backend, name, own, spot, infra, infra_spot, derived, source, day = line.split("|")
        facts.append(
            f'{backend},{name},X,8,80,1,1,-,r,{own},{spot},{infra},{infra_spot},{derived},"{source}",{day},note'
        )
    return list(csv.DictReader(tool["table"]("\n".join(facts)).splitlines()))


def test_tool_copies_or_derives_figures(tool: Any) -> None:
    """A blank stays blank, a derived figure stays marked; Compute Engine's price with the fee replaces bad quotes."""
    rows = made(
        tool,
        "sagemaker|a|4.890||||no|list, quoted (text index id 7; by hand)|2026-09",
        "sagemaker|b|||21.5|||list|2025-11-30",
        "azureml|c|3.10|0.4|||yes|text|2021?",
    )
    figures = [(row["usd_per_hour"], row["spot_usd_per_hour"], row["derived"]) for row in rows]
    assert figures == [("4.890", "", "no"), ("", "", ""), ("3.10", "0.4", "yes")]
    assert [row["source"] for row in rows] == ["list, quoted (by hand)", "list", "text"]
    rows = made(
        tool,
        "vertex|a|||10|4||catalogue|2026-01-01",
        "vertex|b|12||10|10|no|page|2026-01-01",
        "vertex|c|12||10|11|no|blog, low confidence|2026-01-01",
        "vertex|d||||||list|",
    )
    figures = [(row["usd_per_hour"], row["spot_usd_per_hour"], row["derived"]) for row in rows]
    assert figures == [("11.5", "5.5", "yes"), ("12", "", "no"), ("11.5", "", "yes"), ("", "", "")]
    assert "x 1.15" in rows[0]["source"]
    assert "not 12" in rows[2]["source"]


@pytest.mark.parametrize(
    "line", ["sagemaker|a|0||||no|list|2026", "azureml|a|1||||no||2026", "azureml|a|1|||||list|2026"]
)
def test_price_without_an_origin_is_refused(tool: Any, line: str) -> None:
    """A price of 0 is refused too."""
    with pytest.raises(ValueError, match="line 2"):
        made(tool, line)


def test_shipped_tables_have_the_form_of_the_tool(tool: Any) -> None:
    """The tool wrote the tables in the package."""
    texts = [path.read_text() for path in (ROOT / "backends").glob("*/instances.csv")]
    assert {text.splitlines()[0] for text in texts} == {",".join(tool["COLUMNS"])}
    assert "text index" not in "".join(texts)

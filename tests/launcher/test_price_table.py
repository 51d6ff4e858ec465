"""The tool that makes the table of prices from collected facts."""

import csv
import runpy
from pathlib import Path
from typing import Any

import pytest

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


def test_figures_are_copied_unchanged(tool: Any) -> None:
    """A blank stays blank, a derived figure stays marked, and sources lose remarks for their collector."""
    rows = made(
        tool,
        "sagemaker|a|4.890||||no|list, quoted (text index id 7; by hand)|2026-09",
        "sagemaker|b|||21.5|||list|2025-11-30",
        "azureml|c|3.10|0.4|||yes|text|2021?",
    )
    assert [(row["usd_per_hour"], row["spot_usd_per_hour"], row["derived"]) for row in rows] == [
        ("4.890", "", "no"),
        ("", "", ""),
        ("3.10", "0.4", "yes"),
    ]
    assert [row["source"] for row in rows] == ["list, quoted (by hand)", "list", "text"]


def test_vertex_price_is_derived_if_not_quoted(tool: Any) -> None:
    """The source is Compute Engine's price plus the fee; an unreliable quote and a useless spot price are replaced."""
    rows = made(
        tool,
        "vertex|a|||10|4||catalogue|2026-01-01",
        "vertex|b|12||10|10|no|page|2026-01-01",
        "vertex|c|12||10|11|no|blog, low confidence|2026-01-01",
        "vertex|d||||||list|",
    )
    assert [(row["usd_per_hour"], row["spot_usd_per_hour"], row["derived"]) for row in rows] == [
        ("11.5", "5.5", "yes"),
        ("12", "", "no"),
        ("11.5", "", "yes"),
        ("", "", ""),
    ]
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

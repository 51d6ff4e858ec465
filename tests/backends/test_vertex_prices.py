"""The price of a Vertex AI machine: the rules, the table's prices in a plan, and Google's own list."""

import random
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.backends.vertex import prices, prices_list
from cloudtrain.launcher.metering.rate import Machine, Rate
from cloudtrain.launcher.prices import catalog
from doubles.google import billing
from doubles.google.loopback import served as serving
from doubles.wire import Answer, Request

REGION = "us-central1"
ON = "Vertex AI: Training/Pipelines on "
FEE = "Vertex AI: Training/Pipelines management fee on "
Get = Callable[[str, dict[str, str]], dict[str, Any]]


def sku(description: str, usd: float, unit: str = "h", **changes: Any) -> dict[str, Any]:
    """Return a SKU in the catalogue's format."""
    units, nanos = divmod(round(usd * 1e9), 10**9)
    price = {"currencyCode": "USD", "units": str(units), "nanos": nanos}
    expression = {"usageUnit": unit, "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}]}
    return {
        "name": "services/X/skus/Y",
        "description": description,
        "category": {"usageType": "Preemptible" if "Preemptible" in description else "OnDemand"},
        "serviceRegions": [REGION],
        "pricingInfo": [{"effectiveTime": "2026-10-01T07:00:00Z", "pricingExpression": expression}],
        **changes,
    }


# The bill of August 2025: a3-highgpu-8g in us-central1, on demand and by flex start (see backends/vertex/prices.py).
BILL_COMPUTE_ENGINE = [
    sku("Nvidia H100 80GB GPU running in Americas", 9.79655057),
    sku("A3 Instance Core running in Americas", 0.025498),
    sku("A3 Instance Ram running in Americas", 0.00222035, "GiBy.h"),
    sku("SSD backed Local Storage", 0.08, "GiBy.mo"),
    sku("Nvidia H100 80GB GPU attached to DWS Defined Duration VMs running in Americas", 4.200761),
    sku("DWS Defined Duration A3 Core running in Americas", 0.010934),
    sku("DWS Defined Duration A3 Ram running in Americas", 0.000952, "GiBy.h"),
    sku("DWS Defined Duration SSD backed Local Storage running in Americas", 0.08, "GiBy.mo"),
]
BILL_VERTEX = [
    sku(f"{ON}NVIDIA H100 80GB in Iowa", 11.2660332),
    sku(f"{ON}A3 Instance Core in Iowa", 0.0293227),
    sku(f"{ON}A3 Instance RAM in Iowa", 0.0025534, "GiBy.h"),
    sku(f"{FEE}NVIDIA H100 80GB in Iowa", 1.4694826),
    sku(f"{FEE}A3 Instance Core in Iowa", 0.0038247),
    sku(f"{FEE}A3 Instance RAM in Iowa", 0.0003331, "GiBy.h"),
    sku(f"{ON}SSD backed PD Capacity", 0.1955, "GiBy.mo"),
]
BILL_DISK_USD = 0.53561644  # 2,000 GB of pd-ssd


def served(compute_engine: list[dict[str, Any]], vertex: list[dict[str, Any]], page: int = 5000) -> Get:
    """Return a getter that answers with these SKUs, one page at a time."""

    def get(path: str, query: dict[str, str]) -> dict[str, Any]:
        assert query["currencyCode"] == "USD"
        found = {"/v1/services/6F81-5844-456A/skus": compute_engine, "/v1/services/C7E2-9256-1C43/skus": vertex}[path]
        start = int(query.get("pageToken", "0"))
        more = {"nextPageToken": str(start + page)} if start + page < len(found) else {"nextPageToken": ""}
        return {"skus": found[start : start + page], **more}

    return get


def priced(get: Get, machine_type: str, kind: Any, *attached: Any) -> prices_list.Price:
    """Return the machine's price from the getter's list."""
    return prices_list.assemble(prices_list.catalogue(get, REGION), machine_type, kind, *attached)


TABLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "price_table.py"))


def test_fee_is_a_share_of_the_price_on_demand() -> None:
    """STANDARD prices include the fee; reduced prices add the fee of the full price."""
    assert TABLE["standard_usd"](4 * 0.031611 + 15 * 0.004237) == pytest.approx(0.21849885, abs=1e-9)
    assert TABLE["with_fee_usd"](4.2008, 9.79655) == pytest.approx(5.670, abs=5e-4)
    assert prices.disk_hourly("pd-ssd", 2000) == pytest.approx(BILL_DISK_USD, abs=1e-6)
    assert prices.disk_hourly("hyperdisk-balanced", 2000) is None


@given(st.floats(0.01, 500), st.floats(0, 1))
def test_fee_makes_no_kind_dearer_than_standard(on_demand: float, share: float) -> None:
    """No kind is cheaper than the fee alone, for any price of the machine."""
    price = TABLE["with_fee_usd"](on_demand * share, on_demand)
    assert on_demand * prices.FEE <= price <= TABLE["standard_usd"](on_demand) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("kind", "usd", "source"),
    [
        ("standard", 33.795142, "derived from a Compute Engine list price of 2026-07-30 x 1.15, on demand"),
        ("spot", 19.832222, "derived from Compute Engine's list prices of 2026-07-30: spot + 15% of on demand"),
        ("flex_start", 33.795142, "list price of 2026-07-30 x 1.15, on demand, an upper bound"),
        ("reservation", 33.795142, "list price of 2026-07-30 x 1.15, on demand: a reservation costs as much"),
    ],
)
def test_plan_has_the_kinds_price_and_its_source(kind: Any, usd: float, source: str) -> None:
    """The table has no flex-start price: the price on demand counts as an upper bound, and the source says so."""
    machine = catalog.by_type("vertex", "a2-highgpu-8g", REGION)
    assert machine is not None
    found, words, *_ = prices.hourly(machine, kind)
    assert found == usd
    assert words.startswith("a2-highgpu-8g, ")
    assert source in words


def test_plan_distinguishes_quoted_and_derived_prices() -> None:
    """Google's page lists the price of n1-standard-4."""
    machine = catalog.by_type("vertex", "n1-standard-4", REGION)
    assert machine is not None
    assert prices.hourly(machine, "standard")[:2] == (0.21849885, "n1-standard-4, list price of 2026-10-07, on demand")


@pytest.mark.parametrize("kind", ["standard", "spot", "flex_start", "reservation"])
@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine("a4-highgpu-8g", "B200", 8), "no price of a4-highgpu-8g"),
        # The table has the host's price alone, which must not count for both.
        (
            Machine("n1-standard-4", "NVIDIA_TESLA_T4", 2, {"on_demand": Rate(0.22, "2026", "list")}),
            "with 2 x NVIDIA_TESLA_T4",
        ),
    ],
)
def test_unknown_price_is_none(machine: Machine, words: str, kind: Any) -> None:
    """The price is never 0 and never partial; the message names the key to set."""
    found, said, *_ = prices.hourly(machine, kind)
    assert found is None
    assert words in said
    assert "set vertex.price_per_hour" in said


def test_spot_without_its_own_price_is_bounded() -> None:
    """The bound is the price on demand."""
    machine = Machine("g9-standard-4", "L9", 1, {"on_demand": Rate(2.5, "2026-11-01", "list")})
    found, words, *_ = prices.hourly(machine, "spot")
    assert (found, "an upper bound" in words) == (2.5, True)


@pytest.mark.parametrize(
    ("kind", "billed_usd"), [("standard", 101.5429684 - BILL_DISK_USD), ("flex_start", 52.0306163 - BILL_DISK_USD)]
)
def test_both_rules_match_the_bill(kind: Any, billed_usd: float) -> None:
    """Vertex's own prices, and the rule on Compute Engine's, match the bill to 0.01 cent an hour."""
    found = priced(served(BILL_COMPUTE_ENGINE, BILL_VERTEX), "a3-highgpu-8g", kind)
    assert found.total_usd == pytest.approx(billed_usd, abs=1e-4)
    assert found.other_usd == pytest.approx(billed_usd, rel=1e-5)
    alone = priced(served(BILL_COMPUTE_ENGINE, []), "a3-highgpu-8g", kind)
    assert (alone.total_usd, alone.other_usd, alone.difference) == (found.other_usd, None, 0.0)
    assert "Vertex AI" in found.rule
    assert "Compute Engine" in alone.rule


def test_reservation_costs_as_on_demand_with_disks() -> None:
    """Compute Engine bills the machine with its local disks; Vertex's fee excludes the disks."""
    found = priced(served(BILL_COMPUTE_ENGINE, BILL_VERTEX), "a3-highgpu-8g", "reservation")
    assert found.total_usd == pytest.approx(88.49 + 13.1749616, abs=1e-3)
    assert sum(part.usd for part in found.parts if "Local Storage" in part.description) == pytest.approx(0.657534)


def test_difference_of_both_rules_is_reported() -> None:
    """If Vertex's accelerator price had no fee, a budget would use the higher of both."""
    vertex = [sku(f"{ON}NVIDIA H100 80GB in Iowa", 9.79655057), *BILL_VERTEX[1:]]
    found = priced(served(BILL_COMPUTE_ENGINE, vertex), "a3-highgpu-8g", "standard")
    assert found.difference == pytest.approx(0.1317, abs=1e-3)
    assert found.other_usd is not None
    assert found.other_usd > found.total_usd
    assert max(part.effective_time for part in found.parts) == "2026-10-01T07:00:00Z"


TRAPS = [
    sku("Spot Preemptible A3 Instance Core running in Americas", 0.001),
    sku("Spot Preemptible A3 Instance Ram running in Americas", 0.0001, "GiBy.h"),
    sku("Nvidia H100 80GB GPU attached to Spot Preemptible VMs running in Americas", 0.9),
    sku("SSD backed Local Storage attached to Spot Preemptible VMs", 0.01, "GiBy.mo"),
    sku("Reserved Nvidia H100 80GB GPU in Americas in Calendar Mode", 900.0),
    sku("Reserved A3 Instance Core in Americas", 900.0),
    sku("A3 Instance Core running in Americas in Calendar Mode", 900.0),
    sku("Nvidia H100 80GB Plus GPU running in Americas", 900.0),
    sku("Nvidia H100 Mega 80GB GPU attached to DWS Defined Duration VMs running in Americas", 900.0),
    sku("A3Plus Instance Core running in Americas", 900.0),
    sku("A3 Custom Instance Core running in Americas", 900.0),
    sku("Nvidia H100 80GB GPU attached to Sole Tenancy VMs running in Americas", 900.0),
    sku("Sole Tenancy Premium for A3 Instance Core running in Americas", 900.0),
    sku("Commitment v1: A3 Core in Americas for 1 Year", 900.0, category={"usageType": "Commit1Yr"}),
    sku("A3 Instance Core running in Americas", 900.0, category={"usageType": "Commit1Yr"}),
    sku("A3 Instance Core running in Americas", 900.0, category={"usageType": "Preemptible"}),
    sku("Spot Preemptible A3 Instance Core running in Americas", 900.0, category={"usageType": "Commit3Yr"}),
    sku("A3 Instance Core running in Netherlands", 900.0, serviceRegions=["europe-west4"]),
    sku("A3 Instance Core running in Americas", 900.0, pricingInfo=[]),
    sku("A3 Instance Core running in Americas", 900.0, "count"),
    sku("C4D Instance Local SSD running in Americas", 900.0, "GiBy.mo"),
]
TRAPS_VERTEX = [
    sku("Vertex AI: Online/Batch Prediction A3 Predefined Instance Core running in Iowa", 900.0),
    sku("Vertex AI: Online/Batch Prediction management fee on A3 Instance Core in Iowa", 900.0),
    sku(f"{ON}NVIDIA H100 MEGA 80GB in Iowa", 900.0),
    sku(f"{ON}A3 Instance Core in Netherlands", 900.0, serviceRegions=["europe-west4"]),
]


@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_no_misleading_sku_is_used(shuffled: random.Random, page: int) -> None:
    """The result is the same for any order and any number of pages."""
    compute_engine, vertex = [*BILL_COMPUTE_ENGINE, *TRAPS], [*BILL_VERTEX, *TRAPS_VERTEX]
    shuffled.shuffle(compute_engine)
    shuffled.shuffle(vertex)
    listed = prices_list.catalogue(served(compute_engine, vertex, page), REGION)
    clean = prices_list.catalogue(served(BILL_COMPUTE_ENGINE, BILL_VERTEX), REGION)
    for kind in ("standard", "flex_start", "reservation"):
        assert prices_list.assemble(listed, "a3-highgpu-8g", kind) == prices_list.assemble(clean, "a3-highgpu-8g", kind)
    spot = prices_list.assemble(listed, "a3-highgpu-8g", "spot")
    assert spot.total_usd == pytest.approx(
        8 * (0.9 + 1.4694826) + 208 * (0.001 + 0.0038247) + 1872 * (0.0001 + 0.0003331) + 6000 * 0.01 / 730, abs=1e-6
    )


_USD = st.floats(0.0001, 20).map(lambda usd: round(usd, 9))


@given(_USD, _USD, _USD, st.sampled_from([1, 2, 4]))
def test_machine_is_the_sum_of_its_parts(core: float, ram: float, card: float, count: int) -> None:
    """vCPUs, GiB and attached cards each count with their own price, in whole dollars and billionths."""
    listed = [
        sku("N1 Predefined Instance Core running in Americas", core),
        sku("N1 Predefined Instance Ram running in Americas", ram, "GiBy.h"),
        sku("Nvidia Tesla T4 GPU running in Americas", card),
        sku("Nvidia Tesla T4 GPU attached to Spot Preemptible VMs running in Americas", 0.01),
        sku("Nvidia Tesla T4 Virtual Workstation GPU running in Americas", 900.0),
        sku("Custom Instance Core running in Americas", 900.0),
    ]
    found = priced(served(listed, []), "n1-highmem-8", "standard", "NVIDIA_TESLA_T4", count)
    assert found.total_usd == pytest.approx(1.15 * (8 * core + 52 * ram + count * card), abs=2e-6)


def test_a100_of_40_gb_differs_from_80_gb() -> None:
    """The name of the 40 GB card is the beginning of the other name."""
    listed = [
        sku("A2 Instance Core running in Americas", 0.031611),
        sku("A2 Instance Ram running in Americas", 0.004237, "GiBy.h"),
        sku("Nvidia Tesla A100 GPU running in Americas", 2.933908),
        sku("Nvidia Tesla A100 80GB GPU running in Americas", 3.928084),
    ]
    get = served(listed, [])
    assert priced(get, "a2-highgpu-1g", "standard").total_usd == pytest.approx(1.15 * 3.673385, abs=1e-5)
    assert priced(get, "a2-ultragpu-1g", "standard").total_usd == pytest.approx(1.15 * 5.027702, abs=1e-4)
    with pytest.raises(prices_list.NotListed, match="a2-ultragpu-1g: Google lists no `SSD backed Local Storage`"):
        priced(get, "a2-ultragpu-1g", "reservation")


# Compute Engine's prices on demand in us-central1 in 2026: from public price tables (G4's by way of a price crawler's
# tests), G2's solved from two of its machines.
PARTS = [
    *BILL_COMPUTE_ENGINE[:4],
    sku("N1 Predefined Instance Core running in Americas", 0.031611),
    sku("N1 Predefined Instance Ram running in Americas", 0.004237, "GiBy.h"),
    sku("A2 Instance Core running in Americas", 0.031611),
    sku("A2 Instance Ram running in Americas", 0.004237, "GiBy.h"),
    sku("Nvidia Tesla A100 GPU running in Americas", 2.933908),
    sku("Nvidia Tesla A100 80GB GPU running in Americas", 3.928084),
    sku("G2 Instance Core running in Americas", 0.024988),
    sku("G2 Instance Ram running in Americas", 0.002927, "GiBy.h"),
    sku("Nvidia L4 GPU running in Americas", 0.56004),
    sku("G4 Instance Core running in Iowa", 0.04891),
    sku("G4 Instance Ram running in Iowa", 0.00587, "GiBy.h"),
    sku("RTX 6000 96GB running in Iowa", 1.09565),
    sku("Nvidia Tesla T4 GPU running in Americas", 0.35),
    sku("Nvidia Tesla V100 GPU running in Americas", 2.48),
    sku("Nvidia Tesla P100 GPU running in Americas", 1.46),
    sku("Nvidia Tesla P4 GPU running in Americas", 0.6),
]
PRICED = [row["instance_type"] for row in catalog.rows("vertex") if row["region"] == REGION]


@pytest.mark.parametrize("machine_type", [name for name in PRICED if not name.startswith(("a3-ultra", "a4"))])
def test_parts_make_the_tables_price(machine_type: str) -> None:
    """The parts of each type are in this code and in the price table's source: both give the same price.

    The table counts local disks into the fee and into STANDARD jobs: up to 1 % more than a bill.
    """
    machine = catalog.by_type("vertex", machine_type, REGION)
    assert machine.hourly_usd is not None
    get, (name, *attached) = served(PARTS, []), prices_list._machine(machine_type)
    assert priced(get, name, "reservation", *attached).total_usd == pytest.approx(machine.hourly_usd, rel=2e-3)
    assert machine.hourly_usd * 0.99 < priced(get, name, "standard", *attached).total_usd < machine.hourly_usd * 1.001


def test_slice_price_is_for_the_whole_machine() -> None:
    """For A4 Google lists a price for a GPU with its share of the machine, and tags spot as OnDemand."""
    listed = [
        sku("A4 Nvidia B200 (1 gpu slice) running in Americas", 16.11),
        sku(
            "Spot Preemptible A4 Nvidia B200 (1 gpu slice) running in Americas",
            4.9542,
            category={"usageType": "OnDemand"},
        ),
    ]
    get = served(listed, [])
    assert priced(get, "a4-highgpu-8g", "standard").total_usd == pytest.approx(8 * 16.11 * 1.15)
    assert priced(get, "a4-highgpu-8g", "spot").total_usd == pytest.approx(8 * (4.9542 + 0.15 * 16.11))


def test_a3_mega_has_three_names_for_its_card() -> None:
    """The card is Plus on demand, and Mega otherwise, in two word orders; local disks equal a3-highgpu-8g's."""
    listed = [
        sku("Nvidia H100 80GB Plus GPU running in Americas", 10.344276),
        sku("Nvidia H100 Mega 80GB GPU attached to DWS Defined Duration VMs running in Americas", 4.423936),
        sku("Nvidia H100 80GB Mega GPU attached to Spot Preemptible VMs running in Americas", 5.0),
        sku("SSD backed Local Storage", 0.08, "GiBy.mo"),
        sku("SSD backed Local Storage attached to Spot Preemptible VMs", 0.08, "GiBy.mo"),
        sku("DWS Defined Duration SSD backed Local Storage running in Americas", 0.08, "GiBy.mo"),
    ]
    for before in ("", "Spot Preemptible ", "DWS Defined Duration "):
        listed.append(sku(f"{before}A3Plus Instance Core running in Americas", 0.026924))
        listed.append(sku(f"{before}A3Plus Instance Ram running in Americas", 0.002344, "GiBy.h"))
    found = prices_list.catalogue(served(listed, []), REGION)
    host, disks = 208 * 0.026924 + 1872 * 0.002344, 6000 * 0.08 / 730
    on_demand = 8 * 10.344276 + host
    assert prices_list.assemble(found, "a3-megagpu-8g", "standard").total_usd == pytest.approx(
        1.15 * on_demand, abs=1e-5
    )
    cards: list[tuple[Any, float]] = [("spot", 5.0), ("flex_start", 4.423936)]
    for kind, card in cards:
        total = prices_list.assemble(found, "a3-megagpu-8g", kind).total_usd
        assert total == pytest.approx(8 * card + host + disks + 0.15 * on_demand, abs=1e-5)


def test_part_at_0_usd_is_not_listed() -> None:
    """Some entries are placeholders at 0 USD: a machine with free cards would seem the cheapest."""
    listed = [sku("Nvidia H100 80GB GPU running in Americas", 0.0), *BILL_COMPUTE_ENGINE[1:]]
    with pytest.raises(prices_list.NotListed, match="`h100 80gb`"):
        priced(served(listed, []), "a3-highgpu-8g", "standard")


def test_units_and_tiers_are_converted() -> None:
    """Memory in decimal gigabytes is converted to GiB; the last tier counts, and the latest price."""
    first = sku("E2 Instance Core running in Americas", 0.02)
    old, new = first["pricingInfo"][0], sku("", 0.03)["pricingInfo"][0]
    new["pricingExpression"]["tieredRates"].insert(0, {"startUsageAmount": 0, "unitPrice": {"units": "0", "nanos": 0}})
    new["effectiveTime"] = "2026-11-01T00:00:00Z"
    first["pricingInfo"] = [old, new]
    listed = [first, sku("E2 Instance Ram running in Americas", 0.004, "GBy.h")]
    found = priced(served(listed, []), "e2-standard-4", "standard")
    assert found.total_usd == pytest.approx(1.15 * (4 * 0.03 + 16 * 0.004 * 1.073741824), abs=1e-6)
    assert max(part.effective_time for part in found.parts) == "2026-11-01T00:00:00Z"


def test_higher_of_two_prices_counts() -> None:
    """A price that is too low would break a budget."""
    twice = [*BILL_COMPUTE_ENGINE, sku("Nvidia H100 80GB GPU running in Iowa", 9.9)]
    for listed in (twice, twice[::-1]):
        found = priced(served(listed, []), "a3-highgpu-8g", "standard")
        assert any(part.unit_usd == pytest.approx(9.9) for part in found.parts)


@pytest.mark.parametrize("lacking", range(len(BILL_COMPUTE_ENGINE)))
def test_missing_part_is_no_price(lacking: int) -> None:
    """A machine without its cards, or without its memory, would look cheap."""
    listed = [one for place, one in enumerate(BILL_COMPUTE_ENGINE) if place != lacking]
    found = prices_list.catalogue(served(listed, []), REGION)
    # The fee needs the prices on demand, a STANDARD job no disks, flex start its own price of every part.
    lacks: list[Any] = ["standard", "flex_start", "reservation"] if lacking < 3 else ["flex_start"]
    for kind in ["reservation"] if lacking == 3 else lacks:
        with pytest.raises(prices_list.NotListed, match="Google lists no"):
            prices_list.assemble(found, "a3-highgpu-8g", kind)


@pytest.mark.parametrize("name", ["g2-standard-5", "g4-standard-24", "x9-mega-8", "m1-ultramem-40", "", "n1-standard-"])
def test_machine_of_unknown_parts_is_refused(name: str) -> None:
    """The price is not guessed."""
    with pytest.raises(prices_list.NotListed, match="is not known here"):
        priced(served(PARTS, BILL_VERTEX), name, "standard")


def test_invalid_answer_is_refused() -> None:
    """A wrong currency, prices in an unknown form, and endless pages raise ValueError."""
    euros = sku("A3 Instance Core running in Americas", 1.0)
    euros["pricingInfo"][0]["pricingExpression"]["tieredRates"][0]["unitPrice"]["currencyCode"] = "EUR"
    with pytest.raises(ValueError, match="EUR, not USD"):
        prices_list.catalogue(served([euros], []), REGION)
    broken = sku("A3 Instance Core running in Americas", 1.0, pricingInfo=[{"effectiveTime": "2026"}])
    with pytest.raises(ValueError, match="A3 Instance Core"):
        prices_list.catalogue(served([broken], []), REGION)
    with pytest.raises(ValueError, match="more than 100 pages"):
        prices_list.catalogue(lambda path, query: {"nextPageToken": "again"}, REGION)


@pytest.mark.parametrize("region", ["us-central1", "europe-west4"])
@pytest.mark.parametrize("page", [7, 5000])
def test_list_is_read_over_http(region: str, page: int) -> None:
    """Every machine of the stand-in's list, in every kind, over all pages, has the stand-in's own sum."""
    (route,) = (route for route in billing.ROUTES if route.name == "billing.skus")
    world = SimpleNamespace(settings=billing.BillingSettings(sku_page_size=page))

    def respond(request: Request) -> Answer:
        found = re.fullmatch(route.pattern, request.path)
        return route.function(world, request, **found.groupdict())

    with serving(respond) as url, requests.Session() as session:
        listed = prices_list.catalogue(
            lambda path, query: session.get(url + path, params=query, timeout=10).json(), region
        )
    kinds: list[tuple[Any, str]] = [("standard", "STANDARD"), ("spot", "SPOT"), ("flex_start", "FLEX_START")]
    for name, parts in billing.MACHINES.items():
        cards = 2 if name.startswith("n1-") else 0
        attached = ("NVIDIA_TESLA_T4", cards) if cards else ()
        for kind, theirs in kinds:
            if kind == "flex_start" and any(part.startswith(("n1", "e2")) for part in parts):
                with pytest.raises(prices_list.NotListed):
                    prices_list.assemble(listed, name, kind, *attached)
                continue
            found = prices_list.assemble(listed, name, kind, *attached)
            assert found.total_usd == pytest.approx(billing.hourly_usd(name, theirs, region, t4=cards), abs=1e-6)
            assert found.difference == pytest.approx(0, abs=1e-4)

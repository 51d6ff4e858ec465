"""Writes backends/*/instances.csv, the tables of machine types and prices, from collected facts.

    .venv/bin/python tools/price_table.py PATH/TO/gpu_instances.csv

The facts have a row for each type and region, with the service's own price, that of the machine below it
(`infra_...`), source and date. Taken as they are: figures, dates, and which are derived; blank stays blank. Vertex AI's
prices follow from Compute Engine's by the rules of backends/vertex/prices.py wherever they are not quoted. Run twice it
writes the same.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cloudtrain.backends.vertex.machine import label_of
from cloudtrain.backends.vertex.machine_types import choices
from cloudtrain.backends.vertex.prices import FEE

BACKENDS = Path(__file__).parents[1] / "backends"
COLUMNS = {  # ours: theirs
    "backend": "backend",
    "instance_type": "instance_type",
    "accelerator": "accelerator",
    "count": "accelerator_count",
    "accelerator_memory_gib": "accelerator_memory_gib",
    "region": "region",
    "usd_per_hour": "on_demand_usd_per_hour",
    "spot_usd_per_hour": "spot_usd_per_hour",
    "derived": "derived",
    "as_of": "as_of",
    "source": "source",
}
RULE = "; on demand: Compute Engine's x 1.15"
SPOT_RULE = "; spot: Compute Engine's + 0.15 x its on demand"
# Accelerators for N1 machines: name, GiB, and by region Compute Engine's prices of one, on demand and spot.
ATTACHED: dict[str, tuple[str, int, dict[str, tuple[float, float]]]] = {
    "NVIDIA_TESLA_T4": (
        "T4",
        16,
        {"us-central1": (0.35, 0.175), "us-east4": (0.37, 0.1644), "europe-west4": (0.3675, 0.175)},
    ),
    "NVIDIA_TESLA_V100": ("V100", 16, {"us-central1": (2.48, 1.0885), "europe-west4": (2.604, 1.0443)}),
    "NVIDIA_TESLA_P100": ("P100", 16, {"us-central1": (1.46, 0.7034), "europe-west4": (1.533, 0.2341)}),
    "NVIDIA_TESLA_P4": (
        "P4",
        8,
        {"us-central1": (0.6, 0.2236), "us-east4": (0.6, 0.1734), "europe-west4": (0.63, 0.132)},
    ),
}
ATTACHED_AS_OF = "<=2026 (undated)"
ATTACHED_SOURCE = "the GPUs: skypilot-org/skypilot-catalog catalogs/v8/gcp/vms.csv @006059e (Compute Engine)"
# Where its collector found a text again: of no use to anybody else.
_PLACES = ((r" \(text index id \d+\)| \(pages corpus\)", ""), (r"\(text index id \d+; ", "("))
_PLACES += ((r"text index id \d+ \(specs only\)", "specifications only"),)


def standard_usd(on_demand_usd: float) -> float:
    """Return the hourly price of a STANDARD job's machine, from Compute Engine's on-demand price.

    n1-standard-4, us-central1: 1.15 x (4 x 0.031611 + 15 x 0.004237) = 0.21849885, as on the pricing page of 2026-10.
    """
    return on_demand_usd * (1 + FEE)


def with_fee_usd(infrastructure_usd: float, on_demand_usd: float) -> float:
    """Return the hourly price if Compute Engine bills the machine and Vertex bills its fee.

    One H100 by flex start: 4.2008 + 0.15 x 9.7966 = 5.670; 1.15 x 4.2008 = 4.831 would be 15 % too little.
    """
    return infrastructure_usd + on_demand_usd * FEE


def table(facts: str) -> str:
    """Return the table's text. Raises ValueError for facts that make no sense."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for number, row in enumerate(csv.DictReader(facts.splitlines()), 2):
        try:
            ours = _vertex(row) if row["backend"] == "vertex" else _taken(row)
            writer.writerow(ours)
            writer.writerows(_attached(ours) if ours["accelerator"].startswith("(host for ") else ())
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number}: {error!r}") from error
    return text.getvalue()


def _taken(row: dict[str, str]) -> dict[str, str]:
    """Return the row in our columns. Raises ValueError for a price that is none, or has no source or date."""
    ours = {name: row[theirs] for name, theirs in COLUMNS.items()}
    for pattern, instead in _PLACES:
        ours["source"] = re.sub(pattern, instead, ours["source"])
    for price in (ours["usd_per_hour"], ours["spot_usd_per_hour"]):
        if price and not (float(price) > 0 and ours["as_of"] and ours["source"] and ours["derived"] in ("yes", "no")):
            raise ValueError(f"a price of {price} without source, date or mark: {ours}")
    return ours


def _vertex(row: dict[str, str]) -> dict[str, str]:
    """Return the row with Vertex AI's prices.

    A figure of Vertex's own is taken as it is, unless its source is trusted little: a rule seen on a bill is better.
    """
    ours = _taken(row)
    infra, spot = row["infra_on_demand_usd_per_hour"], row["infra_spot_usd_per_hour"]
    own, derived, origin = ours["usd_per_hour"], ours["derived"], ours["source"]
    if infra and (not own or derived == "yes" or "low confidence" in origin):
        instead = f", not {own}" if own and derived == "no" else ""
        own, derived, origin = repr(round(standard_usd(float(infra)), 6)), "yes", f"{origin}{RULE}{instead}"
    reduced = ""
    if infra and spot and float(spot) < float(infra):  # one that is no lower is a gap that somebody has filled in
        reduced, origin = repr(round(with_fee_usd(float(spot), float(infra)), 6)), f"{origin}{SPOT_RULE}"
    return ours | {"usd_per_hour": own, "spot_usd_per_hour": reduced, "derived": derived, "source": origin}


def _attached(host: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield the rows of the host with each legal number of accelerators: the sum of both prices with the fee."""
    for kind, counts in choices(host["instance_type"]).items():
        name, memory_gib, usd = ATTACHED[kind]
        for count in counts if host["region"] in usd else ():
            on_demand, spot = usd[host["region"]]
            with_gpus = float(host["usd_per_hour"]) + count * standard_usd(on_demand)
            reduced = float(host["spot_usd_per_hour"]) + count * with_fee_usd(spot, on_demand)
            yield host | {
                "instance_type": label_of(host["instance_type"], kind, count),
                "accelerator": name,
                "count": str(count),
                "accelerator_memory_gib": str(memory_gib),
                "usd_per_hour": repr(round(with_gpus, 6)),
                "spot_usd_per_hour": repr(round(reduced, 6)),
                "derived": "yes",
                "as_of": ATTACHED_AS_OF,
                "source": f"{ATTACHED_SOURCE}{RULE}{SPOT_RULE}; the machine: {host['source']}",
            }


def main(argv: list[str]) -> int:
    """Write the table; return the exit code."""
    if len(argv) != 1:
        print(__doc__)
        return 2
    made = table(Path(argv[0]).read_text(encoding="utf-8"))
    head, *lines = made.splitlines()
    for name in sorted({line.partition(",")[0] for line in lines}):
        own = [head, *(line for line in lines if line.startswith(f"{name},"))]
        (BACKENDS / name / "instances.csv").write_text("\n".join([*own, ""]), encoding="utf-8")
    rows = list(csv.DictReader(made.splitlines()))
    priced = [row for row in rows if row["usd_per_hour"]]
    derived = sum(row["derived"] == "yes" for row in priced)
    blank = len(rows) - len(priced)
    print(f"{len(rows)} rows: {len(priced) - derived} quoted, {derived} derived, {blank} without a price")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

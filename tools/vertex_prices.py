"""Writes the Vertex AI prices of launcher/instances.csv, worked out from Compute Engine's.

    .venv/bin/python tools/vertex_prices.py PATH/TO/gpu_instances.csv

The source has, beside what is known of Vertex's own prices, Compute Engine's on demand and spot (`infra_...`). Rows
keep their order, other backends' rows every letter. Run twice it changes nothing more.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

from cloudtrain.backends.vertex.prices import standard_usd, with_fee_usd

TARGET = Path(__file__).parents[1] / "launcher" / "instances.csv"
BACKEND = "vertex"
RULE = "; on demand: Compute Engine's x 1.15"
SPOT_RULE = "; spot: Compute Engine's + 0.15 x its on demand"


def rows_of(source: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Return the source's rows by type and region."""
    with source.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["backend"] == BACKEND]
    return {(row["instance_type"], row["region"]): row for row in rows}


def priced(row: dict[str, str], source: dict[str, str]) -> dict[str, str]:
    """Return the row with its prices.

    A figure of Vertex's own is taken as it is, unless its source is trusted little: a rule seen on a bill is better.
    """
    own, infra, spot = (
        source[key] for key in ("on_demand_usd_per_hour", "infra_on_demand_usd_per_hour", "infra_spot_usd_per_hour")
    )
    derived, origin = source["derived"], row["source"].partition(RULE)[0].partition(SPOT_RULE)[0]
    if infra and (not own or derived == "yes" or "low confidence" in source["source"]):
        instead = f", not {own}" if own and derived == "no" else ""
        own, derived, origin = repr(round(standard_usd(float(infra)), 6)), "yes", f"{origin}{RULE}{instead}"
    reduced = ""
    if infra and spot and float(spot) < float(infra):  # one that is no lower is a gap that somebody has filled in
        reduced, origin = repr(round(with_fee_usd(float(spot), float(infra)), 6)), f"{origin}{SPOT_RULE}"
    return row | {"usd_per_hour": own, "spot_usd_per_hour": reduced, "derived": derived, "source": origin}


def rewritten(table: str, source: dict[tuple[str, str], dict[str, str]]) -> str:
    """Return the table's text with the Vertex rows priced."""
    lines = table.splitlines(keepends=True)
    names = next(csv.reader(lines[:1]))
    for place, line in enumerate(lines):
        row = dict(zip(names, next(csv.reader([line])), strict=True))
        found = source.get((row["instance_type"], row["region"]))
        if row["backend"] != BACKEND or found is None:
            continue
        text = io.StringIO()
        csv.DictWriter(text, names, lineterminator="\n").writerow(priced(row, found))
        lines[place] = text.getvalue()
    return "".join(lines)


def main(argv: list[str]) -> int:
    """Write the table; return the exit code."""
    if len(argv) != 1:
        print(__doc__)
        return 2
    TARGET.write_text(rewritten(TARGET.read_text(encoding="utf-8"), rows_of(Path(argv[0]))), encoding="utf-8")
    print("wrote launcher/instances.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The price of a Vertex AI machine: Compute Engine's price plus Vertex's fee.

Vertex alone bills STANDARD jobs, with the fee inside its prices. Spot, flex-start and reserved jobs get two bills:
Compute Engine's price of that kind, and Vertex's management fee, which stays a share of the ON-DEMAND price. A bill
shows that the share also holds for accelerators (a3-highgpu-8g, us-central1, August 2025): an H100 for 11.2660332 USD,
1.15 x 9.79655057. For all further accelerators the share is an inference, so their prices are marked as derived.
Source: an article with that bill, zenn.dev/google_cloud_jp, 2025-08; cloud.google.com/vertex-ai/pricing, 2026-10.
"""

from __future__ import annotations

from typing import NamedTuple

from cloudtrain.launcher.metering.rate import Kind as RateKind
from cloudtrain.launcher.metering.rate import Machine, Rate

from .machine import Kind

MONTH_H = 730  # hours, by Google's count
FEE = 0.15  # as a share of Compute Engine's on-demand price
# On the same bill 2,000 GB cost 0.53561644 USD an hour: 1.15 x 0.17 a month. The figure also bounds cheaper disk types:
# Compute Engine's disk prices, 2026. No price of Hyperdisk is known.
PD_SSD_USD_PER_GB_MONTH = 0.1955
AT_MOST_PD_SSD = ("pd-ssd", "pd-balanced", "pd-standard")


def disk_hourly(disk_type: str, size_gb: float) -> float | None:
    """Return the upper bound of a boot disk's hourly price in us-central1, or None if no price is known."""
    return size_gb * PD_SSD_USD_PER_GB_MONTH / MONTH_H if disk_type in AT_MOST_PD_SSD else None


class ReplicaPrice(NamedTuple):
    """The price of one replica for an hour, without its disk; if `usd` is None, `source` says why.

    `uncertainty`, at least 1, is the factor by which the cost may rise; `as_of` the price's ISO day; `kind` its kind.
    """

    usd: float | None
    source: str
    uncertainty: float = 1.0
    as_of: str | None = None
    kind: RateKind = "on_demand"


def hourly(machine: Machine, kind: Kind) -> ReplicaPrice:
    """Return the price of the kind and its source, for the plan.

    If only the on-demand price is known, `usd` is that price as an upper bound, and `source` says so.
    """
    name, own = machine.instance_type, rate_kind(kind)
    if name.startswith("n1-") and machine.count and " + " not in name:  # the table prices the host without accelerators
        attached = f"{machine.count} x {machine.accelerator}"
        return ReplicaPrice(None, f"no price of {name} with {attached}: set vertex.price_per_hour")
    used: RateKind = own if own in machine.rates else "on_demand"
    rate = machine.rates.get(used)
    if rate is None:
        return ReplicaPrice(None, f"no price of {name} there: set vertex.price_per_hour")
    why = {
        "spot": ", an upper bound: its spot price is not in our table",
        "flex_start": ", an upper bound: flex start has cost about half",
        "reservation": ": a reservation costs as much, used or not",
    }
    source = f"{name}, {_words(rate, used)}{why.get(kind, '') if used != own else ''}"
    return ReplicaPrice(rate.usd, source, machine.uncertainty_of(used), machine.iso_day(used), used)


def rate_kind(kind: Kind) -> RateKind:
    """Return the name that price lists use for the kind of provisioning."""
    return "on_demand" if kind == "standard" else kind


def _words(rate: Rate, kind: RateKind) -> str:
    way = kind.replace("_", " ")
    if rate.is_own or not rate.is_derived:
        return f"{rate.words}, {way}"
    older = f", newer than your own of {rate.passed_over}" if rate.passed_over else ""
    if kind == "spot":
        return f"derived from Compute Engine's list prices of {rate.as_of}: spot + {FEE:.0%} of on demand{older}"
    return f"derived from a Compute Engine list price of {rate.when} x {1 + FEE:g}, {way}{older}"

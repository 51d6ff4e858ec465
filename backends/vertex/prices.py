"""What a Vertex AI machine costs: Compute Engine's price with Vertex's fee on it.

STANDARD jobs are billed by Vertex alone, with the fee in its prices; spot, flex-start and reserved ones by both:
Compute Engine's price of that kind, and Vertex's management fee, which stays a share of the ON-DEMAND price. That the
share holds for accelerators too was seen on a bill (a3-highgpu-8g, us-central1, August 2025): an H100 for 11.2660332
USD, 1.15 x 9.79655057. For other accelerators it is an inference, so what follows from it is marked as derived.
Source: an article with that bill, zenn.dev/google_cloud_jp, 2025-08; cloud.google.com/vertex-ai/pricing, 2026-10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cloudtrain.backends.vertex.machine import Kind
    from cloudtrain.launcher.prices.rate import Kind as RateKind
    from cloudtrain.launcher.prices.rate import Machine, Rate

__all__ = ["FEE", "MONTH_H", "Offer", "disk_hourly", "hourly", "rate_kind", "standard_usd", "with_fee_usd"]

MONTH_H = 730  # as Google counts it
FEE = 0.15  # of Compute Engine's on-demand price
# On the same bill 2,000 GB cost 0.53561644 an hour: 1.15 x 0.17 a month. It bounds what costs less than it there, too:
# Compute Engine's disk prices, 2026. Of Hyperdisk no figure is known.
PD_SSD_USD_PER_GB_MONTH = 0.1955
AT_MOST_PD_SSD = ("pd-ssd", "pd-balanced", "pd-standard")


def standard_usd(on_demand_usd: float) -> float:
    """Return an hour's price of a STANDARD job's machine, from Compute Engine's on demand.

    n1-standard-4, us-central1: 1.15 x (4 x 0.031611 + 15 x 0.004237) = 0.21849885, as on the pricing page of 2026-10.
    """
    return on_demand_usd * (1 + FEE)


def with_fee_usd(infrastructure_usd: float, on_demand_usd: float) -> float:
    """Return an hour's price where Compute Engine bills the machine and Vertex its fee.

    One H100 by flex start: 4.2008 + 0.15 x 9.7966 = 5.670; 1.15 x 4.2008 = 4.831 would be 15 % too little.
    """
    return infrastructure_usd + on_demand_usd * FEE


def disk_hourly(disk_type: str, size_gb: float) -> float | None:
    """Return what a boot disk costs an hour at most, in us-central1; None where it is not known."""
    return size_gb * PD_SSD_USD_PER_GB_MONTH / MONTH_H if disk_type in AT_MOST_PD_SSD else None


class Offer(NamedTuple):
    """What one replica and an hour cost, without its disk; `usd` is None where it is not known, `source` says why.

    `uncertainty`, from 1 up, is how much more it may cost; `as_of` the ISO day of the price; `kind` what it is for.
    """

    usd: float | None
    source: str
    uncertainty: float = 1.0
    as_of: str | None = None
    kind: RateKind = "on_demand"


def hourly(machine: Machine, kind: Kind) -> Offer:
    """Return the price of the kind, and where it is from, for the plan.

    Where only the on-demand price is known, it stands for the kind's own as an upper bound, and the words say so.
    """
    name, own = machine.instance_type, rate_kind(kind)
    if name.startswith("n1-") and machine.count and " + " not in name:  # the table has the host alone
        attached = f"{machine.count} x {machine.accelerator}"
        return Offer(None, f"no price of {name} with {attached}: set vertex.price_per_hour")
    used: RateKind = own if own in machine.rates else "on_demand"
    rate = machine.rates.get(used)
    if rate is None:
        return Offer(None, f"no price of {name} there: set vertex.price_per_hour")
    why = {
        "spot": ", an upper bound: its spot price is not in our table",
        "flex_start": ", an upper bound: flex start has cost about half",
        "reservation": ": a reservation costs as much, used or not",
    }
    source = f"{name}, {_words(rate, used)}{why.get(kind, '') if used != own else ''}"
    return Offer(rate.usd, source, machine.uncertainty_of(used), machine.iso_day(used), used)


def rate_kind(kind: Kind) -> RateKind:
    """Return what lists of prices call the way in which a machine is had."""
    return "on_demand" if kind == "standard" else kind


def _words(rate: Rate, kind: RateKind) -> str:
    """Return how the price came about."""
    way = kind.replace("_", " ")
    if rate.is_own or not rate.is_derived:
        return f"{rate.words}, {way}"
    older = f", newer than your own of {rate.passed_over}" if rate.passed_over else ""
    if kind == "spot":
        return f"derived from Compute Engine's list prices of {rate.as_of}: spot + {FEE:.0%} of on demand{older}"
    return f"derived from a Compute Engine list price of {rate.when} x {1 + FEE:g}, {way}{older}"

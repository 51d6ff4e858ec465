"""All known prices, each with source, day, age and uncertainty, for people and for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..metering.rate import KINDS, Key, Kind, Rate, age_days, uncertainty
from . import catalog, own


@dataclass(frozen=True)
class PriceQuery:
    """Filters of the prices to show; None: no filter. `accelerator` as in `A100:8`, or without a number."""

    backend: str | None = None
    accelerator: str | None = None
    region: str | None = None
    instance_type: str | None = None
    is_spot: bool | None = None


@dataclass(frozen=True)
class PriceLine:
    """A price of a machine type in a region; `rate` is None if unknown. `memory_gib`: of an accelerator, or ""."""

    key: Key
    accelerator: str
    memory_gib: str
    count: int
    rate: Rate | None
    uncertainty: float

    @property
    def origin(self) -> str:
        """The origin of the price: `read` from the vendor by this user, `quoted` or `derived` in the table."""
        if self.rate is None:
            return "unknown"
        if self.rate.is_derived:
            return "derived"
        return "read" if self.rate.is_own else "quoted"

    @property
    def counted_usd(self) -> float | None:
        """The hourly price for budgets: the price times its uncertainty."""
        return None if self.rate is None else self.rate.usd * self.uncertainty

    @property
    def each_usd(self) -> float | None:
        """The hourly price for budgets, for a single accelerator."""
        return None if self.counted_usd is None or not self.count else self.counted_usd / self.count

    def dump(self) -> dict[str, Any]:
        """Return the fields for JSON and CSV."""
        rate = self.rate
        return {
            **self.key._asdict(),
            "accelerator": self.accelerator,
            "count": self.count,
            "usd_per_hour": None if rate is None else rate.usd,
            "counted_usd_per_hour": None if self.counted_usd is None else round(self.counted_usd, 6),
            "counted_usd_per_accelerator_hour": None if self.each_usd is None else round(self.each_usd, 6),
            "spot": self.key.kind == "spot",
            "derived": rate is not None and rate.is_derived,
            "own": rate is not None and rate.is_own,
            "uncertainty": self.uncertainty,
            "as_of": None if rate is None else rate.as_of,
            "age_days": None if rate is None else age_days(rate),
            "source": None if rate is None else rate.source,
        }


def lines(wanted: PriceQuery) -> list[PriceLine]:
    """Return the matching prices, the lowest for budgets first, unknown prices last. Raises ConfigError as `rates`."""
    found = [line for line in _all(wanted) if _is_wanted(line, wanted)]
    return sorted(found, key=lambda line: (line.rate is None, line.counted_usd or 0.0, line.key))


def why_none(wanted: PriceQuery) -> str:
    """Return why no price matches: the unknown filter value, and similar known values."""
    known = lines(PriceQuery(wanted.backend))
    if not known:
        return f"{wanted.backend} has no price list: write {wanted.backend}.price_per_hour into the config"
    asked = "`cloudtrain prices refresh --backend B --region R --type T` asks the vendor"
    name = (wanted.accelerator or "").partition(":")[0]
    kinds = {line.accelerator for line in known if line.accelerator and line.accelerator[0] != "("}
    words = (
        ("region", wanted.region, {line.key.region for line in known}, True),
        ("type", wanted.instance_type, {line.key.instance_type for line in known}, False),
        ("accelerator", name, kinds, True),
    )
    for kind, word, names, is_short in words:
        if word and catalog.plain(word) not in {catalog.plain(each) for each in names}:
            close = get_close_matches(word, sorted(names), 3, 0.7)
            mean = f"; did you mean {' or '.join(f'`{each}`' for each in close)}?" if close else ""
            there = f"; there are {', '.join(sorted(names))}" if is_short and not close else ""
            return f"no {kind} `{word}` is known here{mean}{there}; {asked}"
    return f"nothing is known here that is all of this together: leave a filter out; {asked}"


def _all(wanted: PriceQuery) -> Iterator[PriceLine]:
    mine = {key: rate for key, rate in own.everything().items() if wanted.backend in (None, key.backend)}
    names = {*catalog.backends(), *(key.backend for key in mine)} if wanted.backend is None else {wanted.backend}
    for backend in sorted(names):
        listed = {(row["instance_type"], row["region"]): row for row in catalog.rows(backend)}
        made = {row["instance_type"]: row for row in listed.values()}
        places = {**listed, **{(key.instance_type, key.region): {} for key in mine if key.backend == backend}}
        for instance_type, region in places:
            row = made.get(instance_type, {"accelerator": "", "accelerator_memory_gib": "", "count": "0"})
            rates: dict[Kind, Rate] = catalog.rates(backend, instance_type, region)
            for kind in [one for one in KINDS if one in rates] or ["on_demand"]:
                key, rate = Key(backend, instance_type, region, kind), rates.get(kind)
                sure = uncertainty(rates, kind) if rate is not None else 1.0
                about = row["accelerator"], row["accelerator_memory_gib"], int(row["count"])
                yield PriceLine(key, *about, rate, sure)


def _is_wanted(line: PriceLine, wanted: PriceQuery) -> bool:
    name, _, count = (wanted.accelerator or "").partition(":")
    return (
        (wanted.region is None or wanted.region.lower().replace(" ", "") == line.key.region)
        and (wanted.instance_type is None or catalog.is_type(wanted.instance_type, line.key.instance_type))
        and wanted.is_spot in (None, line.key.kind == "spot")
        and (not name or catalog.is_named(name, line.accelerator, line.memory_gib))
        and (not count or count == str(line.count))
    )

"""Read prices again from the vendors' lists, store them, and report changes. No submit depends on a refresh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import backend as backends
from ..backend import Check
from ..errors import CloudtrainError, ConfigError, UsageError
from ..metering.rate import Key, Kind, Quote, Rate
from . import catalog, own

if TYPE_CHECKING:
    from ..config.schema import JobConfig

DIFFERENCE = 0.01  # the smallest relative difference that doctor reports


@dataclass(frozen=True)
class Target:
    """A backend whose price list is to be read, with its config, if available."""

    name: str
    config: JobConfig | None = None
    error: ConfigError | None = None


@dataclass(frozen=True)
class Change:
    """The price known before, in dollars, and the vendor's answer; `exit_code` of the error, else 0."""

    quote: Quote
    old_usd: float | None
    exit_code: int = 0

    @property
    def share(self) -> float | None:
        """The relative change of the price."""
        rate = self.quote.rate
        return None if rate is None or self.old_usd is None else rate.usd / self.old_usd - 1

    def dump(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        rate = self.quote.rate
        return {
            **self.quote.key._asdict(),
            "old_usd_per_hour": self.old_usd,
            "usd_per_hour": None if rate is None else rate.usd,
            "change": self.share,
            "derived": rate is not None and rate.is_derived,
            "as_of": None if rate is None else rate.as_of,
            "source": None if rate is None else rate.source,
            "reason": self.quote.reason or None,
        }


def priced(name: str) -> backends.Priced | None:
    """Return the backend if its vendor has a price list. Raises ConfigError for an unknown backend."""
    found = backends.load(name)
    return found if isinstance(found, backends.Priced) else None


def targets(file: Path | None, backend: str | None) -> list[Target]:
    """Return the lists of the backend, else of the file, else with a known region. Raises UsageError, ConfigError."""
    if backend is not None and priced(backend) is None:
        cure = f"write {backend}.price_per_hour into the config"
        raise UsageError(f"{backend} has no price list to read", hint=cure)
    if file is not None:
        from .. import config as configs

        names = [name for name in configs.backends_configured(file) if priced(name) is not None]
        names = names if backend is None else [backend]
        if not names:
            raise UsageError(f"no backend of {file} has a price list", hint="name one: --backend sagemaker --region R")
        found = []
        for name in names:
            try:
                found.append(Target(name, configs.load(file, backend=name)))
            except ConfigError as error:  # does not affect the other backends
                if len(names) == 1:
                    raise
                found.append(Target(name, error=error))
        return found
    if backend is not None:
        return [Target(backend)]
    found = [Target(name) for name in backends.names() if priced(name) is not None and _regions(name, None)]
    if not found:
        hint = "name both: --backend sagemaker --region us-east-1; or a config: -f cloudtrain.yaml"
        raise UsageError("no region with usable prices is known", hint=hint)
    return found


def refresh(
    wanted: Sequence[Target], regions: tuple[str, ...], types: tuple[str, ...]
) -> tuple[list[Change], Path | None]:
    """Read the lists and store the prices; return the changes, and the path of a damaged old file's copy.

    Without `regions`: the config's regions and all regions read before. Raises ConfigError if the prices cannot be
    stored.
    """
    damaged = own.add(())  # before any request: checks that the file can be read and written
    changes: list[Change] = []
    for target in wanted:
        if target.error is not None:
            nothing = Quote(Key(target.name, "", "", "on_demand"), None, target.error.message)
            changes.append(Change(nothing, None, target.error.exit_code))
            continue
        for region in regions or _regions(target.name, target.config) or ("",):
            changes += _read(target, region, types)
    own.add(change.quote for change in changes)
    return changes, damaged


def compared(ask: Callable[[], Sequence[Quote]], known: Mapping[Kind, Rate], kind: Kind = "on_demand") -> Check:
    """Store the vendor's prices, and return a check of a kind's beside the known price; without a list, a warning."""
    try:
        quotes = ask()
    except CloudtrainError as error:
        return Check("price", "warn", error.message, error.hint or "a job does not need it")
    quote = next((each for each in quotes if each.key.kind == kind), quotes[0])
    key, rate = quote.key, quote.rate
    if rate is None:
        return Check("price", "warn", quote.reason, f"is it the right region? Else set {key.backend}.price_per_hour")
    text = f"{key.instance_type} in {key.region}: {rate.usd:.3f} USD an hour, {key.kind.replace('_', ' ')}"
    text = f"{text}, by {rate.source}"
    try:
        if why := own.refusal(quote):
            raise ConfigError(f"the list has an invalid price: {why}", hint=f"set {key.backend}.price_per_hour")
        own.add(quotes)
    except ConfigError as error:
        return Check("price", "warn", f"{text}; not kept: {error.message}", error.hint)
    ours = known.get(key.kind)
    if ours is None:
        text += "; before, none was known"
    elif abs(rate.usd - ours.usd) > DIFFERENCE * ours.usd:
        text += f"; before, {ours.usd:.3f} was known, as of {ours.as_of}"
    return Check("price", "ok", f"{text}; kept for plans")


def _regions(name: str, config: JobConfig | None) -> tuple[str, ...]:
    """Return the region of the config or the environment, and all regions with prices read before."""
    try:
        before = {key.region for key in own.everything() if key.backend == name}
    except ConfigError:  # the write repairs the file
        before = set()
    backend = priced(name)
    here = backend.price_region(config) if backend is not None else None
    return tuple(dict.fromkeys([*([here] if here else []), *sorted(before)]))


def _read(target: Target, region: str, types: tuple[str, ...]) -> list[Change]:
    """Return the vendor's prices in a region, or the error."""
    nothing = Key(target.name, "", region, "on_demand")
    if not region:
        why = f"no region: --region, or {target.name}'s in the config"
        return [Change(Quote(nothing, None, why), None, ConfigError.exit_code)]
    types = tuple(catalog.spelled(name, catalog.types(target.name)) for name in types)
    backend = priced(target.name)
    assert backend is not None  # checked by targets()
    try:
        found = backend.quotes(target.config, region, types)
    except CloudtrainError as error:
        reason = f"{error.message} ({error.hint})" if error.hint else error.message
        return [Change(Quote(nothing, None, reason), None, error.exit_code)]
    changes = []
    for quote in found:
        if why := own.refusal(quote):
            quote = Quote(quote.key, None, f"the list has an invalid price: {why}")
        known = catalog.rates(quote.key.backend, quote.key.instance_type, quote.key.region).get(quote.key.kind)
        is_lacking = quote.rate is None and quote.key.instance_type in types
        code = ConfigError.exit_code if is_lacking else 0
        changes.append(Change(quote, None if known is None else known.usd, code))
    return changes

"""Prices from Google's list of today, for all types of our table, or for named types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.backends.vertex import api, prices, prices_list
from cloudtrain.backends.vertex.api import Google, VertexAccess
from cloudtrain.backends.vertex.block import Vertex
from cloudtrain.backends.vertex.machine import block_of, choose, label_of, location_of, project_of
from cloudtrain.launcher.errors import ConfigError, Fault
from cloudtrain.launcher.metering import rate as rating
from cloudtrain.launcher.metering.rate import Key, Quote, Rate
from cloudtrain.launcher.prices import catalog

if TYPE_CHECKING:
    from cloudtrain.backends.vertex.machine import Kind
    from cloudtrain.backends.vertex.prices_list import Catalogue
    from cloudtrain.launcher.config.schema import JobConfig

__all__ = ["listed", "of_machine", "quotes", "region"]

WAYS: tuple[Kind, ...] = ("standard", "spot", "flex_start", "reservation")
SHOWN = 0.001  # differences between both rules below this share are not shown
_ATTACHED = re.compile(r"(\S+) \+ (\d+) x (\w+)")


class MachineSpec(NamedTuple):
    """A machine type with its attached accelerators."""

    machine_type: str
    accelerator: str | None = None
    cards: int = 0


def region(config: JobConfig | None) -> str | None:
    """Return the config's region, the default for prices."""
    return location_of(Vertex() if config is None else block_of(config))


def quotes(google: Google, config: JobConfig | None, region: str, types: tuple[str, ...]) -> list[Quote]:
    """Return the prices of the types in the region; without `types`, of the table's types and the job's own.

    A type with attached accelerators has its name in plans: `n1-standard-8 + 2 x NVIDIA_TESLA_T4`. Raises
    CredentialError, UnreachableError if Google's list cannot be read, or ConfigError without a project.
    """
    block = Vertex() if config is None else block_of(config)
    project = project_of(block)
    if project is None:
        hint = "export GOOGLE_CLOUD_PROJECT, or set vertex.project: a login is asked for on its account"
        raise ConfigError([Fault("no Google Cloud project", key="vertex.project", hint=hint)])
    found = listed(VertexAccess(project, region, tuple(sorted(block.endpoints.items())), google))
    return [quote for wanted in _wanted(config, types) for quote in _of(found, wanted)]


def listed(access: VertexAccess) -> Catalogue:
    """Return Google's list for the region. Raises CredentialError, UnreachableError, ConfigError."""

    def ask(path: str, query: dict[str, str]) -> dict[str, Any]:
        return api.get_json(access, "cloudbilling", path, query)

    with api.answers("read Google's price list", needs="a login; the Cloud Billing API must be enabled"):
        try:
            return prices_list.catalogue(ask, access.location)
        except ValueError as error:
            raise api.GoogleError(0, "", str(error)) from error


def of_machine(found: Catalogue, machine_type: str, kind: Kind, accelerator: str | None, count: int) -> Quote:
    """Return a machine's price for one kind of provisioning, or the reason for a missing price.

    The price is the sum by the more reliable rule; if the other rule gives more, the difference is the uncertainty.
    """
    key = Key("vertex", label_of(machine_type, accelerator, count), found.region, prices.rate_kind(kind))
    try:
        price = prices_list.assemble(found, machine_type, kind, accelerator, count)
    except prices_list.NotListed as error:
        return Quote(key, None, f"Google's list has no price of {key.instance_type}: {error}")
    other = f"; by {price.other_rule} {price.difference:+.1%}" if abs(price.difference) >= SHOWN else ""
    source = f"Cloud Billing Catalog, {price.rule}, since {price.effective_time[:10]}{other}"
    factor, is_derived = round(max(1.0, price.at_most_usd / price.total_usd), 4), price.is_by_share
    rate = Rate(price.total_usd, rating.today().isoformat(), source, is_derived, is_own=True, factor=factor)
    return Quote(key, rate)


def _of(found: Catalogue, wanted: MachineSpec) -> Iterator[Quote]:
    """Yield the machine's prices; leave out the spot, flex-start and reserved kinds that have no price."""
    for kind in WAYS:
        quote = of_machine(found, wanted.machine_type, kind, wanted.accelerator, wanted.cards)
        if quote.rate is not None or kind == "standard":
            yield quote


def _wanted(config: JobConfig | None, types: tuple[str, ...]) -> Iterable[MachineSpec]:
    if types:
        for name in types:
            attached = _ATTACHED.fullmatch(name)
            yield MachineSpec(attached[1], attached[3], int(attached[2])) if attached else MachineSpec(name)
        return
    job = _own(config)
    if job is not None:
        yield job
    for name in catalog.types("vertex"):
        if MachineSpec(name) != job:
            yield MachineSpec(name)


def _own(config: JobConfig | None) -> MachineSpec | None:
    """Return the job's own machine, or None if the config has no valid machine: the plan reports the fault."""
    if config is None or config.backend != "vertex":
        return None
    try:
        choice = choose(config)
    except ConfigError:
        return None
    if choice.label == choice.machine_type:
        return MachineSpec(choice.machine_type)
    return MachineSpec(choice.machine_type, choice.accelerator, choice.count)

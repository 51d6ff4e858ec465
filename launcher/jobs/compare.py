"""Compare backends: the plan of the same job on each backend, and the cheapest backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from ..advice.preparing import prepare
from ..backend import Bundle
from ..config.schema import JobConfig
from ..errors import CloudtrainError, ConfigError
from ..metering.rate import stale
from ..money.budget_preview import books_of
from ..plan import Plan
from ..planning.plan_text import provenance
from ..planning.prepare import Prepared, refresh_words
from ..planning.prepared import ON_DEMAND_FOR_SPOT, cells
from ..planning.request_rules import notes_of
from ..text.tables import hidden, table, wrapped

T = TypeVar("T")
HEAD = ("backend", "machine", "ranks", "USD/h", "up to", "for", "cap", "worst case", "price")
DROPPED = ("for", "up to", "machine", "cap", "ranks")  # where the terminal is narrow
COLUMNS = 100  # of the table where the output is no terminal


@dataclass(frozen=True)
class BackendOffer:
    """A backend's plan for the job, or the `error` if the backend cannot plan the job."""

    backend: str
    prepared: Prepared | None = None
    error: CloudtrainError | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan, or None."""
        return self.prepared.plan if self.prepared else None

    @property
    def why(self) -> str:
        """The reason in one line."""
        if self.error is None:
            return ""
        faults = self.error.faults if isinstance(self.error, ConfigError) else []
        first, hint = (faults[0].message, faults[0].hint) if faults else (self.error.message, self.error.hint)
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        words = " ".join(f"{first}; {hint}".split() if hint else first.split())
        return words + more

    @property
    def lacks(self) -> str:
        """The requested GPUs that the machine lacks, so that its price is for a different job: `0 of 8 GPUs`."""
        if self.prepared is None:
            return ""
        count = (self.prepared.config.resources.accelerators or "").rpartition(":")[2]
        asked, has = int(count or 0), self.prepared.plan.gpus_per_instance
        return f"{has} of {asked} GPUs" if has < asked else ""

    @property
    def unknown_region(self) -> str:
        """The warning of an unknown region, or ""."""
        return "".join(notes_of(self.prepared.unknown_region)) if self.prepared else ""

    def dump(self) -> dict[str, Any]:
        """Return the offer for JSON."""
        plan = None if self.plan is None else self.plan.dump()
        return {"backend": self.backend, "plan": plan, "error": self.why or None, "lacks": self.lacks or None}


def offers(
    load: Callable[[str], JobConfig], names: Sequence[str], config_file: Path, *, packs: bool = False
) -> list[BackendOffer]:
    """Return an offer of each backend, the cheapest hour first, by the expected price.

    Offers with a free or unknown price follow, then offers that lack GPUs, then failed plans. No request is sent, and
    no file is written. Without `packs` the code is not packed, and the requests contain no code; submit reports faults
    of the code. Raises ConfigError if the file itself cannot be read.
    """
    configs = {name: _attempted(partial(load, name)) for name in names}
    faults = [config for config in configs.values() if isinstance(config, CloudtrainError)]
    if len(faults) == len(names):
        raise faults[0]
    found: list[BackendOffer] = []
    bundle = None if packs else Bundle("0" * 64, Path(), 0, 0, 0, (), {})
    for name, config in configs.items():
        if isinstance(config, CloudtrainError):
            found.append(BackendOffer(name, error=config))
            continue
        prepared = _attempted(partial(prepare, config, config_file, Path(), dry=True, shipped=bundle))
        if isinstance(prepared, CloudtrainError):
            found.append(BackendOffer(name, error=prepared))
        else:
            bundle = prepared.bundle  # the code is the same for all
            found.append(BackendOffer(name, prepared))
    return sorted(found, key=_rank)


def cheapest(found: Sequence[BackendOffer]) -> BackendOffer | None:
    """Return the offer with the lowest expected price of an hour; None if no price of a suitable machine is known."""
    first = next(iter(sorted(found, key=_rank)), None)
    return first if first is not None and _rank(first)[0] == 0 else None


def lines(found: Sequence[BackendOffer], columns: int | None = None) -> list[str]:
    """Return the table, with what an offer has to say for itself, and the problems of each backend without a plan."""
    rows = [_row(offer) for offer in found]
    shown = table(HEAD, rows, drop=DROPPED, shorten={"machine": 12}, below="price", columns=columns)
    files = [each.prepared.config_file for each in found if each.prepared]
    old = ", ".join(each.backend for each in found if each.plan and stale(each.plan.price_as_of))
    notes = [
        *hidden(HEAD[:-1], shown),
        *([f"old prices of {old}: {refresh_words(files[0])}"] if old else []),
        *(
            f"worst case of {each.backend}: {each.plan.terms.starts} starts by the platform, a budget allows one"
            for each in found
            if each.plan and each.plan.terms.starts > 1 and each.plan.worst_case_micro
        ),
        *(f"{each.backend}: {each.why}" for each in found if each.error),
        *(each.unknown_region for each in found if each.unknown_region),
    ]
    return [*shown, *wrapped(notes, columns)]


def unlike(found: Sequence[BackendOffer]) -> list[str]:
    """Return which offers of a spot job have a price on demand, if an offer has a spot price."""
    priced = [offer for offer in found if _rank(offer)[0] == 0]
    names = [each.backend for each in priced if each.prepared and cells(each.prepared)["price"] == ON_DEMAND_FOR_SPOT]
    if not names or len(names) == len(priced):
        return []
    return [f"no spot price of {', '.join(names)} is known: the price on demand, an upper bound, is compared"]


def refused(found: Sequence[BackendOffer]) -> list[str]:
    """Return which offers a budget of this installation would refuse at submit, and why."""
    planned = [(offer.backend, offer.prepared) for offer in found if offer.prepared]
    if not planned:
        return []
    books = books_of(planned[0][1].config)  # the project is the same for all
    whys = {backend: books.refused(each.plan.most_micro) for backend, each in planned}
    return [f"{backend} would be refused: {why}" for backend, why in whys.items() if why]


def _attempted(make: Callable[[], T]) -> T | CloudtrainError:
    try:
        return make()
    except CloudtrainError as error:
        return error


def _rank(offer: BackendOffer) -> tuple[int, int]:
    """Return a sort key: offers with an expected price, without a price, with too few GPUs, without a plan."""
    plan = offer.plan
    if plan is None:
        return 3, 0
    if offer.lacks:
        return 2, 0
    if not plan.price_micro:
        return 1, int(plan.price_micro is None)
    return 0, plan.instances * plan.price_micro


def _row(offer: BackendOffer) -> tuple[str, ...]:
    if offer.prepared is None:
        return offer.backend, *["-"] * 7, offer.why.partition("; ")[0]
    plan, shown = offer.prepared.plan, cells(offer.prepared)
    lacks, machine = f"has {offer.lacks}: " if offer.lacks else "", (offer.backend, shown["machine"], shown["ranks"])
    if not plan.price_micro or plan.worst_case_micro is None:
        # A price does not mend an unknown region.
        source = plan.price_source.partition(": cloudtrain prices")[0] if offer.unknown_region else plan.price_source
        return *machine, "-", "-", "-", shown["cap"], "-", lacks + source
    most = f"{ceil(plan.instances * plan.price_micro / 1e6 * plan.uncertainty * 100 - 1e-6) / 100:.2f}"
    source = lacks + provenance(plan).removeprefix(f"{plan.machine}, ")
    return *machine, shown["USD/h"], most, shown["price"], shown["cap"], shown["worst case"], source

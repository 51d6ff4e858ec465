"""A prepared submit, in lines for people: the plan, the code, warnings, and the candidates side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import dollars, span, up

from .. import backend as backends
from ..errors import Fault
from ..text.tables import hidden, table, width, wrapped
from . import bundle as bundles
from . import images, plan_text

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..job import Job
    from ..plan import Plan

HEAD = ("candidate", "place", "machine", "price", "ranks", "batch", "USD/h", "cap", "worst case")
ON_DEMAND_FOR_SPOT = "spot, at most"  # the bill of a spot machine is never above the price on demand
_DROPPED = ("batch", "cap", "ranks")  # where the terminal is narrow
_STORED_BY = ("account", "project", "subscription", "workspace", "profile", "login", "datastore")  # without a bucket
_OURS = "a command of cloudtrain that follows the job (submit, watch, advance)"


@dataclass(frozen=True)
class Prepared:
    """A prepared submit, before any change. `request` is for the id `NAME-00000`."""

    config: JobConfig
    config_file: Path
    backend: backends.Backend
    plan: Plan
    bundle: backends.Bundle
    request: backends.Request
    notes: tuple[str, ...] = ()  # on the config
    warnings: tuple[str, ...] = ()
    old: tuple[str, ...] = ()  # warnings that the submitted code or config is sent, though the files have changed
    settings: tuple[str, ...] = ()  # `a.b=value` from the command line, of all attempts
    unknown_region: Fault | None = None  # a warning, also among the notes
    candidates: tuple[Prepared, ...] = ()  # in the order of trying, this one first; empty without `capacity`
    candidate: int = 0  # the number of the entry in the config's `capacity.try`
    is_repeat: bool = False  # the code and the config of an earlier attempt, except for the budget

    def lines(self, before: Job | None = None) -> list[str]:
        """Return lines for people: the plan, the code, and warnings; of a job `before`, only the cost and changes."""
        earlier = None if before is None else before.attempt.plan
        first, *rest = plan_text.lines(self.plan, self.config.backend, earlier)
        is_same = before is not None and before.bundle.get("sha256") == self.bundle.sha256
        code = [] if is_same else [f"code: {bundles.summary(self.bundle)}"]
        runtime = [images.line(self.request.runtime)] if self.request.runtime and before is None else []
        unaided = _unaided(self.config) if before is not None and before.attempt.state.resumable else []
        notes = (*_candidates(self), *self.notes, *self.warnings, *self.old, *unaided)
        return [f"{self.config.backend}: {first}", *rest, *runtime, *code, *notes]


def _candidates(prepared: Prepared) -> list[str]:
    """Return the table of the candidates, what is held, and who moves on; no lines for a job without candidates."""
    found, plan = prepared.candidates, prepared.plan
    if not found:
        return []
    columns, rows = width(), [list(cells(each).values()) for each in found]
    shown = table(HEAD, rows, drop=_DROPPED, shorten={"machine": 12}, columns=columns)
    notes = hidden(HEAD[:-1], shown)
    if plan.most_micro:
        parts = "the dearest candidate's worst case and a start that comes too late"
        notes.append(f"held once for all: {dollars(up(plan.most_micro))}, {parts}")
    listed = [str(each.candidate) for each in found if each.plan.lists_machines]
    if listed:
        notes.append(f"the service moves from one machine type to the next within candidate {', '.join(listed)}")
    if len(found) > 1:
        notes.append(f"from one candidate to the next moves {_OURS}; to have one always: cloudtrain watch --install")
    notes += _of_checkpoints(found)
    more: dict[str, list[str]] = {}
    for each in found[1:]:
        for line in {*each.notes, *each.warnings} - {*prepared.notes, *prepared.warnings}:
            more.setdefault(line, []).append(str(each.candidate))
    notes += sorted(f"candidate {', '.join(numbers)}: {line}" for line, numbers in more.items())
    return [*shown, *wrapped(notes, columns)]


def _of_checkpoints(found: Sequence[Prepared]) -> Iterator[str]:
    """Yield where the job may move after its first save, and that the price of reading from another cloud is open."""
    stores: dict[str, list[Prepared]] = {}
    for each in found:
        stores.setdefault(store_of(each), []).append(each)
    if len(stores) > 1:
        groups = [f"{', '.join(str(each.candidate) for each in group)} ({name})" for name, group in stores.items()]
        where = f"after its first save the job moves only within a store of checkpoints: {'; '.join(groups)}"
        yield f"{where}; cloudtrain copies none: a task's `checkpoint.mirror` that all candidates reach lifts this"
    for name, group in stores.items():
        if len({each.config.backend for each in group}) > 1:
            numbers = ", ".join(str(each.candidate) for each in group)
            yield f"candidates {numbers} read checkpoints in {name}: the price of the transfer (egress) is not known"


def store_of(each: Prepared) -> str:
    """Return the store of the candidate's checkpoints; candidates of the same store read each other's."""
    config, block = each.config, getattr(each.config, each.config.backend, None)
    if re.match("(?!file:).*://", config.checkpoint.mirror or ""):
        return str(config.checkpoint.mirror)
    place = config.checkpoint.uri or getattr(block, "bucket", None) or getattr(block, "staging_bucket", None)
    parts = (str(getattr(block, key, None) or "") for key in _STORED_BY)
    return " ".join(filter(None, (config.backend, place) if place else (config.backend, *parts, region_of(each))))


def candidates_of(prepared: Prepared) -> list[dict[str, Any]]:
    """Return the candidates for JSON, in the order of trying."""
    return [
        {
            "candidate": each.candidate,
            "backend": each.config.backend,
            "region": region_of(each),
            "spot": each.config.resources.spot,
            "types_moved_by": each.config.backend if each.plan.lists_machines else None,
            "request": each.request.body,
            "plan": each.plan.dump(),
        }
        for each in prepared.candidates
    ]


def cells(each: Prepared) -> dict[str, str]:
    """Return the cells of a prepared submit in a table of several, by their columns."""
    plan, batch, spot = each.plan, each.plan.batch, each.config.resources.spot
    hourly, worst = plan.hourly_usd, plan.worst_case_micro
    kind = "on demand" if not spot else "spot" if plan.is_spot_price else ON_DEMAND_FOR_SPOT
    split = () if batch is None else (batch.micro_size, batch.accumulation, batch.data_ranks(plan.ranks))
    return {
        "candidate": str(each.candidate),
        "place": " ".join(filter(None, [each.config.backend, region_of(each)])),
        "machine": plan.machine or "-",
        "price": "-" if plan.price_micro == 0 else kind,
        "ranks": f"{plan.instances} x {plan.nproc_per_node} = {plan.ranks}",
        "batch": f"{batch.global_size} = {' x '.join(map(str, split))}" if batch else "-",
        "USD/h": "unknown" if hourly is None else f"{hourly:.2f}",
        "cap": span(plan.cap_s) + " (budget)" * (plan.cap_reason == "budget"),
        "worst case": "unknown" if worst is None else dollars(up(worst)),
    }


def region_of(each: Prepared) -> str | None:
    """Return the region of the job's machines; None on a backend without regions."""
    backend = each.backend
    return backend.price_region(each.config) if isinstance(backend, backends.Priced) else None


def _unaided(config: JobConfig) -> list[str]:
    """Return a warning that a resumed script gets no other arguments than at its first start."""
    if not (config.script or config.module) or not config.keep or config.resume_args:
        return []
    same = "warning: the script starts with the same arguments, because `resume_args` is not set"
    return [f"{same}: unless the script loads its kept files by itself, it begins at step 0 and may overwrite them"]

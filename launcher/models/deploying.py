"""Endpoints: the plan, the send with an end enforced by the platform, and the deletion by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.format import dollars, span, up

from .. import backend as backends
from .. import config as configs
from ..backend.models import CheckedModel, EndpointPlan, EndpointWish
from ..errors import (
    NOTHING,
    BudgetError,
    CloudtrainError,
    ConfigError,
    UnreachableError,
    UsageError,
)
from ..job import new_id
from ..jobs import reserve
from ..money import endpoints as costs
from ..money import shared_ledger_sync
from ..store import budgets, endpoints, ledger
from ..store.endpoints import EndpointRecord
from ..store.registry import Registry, this_process
from .registering import config_of

# A platform may refuse to delete an endpoint during the start, and a start may take most of an hour.
LEAST_TTL_S, START_S = 3600, 2400
LEAST_MORE_S = 60
SOON_S = 120  # before its end, an endpoint may be in deletion already
ENDED = ("Deleting", "Failed")  # words of the platform
MOST_NAME = 26  # letters of the model's name in an endpoint's: Azure ML allows 32 in all
HELD = "the worst case stays reserved until the endpoint is gone"
WAIT_S, PAUSE_S = 120.0, 2.0  # for the end of an endpoint after `undeploy`


@dataclass(frozen=True)
class PlannedEndpoint:
    """An endpoint before the send: the wish, the requests, the worst case (None without a price).

    `config`: the part of the stored config that names project and ledger.
    """

    backend: backends.Backend
    target: str
    wish: EndpointWish
    plan: EndpointPlan
    worst_micro: int | None
    config: Mapping[str, Any]

    @property
    def project(self) -> str:
        """The project whose budgets count the endpoint."""
        return reserve.project_of(self.config)

    def lines(self) -> Iterator[str]:
        """Yield the plan for people: machines, price, worst case, end, deletion by hand."""
        plan, wish, price = self.plan, self.wish, costs.price_micro(self.plan)
        yield f"{plan.name}: {wish.model.name}, version {wish.model.version}, on {wish.instances} x {plan.machine}"
        if price is None or self.worst_micro is None:
            yield f"price: unknown ({plan.price_source})"
        else:
            hour = price * wish.instances
            month = dollars(hour * costs.MONTH_H)
            yield f"price: {dollars(hour)} an hour, {month} a month ({plan.price_source})"
            most = f", at up to {plan.uncertainty:.2f} times this price" if plan.uncertainty > 1 else ""
            times = f"{span(wish.ttl_s)}, and {span(costs.SLACK_S)} for the deletion"
            yield f"worst case: {dollars(up(self.worst_micro))}: {times}{most}"
        end = f"the platform deletes the endpoint at {_utc(wish.ends_s)}, with this machine on or off"
        yield plan.unenforced or end
        yield f"by hand: {plan.delete}"


def planned(
    target: str, model: CheckedModel, file: Path, settings: Sequence[str], *, ttl_s: int, instances: int
) -> PlannedEndpoint:
    """Return the endpoint's plan; sends nothing. Raises UsageError, ConfigError."""
    if ttl_s < LEAST_TTL_S:
        message = f"--ttl {span(ttl_s)} is too short: an endpoint may start for most of an hour"
        raise UsageError(message, hint=f"--ttl {span(LEAST_TTL_S)} or longer")
    if target not in backends.names():
        raise UsageError(f"`{target}` is no place for an endpoint", hint=backends.similar(target))
    backend = backends.load(target)
    if not isinstance(backend, backends.Deploys):
        raise UsageError(f"{target} has no endpoints", hint="sagemaker, azureml and vertex have")
    with configs.placing(file, settings):
        config = config_of(target, file, settings)
        name = new_id(model.name[:MOST_NAME].rstrip("-"))
        wish = EndpointWish(model, name, instances, ttl_s, int(time.time()) + ttl_s)
        plan = backend.endpoint(wish, config)
    kept = config.model_dump(mode="json", include={"project"})
    return PlannedEndpoint(backend, target, wish, plan, costs.worst_micro(plan, instances, ttl_s), kept)


def check_room(registry: Registry, found: PlannedEndpoint) -> None:
    """Raise the reason against a send: no enforced end, no price, or no room in a budget."""
    if found.plan.unenforced or not isinstance(found.backend, backends.EndsEndpoints):
        hint = f"--dry-run prints the requests, to send by hand; then: {found.plan.delete}"
        raise UsageError(f"not sent: {found.plan.unenforced}", hint=hint)
    if found.worst_micro is None:
        hint = f"write `price_per_hour` in the block {found.target} of the config"
        raise ConfigError(f"no price is known, so no worst case: {found.plan.price_source}", hint=hint)
    _require_room(registry, found.project, found.worst_micro, "a shorter --ttl, fewer or smaller machines")


def _require_room(registry: Registry, project: str, amount_micro: int, smaller: str) -> None:
    """Raise BudgetError if a budget of this installation has no room; `smaller`: how to need less, for the hint."""
    if _refused(registry, project, amount_micro, smaller) is not None:
        reserve.reconcile(registry)  # ended jobs and endpoints may still hold their worst cases
        if (error := _refused(registry, project, amount_micro, smaller)) is not None:
            raise error


def _refused(registry: Registry, project: str, amount_micro: int, smaller: str) -> BudgetError | None:
    """Return the error if a budget of this installation has no room."""
    standings = ledger.standings(registry.database, time.time(), project)
    try:
        budgets.require_room(standings, amount_micro)
    except BudgetError as error:
        short = [each for each in standings if any(budgets.refusal(each, amount_micro))]
        raised = " && ".join(budgets.raising(each, amount_micro) for each in short)
        error.hint = f"{smaller}, or {raised}"
        return error
    return None


def send(registry: Registry, found: PlannedEndpoint) -> list[str]:
    """Reserve the worst case, schedule the end, start the endpoint; return lines about the budgets.

    Raises BudgetError and the backend's errors; after UnreachableError from the start, the endpoint may exist, and
    counts until the platform denies the endpoint.
    """
    check_room(registry, found)
    backend, database, plan = found.backend, registry.database, found.plan
    assert isinstance(backend, backends.EndsEndpoints), "checked by check_room"
    record = _record(found)
    endpoints.add(database, record, reserve.ledgers_of(registry, found.config))
    try:
        shared = shared_ledger_sync.hold(database, record.key, 1, time.time())
        backend.prepare_endpoint(plan, found.wish.model)
        if record.ends_s - time.time() < START_S:
            hint = "deploy again: the files are there now"
            raise CloudtrainError("the upload has left too little of the lifetime for a start", hint=hint)
        endpoints.change(database, plan.name, "starting", seen_s=time.time())
        backend.start_endpoint(plan)
    except BaseException as error:
        is_uncertain = not isinstance(error, CloudtrainError) or isinstance(error, UnreachableError)
        if is_uncertain and endpoints.find(database, plan.name).state == "starting":
            if isinstance(error, CloudtrainError):
                error.message += f"; the endpoint {plan.name} may exist until its end: cloudtrain list asks for it"
            raise
        _close(registry, backend, record, error)
        raise
    endpoints.change(database, plan.name, "live", word="Creating", seen_s=time.time())
    own = ledger.standings(database, time.time(), record.project)
    return list(reserve.words(record.worst_micro, [*own, *shared]))


@dataclass(frozen=True)
class Extension:
    """A later end of a live endpoint, and the worst case that comes on top."""

    record: EndpointRecord
    ends_s: float
    more_micro: int

    def lines(self) -> Iterator[str]:
        """Yield the new end and the costs for people."""
        record = self.record
        yield f"{record.name}: the platform deletes the endpoint at {_utc(self.ends_s)}, not {_utc(record.ends_s)}"
        whole = dollars(up(record.worst_micro + self.more_micro))
        yield f"worst case: {dollars(up(self.more_micro))} on top, so {whole} in all"


def extension(registry: Registry, name: str, more_s: int) -> Extension:
    """Return the longer lifetime of the endpoint, by its price at the deploy. Raises UsageError, BudgetError."""
    if more_s < LEAST_MORE_S:
        raise UsageError(f"{more_s} s more are too short", hint=f"add {span(LEAST_MORE_S)} or more")
    record = endpoints.find(registry.database, name)
    _require_time(record)
    # The share of the first worst case has the price's uncertainty.
    whole_s = int(record.ends_s - record.created_s) + costs.SLACK_S
    more_micro = -(-record.worst_micro * more_s // whole_s)
    _require_room(registry, record.project, more_micro, "a shorter time")
    record = costs.refresh_one(registry.database, record)
    if record.state != "live" or record.word in ENDED:
        raise _no_longer(record, f"it is {record.word if record.state == 'live' else record.state}")
    return Extension(record, record.ends_s + more_s, more_micro)


def _require_time(record: EndpointRecord) -> None:
    """Raise UsageError if the endpoint is gone, or may be in deletion before its end moves."""
    if record.state == "gone":
        raise _no_longer(record, "it is gone")
    if (left_s := record.ends_s - time.time()) < SOON_S:
        raise _no_longer(record, "its end is too near" if left_s > 0 else "its end has passed")


def _no_longer(record: EndpointRecord, why: str) -> UsageError:
    return UsageError(f"{record.name} cannot live longer: {why}", hint="cloudtrain deploy starts another endpoint")


def extend(registry: Registry, found: Extension) -> list[str]:
    """Reserve the additional worst case, then move the platform's end; return lines about the budgets.

    Raises BudgetError and the backend's errors. After UnreachableError the end may have moved: the money stays held.
    """
    database, record, now_s = registry.database, found.record, time.time()
    backend = backends.load(record.backend)
    assert isinstance(backend, backends.EndsEndpoints), "only such a backend has sent an endpoint"
    _require_time(record)  # again: a question may have waited for its answer
    number = endpoints.extend(database, record, found.ends_s, found.more_micro, now_s)
    is_sent = False
    try:
        shared = shared_ledger_sync.hold(database, record.key, number, now_s)
        is_sent = True
        backend.extend_endpoint(dict(record.ref), found.ends_s)
    except BaseException as error:
        is_uncertain = is_sent and (not isinstance(error, CloudtrainError) or isinstance(error, UnreachableError))
        is_free = not is_uncertain and endpoints.restore(database, record, found.ends_s, number, now_s)
        if is_free:
            shared_ledger_sync.push(database)
        if isinstance(error, CloudtrainError):
            error.message += f"; {NOTHING if is_free else HELD}"
            if is_uncertain:
                # The same command again would add the whole time a second time.
                error.hint = f"cloudtrain extend {record.name} 1m sends the new end again, a minute later"
        raise
    return list(reserve.words(found.more_micro, [*ledger.standings(database, now_s, record.project), *shared]))


def undeploy(registry: Registry, name: str) -> EndpointRecord:
    """Delete the endpoint, and wait until the platform denies the endpoint; return the record."""
    database = registry.database
    record = costs.refresh_one(database, endpoints.find(database, name))
    if record.state == "gone":
        return record
    backend = backends.load(record.backend)
    assert isinstance(backend, backends.EndsEndpoints), "only such a backend has sent an endpoint"
    backend.delete_endpoint(dict(record.ref))
    end_s = time.monotonic() + WAIT_S
    while (record := costs.refresh_one(database, record)).state != "gone" and time.monotonic() < end_s:
        time.sleep(PAUSE_S)
    shared_ledger_sync.push(database)
    return record


def _utc(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))


def _record(found: PlannedEndpoint) -> EndpointRecord:
    plan, wish, price = found.plan, found.wish, costs.price_micro(found.plan)
    assert price is not None, "checked by check_room"
    assert found.worst_micro is not None, "checked by check_room"
    return EndpointRecord(
        name=plan.name,
        backend=found.target,
        model=f"{wish.model.name} {wish.model.digest}",
        machine=plan.machine,
        instances=wish.instances,
        hourly_micro=price * wish.instances,
        worst_micro=found.worst_micro,
        project=found.project,
        created_s=time.time(),
        ends_s=wish.ends_s,
        ref=plan.ref,
        submitter=this_process(),
    )


def _close(registry: Registry, backend: backends.EndsEndpoints, record: EndpointRecord, error: BaseException) -> None:
    """Remove the parts of an endpoint that was never started, and free the money."""
    is_gone = True
    with contextlib.suppress(CloudtrainError):  # what is left has no price
        is_gone = backend.discard_endpoint(dict(record.ref))
    if not is_gone:
        return
    endpoints.end(registry.database, record, time.time())
    shared_ledger_sync.push(registry.database)
    if isinstance(error, CloudtrainError):
        error.message += f"; {NOTHING}"

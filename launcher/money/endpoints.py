"""Endpoints and money: the worst case, the cost so far, and the end, by the word of the platform alone."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.format import amount

from ..errors import CloudtrainError
from ..metering.limit import PARTS, CostRate
from ..store import endpoints
from ..store.endpoints import EndpointRecord
from ..text.money import as_usd, clock
from ..text.tables import table

if TYPE_CHECKING:
    from ..backend import EndsEndpoints
    from ..backend.models import EndpointPlan
    from ..store.database import Database

SLACK_S = 1800  # after the end: the deletion, and the three tries of the schedule; half an hour is an allowance
MONTH_H = 730
NEW_TRIES, NEW_PAUSE_S = 3, 0.5  # a platform may deny a new endpoint at first
LATE_S = 600.0  # a request of a killed process may arrive so late
OLD_S = 600.0  # a process on another machine is believed to be alive so long
DROPPED = ("BACKEND", "DELETED", "MACHINES")  # on a narrow terminal, in this order
HEAD = ("ENDPOINT", "BACKEND", "STATE", "MACHINES", "DELETED", "USD", "USD/MONTH")


def price_micro(plan: EndpointPlan) -> int | None:
    """Return the price of one instance for an hour, in micro-dollars; None if unknown."""
    return None if plan.hourly_usd is None else math.ceil(round(plan.hourly_usd * 1e6, 3))


def worst_micro(plan: EndpointPlan, instances: int, ttl_s: int) -> int | None:
    """Return the highest possible cost: all instances until the end and the slack, at the price's upper bound."""
    price = price_micro(plan)
    if price is None:
        return None
    return -(-CostRate(instances, price, plan.uncertainty).scaled * (ttl_s + SLACK_S) // (3600 * PARTS))


def refresh(database: Database) -> list[str]:
    """Ask the platforms for all endpoints without a confirmed end; return a line for each failure."""
    failures = []
    for record in endpoints.rows(database, active=True):
        try:
            refresh_one(database, record)
        except CloudtrainError as error:  # a removed SDK, an expired login: the worst case stays reserved
            failures.append(f"the endpoint {record.name} is listed as it was last seen: {error.message}")
    return failures


def refresh_one(database: Database, record: EndpointRecord) -> EndpointRecord:
    """Ask the platform for the endpoint; return its record. Raises CloudtrainError."""
    from .. import backend as backends

    if record.state == "gone" or (record.state != "live" and _deploys(record)):
        return record
    backend = backends.load(record.backend)
    assert isinstance(backend, backends.EndsEndpoints), "only such a backend has sent an endpoint"
    ref, now_s = dict(record.ref), time.time()
    word = None if record.state == "preparing" else _word(backend, record)
    if word is not None and now_s > record.ends_s + SLACK_S:  # the platform has failed to delete the endpoint
        backend.delete_endpoint(ref)
        word = backend.endpoint_state(ref)
    if word is not None:
        endpoints.change(database, record.name, "live", word=word, seen_s=now_s)
    elif record.state == "starting" and now_s - (record.seen_s or 0.0) < LATE_S:
        return record
    elif backend.discard_endpoint(ref):
        endpoints.end(database, record, _end_s(record, now_s))
    return endpoints.find(database, record.name)


def _word(backend: EndsEndpoints, record: EndpointRecord) -> str | None:
    """Return the platform's state of the endpoint. A new endpoint is denied only if the platform denies it again."""
    is_new = record.state == "live" and time.time() - record.created_s < LATE_S
    ref, tries = dict(record.ref), NEW_TRIES if is_new else 1
    for number in range(tries):
        word = backend.endpoint_state(ref)
        if word is not None or number == tries - 1:
            return word
        time.sleep(NEW_PAUSE_S)
    return None


def _deploys(record: EndpointRecord) -> bool:
    """Return whether the deploying process may still be at work."""
    who = record.submitter
    if who.get("host") != platform.node():
        return time.time() - record.created_s < OLD_S
    return processes.alive(who["pid"], who["stamp"])


def _end_s(record: EndpointRecord, now_s: float) -> float:
    """Return the latest possible end of a deleted endpoint: the scheduled end, unless the endpoint was seen later."""
    return min(now_s, max(record.seen_s or 0.0, record.ends_s + SLACK_S))


def lines(database: Database) -> list[str]:
    """Return a line for each endpoint without a confirmed end, as last seen."""
    now_s = time.time()
    return [
        f"the endpoint {each.name} ({each.backend}) has cost {amount(each.spent_micro(now_s))} USD, and costs "
        f"{amount(each.hourly_micro * MONTH_H)} USD a month; it is deleted at {clock(each.ends_s, now_s)}"
        for each in endpoints.rows(database, active=True)
    ]


def shown(records: Sequence[EndpointRecord], columns: int | None) -> tuple[list[str], dict[str, Any]]:
    """Return the endpoints as a table, after an empty line, and for JSON; both empty without endpoints."""
    now_s = time.time()
    rows = [
        (
            each.name,
            each.backend,
            each.word or each.state,
            f"{each.instances} x {each.machine}",
            clock(each.ends_s if each.ended_s is None else each.ended_s, now_s),
            amount(each.spent_micro(now_s)),
            "-" if each.state == "gone" else amount(each.hourly_micro * MONTH_H),
        )
        for each in records
    ]
    if not rows:
        return [], {}
    lines = table(HEAD, rows, drop=DROPPED, columns=columns)
    return ["", *lines], {"endpoints": [as_json(each, now_s) for each in records]}


def as_json(record: EndpointRecord, now_s: float) -> dict[str, Any]:
    """Return the endpoint for JSON."""
    return {
        "endpoint": record.name,
        "backend": record.backend,
        "model": record.model,
        "state": record.state,
        "platform_state": record.word or None,
        "machine": record.machine,
        "instances": record.instances,
        "created_s": record.created_s,
        "ends_s": record.ends_s,
        "ended_s": record.ended_s,
        "project": record.project or None,
        "spent_usd": as_usd(record.spent_micro(now_s)),
        "usd_per_hour": as_usd(record.hourly_micro),
        "usd_per_month": as_usd(record.hourly_micro * MONTH_H),
        "worst_case_usd": as_usd(record.worst_micro),
    }

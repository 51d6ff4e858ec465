"""The table of endpoints: a row for each endpoint of this installation, from before its first request.

The worst case is a reservation under `endpoint:NAME`, an id that no job can have. The reservation counts until the
platform denies the endpoint.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import NoSuchJobError, UsageError
from . import ledger
from .database import Database

# preparing: the start's request has not begun. starting: the endpoint may exist. live: the platform has
# confirmed the endpoint.
EndpointState = Literal["preparing", "starting", "live", "gone"]


@dataclass(frozen=True)
class EndpointRecord:
    """An endpoint. `hourly_micro` is of all instances together; `word` is the platform's last word for the state.

    `model`: name and digest of the folder. `ends_s`: when the platform deletes the endpoint by itself.
    """

    name: str
    backend: str
    model: str
    machine: str
    instances: int
    hourly_micro: int
    worst_micro: int
    project: str
    created_s: float
    ends_s: float
    ref: Mapping[str, Any]
    submitter: Mapping[str, Any]
    state: EndpointState = "preparing"
    word: str = ""
    seen_s: float | None = None
    ended_s: float | None = None

    @property
    def key(self) -> str:
        """The id in the ledger."""
        return f"endpoint:{self.name}"

    def spent_micro(self, now_s: float) -> int:
        """Return the cost so far by the price list, counted from before the first request: an upper bound."""
        if self.state == "preparing":
            return 0
        seconds = max(0.0, (now_s if self.ended_s is None else self.ended_s) - self.created_s)
        return int(-(-self.hourly_micro * seconds // 3600))


def add(database: Database, record: EndpointRecord, ledgers: list[str]) -> None:
    """Store the endpoint and reserve its worst case, both or neither. Raises BudgetError."""
    values = {**record.__dict__, "ref": json.dumps(record.ref), "submitter": json.dumps(record.submitter)}
    with database.transaction():
        ledger.reserve(database, record.key, 1, record.project, record.worst_micro, record.created_s, ledgers=ledgers)
        names = ", ".join(values)
        marks = ", ".join("?" * len(values))
        database.execute(f"INSERT INTO endpoints ({names}) VALUES ({marks})", tuple(values.values()))


def change(database: Database, name: str, state: EndpointState, *, word: str = "", seen_s: float | None = None) -> None:
    """Store the state, unless the endpoint is gone."""
    database.execute(
        "UPDATE endpoints SET state = ?, word = ?, seen_s = COALESCE(?, seen_s) WHERE name = ? AND state != 'gone'",
        (state, word, seen_s, name),
    )


def end(database: Database, record: EndpointRecord, ended_s: float) -> None:
    """Store the end, and replace the reservation by the cost, which is zero without a start."""
    ended_s = record.created_s if record.state == "preparing" else ended_s
    with database.transaction():
        database.execute(
            "UPDATE endpoints SET state = 'gone', word = '', ended_s = ? WHERE name = ?", (ended_s, record.name)
        )
        if record.state == "preparing":
            ledger.release(database, record.key, 1, ended_s)
        else:
            spent_micro = record.spent_micro(ended_s)
            ledger.settle(database, record.key, 1, spent_micro, ended_s, started_s=record.created_s)
            for number in _reserved(database, record)[1:]:  # of extensions; the first has the whole cost
                ledger.settle(database, record.key, number, 0, ended_s)


def extend(database: Database, record: EndpointRecord, ends_s: float, more_micro: int, now_s: float) -> int:
    """Store a later end and reserve its cost, both or neither; return the reservation's number. Raises BudgetError.

    The ledgers are those of the endpoint. Raises UsageError if the end has changed since the record was read.
    """
    with database.transaction():
        present = find(database, record.name)
        if (present.state, present.ends_s) != ("live", record.ends_s):
            raise UsageError(
                f"another command has changed {record.name}", hint="look at cloudtrain list, and try again"
            )
        number = _reserved(database, record)[-1] + 1
        places = ledger.ledgers_of_attempt(database, record.key, 1)
        ledger.reserve(database, record.key, number, record.project, more_micro, now_s, ledgers=places)
        _set_end(database, record.name, ends_s, record.worst_micro + more_micro)
    return number


def restore(database: Database, record: EndpointRecord, ends_s: float, number: int, now_s: float) -> bool:
    """Take back an extension to `ends_s` that the platform has refused; return whether the reservation is free again.

    If the row has another end by now, a later extension is built on this one: then the end and the money stay.
    """
    with database.transaction():
        is_last = find(database, record.name).ends_s == ends_s
        if is_last:
            _set_end(database, record.name, record.ends_s, record.worst_micro)
            ledger.release(database, record.key, number, now_s)
    return is_last


def _set_end(database: Database, name: str, ends_s: float, worst_micro: int) -> None:
    database.execute("UPDATE endpoints SET ends_s = ?, worst_micro = ? WHERE name = ?", (ends_s, worst_micro, name))


def _reserved(database: Database, record: EndpointRecord) -> list[int]:
    """Return the numbers of the endpoint's reservations: 1 of the deploy, further numbers of extensions."""
    rows = database.execute("SELECT attempt FROM reservations WHERE job_id = ? ORDER BY attempt", (record.key,))
    return [row["attempt"] for row in rows]


def find(database: Database, name: str) -> EndpointRecord:
    """Return the endpoint with the name. Raises NoSuchJobError."""
    found = [each for each in rows(database) if each.name == name]
    if not found:
        raise NoSuchJobError(f"no endpoint of this installation is called {name}", hint="cloudtrain list names them")
    return found[0]


def rows(database: Database, *, active: bool = False) -> list[EndpointRecord]:
    """Return all endpoints, or the endpoints without a confirmed end, the newest first."""
    only = " WHERE state != 'gone'" if active else ""
    return [_record(row) for row in database.execute(f"SELECT * FROM endpoints{only} ORDER BY created_s DESC")]


def _record(row: sqlite3.Row) -> EndpointRecord:
    values = {name: row[name] for name in row.keys()}  # noqa: SIM118  # a Row iterates over its values
    assert values["state"] in get_args(EndpointState), "the table holds what `change` has written"
    return EndpointRecord(**{**values, "ref": json.loads(row["ref"]), "submitter": json.loads(row["submitter"])})

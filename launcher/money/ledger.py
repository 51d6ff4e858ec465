"""The home's own ledger: budgets, what every attempt may cost at worst until it ends, and what it has cost then.

A reservation is written in the transaction that journals the intent to send (submit.py), and once for each attempt. It
is `held` until the attempt ends, then `settled` to what was spent, by the months it was spent in; it is `released` only
where nothing was ever sent. `tellings`: what each ledger that it shares with others knows of it (teams.py): `wanted`
(may be there), `joining` (was begun before it was shared), `held`, `closing` (has to hear of the end), or `closed`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cloudtrain.launcher.database import Database
from cloudtrain.launcher.money.budgets import (
    MOST_MICRO,
    OVERALL,
    Budget,
    Held,
    Period,
    Standing,
    by_month,
    month_of,
    require_room,
)

__all__ = [
    "Closing",
    "adopt",
    "budgets",
    "closing",
    "held",
    "join",
    "joining",
    "leave",
    "ledgers",
    "mark_closed",
    "mark_held",
    "months",
    "never_asked",
    "projects",
    "release",
    "remember_ledger",
    "remove_budget",
    "reservation",
    "reserve",
    "revive",
    "set_budget",
    "settle",
    "spent",
    "standing_of",
    "standings",
    "told_of",
    "unpriced",
    "untold",
]

_TOLD = (
    "SELECT r.*, t.ledger, t.told FROM tellings t JOIN reservations r ON r.job_id = t.job_id AND r.attempt = t.attempt"
)


@dataclass(frozen=True)
class Closing:
    """An attempt whose end a team's ledger has to hear of. `months`: what it has cost in each; empty for nothing."""

    job_id: str
    attempt: int
    project: str
    amount_micro: int | None
    created_s: float
    spent_micro: int | None
    ended_s: float
    months: Mapping[str, int]


# -- budgets --------------------------------------------------------------------------------------------------------


def set_budget(database: Database, budget: Budget) -> None:
    """Store the limit, in place of an earlier one of that project and period."""
    database.execute(
        "INSERT OR REPLACE INTO budgets (project, period, limit_micro, overcommit_percent, set_s)"
        " VALUES (?, ?, ?, ?, ?)",
        (budget.project, budget.period, budget.limit_micro, budget.overcommit_percent, budget.set_s),
    )


def remove_budget(database: Database, project: str, period: Period) -> bool:
    """Remove the limit; return whether there was one."""
    values = (project, period)
    with database.transaction():
        found = database.execute("SELECT 1 FROM budgets WHERE project = ? AND period = ?", values)
        database.execute("DELETE FROM budgets WHERE project = ? AND period = ?", values)
    return bool(found)


def budgets(database: Database, project: str | None = None) -> list[Budget]:
    """Return all budgets, or those that a job of the project counts against: its own and the overall ones."""
    only, values = ("", ()) if project is None else ("WHERE project IN ('', ?) ", (project,))
    rows = database.execute(f"SELECT * FROM budgets {only}ORDER BY project, period", values)
    return [
        Budget(row["project"], row["period"], row["limit_micro"], row["overcommit_percent"], row["set_s"])
        for row in rows
    ]


def standings(database: Database, now_s: float, project: str | None = None) -> list[Standing]:
    """Return how each budget stands, or each that a job of the project counts against."""
    return [standing_of(database, budget, now_s) for budget in budgets(database, project)]


def standing_of(database: Database, budget: Budget, now_s: float) -> Standing:
    """Return how the budget stands: what its jobs have cost, in this month if it is monthly, and what is held."""
    project = None if budget.project == OVERALL else budget.project
    month = month_of(now_s)
    means = database.execute(
        "SELECT COUNT(*) AS count, COALESCE(SUM(spent_micro), 0) AS spent, COALESCE(SUM(amount_micro), 0) AS amount"
        " FROM reservations WHERE state = 'settled' AND amount_micro > 0 AND (?1 IS NULL OR project = ?1)",
        (project,),
    )[0]
    return Standing(
        budget,
        month,
        spent(database, project, month if budget.period == "month" else None),
        tuple(held(database, project)),
        means["spent"],
        means["amount"],
        means["count"],
    )


# -- reservations ---------------------------------------------------------------------------------------------------


def reserve(
    database: Database,
    job_id: str,
    attempt: int,
    project: str,
    amount_micro: int | None,
    now_s: float,
    *,
    ledgers: Iterable[str] = (),
) -> list[Standing]:
    """Hold the attempt's worst case in every budget that it counts against; return how they stand then.

    To be called in the transaction that journals the intent. Once for each attempt: again, it changes nothing.
    `ledgers`: where shared budgets are, to be asked before the send. Raises BudgetError.
    """
    with database.transaction():
        if not database.execute("SELECT 1 FROM reservations WHERE job_id = ? AND attempt = ?", (job_id, attempt)):
            require_room(standings(database, now_s, project), amount_micro)
            database.execute(
                "INSERT INTO reservations (job_id, attempt, project, amount_micro, created_s, state)"
                " VALUES (?, ?, ?, ?, ?, 'held')",
                (job_id, attempt, project, amount_micro, now_s),
            )
            for uri in ledgers:
                database.execute("INSERT INTO tellings VALUES (?, ?, ?, 'wanted')", (job_id, attempt, uri))
        return standings(database, now_s, project)


def settle(
    database: Database,
    job_id: str,
    attempt: int,
    spent_micro: int | None,
    ended_s: float,
    *,
    started_s: float | None = None,
) -> None:
    """Put what the attempt has cost in place of what was held for it, by the months from start to end; it is over.

    None, where nobody knows what it has cost, leaves it at its worst case: it is never taken for nothing. May be told
    again, with a better figure. One without a reservation, of before there were any, gets one here.
    """
    with database.transaction():
        adopt(database, job_id, attempt, OVERALL, None, ended_s)
        row = reservation(database, job_id, attempt)
        if row is None or row["state"] == "released":
            return
        total = row["amount_micro"] if spent_micro is None else min(max(0, spent_micro), MOST_MICRO)
        if (row["state"], row["spent_micro"], row["ended_s"]) == ("settled", total, ended_s):
            return
        _close(database, row, "settled", total, ended_s)
        for month, micro in by_month(total or 0, started_s, ended_s).items():
            database.execute(
                "INSERT INTO spends (job_id, attempt, month, project, spent_micro) VALUES (?, ?, ?, ?, ?)",
                (job_id, attempt, month, row["project"], micro),
            )


def release(database: Database, job_id: str, attempt: int, now_s: float) -> None:
    """Free what is held for the attempt, which was never sent and never will be: its backend has said so."""
    with database.transaction():
        row = reservation(database, job_id, attempt)
        if row is not None and row["state"] == "held":
            _close(database, row, "released", 0, now_s)


def adopt(
    database: Database,
    job_id: str,
    attempt: int,
    project: str,
    amount_micro: int | None,
    created_s: float,
    *,
    ledgers: Iterable[str] = (),
) -> None:
    """Hold what was begun before there was a ledger, whatever the budgets are; what has a place keeps it.

    `ledgers`: the shared budgets that hear of it.
    """
    database.execute(
        "INSERT OR IGNORE INTO reservations (job_id, attempt, project, amount_micro, created_s, state)"
        " VALUES (?, ?, ?, ?, ?, 'held')",
        (job_id, attempt, project, amount_micro, created_s),
    )
    for uri in ledgers:
        database.execute("INSERT OR IGNORE INTO tellings VALUES (?, ?, ?, 'joining')", (job_id, attempt, uri))


def revive(database: Database, job_id: str, attempt: int) -> None:
    """Hold again what was released, where the attempt turns out to have been sent after all; its ledgers hear of it."""
    with database.transaction():
        row = reservation(database, job_id, attempt)
        if row is None or row["state"] != "released":
            return
        database.execute(
            "UPDATE reservations SET state = 'held', spent_micro = NULL, ended_s = NULL"
            " WHERE job_id = ? AND attempt = ?",
            (job_id, attempt),
        )
        database.execute("UPDATE tellings SET told = 'joining' WHERE job_id = ? AND attempt = ?", (job_id, attempt))


def held(database: Database, project: str | None = None) -> list[Held]:
    """Return what may still cost money, of the project or of all, the earliest first."""
    rows = database.execute(
        "SELECT * FROM reservations WHERE state = 'held' AND (?1 IS NULL OR project = ?1) ORDER BY created_s, job_id",
        (project,),
    )
    return [_held(row) for row in rows]


def unpriced(database: Database) -> list[str]:
    """Return the jobs that have ended and cost nobody knows what."""
    rows = database.execute(
        "SELECT DISTINCT job_id FROM reservations WHERE state = 'settled' AND spent_micro IS NULL ORDER BY job_id"
    )
    return [row["job_id"] for row in rows]


def spent(database: Database, project: str | None, month: str | None) -> int:
    """Return what ended attempts have cost, of the project or of all, in the month and after it, or ever.

    After it: where the clock was put back, what was spent meanwhile still counts.
    """
    rows = database.execute(
        "SELECT COALESCE(SUM(spent_micro), 0) FROM spends WHERE (?1 IS NULL OR project = ?1)"
        " AND (?2 IS NULL OR month >= ?2)",
        (project, month),
    )
    total: int = rows[0][0]
    return total


def months(database: Database) -> dict[str, dict[str, int]]:
    """Return project -> month -> what ended attempts have cost in it; jobs without a project are under OVERALL."""
    found: dict[str, dict[str, int]] = {}
    rows = database.execute(
        "SELECT project, month, SUM(spent_micro) AS spent FROM spends GROUP BY project, month ORDER BY project, month"
    )
    for row in rows:
        found.setdefault(row["project"], {})[row["month"]] = row["spent"]
    return found


def projects(database: Database) -> list[str]:
    """Return all projects that have spent or hold anything, by name."""
    rows = database.execute(
        "SELECT DISTINCT project FROM reservations WHERE project != '' AND state != 'released' ORDER BY project"
    )
    return [row["project"] for row in rows]


# -- what a team's ledger knows -------------------------------------------------------------------------------------


def remember_ledger(database: Database, project: str, uri: str | None) -> None:
    """Store where the budgets are that a project shares with others, and have what it holds join; None forgets it."""
    if uri is None:
        database.execute("DELETE FROM ledgers WHERE project = ?", (project,))
    elif ledgers(database).get(project) != uri:
        with database.transaction():
            join(database, project, uri)
            database.execute("INSERT OR REPLACE INTO ledgers (project, uri) VALUES (?, ?)", (project, uri))


def ledgers(database: Database) -> dict[str, str]:
    """Return project -> where its shared ledger is."""
    return {row["project"]: row["uri"] for row in database.execute("SELECT * FROM ledgers ORDER BY project")}


def join(database: Database, project: str, uri: str) -> None:
    """Have the shared ledger hear of what the project holds already, which was begun before it was shared there."""
    database.execute(
        "INSERT OR IGNORE INTO tellings SELECT job_id, attempt, ?2, 'joining' FROM reservations"
        " WHERE state = 'held' AND (project = ?1 OR ?1 = '')",
        (project, uri),
    )


def joining(database: Database, uri: str) -> list[Held]:
    """Return what the shared ledger has to hear of, whatever its budgets are: it runs."""
    rows = database.execute(f"{_TOLD} WHERE t.told = 'joining' AND t.ledger = ? AND r.state = 'held'", (uri,))
    return [_held(row) for row in rows]


def told_of(database: Database, job_id: str, attempt: int) -> list[str]:
    """Return the shared ledgers that the attempt counts in."""
    rows = database.execute(
        "SELECT ledger FROM tellings WHERE job_id = ? AND attempt = ? ORDER BY ledger", (job_id, attempt)
    )
    return [row["ledger"] for row in rows]


def reservation(database: Database, job_id: str, attempt: int) -> sqlite3.Row | None:
    """Return the attempt's row, None without one."""
    rows = database.execute("SELECT * FROM reservations WHERE job_id = ? AND attempt = ?", (job_id, attempt))
    return rows[0] if rows else None


def never_asked(database: Database, job_id: str, attempt: int, uri: str) -> None:
    """Have nothing to take back from a shared ledger, to which nothing of the attempt was ever written."""
    database.execute(
        "DELETE FROM tellings WHERE job_id = ? AND attempt = ? AND ledger = ? AND told = 'wanted'",
        (job_id, attempt, uri),
    )


def mark_held(database: Database, job_id: str, attempt: int, uri: str) -> None:
    """Store that the shared ledger holds it."""
    database.execute(
        "UPDATE tellings SET told = 'held'"
        " WHERE job_id = ? AND attempt = ? AND ledger = ? AND told IN ('wanted', 'joining')",
        (job_id, attempt, uri),
    )


def mark_closed(database: Database, end: Closing, uri: str) -> None:
    """Store that the shared ledger has heard of this end; another one, of later, is told too."""
    database.execute(
        "UPDATE tellings SET told = 'closed' WHERE job_id = ?1 AND attempt = ?2 AND ledger = ?3 AND told = 'closing'"
        " AND EXISTS (SELECT 1 FROM reservations WHERE job_id = ?1 AND attempt = ?2 AND ended_s = ?4"
        " AND spent_micro IS ?5)",
        (end.job_id, end.attempt, uri, end.ended_s, end.spent_micro),
    )


def leave(database: Database, uri: str) -> None:
    """Have nothing more to tell a shared ledger, which is gone for good."""
    database.execute("DELETE FROM tellings WHERE ledger = ?", (uri,))


def untold(database: Database) -> list[str]:
    """Return the shared ledgers that have yet to hear of something."""
    rows = database.execute("SELECT DISTINCT ledger FROM tellings WHERE told IN ('closing', 'joining') ORDER BY ledger")
    return [row["ledger"] for row in rows]


def closing(database: Database) -> dict[str, list[Closing]]:
    """Return ledger -> the ends that it has to hear of."""
    found: dict[str, list[Closing]] = {}
    for row in database.execute(f"{_TOLD} WHERE t.told = 'closing' AND r.state != 'held' ORDER BY r.ended_s, r.job_id"):
        months = database.execute(
            "SELECT month, spent_micro FROM spends WHERE job_id = ? AND attempt = ?", (row["job_id"], row["attempt"])
        )
        amount = None if row["state"] == "released" else row["amount_micro"]  # it says nothing of what jobs cost
        end = Closing(
            *(row["job_id"], row["attempt"], row["project"], amount, row["created_s"]),
            *(row["spent_micro"], row["ended_s"]),
            {each["month"]: each["spent_micro"] for each in months},
        )
        found.setdefault(row["ledger"], []).append(end)
    return found


# -- inside ---------------------------------------------------------------------------------------------------------


def _held(row: sqlite3.Row) -> Held:
    return Held(row["job_id"], row["attempt"], row["project"], row["amount_micro"], row["created_s"])


def _close(database: Database, row: sqlite3.Row, state: str, spent_micro: int | None, ended_s: float) -> None:
    """Store the end, which each ledger that it is shared with has to hear of too."""
    key = (row["job_id"], row["attempt"])
    database.execute(
        "UPDATE reservations SET state = ?, spent_micro = ?, ended_s = ? WHERE job_id = ? AND attempt = ?",
        (state, spent_micro, ended_s, *key),
    )
    database.execute("UPDATE tellings SET told = 'closing' WHERE job_id = ? AND attempt = ?", key)
    database.execute("DELETE FROM spends WHERE job_id = ? AND attempt = ?", key)

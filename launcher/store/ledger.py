"""The installation's own ledger: budgets, reservations (worst cases of attempts that have not ended), and real costs.

`submit.py` writes a reservation once for each attempt, in the transaction that journals the intent to send. The state
is `held` until the attempt ends, then `settled` to the cost, split by month; `released` only if nothing was ever sent.
The table `tellings` records the state of each shared ledger (shared_ledger_sync.py): `wanted` (the write may have
arrived), `joining` (began before the ledger was shared), `moving` (its number or amount has changed), `held`, `closing`
(must still learn of the end) or `closed`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..metering.meter import spent_at_worst_micro
from . import agent_limit
from .attempts import COST_COLUMNS, attempt_of
from .budgets import AGENT, MOST_MICRO, Accounts, End, Held, LedgerBudget, Period, Standing, by_month, require_room
from .database import Database

_ONE = "WHERE job_id = ? AND attempt = ?"
_ROWS = "SELECT r.*, t.ledger, t.told FROM tellings t JOIN reservations r USING (job_id, attempt)"


@dataclass(frozen=True)
class Closing:
    """The end of an attempt for a shared ledger."""

    job_id: str
    attempt: int
    created_s: float
    spent_micro: int | None
    end: End


def set_budget(database: Database, budget: LedgerBudget) -> None:
    """Store the limit; replace an earlier limit of the same project and period."""
    values = (budget.project, budget.period, budget.limit_micro, budget.overcommit_percent, budget.set_s)
    database.execute("INSERT OR REPLACE INTO budgets VALUES (?, ?, ?, ?, ?)", values)


def remove_budget(database: Database, project: str, period: Period) -> bool:
    """Remove the limit; return whether a limit existed."""
    values = (project, period)
    return bool(database.execute("DELETE FROM budgets WHERE project = ? AND period = ? RETURNING 1", values))


def budgets(database: Database) -> list[LedgerBudget]:
    """Return all budgets."""
    return [LedgerBudget(**dict(row)) for row in database.execute("SELECT * FROM budgets ORDER BY project, period")]


def standings(database: Database, now_s: float, project: str | None = None) -> list[Standing]:
    """Return the state of each budget, or of each budget that applies to the project's jobs."""
    return accounts(database, now_s).standings(now_s, project)


def accounts(database: Database, now_s: float) -> Accounts:
    """Return the sums of the ledger."""
    database.require_sound("reservations", "spends", "budgets")
    means = database.execute(
        "SELECT project, COUNT(*), COALESCE(SUM(spent_micro), 0), SUM(amount_micro)"
        " FROM reservations WHERE state = 'settled' AND amount_micro > 0 GROUP BY project"
    )
    of_project = {project: (count, cost, worst) for project, count, cost, worst in means}
    return Accounts(budgets(database), held(database, now_s), months(database), of_project)


def reserve(database: Database, held: Held, *, ledgers: Iterable[str] = ()) -> None:
    """Reserve the attempt's worst case in every budget that applies.

    Call the function in the transaction that journals the intent. A second call for an attempt changes no row.
    `ledgers`: shared ledgers to ask before the send. Raises BudgetError.
    """
    with database.transaction():
        if reservation(database, held.job_id, held.attempt) is None:
            require_room(standings(database, held.created_s, held.project), held.amount_micro)
            adopt(database, held, ledgers=ledgers, told="wanted")


def settle(
    database: Database,
    job_id: str,
    attempt: int,
    spent_micro: int | None,
    ended_s: float,
    *,
    started_s: float | None = None,
) -> None:
    """Replace the attempt's reservation by its cost, split over the months from start to end; the attempt has ended.

    If `spent_micro` is None, the cost is unknown and the worst case stays: an unknown cost never counts as zero. A
    later call may give a better figure.
    """
    with database.transaction():
        row = reservation(database, job_id, attempt)
        if row is None or row["state"] == "released":
            return
        total = row["amount_micro"] if spent_micro is None else min(max(0, spent_micro), MOST_MICRO)
        if (row["state"], row["spent_micro"], row["ended_s"]) == ("settled", total, ended_s):
            return
        _close(database, row, "settled", total, ended_s)
        for month, micro in by_month(total or 0, started_s, ended_s).items():
            values = (job_id, attempt, month, row["project"], micro)
            database.execute("INSERT INTO spends VALUES (?, ?, ?, ?, ?)", values)


def release(database: Database, job_id: str, attempt: int, now_s: float) -> None:
    """Free the reservation of an attempt that was never sent and never will be, as its backend has confirmed."""
    with database.transaction():
        row = reservation(database, job_id, attempt)
        if row is not None and row["state"] == "held":
            _close(database, row, "released", 0, now_s)


def move(database: Database, job_id: str, attempt: int, later: int, now_s: float) -> None:
    """Give the reservation of an ended attempt to the job's later attempt, in the transaction that stores both.

    An attempt that has cost something keeps its cost, and the later attempt gets the rest: the sum stays the same.
    """
    with database.transaction():
        row = reservation(database, job_id, attempt)
        if row is None or row["state"] == "released":
            return
        if row["spent_micro"] != 0:
            rest = None if row["amount_micro"] is None else max(0, row["amount_micro"] - (row["spent_micro"] or 0))
            places = ledgers_of_attempt(database, job_id, attempt)
            adopt(database, Held(job_id, later, row["project"], rest, now_s), ledgers=places, told="moving")
            return
        again = "attempt = ?, state = 'held', spent_micro = NULL, ended_s = NULL"
        database.execute(f"UPDATE reservations SET {again} {_ONE}", (later, job_id, attempt))
        database.execute(f"UPDATE tellings SET attempt = ?, told = 'moving' {_ONE}", (later, job_id, attempt))
        database.execute(f"DELETE FROM spends {_ONE}", (job_id, attempt))


def shrink(database: Database, job_id: str, attempt: int, amount_micro: int) -> None:
    """Reduce the reservation to the amount, and queue the change for the shared ledgers."""
    with database.transaction():
        sql = f"UPDATE reservations SET amount_micro = ? {_ONE} AND amount_micro > ? AND state = 'held' RETURNING 1"
        if database.execute(sql, (amount_micro, job_id, attempt, amount_micro)):
            database.execute(f"UPDATE tellings SET told = 'moving' {_ONE} AND told = 'held'", (job_id, attempt))


def cover(database: Database, job_id: str, attempt: int, amount_micro: int | None, now_s: float) -> None:
    """Raise the reservation to the amount, if less is held. Raises BudgetError if a budget has no room for the rest."""
    with database.transaction():
        row = reservation(database, job_id, attempt)
        if row is None or row["amount_micro"] is None or amount_micro is None or amount_micro <= row["amount_micro"]:
            return
        require_room(standings(database, now_s, row["project"]), amount_micro - row["amount_micro"])
        database.execute(f"UPDATE reservations SET amount_micro = ? {_ONE}", (amount_micro, job_id, attempt))


def forget(database: Database, job_id: str, attempt: int) -> None:
    """Remove the row of a released attempt, unless a shared ledger must still learn of the release."""
    with database.transaction():
        if not database.execute(f"SELECT 1 FROM tellings {_ONE} AND told != 'closed'", (job_id, attempt)):
            database.execute(f"DELETE FROM tellings {_ONE}", (job_id, attempt))
            database.execute(f"DELETE FROM reservations {_ONE} AND state = 'released'", (job_id, attempt))


def adopt(database: Database, held: Held, *, ledgers: Iterable[str] = (), told: str = "joining") -> None:
    """Reserve for an attempt that runs already, unchecked; each of `ledgers` must record it, in the state `told`."""
    columns = "job_id, attempt, project, amount_micro, created_s, state"
    row = (held.job_id, held.attempt, held.project, held.amount_micro, held.created_s)
    database.execute(f"INSERT OR IGNORE INTO reservations ({columns}) VALUES (?, ?, ?, ?, ?, 'held')", row)
    for uri in ledgers:
        values = (held.job_id, held.attempt, uri, told)
        database.execute("INSERT OR IGNORE INTO tellings VALUES (?, ?, ?, ?)", values)


def revive(database: Database, job_id: str, attempt: int) -> None:
    """Hold a released reservation again, if the attempt was sent after all, and queue the change for shared ledgers."""
    with database.transaction():
        held_again = "UPDATE reservations SET state = 'held', spent_micro = NULL, ended_s = NULL"
        if database.execute(f"{held_again} {_ONE} AND state = 'released' RETURNING 1", (job_id, attempt)):
            database.execute(f"UPDATE tellings SET told = 'joining' {_ONE}", (job_id, attempt))


def held(database: Database, now_s: float | None = None) -> list[Held]:
    """Return the attempts that may still cost money, the earliest first."""
    now_s = time.time() if now_s is None else now_s
    rows = database.execute(
        f"SELECT r.job_id, r.attempt, r.project, r.amount_micro, r.created_s, {COST_COLUMNS} FROM reservations r"
        " LEFT JOIN attempts a ON a.job_id = r.job_id AND a.number = r.attempt"
        " WHERE r.state = 'held' ORDER BY r.created_s, r.job_id"
    )
    # At worst, as at the end: 0 at an unknown price, and for an attempt without a row.
    runs = [[] if row["number"] is None else [attempt_of(row, row["job_id"])] for row in rows]
    used = [spent_at_worst_micro(attempts, now_s) or 0 for attempts in runs]
    return [replace(_held(row), used_micro=micro) for row, micro in zip(rows, used, strict=True)]


def unpriced(database: Database) -> list[str]:
    """Return the jobs that have ended at an unknown cost."""
    sql = "SELECT DISTINCT job_id FROM reservations WHERE state = 'settled' AND spent_micro IS NULL ORDER BY job_id"
    return [row["job_id"] for row in database.execute(sql)]


def months(database: Database) -> dict[str, dict[str, int]]:
    """Return project -> month -> cost of ended attempts; jobs without a project are under OVERALL."""
    found: dict[str, dict[str, int]] = {}
    sql = "SELECT project, month, SUM(spent_micro) AS spent FROM spends GROUP BY 1, 2 ORDER BY 1, 2"
    for row in database.execute(sql):
        found.setdefault(row["project"], {})[row["month"]] = row["spent"]
    return found


def projects(database: Database) -> list[str]:
    """Return all projects with costs or reservations, by name."""
    sql = "SELECT DISTINCT project FROM reservations WHERE project != '' AND state != 'released' ORDER BY project"
    return [row["project"] for row in database.execute(sql)]


def remember_ledger(database: Database, project: str, uri: str | None) -> None:
    """Store the address of the project's shared ledger and queue held attempts for it; None deletes the address."""
    if uri is None:
        database.execute("DELETE FROM ledgers WHERE project = ?", (project,))
    elif ledgers(database).get(project) != uri:
        with database.transaction():
            # The project's held attempts began before the project was shared there.
            database.execute(
                "INSERT OR IGNORE INTO tellings SELECT job_id, attempt, ?2, 'joining' FROM reservations"
                " WHERE state = 'held' AND (project = ?1 OR ?1 = '')",
                (project, uri),
            )
            database.execute("INSERT OR REPLACE INTO ledgers (project, uri) VALUES (?, ?)", (project, uri))


def join_sent(database: Database, uri: str) -> None:
    """Queue for the ledger all held attempts that were sent before the ledger counted all jobs."""
    sent = "SELECT job_id, attempt, ?, 'joining' FROM reservations r JOIN attempts a USING (job_id)"
    sent += " WHERE r.state = 'held' AND a.number = r.attempt AND a.phase = 'sent'"
    database.execute(f"INSERT OR IGNORE INTO tellings {sent}", (uri,))


def ledgers(database: Database) -> dict[str, str]:
    """Return project -> address of its shared ledger; under AGENT the ledger of the owner's limit."""
    known = {row["project"]: row["uri"] for row in database.execute("SELECT * FROM ledgers ORDER BY project")}
    return {**known, AGENT: agent_limit.place()} if agent_limit.known().key else known


def joining(database: Database, uri: str, told: str) -> list[Held]:
    """Return the running attempts that the shared ledger must record, without a budget check."""
    rows = database.execute(f"{_ROWS} WHERE t.told = ? AND t.ledger = ? AND r.state = 'held'", (told, uri))
    return [_held(row) for row in rows]


def ledgers_of_attempt(database: Database, job_id: str, attempt: int) -> list[str]:
    """Return the shared ledgers that count the attempt."""
    rows = database.execute(f"SELECT ledger FROM tellings {_ONE} ORDER BY ledger", (job_id, attempt))
    return [row["ledger"] for row in rows]


def reservation(database: Database, job_id: str, attempt: int) -> sqlite3.Row | None:
    """Return the attempt's row, or None."""
    rows = database.execute(f"SELECT * FROM reservations {_ONE}", (job_id, attempt))
    return rows[0] if rows else None


def never_asked(database: Database, job_id: str, attempt: int, uri: str) -> None:
    """Remove the queue entry for a shared ledger that never received a write about the attempt."""
    database.execute(f"DELETE FROM tellings {_ONE} AND ledger = ? AND told = 'wanted'", (job_id, attempt, uri))


def mark_held(database: Database, job_id: str, attempt: int, uri: str) -> None:
    """Store that the shared ledger holds the attempt."""
    asked = f"{_ONE} AND ledger = ? AND told IN ('wanted', 'joining', 'moving')"
    database.execute(f"UPDATE tellings SET told = 'held' {asked}", (job_id, attempt, uri))


def mark_closed(database: Database, closed: Closing, uri: str) -> None:
    """Store that the shared ledger has recorded this end; a later, different end stays queued."""
    database.execute(
        "UPDATE tellings SET told = 'closed' WHERE job_id = ?1 AND attempt = ?2 AND ledger = ?3 AND told = 'closing'"
        " AND EXISTS (SELECT 1 FROM reservations WHERE job_id = ?1 AND attempt = ?2 AND ended_s = ?4"
        " AND spent_micro IS ?5)",
        (closed.job_id, closed.attempt, uri, closed.end.ended_s, closed.spent_micro),
    )


def leave(database: Database, uri: str, *, only_released: bool = False) -> None:
    """Remove the queue entries for a shared ledger that does not exist: all, or those of released attempts."""
    some = "(job_id, attempt) IN (SELECT job_id, attempt FROM reservations WHERE state = 'released')"
    database.execute(f"DELETE FROM tellings WHERE ledger = ?{f' AND {some}' if only_released else ''}", (uri,))


def unsynced(database: Database) -> list[str]:
    """Return the shared ledgers with queued changes."""
    some = "SELECT ledger FROM tellings WHERE told"  # each part has an index
    rows = database.execute(f"{some} IN ('closing', 'joining') UNION {some} = 'moving' ORDER BY ledger")
    return [row["ledger"] for row in rows]


def closing(database: Database) -> dict[str, list[Closing]]:
    """Return ledger -> the ends that the ledger must still record."""
    found: dict[str, list[Closing]] = {}
    for row in database.execute(f"{_ROWS} WHERE t.told = 'closing' AND r.state != 'held' ORDER BY r.ended_s, r.job_id"):
        key = (row["job_id"], row["attempt"])
        months = database.execute(f"SELECT month, spent_micro FROM spends {_ONE}", key)
        amount = None if row["state"] == "released" else row["amount_micro"]  # keep it out of the mean cost
        end = End(row["project"], amount, row["ended_s"], {each["month"]: each["spent_micro"] for each in months})
        found.setdefault(row["ledger"], []).append(Closing(*key, row["created_s"], row["spent_micro"], end))
    return found


def _held(row: sqlite3.Row) -> Held:
    return Held(row["job_id"], row["attempt"], row["project"], row["amount_micro"], row["created_s"])


def _close(database: Database, row: sqlite3.Row, state: str, spent_micro: int | None, ended_s: float) -> None:
    """Store the end, and queue the end for each shared ledger that counts the attempt."""
    key = (row["job_id"], row["attempt"])
    values = (state, spent_micro, ended_s, *key)
    database.execute(f"UPDATE reservations SET state = ?, spent_micro = ?, ended_s = ? {_ONE}", values)
    database.execute(f"UPDATE tellings SET told = 'closing' {_ONE}", key)
    database.execute(f"DELETE FROM spends {_ONE}", key)

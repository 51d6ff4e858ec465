"""Synchronisation of this installation with its shared ledgers: reservations before a send, costs after the end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cloudtrain.entrypoints.processes import user_name

from ..errors import BudgetError, CloudtrainError, ConfigError
from ..store import agent_limit, ledger
from ..store.budgets import AGENT, OVERALL, End, Held, LedgerBudget, Period, Standing, month_of
from ..store.database import Database
from ..store.home import identity
from ..store.ledger import Closing
from . import shared_ledger
from .conditional import ConditionalObject

QUICK_S = 10.0  # for reporting an end; the next command retries
AGAIN_S = 30.0  # pause after a failed attempt, until this process tries again on its own

_not_before_s: dict[str, float] = {}  # ledger -> time.monotonic


def hold(database: Database, job_id: str, attempt: int, now_s: float) -> list[Standing]:
    """Reserve the attempt's worst case in each of its shared ledgers; return the budgets' states afterwards.

    The same writes carry queued changes. Raises BudgetError, UnreachableError, ConfigError, CredentialError: then the
    job must not be sent, and once the attempt is released, the release is queued.
    """
    row = ledger.reservation(database, job_id, attempt)
    if row is None:
        return []
    held = Held(job_id, attempt, row["project"], row["amount_micro"], row["created_s"], this_person())
    if (agents := ledger.ledgers(database).get(AGENT)) is not None:  # perhaps set since the attempt was journalled
        ledger.adopt(database, held, ledgers=[agents], told="wanted")
        ledger.join_sent(database, agents)
    places = ledger.ledgers_of_attempt(database, job_id, attempt)
    return [standing for uri in places for standing in _hold_at(database, uri, held, now_s)]


def push(database: Database, *, patient: bool = False) -> list[str]:
    """Write ended attempts to the shared ledgers; return an error line for each ledger that could not be written.

    A failed write stays queued, and the ledger counts the worst case until the next command succeeds.
    """
    failures = []
    for uri in ledger.unsynced(database):
        if not patient and time.monotonic() < _not_before_s.get(uri, 0.0):
            continue
        try:
            if uri not in ledger.ledgers(database).values() and shared_ledger.read(ConditionalObject(uri)) is None:
                # A submit named a ledger that does not exist, and died: the address is stored before the first write.
                ledger.leave(database, uri, only_released=True)
            if uri in ledger.unsynced(database):
                _change(database, uri, lambda book: None, most_s=QUICK_S)
        except CloudtrainError as error:
            _not_before_s[uri] = time.monotonic() + AGAIN_S
            failures.append(failure(uri, error))
    return failures


def set_budget(database: Database, budget: LedgerBudget, uri: str, *, may_make: bool) -> Standing:
    """Set a shared budget for all users of the ledger; return its state. Attempts that run already join the ledger."""
    if may_make:
        _make(ConditionalObject(uri))
    ledger.remember_ledger(database, budget.project, uri)

    def apply(book: shared_ledger.Book) -> None:
        book.budgets[budget.project, budget.period] = budget

    return shared_ledger.accounts(_change(database, uri, apply)).standing(budget, time.time())


def remove_budget(database: Database, uri: str, project: str, period: Period) -> bool:
    """Remove a shared budget; return whether the budget existed."""
    found: list[LedgerBudget | None] = []
    _change(database, uri, lambda book: found.append(book.budgets.pop((project, period), None)))
    return found[-1] is not None


def forget(database: Database, project: str, uri: str) -> None:
    """Forget the address of the project's shared ledger; ends are still queued, unless the ledger was deleted.

    Earlier shared ledgers are forgotten too, if deleted and without a budget. Raises UnreachableError, ConfigError,
    CredentialError if the ledger's existence cannot be checked: then no address is forgotten.
    """
    gone = [uri] if shared_ledger.read(ConditionalObject(uri)) is None else []
    for former in sorted(set(ledger.unsynced(database)) - set(ledger.ledgers(database).values())):
        with contextlib.suppress(CloudtrainError):  # `budget show` names each ledger in trouble
            gone += [former] if shared_ledger.read(ConditionalObject(former)) is None else []
    with database.transaction():
        ledger.remember_ledger(database, project, None)
        for each in gone:
            ledger.leave(database, each)


def close_others(database: Database, uri: str, job_id: str, spent_micro: int) -> int:
    """Close another machine's job, which will not close itself, at the given cost; return the number of attempts."""
    own = identity(database.folder)[:12]
    closed: list[int] = []

    def apply(book: shared_ledger.Book) -> None:
        keys = [key for key, held in book.held.items() if held.job_id == job_id and key.partition("/")[0] != own]
        if keys and not any(closed) and agent_limit.is_place(uri):  # asked once, also if the write is repeated
            agent_limit.require_word(f"close {job_id}")
        now_s = time.time()
        ends = {
            key: End(book.held[key].project, None, now_s, {month_of(now_s): spent_micro if key == keys[0] else 0})
            for key in keys
        }
        shared_ledger.close(book, ends, now_s)
        closed.append(len(keys))

    _change(database, uri, apply)
    return closed[-1]


def failure(uri: str, error: CloudtrainError) -> str:
    """Return the error in a line that names the ledger."""
    return error.message if uri in error.message else f"{uri}: {error.message}"


def key_of(folder: Path, of: Held | Closing) -> str:
    """Return the attempt's key, unique among all installations.

    The key has the creation time: an installation copied into an image or a cache has the identity of its original.
    """
    return f"{identity(folder)[:12]}/{of.job_id}/{of.attempt}/{of.created_s:.6f}"


def this_person() -> str:
    """Return the user and host, for people: `me@laptop`."""
    return f"{user_name(os.getuid())}@{socket.gethostname()}"


def _hold_at(database: Database, uri: str, held: Held, now_s: float) -> list[Standing]:
    key = key_of(database.folder, held)
    asked: list[str] = []

    def apply(book: shared_ledger.Book) -> None:
        shared_ledger.hold(book, key, held, now_s)
        asked.append(key)  # from here on a write may have been sent

    try:
        known = ledger.ledgers(database)
        is_known = uri in (known.get(held.project), known.get(OVERALL), known.get(AGENT))
        if not is_known and shared_ledger.read(ConditionalObject(uri)) is not None:  # named by a config
            ledger.remember_ledger(database, held.project, uri)  # the project's held attempts join
        book = _change(database, uri, apply)
    except BudgetError as error:
        raise BudgetError(error.message, where=uri, hint=error.hint) from error
    except CloudtrainError:
        if not asked:  # the address may be wrong: a queue entry would be retried forever
            ledger.never_asked(database, held.job_id, held.attempt, uri)
        raise
    ledger.mark_held(database, held.job_id, held.attempt, uri)
    return shared_ledger.accounts(book).standings(now_s, held.project)


def _make(cell: ConditionalObject) -> None:
    """Create the ledger unless it exists. Raises ConfigError if the store ignores write conditions."""
    shared_ledger.change(cell, lambda book: None, may_make=True)
    _, before = cell.read()
    shared_ledger.change(cell, lambda book: None)
    data, _ = cell.read()
    if data is not None and cell.write(data, before):
        message = "this store ignores write conditions, so a ledger is not safe in this store"
        raise ConfigError(message, where=cell.uri, hint="choose a store with conditional writes (If-Match)")


def _change(
    database: Database, uri: str, apply: Callable[[shared_ledger.Book], object], *, most_s: float = shared_ledger.MOST_S
) -> shared_ledger.Book:
    """Change the ledger; the same write carries all queued changes of this installation."""
    now_s, person = time.time(), this_person()
    ends = ledger.closing(database).get(uri, [])
    joining, moving = (
        {key_of(database.folder, held): replace(held, by=person) for held in ledger.joining(database, uri, told)}
        for told in ("joining", "moving")
    )
    ends_by_key = {key_of(database.folder, closed): closed.end for closed in ends}

    def change(book: shared_ledger.Book) -> None:
        if ends_by_key:
            shared_ledger.close(book, ends_by_key, now_s)
        for key, held in joining.items():
            shared_ledger.join(book, key, held)
        apply(book)
        for key, held in moving.items():
            shared_ledger.follow(book, key, held)

    book = shared_ledger.change(ConditionalObject(uri), change, most_s=most_s)
    for held in (*joining.values(), *moving.values()):
        ledger.mark_held(database, held.job_id, held.attempt, uri)
    for closed in ends:
        ledger.mark_closed(database, closed, uri)
    return book

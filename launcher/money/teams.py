"""What this home tells the ledgers that its projects share with others: what it sends, and how that has ended."""

from __future__ import annotations

import os
import pwd
import socket
import time
from typing import TYPE_CHECKING

from cloudtrain.launcher.errors import BudgetError, CloudtrainError
from cloudtrain.launcher.home import identity
from cloudtrain.launcher.money import ledger, teamledger
from cloudtrain.launcher.money.budgets import Held, Standing
from cloudtrain.launcher.money.cells import open_cell

if TYPE_CHECKING:
    from pathlib import Path

    from cloudtrain.launcher.database import Database

__all__ = ["hold", "key_of", "tell", "this_person"]

QUICK_S = 10.0  # for telling of an end, which the next command does too
AGAIN_S = 30.0  # after a ledger has not answered, until this process tries again by itself

_not_before_s: dict[str, float] = {}  # ledger -> time.monotonic


def hold(database: Database, job_id: str, attempt: int, now_s: float) -> list[Standing]:
    """Hold the attempt's worst case in its team's ledger, if it has one; return how the budgets there stand then.

    What that ledger has yet to hear is told with it. Raises BudgetError, UnreachableError, ConfigError,
    CredentialError: then nothing may be sent, and once the attempt is released, the ledger is told so.
    """
    row = ledger.reservation(database, job_id, attempt)
    if row is None or row["ledger"] is None:
        return []
    held = Held(job_id, attempt, row["project"], row["amount_micro"], row["created_s"], this_person())
    key = key_of(database.folder, job_id, attempt)
    ends = ledger.closing(database).get(row["ledger"], [])

    def apply(book: teamledger.Book) -> None:
        _close(database, book, ends, now_s)
        teamledger.hold(book, key, held, now_s)

    try:
        book = teamledger.change(open_cell(row["ledger"]), apply)
    except BudgetError as error:
        raise BudgetError(error.message, where=row["ledger"], hint=error.hint) from error
    ledger.mark_held(database, job_id, attempt)
    for end in ends:
        ledger.mark_closed(database, end)
    return teamledger.standings(book, now_s, row["project"])


def tell(database: Database, *, patient: bool = False) -> list[str]:
    """Tell the teams' ledgers what has ended; return what stands in the way, of each that could not be told.

    What could not be told stays, and counts there at its worst case, until the next command tells it.
    """
    failures = []
    for uri, ends in ledger.closing(database).items():
        if not patient and time.monotonic() < _not_before_s.get(uri, 0.0):
            continue
        try:
            _tell_one(database, uri, ends)
        except CloudtrainError as error:
            _not_before_s[uri] = time.monotonic() + AGAIN_S
            failures.append(f"{uri}: {error.message}")
    return failures


def key_of(folder: Path, job_id: str, attempt: int) -> str:
    """Return what the attempt is called among all homes' jobs."""
    return f"{identity(folder)[:12]}/{job_id}/{attempt}"


def this_person() -> str:
    """Return who holds it, for people: `me@laptop`."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _tell_one(database: Database, uri: str, ends: list[ledger.Closing]) -> None:
    now_s = time.time()
    teamledger.change(open_cell(uri), lambda book: _close(database, book, ends, now_s), most_s=QUICK_S)
    for end in ends:
        ledger.mark_closed(database, end)


def _close(database: Database, book: teamledger.Book, ends: list[ledger.Closing], now_s: float) -> None:
    told = {
        key_of(database.folder, end.job_id, end.attempt): teamledger.End(
            end.project, end.amount_micro, end.ended_s, end.months
        )
        for end in ends
    }
    teamledger.close(book, told, now_s)

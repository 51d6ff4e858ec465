"""A ledger that several machines share without a server: a single JSON object, changed by compare and swap.

A writer reads and changes the whole content, and writes on condition that the version is unchanged, else starts over.
Each write carries a random nonce, so the next read shows whether a write with a lost answer succeeded. Attempts that
may cost money are under `held`, keyed by installation, job and attempt. At its end an attempt moves to `closed` for
KEEP_S, so no attempt counts twice or is held again. Afterwards only sums are kept.

A delayed request of a dead sender does no harm once its job is closed: closing always writes, even for an unknown job,
so the version in the delayed request is no longer current.
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import ConfigError, UnreachableError
from ..store import agent_limit
from ..store.budgets import Accounts, End, Held, LedgerBudget, Standing, month_of, require_room
from .conditional import ConditionalObject

FORM = 1
MOST_S = 60.0  # how long to retry while other writers win or the store does not answer
PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
KEEP_S = 100 * 86_400  # after the end; longer than any plausible clock error or late settlement
NONCES = 256  # kept for the last writes
_UNWRITTEN = ("job_id", "used_micro")  # fields of Held


@dataclass
class Book:
    """The object's content, to be changed in place.

    `spent`: project -> month -> sum of unlisted attempts; all attempts that ended before `before_s` may be in the sums.
    """

    budgets: dict[tuple[str, str], LedgerBudget] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    closed: dict[str, End] = field(default_factory=dict)
    spent: dict[str, dict[str, int]] = field(default_factory=dict)
    before_s: float = 0.0
    nonces: list[str] = field(default_factory=list)


def read(cell: ConditionalObject) -> Book | None:
    """Return the content, None if missing. Raises UnreachableError; ConfigError if the content is damaged."""
    data = cell.read()[0]
    return None if data is None else load(data, cell.uri)


def change(
    cell: ConditionalObject, apply: Callable[[Book], None], *, may_make: bool = False, most_s: float = MOST_S
) -> Book:
    """Return the content after `apply` has changed it in an atomic write.

    `apply` may be called several times, with the current content each time; its errors are raised, and no write
    happens. Raises UnreachableError if the write is not confirmed, ConfigError if the object is missing.
    """
    nonce, end = secrets.token_hex(8), time.monotonic() + most_s
    pause_s, doubt = PAUSE_S, None
    while True:
        data, version = cell.read()
        if data is None and not may_make:
            hint = "cloudtrain budget set [PROJECT] LIMIT --ledger PLACE makes it; is the place right?"
            raise ConfigError("there is no ledger", where=cell.uri, hint=hint)
        book = Book() if data is None else load(data, cell.uri)
        if nonce in book.nonces:  # the write succeeded, only the answer was lost
            return book
        apply(book)
        book.nonces = [*book.nonces, nonce][-NONCES:]
        try:
            if cell.write(_dump(book), version):
                return book
        except UnreachableError as error:
            doubt = error
        if time.monotonic() > end:
            message = f"the ledger could not be written for {most_s:.0f} s" + (f": {doubt.message}" if doubt else "")
            raise UnreachableError(message, where=cell.uri, hint="try again") from doubt
        time.sleep(random.uniform(0, pause_s))
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)


def standings(uri: str, project: str | None = None) -> list[Standing]:
    """Return the state of the ledger's budgets, or of those for the project's jobs. Raises ConfigError if missing."""
    if (book := read(ConditionalObject(uri))) is None:
        raise ConfigError("there is no ledger any more")
    return [replace(each, place=uri) for each in accounts(book).standings(time.time(), project)]


def accounts(book: Book) -> Accounts:
    """Return the sums of the ledger."""
    months = {project: Counter(each) for project, each in book.spent.items()}
    means: dict[str, tuple[int, int, int]] = {}
    for end in book.closed.values():
        months.setdefault(end.project, Counter()).update(end.months)
        if end.amount_micro:
            count, settled, expected = means.get(end.project, (0, 0, 0))
            means[end.project] = count + 1, settled + sum(end.months.values()), expected + end.amount_micro
    held = sorted(book.held.values(), key=lambda each: (each.created_s, each.job_id))
    return Accounts(list(book.budgets.values()), held, months, means)


def hold(book: Book, key: str, held: Held, now_s: float) -> None:
    """Reserve the worst case; of an attempt that is held already, what is held too little.

    Raises BudgetError if a budget has no room, ConfigError if the attempt is closed already and must not start.
    """
    _rename(book, key)
    if (known := book.held.get(key)) is not None:
        more_micro = (held.amount_micro or 0) - (known.amount_micro or 0)
        if more_micro > 0 and known.amount_micro is not None:
            require_room(accounts(book).standings(now_s, held.project), more_micro)
            book.held[key] = held
        return
    if key in book.closed:
        raise ConfigError(f"the team's ledger has closed {held.job_id} already", hint="submit it again")
    require_room(accounts(book).standings(now_s, held.project), held.amount_micro)
    book.held[key] = held


def join(book: Book, key: str, held: Held) -> None:
    """Hold an attempt that runs already, without a budget check; also an attempt released by mistake as never sent."""
    end = book.closed.get(key)
    if end is not None and end.amount_micro is None and not end.months:
        del book.closed[key]
    if key not in book.closed:
        book.held[key] = held


def follow(book: Book, key: str, held: Held) -> None:
    """Take over the number and the smaller amount of a reservation that has changed, until its end."""
    _rename(book, key)
    known = book.held.get(key, held)
    if key not in book.closed and (known.amount_micro or 0) >= (held.amount_micro or 0):
        book.held[key] = held


def close(book: Book, ends: Mapping[str, End], now_s: float) -> None:
    """Replace reservations by costs; a repeated close replaces the figures. Also sums up entries older than KEEP_S."""
    for key, end in ends.items():
        _rename(book, key)
        known = book.held.pop(key, None) or book.closed.get(key)
        # An unknown attempt that ended before `before_s` may be in the sums already.
        if known is not None or end.ended_s >= book.before_s:
            book.closed[key] = end
    _sum_up(book, now_s - KEEP_S)


def _rename(book: Book, key: str) -> None:
    """Give the new key to a reservation that has moved to a later attempt of its job: only the number differs."""
    parts = key.split("/")
    for old in book.held:
        known = old.split("/")
        if old != key and [*known[:2], *known[3:]] == [*parts[:2], *parts[3:]]:
            book.held[key] = book.held.pop(old)
            return


def load(data: bytes, uri: str) -> Book:
    """Return the content. Raises ConfigError if damaged: a damaged ledger never counts as an empty ledger."""
    try:
        fields = json.loads(data)
        form = fields["cloudtrain_ledger"]
        if form != FORM:
            hint = "use the newest cloudtrain on every machine"
            raise ConfigError(f"the ledger has form {form!r}, and this version knows {FORM}", where=uri, hint=hint)
        is_owners = agent_limit.is_place(uri)  # its user can write the ledger, and the owner alone the limit
        budgets = agent_limit.limits() if is_owners else map(_budget, fields["budgets"])
        return Book(
            {(each.project, each.period): each for each in budgets},
            {key: _held(each) for key, each in fields["held"].items()},
            {key: _end(each) for key, each in fields["closed"].items()},
            {project: _months(months) for project, months in fields["spent"].items()},
            float(fields["before_s"]),
            [str(nonce) for nonce in fields["nonces"]],
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        message = f"the ledger is damaged, or the object is not a ledger ({type(error).__name__}: {error})"
        hint = "restore an earlier version of the object; nothing is sent until then"
        if agent_limit.is_place(uri):
            hint += f"; or the owner begins at 0: {agent_limit.repair(uri.removeprefix('file://'))}"
        raise ConfigError(message, where=uri, hint=hint) from error


def _sum_up(book: Book, before_s: float) -> None:
    """Reduce entries that ended earlier to sums, at most once a month rather than at each write."""
    if month_of(before_s) == month_of(book.before_s):
        return
    for key, end in list(book.closed.items()):
        if end.ended_s < before_s:
            del book.closed[key]
            book.spent[end.project] = months = Counter(book.spent.get(end.project, {}))
            months.update(end.months)
    book.before_s = max(book.before_s, before_s)


def _dump(book: Book) -> bytes:
    fields = {
        "cloudtrain_ledger": FORM,
        "budgets": [asdict(each) for each in book.budgets.values()],
        "held": {
            key: {"job": held.job_id, **{name: value for name, value in vars(held).items() if name not in _UNWRITTEN}}
            for key, held in book.held.items()
        },
        "closed": {key: asdict(each) for key, each in book.closed.items()},
        "spent": book.spent,
        "before_s": book.before_s,
        "nonces": book.nonces,
    }
    return json.dumps(fields, indent=1, sort_keys=True, allow_nan=False).encode()


def _budget(entry: dict[str, Any]) -> LedgerBudget:
    period = entry["period"]
    if period not in ("all", "month"):
        raise ValueError(f"no such period: {period!r}")
    limit, percent = _micro(entry["limit_micro"]), _micro(entry["overcommit_percent"])
    return LedgerBudget(_text(entry["project"]), period, limit, percent, float(entry["set_s"]), _text(entry["set_by"]))


def _held(entry: dict[str, Any]) -> Held:
    amount = None if entry["amount_micro"] is None else _micro(entry["amount_micro"])
    attempt, created_s = int(entry["attempt"]), float(entry["created_s"])
    return Held(_text(entry["job"]), attempt, _text(entry["project"]), amount, created_s, _text(entry["by"]))


def _end(entry: dict[str, Any]) -> End:
    amount = None if entry["amount_micro"] is None else _micro(entry["amount_micro"])
    return End(_text(entry["project"]), amount, float(entry["ended_s"]), _months(entry["months"]))


def _months(amounts: dict[str, Any]) -> dict[str, int]:
    return {str(month): _micro(micro) for month, micro in amounts.items()}


def _text(value: Any) -> str:
    """Return printable text: text from other users must not control a terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in str(value))


def _micro(value: Any) -> int:
    """Return a sum. Raises ValueError: a negative sum would create room in a budget."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"no sum of money: {value!r}")
    return value

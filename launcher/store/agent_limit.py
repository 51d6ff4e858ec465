"""The owner's limit on all jobs that a user of the operating system sends: for coding agents, which type any command.

The folder is OWNERS/USER if root has set a limit there, else in the home that the password database names: no variable
moves it. `limit.json`, the owner's, has the limit, the hash of the owner's word, and the approvals. In `ledger/` the
user's processes keep the ledger of all their homes, and the requests. If a part is missing, nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from cloudtrain.entrypoints.format import counted, most
from cloudtrain.entrypoints.records import Record

from ..errors import BudgetError, ConfigError, CredentialError, UsageError
from ..job import Job
from ..text.terminal import is_terminal
from ..text.units import format_money
from .budgets import AGENT, LedgerBudget, Period

OWNERS = Path("/etc/cloudtrain/agents")
TRIES, LEAST_LETTERS = 3, 8  # of the word
OPEN_S = 7 * 86_400.0  # after which a request goes away
user = ""  # whom root names by --user


@dataclass(frozen=True)
class SpendRequest(Record, checks=True):
    """A request for a job that may cost `amount_micro`; `digest` is of config, code and money, `job` has taken it.

    `price`: "ml.new at 2.00 USD an hour", if only the config knows the price of the vendor's machine.
    """

    id: str
    digest: str
    amount_micro: int
    what: str
    created_s: float
    job: str = ""
    price: str = ""

    @property
    def words(self) -> str:
        """Return the job and what it may cost."""
        by = f", by the config's price alone ({self.price})" if self.price else ""
        return f"{self.what} may cost {most(self.amount_micro)} in all{by}"


@dataclass(frozen=True)
class AgentLimit(Record, checks=True):
    """The owner's file. `limit_micro` is None once the owner has removed the limit: the ledger still counts."""

    limit_micro: int | None = None
    period: Period = "all"
    ask_above_micro: int | None = None
    salt: str = ""
    key: str = ""
    approved: tuple[SpendRequest, ...] = ()


def folder() -> Path:
    """Return the folder of the limit. Raises UsageError for an unknown --user."""
    owned, at = OWNERS / (entry := _entry()).pw_name, entry.pw_dir
    is_owned = user or not at or any(_is_there(owned / part) for part in ("limit.json", "ledger/ledger.json"))
    return owned if is_owned else Path(at) / ".config" / "cloudtrain" / "agent"


def _entry() -> pwd.struct_passwd:
    uid = int(user) if user.isdecimal() else os.getuid()
    try:
        return pwd.getpwnam(user) if user and not user.isdecimal() else pwd.getpwuid(uid)
    except KeyError:
        if user and not user.isdecimal():
            raise UsageError(f"this machine has no user `{user}`") from None
        return pwd.struct_passwd((str(uid), "x", uid, uid, "", "", ""))  # a container's user without a name


def _is_there(file: Path) -> bool:
    try:
        return bool(file.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # the reader says what is wrong: a limit that cannot be seen is not taken for no limit
        return True


def place() -> str:
    """Return the address of the ledger."""
    return f"file://{folder()}/ledger/ledger.json"


def is_place(uri: str) -> bool:
    """Return whether the address means the ledger, also through links."""
    path = Path(f"/{uri.removeprefix('file://').partition('/')[2]}")
    with contextlib.suppress(OSError):  # on macOS, capital letters mean the same file
        is_alike = uri.startswith("file:") and path.name.casefold() == "ledger.json"
        return is_alike and path.parent.samefile(folder() / "ledger")
    return False


def known(*, is_whole: bool = True) -> AgentLimit:
    """Return the owner's file, or no limit. Raises ConfigError if damaged, or if `is_whole` and one part is missing."""
    file, book = folder() / "limit.json", folder() / "ledger" / "ledger.json"
    try:
        found = AgentLimit.load(json.loads(file.read_text())) if _is_there(file) else AgentLimit()
        if is_whole and bool(found.key) != _is_there(book):
            raise FileNotFoundError(2, "missing", str(book if found.key else file))
    except (OSError, ValueError) as error:
        message = f"the owner's limit on all jobs cannot be read ({getattr(error, 'strerror', None) or error})"
        hint = f"nothing is sent until the owner sets it again: {repair('' if isinstance(error, OSError) else file)}"
        raise ConfigError(message, where=str(getattr(error, "filename", None) or file), hint=hint) from error
    return found


def repair(damaged: Path | str) -> str:
    """Return what the owner types for a damaged file, or a missing one."""
    sudo = "sudo " if folder().is_relative_to(OWNERS) else ""
    return (f"{sudo}rm {damaged} && " if damaged else "") + command("set agent 50USD --month")


def limits() -> tuple[LedgerBudget, ...]:
    """Return the limit as a budget over all accounts of the ledger; empty without a limit."""
    found = known()
    budget = LedgerBudget(AGENT, found.period, found.limit_micro or 0, ask_above_micro=found.ask_above_micro)
    return () if found.limit_micro is None else (budget,)


def require_word(what: str) -> None:
    """Ask the owner for the word, if a limit is set. Raises CredentialError without a terminal, and for wrong words."""
    if (found := known(is_whole=False)).limit_micro is None:
        return
    for _ in range(TRIES):
        if _hashed(_typed(f"The owner's word, to {what}"), found.salt) == found.key:
            return
    raise CredentialError(f"cannot {what}: the word is wrong", hint="only the owner of the limit for agents can")


def ask_owner(what: str) -> AgentLimit:
    """Ask for the word, a new one for a new limit; return the owner's file. Raises CredentialError, UsageError."""
    where = folder()
    try:
        os.umask(0o022)
        (where / "ledger").mkdir(parents=True, exist_ok=True)
        if user:
            where.chmod(0o755)  # the user reads what is there
        if not os.access(where, os.W_OK):
            raise PermissionError
    except PermissionError as error:
        message, hint = f"cannot {what}: you cannot write there", f"as root, with its own cloudtrain: {command('...')}"
        raise CredentialError(message, where=str(where), hint=hint) from error
    require_word(what)
    if (found := known(is_whole=False)).limit_micro is None:
        word, salt = _typed("A new word, which only the owner knows", confirmation_prompt=True), os.urandom(16).hex()
        if len(word) < LEAST_LETTERS:
            raise UsageError(f"the word has {len(word)} letters", hint=f"take at least {LEAST_LETTERS}")
        found = replace(found, salt=salt, key=_hashed(word, salt))
    return found


def write(found: AgentLimit) -> None:
    """Write the owner's file. Raises ConfigError."""
    from cloudtrain.entrypoints import atomic_json

    with _writing(path := folder() / "limit.json"):
        atomic_json.write_json(path, found.dump())


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "nothing was changed, and nothing was sent; correct the cause, then try again"
        raise ConfigError(f"cannot write the file ({error.strerror})", where=str(path), hint=hint) from error


def become_user() -> None:
    """Give the ledger's folder to the user. Root acts as the user from now on, who can put links into the folder."""
    if user:
        os.chown(folder() / "ledger", (entry := _entry()).pw_uid, entry.pw_gid)
        os.setgroups([])
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)


def command(*words: str) -> str:
    """Return the command of `budget` as the owner types it."""
    line, where = " ".join(("cloudtrain budget", *words)), folder()
    return f"sudo {line} --user {where.name}" if where.is_relative_to(OWNERS) else line


def requests() -> list[SpendRequest]:
    """Return the requests, the oldest first, also those that are approved or taken. Raises ConfigError."""
    path = folder() / "ledger" / "requests.json"
    try:
        return [SpendRequest.load(each) for each in json.loads(path.read_text())] if _is_there(path) else []
    except (OSError, ValueError, TypeError) as error:
        hint = f"rm {path}: jobs that wait for an approval, or have one, then need a new one"
        raise ConfigError(f"the requests to the owner cannot be read ({error})", where=str(path), hint=hint) from error


def require_approved(job: Job) -> None:
    """Raise BudgetError, with a request, if the owner must approve the job's attempt, and has not.

    The job takes the approval, for its later attempts too.
    """
    plan, found, key, digest = job.attempt.plan, known(), _key(job), str(job.attempt.submitter.get("digest") or "")
    micro, above_micro = plan.spent_micro + (plan.most_micro or 0), found.ask_above_micro
    is_dear = bool(plan.most_micro) and above_micro is not None and micro > above_micro
    if found.limit_micro is None or not (is_dear or plan.is_unlisted):
        return
    what = f"{job.name} on {job.backend} ({counted(plan.instances, 'instance')} of {plan.machine})"
    price = f"{plan.machine} at {format_money(plan.price_micro or 0)} an hour" if plan.is_unlisted else ""
    new = SpendRequest(os.urandom(4).hex(), digest, micro, what, time.time(), price=price)
    with _changing() as asked:
        asked[:] = [each for each in asked if each.job or abs(new.created_s - each.created_s) < OPEN_S]
        same = [each for each in asked if (each.job or each.digest) in (key, digest) and each.amount_micro >= micro]
        same = [each for each in same if each.price == price]  # no sum of an approval knows another price
        for each in same:
            if replace(each, job="") in found.approved:
                asked[asked.index(each)] = replace(each, job=key)
                return
        asked += [] if same else [new]
    hint = f"the owner types `{command('approve', [*same, new][0].id)}`; then send it again"
    raise BudgetError(f"{new.words}, and needs the owner's approval", hint=hint)


def give_back(job: Job) -> None:
    """Give the approval back that a job has taken which was not sent."""
    if limits():
        with _changing() as asked:
            asked[:] = [replace(each, job="") if each.job == _key(job) else each for each in asked]


@contextlib.contextmanager
def _changing() -> Iterator[list[SpendRequest]]:
    from cloudtrain.entrypoints import atomic_json, processes  # not for a list

    path = folder() / "ledger" / "requests.json"
    with _writing(path), processes.locked(path.with_suffix(".lock")):
        yield (asked := requests())
        atomic_json.write_json(path, [each.dump() for each in asked])


def _key(job: Job) -> str:
    return f"{job.id}/{job.created_s:.6f}"  # unique among all homes


def _typed(question: str, **options: Any) -> str:
    if not is_terminal():
        hint = "the owner of the limit types the word, at a terminal"
        raise CredentialError(f"{question}: the input is not a terminal", hint=hint)
    return str(click.prompt(question, hide_input=True, err=True, **options))


def _hashed(word: str, salt: str) -> str:
    import hashlib  # few commands need a word

    return hashlib.scrypt(word.encode(), salt=bytes.fromhex(salt), n=2**14, r=8, p=1).hex()

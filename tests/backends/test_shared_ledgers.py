"""A team's ledger in every store: conditional writes by many writers, with lost answers and outages."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.stores import azure, google_http
from cloudtrain.launcher.errors import BudgetError, ConfigError, CredentialError, UnreachableError
from cloudtrain.launcher.money import shared_ledger, shared_ledger_sync
from cloudtrain.launcher.money.conditional import ConditionalObject, located
from cloudtrain.launcher.store.budgets import Held, LedgerBudget
from cloudtrain.launcher.store.database import Database
from doubles.azure.names import ACCOUNT, CONTAINER
from doubles.google.names import BUCKET

STORES = ("file", "s3", "gs", "https")
CLOUDS = pytest.mark.parametrize("store", STORES[1:], indirect=True)
NEWER = b'{"cloudtrain_ledger": 2}'


@dataclass(frozen=True)
class Store:
    """A place for a ledger, a place in a missing bucket, and a function that makes the next requests fail."""

    place: str
    missing: str
    fault: Callable[..., None] = print
    write: str = ""
    read: str = ""


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return each store in turn; the environment leads this process to the store."""
    if request.param == "file":
        return Store(str(tmp_path), str(tmp_path / "not" / "there"))
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    if request.param == "s3":
        double = request.getfixturevalue("aws")
        for name, value in double.environ.items():
            monkeypatch.setenv(name, value)
        place = f"s3://{double.bucket()}/money"
        return Store(place, "s3://no-such-bucket/money", double.fault, "s3:PutObject", "s3:GetObject")
    if request.param == "gs":
        double = request.getfixturevalue("google")
        double.apply(monkeypatch)
        monkeypatch.setattr(google_http, "PAUSE_S", 0.01)
        place = f"gs://{BUCKET}/money"
        return Store(place, "gs://no-such-bucket/money", double.fault, "storage.insert", "storage.download")
    double = request.getfixturevalue("azure")
    double.apply(monkeypatch)
    monkeypatch.setattr(azure, "PAUSE_S", 0.01)
    host = f"https://{ACCOUNT}.blob.core.windows.net"
    return Store(f"{host}/{CONTAINER}/money", f"{host}/missing/money", double.fault, "blob.put", "blob.get")


def opened(store: Store) -> ConditionalObject:
    """Return the conditional object, as a command opens it."""
    return ConditionalObject(located(store.place))


def with_budget(cell: ConditionalObject, limit_micro: int = 100) -> None:
    """Make the ledger, with a budget over all jobs."""

    def apply(book: shared_ledger.Book) -> None:
        book.budgets["", "all"] = LedgerBudget("", "all", limit_micro)

    shared_ledger.change(cell, apply, may_make=True)


def hold(cell: ConditionalObject, key: str, amount_micro: int = 10) -> None:
    """Hold a job's worst case."""
    held = Held(key, 1, "", amount_micro, 1.0)
    shared_ledger.change(cell, lambda book: shared_ledger.hold(book, key, held, 1.0))


def test_ledger_of_many_writers_at_once_is_never_exceeded(store: Store, home: Path) -> None:
    """Eight writers want 20 of 100 each at the same time: five succeed, three are refused, and all five are stored."""
    home.mkdir()
    # The store proves that it compares before a write, or is refused.
    shared_ledger_sync.set_budget(Database(home), LedgerBudget("", "all", 100), located(store.place), may_make=True)
    outcomes: list[Any] = []

    def want(number: int) -> None:
        try:
            outcomes.append(hold(opened(store), f"home/job{number}/1", 20))
        except BudgetError as error:
            outcomes.append(error)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(want, range(8)))
    book = shared_ledger.read(opened(store))
    assert (len(book.held), outcomes.count(None), len(outcomes)) == (5, 5, 8)


@CLOUDS
@pytest.mark.parametrize("count", [1, 20])
def test_write_whose_answer_is_lost_is_recognised(store: Store, count: int) -> None:
    """Lost once, or until the client gives up: a written change counts once, and is not refused."""
    cell = opened(store)
    with_budget(cell, 10)
    store.fault(store.write, "lost", count=count)
    hold(cell, "home/job/1")
    book = shared_ledger.read(cell)
    assert (list(book.held), len(book.nonces)) == (["home/job/1"], 2)


@CLOUDS
def test_unreachable_ledger_is_exit_code_7(store: Store) -> None:
    """A missing answer proves no money: a submit must not continue."""
    cell = opened(store)
    store.fault([store.read, store.write], "drop")
    with pytest.raises(UnreachableError):
        cell.read()
    with pytest.raises(UnreachableError):
        cell.write(b"{}", "")


def test_ledger_in_a_missing_place_is_reported(store: Store) -> None:
    """A missing bucket, container or folder is no empty ledger."""
    cell = ConditionalObject(located(store.missing))
    with pytest.raises((ConfigError, UnreachableError), match="ledger"):
        with_budget(cell)


@CLOUDS
def test_unreadable_ledger_is_exit_code_4(store: Store) -> None:
    """A user without the right gets an error with the place."""
    how: dict[str, Any] = {"code": "AccessDenied", "message": "no", "status": 403}
    kind = "403" if store.place.startswith("gs") else "error"
    if store.place.startswith("https"):
        how["code"] = "AuthorizationPermissionMismatch"
    store.fault([store.read], kind, **({} if kind == "403" else how))
    with pytest.raises(CredentialError) as caught:
        opened(store).read()
    assert store.place in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"cloudtrain_ledger": 1}', b"\xff\xfe", b'{"a": 1}', NEWER])
def test_unreadable_ledger_never_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    """No sum is reserved in a damaged ledger or in a newer form, which all users must share; the file is unchanged."""
    (tmp_path / "ledger.json").write_bytes(content)
    with pytest.raises(ConfigError, match="form 2" if content == NEWER else "damaged"):
        hold(ConditionalObject(located(str(tmp_path))), "home/job/1")
    assert (tmp_path / "ledger.json").read_bytes() == content


def test_ledger_with_negative_sums_is_damaged(tmp_path: Path) -> None:
    """A negative sum would make room for further jobs."""
    cell = ConditionalObject(located(str(tmp_path)))
    with_budget(cell)
    hold(cell, "home/job/1")
    told = json.loads((tmp_path / "ledger.json").read_text())
    told["held"]["home/job/1"]["amount_micro"] = -1000
    (tmp_path / "ledger.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="damaged"):
        hold(cell, "home/other/1")

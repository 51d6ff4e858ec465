"""The shared ledger over a conditional object in memory: lost answers, stored sums, late reports."""

import time
from dataclasses import dataclass

import pytest

from cloudtrain.launcher.errors import BudgetError, ConfigError, UnreachableError, UsageError
from cloudtrain.launcher.money import shared_ledger
from cloudtrain.launcher.money.conditional import ConditionalObject, located
from cloudtrain.launcher.store.budgets import End, Held, LedgerBudget

DAY_S = 86_400.0
NOW_S = 1_795_348_800.0  # 2026-11-22 12:00 UTC


@dataclass
class Memory(ConditionalObject):
    """A conditional object, which no write reaches while it is away."""

    uri: str = "memory://ledger"
    data: bytes | None = None
    version: int = 0
    is_away: bool = False

    def read(self) -> tuple[bytes | None, str]:
        """Return the data and the version."""
        return self.data, str(self.version) if self.data is not None else ""

    def write(self, data: bytes, version: str) -> bool:
        """Replace the data if the version matches."""
        if self.is_away:
            raise UnreachableError("no answer")
        if version != self.read()[1]:
            return False
        self.data, self.version = data, self.version + 1
        return True


@pytest.fixture
def cell() -> Memory:
    """Return a ledger with a budget of 100 micro-dollars over project vision."""
    made = Memory()
    budget = LedgerBudget("vision", "all", 100)
    shared_ledger.change(made, lambda book: book.budgets.update({("vision", "all"): budget}), may_make=True)
    return made


def hold(cell: Memory, key: str, amount: int = 10) -> None:
    """Reserve a worst case."""
    held = Held(key, 1, "vision", amount, NOW_S, "me@laptop")
    shared_ledger.change(cell, lambda book: shared_ledger.hold(book, key, held, NOW_S))


def close(cell: Memory, key: str, spent: int, ended_s: float = NOW_S, now_s: float = NOW_S) -> None:
    """Report an end."""
    months = {time.strftime("%Y-%m", time.gmtime(ended_s)): spent}
    ends = {key: End("vision", 10, ended_s, months)}
    shared_ledger.change(cell, lambda book: shared_ledger.close(book, ends, now_s))


def seen(cell: Memory, now_s: float = NOW_S) -> tuple[int, int]:
    """Return the spent sum and the reserved sum."""
    book = shared_ledger.read(cell)
    assert book is not None
    standing = shared_ledger.accounts(book).standings(now_s)[0]
    return standing.money.spent_micro, standing.money.held_micro


def test_change_that_cannot_be_written_is_unreachable(cell: Memory) -> None:
    """The retries end after a time limit, so that `submit` can report the fault and send no job."""
    cell.is_away = True
    with pytest.raises(UnreachableError, match="could not be written"):
        shared_ledger.change(cell, lambda book: None, most_s=0.05)


def test_refused_hold_names_the_holder_of_the_money(cell: Memory) -> None:
    """The message has the holder's job and person, the ledger is unchanged; control characters are replaced."""
    hold(cell, "a/job/1", 95)
    version = cell.version
    with pytest.raises(BudgetError, match="by a/job/1 of me@laptop"):
        hold(cell, "b/job/1")
    assert cell.version == version
    held = Held("\x1b[2Jjob\n", 1, "vision", 1, NOW_S, "me")
    shared_ledger.change(cell, lambda book: shared_ledger.hold(book, "k", held, NOW_S))
    book = shared_ledger.read(cell)
    assert book.held["k"].job_id == "?[2Jjob?"


def test_attempt_is_held_and_closed_once(cell: Memory) -> None:
    """A better figure replaces the cost; after the close a hold is refused, and a dead submitter's write fails."""
    for _ in range(2):
        hold(cell, "a/job/1")
    for spent in (7, 7, 6):
        close(cell, "a/job/1", spent)
    assert seen(cell) == (6, 0)
    close(cell, "b/job/1", 0)
    with pytest.raises(ConfigError, match="closed"):
        hold(cell, "b/job/1")
    _, version = cell.read()
    close(cell, "c/job/1", 0)
    assert not cell.write(b"late", version)


def test_old_ends_are_stored_as_sums(cell: Memory) -> None:
    """After some months the jobs leave the object, and their cost still counts, exact to the micro-dollar."""
    for number in range(20):
        hold(cell, f"a/job{number}/1", 5)
        close(cell, f"a/job{number}/1", 3, NOW_S - number * DAY_S, NOW_S)
    size = len(cell.data or b"")
    hold(cell, "a/late/1", 5)
    close(cell, "a/late/1", 1, NOW_S + 120 * DAY_S, NOW_S + 120 * DAY_S)
    book = shared_ledger.read(cell)
    assert (list(book.closed), book.spent["vision"]) == (["a/late/1"], {"2026-11": 60})
    assert seen(cell) == (61, 0)
    assert len(cell.data or b"") < size / 2


def test_late_ends_count_once(cell: Memory) -> None:
    """A laptop repeats an old report after half a year without effect; a restored ledger may lack the hold."""
    earlier = cell.data
    hold(cell, "a/job/1")
    cell.data = earlier
    close(cell, "a/job/1", 8)
    assert seen(cell) == (8, 0)
    hold(cell, "a/told/1")
    hold(cell, "a/untold/1")
    close(cell, "a/told/1", 3)
    later_s = NOW_S + 200 * DAY_S
    close(cell, "b/other/1", 0, later_s, later_s)
    close(cell, "a/told/1", 3, NOW_S, later_s)
    close(cell, "a/untold/1", 4, NOW_S, later_s)
    assert seen(cell) == (8 + 7, 0)


def test_clock_years_ahead_loses_no_money(cell: Memory) -> None:
    """Early sums still count, and so do later reports of machines with a right clock."""
    hold(cell, "a/job/1")
    close(cell, "b/ahead/1", 2, NOW_S + 3650 * DAY_S, NOW_S + 3650 * DAY_S)
    close(cell, "a/job/1", 9)
    assert seen(cell)[0] == 11
    hold(cell, "a/next/1", 89)
    with pytest.raises(BudgetError):
        hold(cell, "a/more/1", 1)


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("s3://bucket", "s3://bucket/ledger.json"),
        ("s3://bucket/", "s3://bucket/ledger.json"),
        ("gs://bucket/a/b.json", "gs://bucket/a/b.json"),
        ("https://acc.blob.core.windows.net/money", "https://acc.blob.core.windows.net/money/ledger.json"),
        ("/mnt/nas", "file:///mnt/nas/ledger.json"),
        ("file:///mnt/nas/", "file:///mnt/nas/ledger.json"),
    ],
)
def test_address_of_a_ledger_is_normalised(text: str, uri: str) -> None:
    """A file or a folder has a single address for all spellings."""
    assert located(text) == located(uri) == uri


@pytest.mark.parametrize(
    "text", ["", "ledger.json", "s3://", "http://a/b", "https://acc.blob.x.net/c?sig=secret", "s3:/a"]
)
def test_unsupported_ledger_address_is_refused(text: str) -> None:
    """The message hides the address, which may contain a signature."""
    with pytest.raises(UsageError) as caught:
        located(text)
    assert "secret" not in str(caught.value)


def test_reservation_that_moves_keeps_its_place_in_the_budget(cell: Memory) -> None:
    """The later attempt's key takes over the entry; the end of the later attempt closes the one entry."""
    hold(cell, "home/j/1/7.5", 90)
    hold(cell, "home/j/2/7.5", 90)
    assert seen(cell) == (0, 90)
    close(cell, "home/j/3/7.5", 20)
    assert seen(cell) == (20, 0)


def test_reservation_that_grows_needs_room_and_one_that_shrinks_frees_it(cell: Memory) -> None:
    """More than was held is asked for as by a new job."""
    hold(cell, "home/j/1/7.5", 90)
    with pytest.raises(BudgetError):
        hold(cell, "home/j/2/7.5", 101)
    smaller = Held("j", 2, "vision", 30, NOW_S)
    shared_ledger.change(cell, lambda book: shared_ledger.follow(book, "home/j/2/7.5", smaller))
    hold(cell, "home/k/1/8.5", 70)
    assert seen(cell) == (0, 100)


def test_late_word_of_a_move_does_not_open_a_closed_reservation(cell: Memory) -> None:
    """A process that was overtaken by the end of the job changes nothing."""
    hold(cell, "home/j/1/7.5", 90)
    close(cell, "home/j/1/7.5", 0)
    held = Held("j", 1, "vision", 90, NOW_S)
    shared_ledger.change(cell, lambda book: shared_ledger.follow(book, "home/j/1/7.5", held))
    assert seen(cell) == (0, 0)

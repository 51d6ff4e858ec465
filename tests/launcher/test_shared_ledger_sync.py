"""Shared ledgers of two home folders: which jobs enter a ledger, delayed reports, and lost machines."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.launcher.errors import BudgetError, ConfigError, UnreachableError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import reserve
from cloudtrain.launcher.money import shared_ledger, shared_ledger_sync
from cloudtrain.launcher.money.conditional import ConditionalObject, located
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import LedgerBudget, Standing
from cloudtrain.launcher.store.home import identity
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job, plan_of

Journal = Callable[..., Job]
USD = 1_000_000
BEGUN_S = float(int(time.time()) - 3600)
PLAN = {"instances": 1, "hourly_usd": 10.0, "price_micro": 10 * USD, "worst_case_micro": 10 * USD}


@pytest.fixture
def homes(tmp_path: Path) -> list[Registry]:
    """Return the registries of two machines."""
    for name in "ab":
        (tmp_path / name).mkdir()
    return [Registry(tmp_path / name) for name in "ab"]


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Return the address of a ledger that does not exist yet."""
    (tmp_path / "disk").mkdir()
    return located(str(tmp_path / "disk"))


@pytest.fixture
def journal() -> Callable[..., Job]:
    """Return a function that journals a job of project vision; the job still waits for the shared ledger."""

    def add(registry: Registry, name: str, project: str | None = "vision", uri: str | None = None) -> Job:
        def make(job_id: str, number: int) -> Job:
            config = {"project": {"name": project, "ledger": uri}} if project else {}
            job = make_job(job_id, number, plan=plan_of(**PLAN), config=config)
            reserve.reserve(registry, job.attempt, job.config)
            return job

        return registry.add(name, make, exclusive=True, key=None)[0]

    return add


def hold(registry: Registry, job: Job) -> Job:
    """Reserve in the shared ledger, as `submit` does before the send; return the job."""
    shared_ledger_sync.hold(registry.database, job.id, 1, time.time())
    registry.mark_sent(job.attempt, {"x": 1})
    return job


def book(place: str) -> shared_ledger.Book:
    """Return the content of the ledger."""
    found = shared_ledger.read(ConditionalObject(place))
    assert found is not None
    return found


def share(registry: Registry, place: str, usd: int, project: str = "vision") -> Standing:
    """Set a budget of the project in the ledger, which is made if there is none."""
    budget = LedgerBudget(project, "all", usd * USD)
    return shared_ledger_sync.set_budget(registry.database, budget, place, may_make=True)


def end(registry: Registry, job: Job) -> None:
    """Store the end of the job after half an hour, for 5 USD."""
    registry.set_state(job.attempt, State("succeeded", started_s=BEGUN_S, ended_s=BEGUN_S + 1800), {})


def settle(registry: Registry, job: Job) -> None:
    """Store the end of the job, and report the end to the ledger."""
    end(registry, job)
    assert shared_ledger_sync.push(registry.database) == []


def held(place: str) -> list[str]:
    """Return the jobs that the ledger holds money for."""
    return [each.job_id for each in book(place).held.values()]


def totals(place: str) -> tuple[int, int]:
    """Return the spent sum and the reserved sum of the ledger."""
    standing = shared_ledger.accounts(book(place)).standings(time.time())[0]
    return standing.money.spent_micro, standing.money.held_micro


def test_job_counts_in_its_project_ledger_and_the_overall_ledger(
    homes: list[Registry], place: str, journal: Journal, tmp_path: Path
) -> None:
    """A job reserves in two ledgers: a refusal frees the reservation in both, and both ledgers receive the end."""
    (tmp_path / "own").mkdir()
    own = located(str(tmp_path / "own"))
    database = homes[0].database
    share(homes[0], place, 15, "")
    share(homes[0], own, 1000)
    one = hold(homes[0], journal(homes[0], "one"))
    two = journal(homes[0], "two")
    with pytest.raises(BudgetError, match="the overall 15 USD"):
        hold(homes[0], two)
    homes[0].mark_never_sent(two.attempt, State("failed", "error"))
    assert shared_ledger_sync.push(database) == []
    assert held(place) == held(own) == ["one"]
    settle(homes[0], one)
    assert totals(place) == totals(own) == (5 * USD, 0)


def test_wrong_ledger_is_forgotten_and_the_right_ledger_counts_all_jobs(
    homes: list[Registry], place: str, journal: Journal, tmp_path: Path
) -> None:
    """A wrong address is refused and forgotten, also after a kill; the right ledger, shared later, counts the job."""
    database = homes[0].database
    early = journal(homes[0], "early")
    homes[0].mark_sent(early.attempt, {"x": 1})
    for name, folder in (("no-folder", tmp_path / "typo"), ("no-ledger", tmp_path)):
        lost = journal(homes[0], name, uri=located(str(folder)))
        with pytest.raises((UnreachableError, ConfigError)):
            hold(homes[0], lost)
        homes[0].mark_never_sent(lost.attempt, State("failed", "error"))
    killed = journal(homes[0], "killed-before-its-hold", uri=place)
    homes[0].mark_never_sent(killed.attempt, State("failed", "error"))  # by the next command
    assert shared_ledger_sync.push(database) == []
    assert (ledger.ledgers(database), ledger.unsynced(database)) == ({}, [])
    share(homes[1], place, 15)
    late = journal(homes[0], "late", uri=place)
    with pytest.raises(BudgetError, match="by early of"):
        hold(homes[0], late)


@pytest.mark.parametrize("heard", [False, True], ids=["ledger has yet to hear", "ledger has heard"])
def test_released_job_that_was_sent_is_held_again(
    homes: list[Registry], place: str, journal: Journal, heard: bool
) -> None:
    """A second machine assumed a dead submitter and freed the money; the ledger has to hold the money again."""
    share(homes[0], place, 15)
    job = journal(homes[0], "one")
    shared_ledger_sync.hold(homes[0].database, "one", 1, time.time())
    homes[0].mark_never_sent(job.attempt, State("failed", "error"))
    if heard:
        assert (shared_ledger_sync.push(homes[0].database), book(place).held) == ([], {})
    homes[0].mark_sent(job.attempt, {"x": 1})
    for _ in range(2):
        assert shared_ledger_sync.push(homes[0].database) == []
        assert held(place) == ["one"]
    settle(homes[0], job)
    assert totals(place) == (5 * USD, 0)


def test_moved_ledger_takes_running_jobs_along(
    homes: list[Registry], place: str, journal: Journal, tmp_path: Path
) -> None:
    """The new ledger counts the job from the start, the old until the end; a deleted old ledger can be forgotten."""
    database = homes[0].database
    share(homes[0], place, 30)
    job = hold(homes[0], journal(homes[0], "one"))
    (tmp_path / "new").mkdir()
    new = located(str(tmp_path / "new"))
    assert share(homes[0], new, 30).money.held_micro == 10 * USD
    assert held(place) == held(new) == ["one"]
    (tmp_path / "disk" / "ledger.json").unlink()
    end(homes[0], job)
    shared_ledger_sync.push(database, patient=True)
    (tmp_path / "disk").rename(tmp_path / "away")
    shared_ledger_sync.forget(database, "vision", new)
    assert ledger.unsynced(database) == [place]  # the old ledger may come back
    (tmp_path / "away").rename(tmp_path / "disk")
    shared_ledger_sync.set_budget(database, LedgerBudget("vision", "all", 30 * USD), new, may_make=False)
    shared_ledger_sync.forget(database, "vision", new)
    assert ledger.unsynced(database) == []
    assert totals(new)[0] == 5 * USD


def test_job_of_a_lost_machine_can_be_closed_by_a_second_machine(
    homes: list[Registry], place: str, journal: Journal
) -> None:
    """A person gives the cost; a home folder's own jobs are closed by their backend instead."""
    share(homes[0], place, 15)
    hold(homes[0], journal(homes[0], "one"))
    assert shared_ledger_sync.close_others(homes[0].database, place, "one", 3 * USD) == 0
    assert shared_ledger_sync.close_others(homes[1].database, place, "one", 3 * USD) == 1
    assert totals(place) == (3 * USD, 0)


def test_deleted_ledger_can_be_forgotten(homes: list[Registry], place: str, journal: Journal, tmp_path: Path) -> None:
    """Otherwise each command would report the ledger; an unreachable ledger keeps its pending reports."""
    database = homes[0].database
    share(homes[0], place, 15)
    job = hold(homes[0], journal(homes[0], "one"))
    (tmp_path / "disk" / "ledger.json").unlink()
    end(homes[0], job)
    (tmp_path / "disk").rename(tmp_path / "away")
    with pytest.raises(UnreachableError):
        shared_ledger_sync.forget(database, "vision", place)
    assert ledger.unsynced(database) == [place]
    (tmp_path / "away").rename(tmp_path / "disk")
    shared_ledger_sync.forget(database, "vision", place)
    assert (ledger.unsynced(database), ledger.ledgers(database)) == ([], {})


def test_copied_home_folder_has_separate_reservations(homes: list[Registry], place: str, journal: Journal) -> None:
    """A home folder in an image or a cache keeps its identity; two jobs of a name are two jobs with separate ends."""
    (homes[1].folder / "identity").write_text(identity(homes[0].folder))
    share(homes[0], place, 25)
    jobs = [hold(home, journal(home, "nightly", uri=place)) for home in homes]
    assert totals(place)[1] == 20 * USD
    settle(homes[0], jobs[0])
    assert totals(place) == (5 * USD, 10 * USD)


def test_final_bill_replaces_a_reported_cost(homes: list[Registry], place: str, journal: Journal) -> None:
    """The platform's final bill replaces the figure that was reported first."""
    share(homes[0], place, 25)
    job = hold(homes[0], journal(homes[0], "one"))
    for seconds in (1800.0, 900.0):
        homes[0].set_state(
            job.attempt, State("succeeded", started_s=BEGUN_S, ended_s=BEGUN_S + 1800, billed_s=seconds), {}
        )
        assert shared_ledger_sync.push(homes[0].database) == []
    assert totals(place)[0] == 2_500_000


def test_store_without_conditional_writes_is_refused(
    homes: list[Registry], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some stores with S3's protocol ignore If-Match: the creation of the ledger detects and refuses the store."""

    class Careless(ConditionalObject):
        def write(self, data: bytes, version: str) -> bool:
            return super().write(data, self.read()[1])

    monkeypatch.setattr(shared_ledger_sync, "ConditionalObject", Careless)
    with pytest.raises(ConfigError, match="a ledger is not safe in this store"):
        share(homes[0], place, 10)
    assert ledger.ledgers(homes[0].database) == {}

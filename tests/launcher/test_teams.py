"""What two homes tell the ledger they share: what joins it, what it cannot hear for a while, and lost machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.launcher.errors import BudgetError, ConfigError, UnreachableError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import reserve
from cloudtrain.launcher.money import teamledger, teams
from cloudtrain.launcher.money.cells import located, open_cell
from cloudtrain.launcher.money.filecell import FileCell
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import LedgerBudget
from cloudtrain.launcher.store.home import identity
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import plan_of

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
    """Return where the ledger is to be; it is not made yet."""
    (tmp_path / "disk").mkdir()
    return located(str(tmp_path / "disk"))


@pytest.fixture
def journal(make_job: Callable[..., Job]) -> Callable[..., Job]:
    """Return a function that journals a job of project vision in a home, and has it wait for the team's word."""

    def add(registry: Registry, name: str, project: str | None = "vision", uri: str | None = None) -> Job:
        def make(job_id: str, number: int) -> Job:
            made = make_job(job_id, number)
            config = {"project": {"name": project, "ledger": uri}} if project else {}
            job = replace(made, attempt=replace(made.attempt, plan=plan_of(**PLAN)), config=config)
            reserve.reserve(registry, job.attempt, job.config)
            return job

        return registry.add(name, make, exclusive=True, key=None)[0]

    return add


def hold(registry: Registry, job: Job) -> None:
    """Ask the team's ledger, as submit does before it sends."""
    teams.hold(registry.database, job.id, 1, time.time())
    registry.mark_sent(job.attempt, {"x": 1})


def book(place: str) -> teamledger.Book:
    """Return what is in the ledger."""
    found = teamledger.read(open_cell(place))
    assert found is not None
    return found


def vision(usd: int, project: str = "vision") -> LedgerBudget:
    """Return a budget."""
    return LedgerBudget(project, "all", usd * USD)


def test_what_runs_joins_a_ledger_that_is_made_later(
    homes: list[Registry], place: str, journal: Callable[..., Job]
) -> None:
    """Else the team would not know of half of its spending; its end is told too."""
    job = journal(homes[0], "early")
    homes[0].mark_sent(job.attempt, {"x": 1})
    standing = teams.set_budget(homes[0].database, vision(15), place, may_make=True)
    assert standing.reserved_micro == 10 * USD
    late = journal(homes[1], "late", uri=place)
    with pytest.raises(BudgetError, match="by early of"):
        hold(homes[1], late)
    homes[0].set_state(job.attempt, State("succeeded", started_s=BEGUN_S, ended_s=BEGUN_S + 1800), {})
    assert teams.tell(homes[0].database) == []
    hold(homes[1], late)
    assert [held.job_id for held in book(place).held.values()] == ["late"]


def test_ledger_of_all_jobs_holds_those_without_one_of_their_own(
    homes: list[Registry], place: str, journal: Callable[..., Job]
) -> None:
    """A budget over all jobs, shared: every project's job counts, and one without a project."""
    teams.set_budget(homes[0].database, vision(25, ""), place, may_make=True)
    hold(homes[0], journal(homes[0], "one"))
    hold(homes[0], journal(homes[0], "two", None))
    with pytest.raises(BudgetError, match="the overall 25 USD"):
        hold(homes[0], journal(homes[0], "three", "speech"))


def test_job_of_a_project_with_a_ledger_of_its_own_counts_in_the_overall_one_too(
    homes: list[Registry], place: str, journal: Callable[..., Job], tmp_path: Path
) -> None:
    """Two shared ledgers, each asked: what one refuses is freed in the other, and each hears of the end."""
    (tmp_path / "own").mkdir()
    own = located(str(tmp_path / "own"))
    database = homes[0].database
    teams.set_budget(database, vision(15, ""), place, may_make=True)
    teams.set_budget(database, vision(1000), own, may_make=True)
    one = journal(homes[0], "one")
    hold(homes[0], one)
    two = journal(homes[0], "two")
    with pytest.raises(BudgetError, match="the overall 15 USD"):
        hold(homes[0], two)
    homes[0].mark_never_sent(two.attempt, State("failed", "error"))
    assert teams.tell(database) == []
    assert [[held.job_id for held in book(uri).held.values()] for uri in (place, own)] == [["one"], ["one"]]
    homes[0].set_state(one.attempt, State("succeeded", started_s=BEGUN_S, ended_s=BEGUN_S + 1800), {})
    assert teams.tell(database) == []
    for uri in (place, own):
        standing = teamledger.standings(book(uri), time.time())[0]
        assert (standing.spent_micro, standing.reserved_micro) == (5 * USD, 0)


def test_ledger_out_of_reach_refuses_and_hears_of_it_later(
    homes: list[Registry], place: str, journal: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent on a guess; the end that could not be told is told by the next command, once."""
    monkeypatch.setattr(teams, "AGAIN_S", 0.0)
    teams.set_budget(homes[0].database, vision(15), place, may_make=True)
    job = journal(homes[0], "one")
    hold(homes[0], job)
    (tmp_path / "disk").rename(tmp_path / "away")
    other = journal(homes[1], "two", uri=place)
    with pytest.raises(UnreachableError, match="no folder"):
        hold(homes[1], other)
    homes[1].mark_never_sent(other.attempt, State("failed", "error"))
    homes[0].set_state(job.attempt, State("succeeded", started_s=BEGUN_S, ended_s=BEGUN_S + 1800), {})
    assert [len(teams.tell(home.database)) for home in homes] == [1, 0]  # nothing was ever written of the other's
    (tmp_path / "away").rename(tmp_path / "disk")
    assert [teams.tell(home.database) for home in homes] == [[], []]
    assert [ledger.untold(home.database) for home in homes] == [[], []]
    standing = teamledger.standings(book(place), time.time())[0]
    assert (standing.spent_micro, standing.reserved_micro) == (5 * USD, 0)


def test_wrong_ledger_binds_nothing_and_the_right_one_hears_of_all(
    homes: list[Registry], place: str, journal: Callable[..., Job], tmp_path: Path
) -> None:
    """A mistyped place is refused and forgotten; the right one, shared later, counts what runs."""
    database = homes[0].database
    early = journal(homes[0], "early")
    homes[0].mark_sent(early.attempt, {"x": 1})
    for name, folder in (("no-folder", tmp_path / "typo"), ("no-ledger", tmp_path)):
        lost = journal(homes[0], name, uri=located(str(folder)))
        with pytest.raises((UnreachableError, ConfigError)):
            hold(homes[0], lost)
        homes[0].mark_never_sent(lost.attempt, State("failed", "error"))
    assert (ledger.ledgers(database), ledger.untold(database)) == ({}, [])
    teams.set_budget(homes[1].database, vision(15), place, may_make=True)
    late = journal(homes[0], "late", uri=place)
    with pytest.raises(BudgetError, match="by early of"):
        hold(homes[0], late)


@pytest.mark.parametrize("heard", [False, True], ids=["ledger has yet to hear", "ledger has heard"])
def test_job_that_was_sent_after_all_is_held_again(
    homes: list[Registry], place: str, journal: Callable[..., Job], heard: bool
) -> None:
    """Another machine took its submitter for dead: the money was freed, and has to be held there again."""
    teams.set_budget(homes[0].database, vision(15), place, may_make=True)
    job = journal(homes[0], "one")
    teams.hold(homes[0].database, "one", 1, time.time())
    homes[0].mark_never_sent(job.attempt, State("failed", "error"))
    if heard:
        assert (teams.tell(homes[0].database), book(place).held) == ([], {})
    homes[0].mark_sent(job.attempt, {"x": 1})
    for _ in range(2):
        assert teams.tell(homes[0].database) == []
        assert [held.job_id for held in book(place).held.values()] == ["one"]
    homes[0].set_state(job.attempt, State("succeeded", started_s=BEGUN_S, ended_s=BEGUN_S + 1800), {})
    assert teams.tell(homes[0].database) == []
    standing = teamledger.standings(book(place), time.time())[0]
    assert (standing.spent_micro, standing.reserved_micro) == (5 * USD, 0)


def test_ledger_that_moves_takes_what_runs_along(
    homes: list[Registry], place: str, journal: Callable[..., Job], tmp_path: Path
) -> None:
    """The new one counts it from the first; the old one until its end, and if it is gone it can be forgotten."""
    database = homes[0].database
    teams.set_budget(database, vision(30), place, may_make=True)
    job = journal(homes[0], "one")
    hold(homes[0], job)
    (tmp_path / "new").mkdir()
    new = located(str(tmp_path / "new"))
    assert teams.set_budget(database, vision(30), new, may_make=True).reserved_micro == 10 * USD
    assert [[held.job_id for held in book(uri).held.values()] for uri in (place, new)] == [["one"], ["one"]]
    (tmp_path / "disk" / "ledger.json").unlink()
    homes[0].set_state(job.attempt, State("succeeded", started_s=BEGUN_S, ended_s=BEGUN_S + 1800), {})
    teams.tell(database, patient=True)
    (tmp_path / "disk").rename(tmp_path / "away")
    teams.forget(database, "vision", new)
    assert ledger.untold(database) == [place]  # it may come back
    (tmp_path / "away").rename(tmp_path / "disk")
    teams.set_budget(database, vision(30), new, may_make=False)
    teams.forget(database, "vision", new)
    assert ledger.untold(database) == []
    assert teamledger.standings(book(new), time.time())[0].spent_micro == 5 * USD


def test_lost_machines_job_can_be_closed_by_another(
    homes: list[Registry], place: str, journal: Callable[..., Job]
) -> None:
    """With what it has cost, by somebody who knows; of a home's own jobs the backend is asked instead."""
    teams.set_budget(homes[0].database, vision(15), place, may_make=True)
    hold(homes[0], journal(homes[0], "one"))
    assert teams.close_others(homes[0].database, place, "one", 3 * USD) == 0
    assert teams.close_others(homes[1].database, place, "one", 3 * USD) == 1
    standing = teamledger.standings(book(place), time.time())[0]
    assert (standing.spent_micro, standing.reserved_micro) == (3 * USD, 0)


def test_ledger_that_is_gone_for_good_can_be_forgotten(
    homes: list[Registry], place: str, journal: Callable[..., Job], tmp_path: Path
) -> None:
    """Else each command would say that it cannot be told; one that merely is away keeps what it has to hear."""
    database = homes[0].database
    teams.set_budget(database, vision(15), place, may_make=True)
    job = journal(homes[0], "one")
    hold(homes[0], job)
    (tmp_path / "disk" / "ledger.json").unlink()
    homes[0].set_state(job.attempt, State("succeeded", started_s=BEGUN_S, ended_s=BEGUN_S + 1800), {})
    (tmp_path / "disk").rename(tmp_path / "away")
    with pytest.raises(UnreachableError):
        teams.forget(database, "vision", place)
    assert ledger.untold(database) == [place]
    (tmp_path / "away").rename(tmp_path / "disk")
    teams.forget(database, "vision", place)
    assert (ledger.untold(database), ledger.ledgers(database)) == ([], {})


def test_same_names_on_two_machines_are_two_jobs(
    homes: list[Registry], place: str, journal: Callable[..., Job]
) -> None:
    """A name is free on each machine; in the ledger each home's is its own."""
    teams.set_budget(homes[0].database, vision(25), place, may_make=True)
    hold(homes[0], journal(homes[0], "same"))
    hold(homes[1], journal(homes[1], "same", uri=place))
    assert len(book(place).held) == 2


def test_copied_home_holds_its_jobs_beside_its_originals(
    homes: list[Registry], place: str, journal: Callable[..., Job]
) -> None:
    """A home in an image or a cache keeps its identity; two jobs of one name there are two, and end each for itself."""
    (homes[1].folder / "identity").write_text(identity(homes[0].folder))
    teams.set_budget(homes[0].database, vision(25), place, may_make=True)
    jobs = [journal(home, "nightly", uri=place) for home in homes]
    for home, job in zip(homes, jobs, strict=True):
        hold(home, job)
    assert teamledger.standings(book(place), time.time())[0].reserved_micro == 20 * USD
    homes[0].set_state(jobs[0].attempt, State("succeeded", started_s=BEGUN_S, ended_s=BEGUN_S + 1800), {})
    assert teams.tell(homes[0].database) == []
    standing = teamledger.standings(book(place), time.time())[0]
    assert (standing.spent_micro, standing.reserved_micro) == (5 * USD, 10 * USD)


def test_better_figure_is_told_too(homes: list[Registry], place: str, journal: Callable[..., Job]) -> None:
    """What the platform bills in the end takes the place of what was first told."""
    teams.set_budget(homes[0].database, vision(25), place, may_make=True)
    job = journal(homes[0], "one")
    hold(homes[0], job)
    for seconds in (1800.0, 900.0):
        homes[0].set_state(
            job.attempt, State("succeeded", started_s=BEGUN_S, ended_s=BEGUN_S + 1800, billed_s=seconds), {}
        )
        assert teams.tell(homes[0].database) == []
    assert teamledger.standings(book(place), time.time())[0].spent_micro == 2_500_000


def test_store_that_does_not_compare_keeps_no_ledger(
    homes: list[Registry], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some that speak S3's protocol pass over If-Match: that is found out when the ledger is made, and refused."""

    class Careless(FileCell):
        def write(self, data: bytes, version: str) -> bool:
            return super().write(data, self.read()[1])

    monkeypatch.setattr(teams, "open_cell", Careless)
    with pytest.raises(ConfigError, match="a ledger is not safe in this store"):
        teams.set_budget(homes[0].database, vision(10), place, may_make=True)
    assert ledger.ledgers(homes[0].database) == {}

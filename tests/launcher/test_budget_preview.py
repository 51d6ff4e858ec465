"""`plan`, a dry run and `submit` report the budgets of a job before the job is sent."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.money.budget_preview import ApplicableBudgets, books_of, require_known_project
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import Held, LedgerBudget
from cloudtrain.launcher.store.home import home as make_home
from cloudtrain.launcher.store.registry import Registry
from doubles.signatures import MakeProject

USD = 1_000_000


@pytest.fixture
def books(project: MakeProject, home: Path) -> Callable[..., ApplicableBudgets]:
    """Return a function that sets budgets `{(project, period): USD}` and returns the applicable budgets of a job."""

    def read(own: str = "", **limits: int) -> ApplicableBudgets:
        make_home()
        database = Registry().database
        for name, limit in limits.items():
            ledger.set_budget(database, LedgerBudget(name.removesuffix("_"), "all", limit * USD))
        ledger.reserve(database, Held("old", 1, "vision", 3_140_000, time.time()))
        ledger.settle(database, "old", 1, 3_140_000, time.time())
        folder = project(f"project: {own}\n" if own else "")
        return books_of(configs.load(folder / "cloudtrain.yaml"))

    return read


def test_known_project_is_reported_with_its_remaining_budget(books: Callable[..., ApplicableBudgets]) -> None:
    """The line names the budget and its remaining money; a free job counts against no budget."""
    found = books("vision", vision=20, speech=5)
    assert list(found.lines(5 * USD)) == ["counts against project vision's 20 USD (16.86 left)"]
    assert (list(found.lines(0)), found.refused(0)) == ([], "")
    require_known_project(found)


def test_misspelt_project_is_refused(books: Callable[..., ApplicableBudgets]) -> None:
    """A misspelt project has no budget; the hint gives the similar name, and the command that adds the new project."""
    found = books("visoin", vision=20)
    with pytest.raises(ConfigError, match="project visoin has no budget") as caught:
        require_known_project(found)
    hint = "did you mean `vision`? Else give it one: cloudtrain budget set visoin 100USD"
    assert caught.value.faults[0].hint == hint
    assert [*found.lines(1)][-1] == f"would be refused: project visoin has no budget; {hint}"
    assert found.dump(1)["refused"]


@pytest.mark.parametrize(
    ("own", "limits", "said"),
    [
        ("sonar", {"vision": 20}, ["project sonar: no budget of its own (known: vision)"]),
        ("", {"vision": 20}, []),
        (
            "{name: vision, ledger: s3://team/money}",
            {"speech": 5},
            ["counts against the shared ledger s3://team/money/ledger.json, checked at submit"],
        ),
    ],
)
def test_project_without_budget_has_a_note(
    books: Callable[..., ApplicableBudgets], own: str, limits: dict[str, int], said: list[str]
) -> None:
    """A line says that no budget limits a new project; neither `plan` nor a dry run reads a shared ledger's bucket."""
    found = books(own, **limits)
    assert list(found.lines(1)) == said
    require_known_project(found)


def test_too_small_budget_is_reported_before_the_submit(books: Callable[..., ApplicableBudgets]) -> None:
    """The line predicts the refusal with its sums; an unknown price does not fit into any budget."""
    found = books("vision", vision=5)
    assert [*found.lines(5 * USD)][-1] == (
        "would be refused: project vision's 5 USD does not hold this job's worst case of 5 USD: spent 3.14 USD,"
        " left 1.86 USD"
    )
    assert "is unknown" in found.refused(None)


def test_dry_run_creates_no_home_and_predicts_a_refusal(cli: Any, home: Path, project: MakeProject) -> None:
    """The dry run exits with 0 in either case; the submit is refused before any prompt, and `plan --json` agrees."""
    folder = project("project: vision\nlimits: {max_duration: 1h}\nlocal: {price_per_hour: 10 USD}\n")
    assert cli("submit", "--dry-run", cwd=folder).code == 0
    assert cli("plan", "--json", cwd=folder).json["budgets"]["against"] == []
    assert not home.exists()
    assert cli("budget", "set", "vision", "5USD").code == 0
    dry = cli("submit", "--dry-run", cwd=folder)
    assert (dry.code, "would be refused: project vision's 5 USD does not hold" in dry.stderr) == (0, True), dry.stderr
    assert "would be refused" in cli("plan", cwd=folder).stdout
    assert "local would be refused" in cli("plan", "--backend", "all", cwd=folder).stdout
    assert cli("plan", "--json", cwd=folder).json["budgets"]["refused"]
    sent = cli("submit", "-d", cwd=folder)
    assert (sent.code, "there is nobody" in sent.stderr) == (6, False), sent.stderr
    slip = cli("submit", "-d", "-y", "--set", "project=visoin", cwd=folder)
    assert (slip.code, "did you mean `vision`?" in slip.stderr, "itself failed" in slip.stderr) == (3, True, False)
    assert cli("list", "--json").json["jobs"] == []


def test_misspelt_project_is_refused_with_a_shared_ledger(cli: Any, project: MakeProject, tmp_path: Path) -> None:
    """Known names are the names in the shared ledger; a quite different name is reported and needs a confirmation."""
    place = tmp_path / "disk"
    place.mkdir()
    assert cli("budget", "set", "vision", "5000USD", "--ledger", place).code == 0
    folder = project("limits: {max_duration: 1h}\nlocal: {price_per_hour: 10 USD}\n")
    slip = cli("submit", "-d", "--set", f"project={{name: visoin, ledger: {place}}}", cwd=folder)
    assert (slip.code, "did you mean `vision`?" in slip.stderr) == (3, True), slip.stderr
    for _ in range(2):  # the first run stores the ledger's place, but the project still has no budget
        other = cli("submit", "-d", "--set", f"project={{name: sonar, ledger: {place}}}", cwd=folder)
        assert other.code == 2
        for part in ("project sonar: no budget of its own (known: vision)", "cannot ask for confirmation"):
            assert part in other.stderr, other.stderr
    assert cli("budget", "set", "9000USD", "--ledger", place).code == 0
    assert "did you mean" not in cli("plan", "--set", "project=visoin", cwd=folder).stdout  # the ledger may have it
    slip = cli("submit", "-d", "--set", "project=visoin", cwd=folder)
    assert (slip.code, "did you mean `vision`?" in slip.stderr) == (3, True), slip.stderr


def test_budget_option_sets_the_limit_and_conflicts_are_refused(cli: Any, project: MakeProject) -> None:
    """`--budget` sets `budget.limit`; with both set, `plan`, `submit` and `resume` exit with code 2."""
    folder = project("limits: {max_duration: 1h}\nlocal: {price_per_hour: 10 USD}\nbudget: {limit: 50 USD}\n")
    assert cli("plan", "--json", "--budget", "5USD", cwd=folder).json["budget_micro"] == 5 * USD
    both = ("--budget", "5USD", "--set", "budget.limit=6USD")
    for command in (("plan", *both), ("submit", "--dry-run", *both), ("resume", "x", *both)):
        refused = cli(*command, cwd=folder)
        assert (refused.code, "--budget and --set budget.limit both say" in refused.stderr) == (2, True)
    odd = cli("plan", "--budget", "5k", cwd=folder)
    assert (odd.code, "with all its digits" in odd.stderr) == (2, True), odd.stderr

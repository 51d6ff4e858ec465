"""What plan, a dry run and submit say of budgets before anything is sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.money.foretold import ApplicableBudgets, books_of, require_known_project
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import LedgerBudget
from cloudtrain.launcher.store.home import home as make_home
from cloudtrain.launcher.store.registry import Registry

USD = 1_000_000
PRELOADED = ("cloudtrain.launcher.cli", "cloudtrain.launcher.commands.plan", "cloudtrain.launcher.commands.submit")


@pytest.fixture
def books(project: Callable[..., Path], home: Path) -> Callable[..., ApplicableBudgets]:
    """Return a function that sets budgets `{(project, period): USD}`, and returns what a job counts against."""

    def read(own: str = "", **limits: int) -> ApplicableBudgets:
        make_home()
        registry = Registry()
        for name, limit in limits.items():
            ledger.set_budget(registry.database, LedgerBudget(name.removesuffix("_"), "all", limit * USD))
        ledger.reserve(registry.database, "old", 1, "vision", 3_140_000, time.time())
        ledger.settle(registry.database, "old", 1, 3_140_000, time.time())
        registry.close()
        folder = project(f"project: {own}\n" if own else "")
        return books_of(configs.load(folder / "cloudtrain.yaml"))

    return read


def test_project_that_is_known_is_told_with_what_is_left(books: Callable[..., ApplicableBudgets]) -> None:
    """The line names the budget and its money left; a job that costs nothing counts against none."""
    found = books("vision", vision=20, speech=5)
    assert found.lines(5 * USD) == ["counts against project vision's 20 USD (16.86 left)"]
    assert (found.lines(0), found.refused(0)) == ([], "")
    require_known_project(found)


def test_slip_in_a_projects_name_is_refused(books: Callable[..., ApplicableBudgets]) -> None:
    """It would count against nothing: the near name is asked for, and how to mean it all the same."""
    found = books("visoin", vision=20)
    with pytest.raises(ConfigError, match="project visoin has no budget") as caught:
        require_known_project(found)
    hint = "did you mean `vision`? Else give it one: cloudtrain budget set visoin 100USD"
    assert caught.value.faults[0].hint == hint
    assert found.lines(1)[-1] == f"would be refused: project visoin has no budget; {hint}"
    assert found.dump(1)["refused"]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("sonar", ["project sonar: no budget of its own (known: vision)"]),
        ("", []),
    ],
)
def test_project_without_a_budget_is_said(books: Callable[..., ApplicableBudgets], own: str, said: list[str]) -> None:
    """A new project's job is sent, and a line says that no budget limits the project; no line without a project."""
    found = books(own, vision=20)
    assert found.lines(1) == said
    require_known_project(found)


def test_budget_that_does_not_hold_it_is_told(books: Callable[..., ApplicableBudgets]) -> None:
    """What submit would refuse, and with what sums; a price that nobody knows fits into none."""
    found = books("vision", vision=5)
    assert found.lines(5 * USD)[-1] == (
        "would be refused: project vision's 5 USD does not hold this job's worst case of 5 USD: spent 3.14 USD,"
        " left 1.86 USD"
    )
    assert "is unknown" in found.refused(None)


def test_shared_budget_is_asked_at_submit(books: Callable[..., ApplicableBudgets]) -> None:
    """Neither plan nor dry run asks a bucket."""
    found = books("{name: vision, ledger: s3://team/money}", speech=5)
    assert found.lines(1) == [
        "counts against the shared ledger s3://team/money/ledger.json, checked at submit",
    ]


def test_dry_run_makes_no_home_and_says_what_submit_would(cli: Any, home: Path, project: Callable[..., Path]) -> None:
    """Exit code 0 in either case; the real submit is refused before anybody is asked, and plan says it in JSON."""
    quick = replace(cli, preloaded=PRELOADED)
    folder = project("project: vision\nlimits: {max_duration: 1h}\nlocal: {price_per_hour: 10 USD}\n")
    assert quick("submit", "--dry-run", cwd=folder).code == 0
    assert quick("plan", "--json", cwd=folder).json["budgets"]["against"] == []
    assert not home.exists()
    assert quick("budget", "set", "vision", "5USD").code == 0
    dry = quick("submit", "--dry-run", cwd=folder)
    assert (dry.code, "would be refused: project vision's 5 USD does not hold" in dry.stderr) == (0, True), dry.stderr
    assert "would be refused" in quick("plan", cwd=folder).stdout
    assert "local would be refused" in quick("plan", "--backend", "all", cwd=folder).stdout
    assert quick("plan", "--json", cwd=folder).json["budgets"]["refused"]
    sent = quick("submit", "-d", cwd=folder)
    assert (sent.code, "there is nobody" in sent.stderr) == (6, False), sent.stderr
    slip = quick("submit", "-d", "-y", "--set", "project=visoin", cwd=folder)
    assert (slip.code, "did you mean `vision`?" in slip.stderr, "itself failed" in slip.stderr) == (3, True, False)
    assert quick("list", "--json").json["jobs"] == []


def test_slip_is_refused_where_the_team_shares_its_budgets(
    cli: Any, project: Callable[..., Path], tmp_path: Path
) -> None:
    """Whose names are those that the shared ledger has; one like none of them is told, and goes on to be asked for."""
    quick = replace(cli, preloaded=PRELOADED)
    place = tmp_path / "disk"
    place.mkdir()
    assert quick("budget", "set", "vision", "5000USD", "--ledger", place).code == 0
    folder = project("limits: {max_duration: 1h}\nlocal: {price_per_hour: 10 USD}\n")
    slip = quick("submit", "-d", "--set", f"project={{name: visoin, ledger: {place}}}", cwd=folder)
    assert (slip.code, "did you mean `vision`?" in slip.stderr) == (3, True), slip.stderr
    for _ in range(2):  # that its place is known by then makes it no budget
        other = quick("submit", "-d", "--set", f"project={{name: sonar, ledger: {place}}}", cwd=folder)
        assert other.code == 2
        for part in ("project sonar: no budget of its own (known: vision)", "cannot ask for confirmation"):
            assert part in other.stderr, other.stderr
    assert quick("budget", "set", "9000USD", "--ledger", place).code == 0
    assert "did you mean" not in quick("plan", "--set", "project=visoin", cwd=folder).stdout  # it may be shared there
    slip = quick("submit", "-d", "--set", "project=visoin", cwd=folder)
    assert (slip.code, "did you mean `vision`?" in slip.stderr) == (3, True), slip.stderr


def test_budget_of_the_command_line(cli: Any, project: Callable[..., Path]) -> None:
    """`--budget` is `budget.limit`; two that say it differ, so neither is taken silently. resume refuses the same."""
    quick = replace(cli, preloaded=(*PRELOADED, "cloudtrain.launcher.commands.resume"))
    folder = project("limits: {max_duration: 1h}\nlocal: {price_per_hour: 10 USD}\nbudget: {limit: 50 USD}\n")
    assert quick("plan", "--json", "--budget", "5USD", cwd=folder).json["budget_micro"] == 5 * USD
    both = ("--budget", "5USD", "--set", "budget.limit=6USD")
    for command in (("plan", *both), ("submit", "--dry-run", *both), ("resume", "x", *both)):
        refused = quick(*command, cwd=folder)
        assert (refused.code, "--budget and --set budget.limit both say" in refused.stderr) == (2, True)
    odd = quick("plan", "--budget", "5k", cwd=folder)
    assert (odd.code, "with all its digits" in odd.stderr) == (2, True), odd.stderr

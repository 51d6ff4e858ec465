"""A sweep as a whole in the commands: list, cost, compare, report, wait, watch, resume; rows without real runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.entrypoints.sweep.search import Allowance, decide, values_of
from cloudtrain.launcher import cli
from cloudtrain.launcher.errors import CloudtrainError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.store import sweeps
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.sweeps import growing, searching
from doubles import swept


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs a command in this process; with `--json` it returns the object, else the text."""

    def call(*args: str) -> Any:
        capsys.readouterr()
        cli.cli.main(list(args), standalone_mode=False)
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in args else out

    return call


# -- list -------------------------------------------------------------------------------------------------------------


def test_list_shows_a_sweep_as_one_line(registry: Registry, seed: Callable[..., Job], run: Callable[..., Any]) -> None:
    """Trials are hidden below their sweep, and do not push older jobs from the list; --all and --state show trials."""
    seed("older", State("succeeded", started_s=1.0, ended_s=2.0))
    sweep = swept.put(registry, 30)
    lines = run("list").splitlines()
    assert [line.split()[0] for line in lines] == ["JOB", sweep.id, "older"]
    assert "sweep ended" in lines[1]
    assert "30/30 trials, loss 0.12" in lines[1]
    assert len(run("list", "--all").splitlines()) == 1 + 1 + 30 + 1
    failed = run("list", "--state", "failed").splitlines()
    assert [line.split()[0] for line in failed] == ["JOB", f"{sweep.id}-1"]


def test_list_counts_the_money_and_the_trials_of_a_sweep(registry: Registry, run: Callable[..., Any]) -> None:
    """JSON has the sweep beside all jobs, with the cost by the ledger."""
    sweep = swept.put(registry, 9)
    found = run("list", "--json")
    (shown,) = found["sweeps"]
    assert len(found["jobs"]) == 9
    assert (shown["sweep"], shown["state"], shown["trials_done"], shown["trials"]) == (sweep.id, "ended", 9, 9)
    assert (shown["best_step"], shown["limit_usd"]) == (810, 9.0)
    seconds = 13 * swept.START_S + swept.STEP_S * (9 * 90 + 3 * 180 + 540)
    assert shown["spend_usd"] == pytest.approx(seconds * swept.HOURLY_MICRO / 3600 / 1e6, rel=0.01)
    best = run("status", sweep.id, "--json")["best"][0]
    assert shown["best"] == best["value"]


@pytest.mark.parametrize(
    ("args", "count"),
    [(["--active"], 0), (["--tag", "team=vision"], 1), (["--tag", "team=x"], 0), (["--since", "1h"], 1), (["-n1"], 1)],
)
def test_list_chooses_sweeps_as_jobs(args: list[str], count: int, registry: Registry, run: Callable[..., Any]) -> None:
    """The filters of jobs hold for sweeps."""
    swept.put(registry, 9)
    assert len(run("list", *args, "--json")["sweeps"]) == count


def test_active_list_has_a_running_sweep(registry: Registry, run: Callable[..., Any]) -> None:
    """A sweep is active as long as it may send trials, also between two trials."""
    sweep = swept.put(registry, 9, state="running")
    assert [each["sweep"] for each in run("list", "--active", "--json")["sweeps"]] == [sweep.id]
    assert "sweep running" in run("list", "--active")


# -- resume -----------------------------------------------------------------------------------------------------------


def test_grown_sweep_keeps_the_values_of_its_trials(registry: Registry) -> None:
    """More trials and more money change no value of a known trial, and the stored config has both."""
    sweep = swept.put(registry, 9)
    grown = growing.grown(registry.database, sweep, "+18", "+1.50USD")
    before, after = searching.search_of(sweep.config), searching.search_of(grown.config)
    assert (after.trials, grown.limit_micro, grown.state) == (27, 10_500_000, "running")
    assert grown.config["budget"]["limit"] == "10.50 USD"
    assert [values_of(before, {}, n, 0) for n in range(9)] == [values_of(after, {}, n, 0) for n in range(9)]
    assert growing.grown(registry.database, sweep, "12", "20USD").limit_micro == 20_000_000
    growing.go_on(registry, grown)
    assert sweeps.find(registry.database, sweep.id) == grown
    results = searching.results_of(sweeps.segments(registry.database, sweep.id))
    assert [each.key for each in decide(before, results, [], Allowance())] == []
    assert [each.key for each in decide(after, results, [], Allowance())] == [(n, 0) for n in range(9, 13)]


@pytest.mark.parametrize(
    ("trials", "budget", "words"),
    [
        (None, None, "has ended"),
        ("+x", None, "expected a whole number"),
        ("8", None, "9 trials of digits-x7k2p began already"),
        ("-3", None, "expected a whole number"),
        ("+40000", None, "at most 10000"),
        (None, "1USD", "has spent and holds 1.2"),
        (None, "+much", "expected an amount"),
    ],
)
def test_impossible_growth_is_refused(trials: str | None, budget: str | None, words: str, registry: Registry) -> None:
    """Each refusal says what is wrong, and changes no row."""
    sweep = swept.put(registry, 9)
    with pytest.raises(CloudtrainError, match=words):
        growing.grown(registry.database, sweep, trials, budget)
    assert sweeps.find(registry.database, sweep.id) == sweep


def test_grid_and_population_take_no_more_trials(registry: Registry) -> None:
    """A grid's trials are all in the sweep, and a population keeps its size."""
    space = {"training.optimizer.lr": [0.1, 0.01], "training.optimizer.name": ["adamw", "sgd"]}
    sweep = swept.put(registry, 4, algorithm="grid", space=space)
    with pytest.raises(UsageError, match="the grid has 4 trials"):
        growing.grown(registry.database, sweep, "+1", None)
    of_pbt = replace(sweep, config=swept.config_of(4, algorithm="pbt"))
    with pytest.raises(UsageError, match="a population keeps its 4 trials"):
        growing.grown(registry.database, of_pbt, "+1", None)


def test_sweep_without_a_budget_gets_one(registry: Registry) -> None:
    """`+` needs a budget to add to; a plain sum sets the first one."""
    sweep = swept.put(registry, 9, limit_micro=None)
    with pytest.raises(UsageError, match="no budget to add to"):
        growing.grown(registry.database, sweep, None, "+5USD")
    assert growing.grown(registry.database, sweep, None, "5USD").config["budget"]["limit"] == "5 USD"


def test_options_of_a_job_are_refused_for_a_sweep(
    registry: Registry, seed: Callable[..., Job], run: Callable[..., Any]
) -> None:
    """A sweep keeps its machines and its code, and a job has no trials."""
    sweep = swept.put(registry, 9)
    with pytest.raises(UsageError, match="--instances is for a job"):
        run("resume", sweep.id, "--instances", "2")
    seed("alone", State("stopped", "user", started_s=1.0, ended_s=2.0))
    with pytest.raises(UsageError, match="--trials is for a sweep"):
        run("resume", "alone", "--trials", "+2")

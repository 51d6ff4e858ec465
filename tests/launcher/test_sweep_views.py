"""A sweep as a whole in the commands: list, cost, compare, report, wait, watch, resume; rows without real runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from cloudtrain.launcher import cli
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.store.registry import Registry
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

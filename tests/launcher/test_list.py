"""What `list` prints beside its table, and what it refuses; which jobs it chooses is held by test_listed.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import cli
from cloudtrain.launcher.errors import CredentialError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import poller
from cloudtrain.launcher.store.registry import Registry


def run(*args: str) -> None:
    """Run `list` in this process."""
    cli.cli.main(["list", *args], standalone_mode=False)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every backend refuse to say how a job is."""

    def refresh(registry: Registry, job: Job) -> Job:
        raise CredentialError("the token has expired")

    monkeypatch.setattr(poller, "refresh", refresh)


@pytest.mark.usefixtures("refused")
def test_list_shows_what_cannot_be_asked_as_it_was(
    seed: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the table, with the reason beside it; in JSON under a name of its own."""
    seed("far", State("running", started_s=1.0))
    seed("done", State("succeeded", started_s=1.0, ended_s=2.0))
    run()
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()] == ["JOB", "done", "far"]
    assert "far is listed as it was last seen: the token has expired" in told.err
    run("--json")
    found = json.loads(capsys.readouterr().out)
    assert [each["job"] for each in found["jobs"]] == ["done", "far"]
    assert (found["running"], found["not_answered"]) == (1, {"far": "the token has expired"})


def test_list_is_json_without_any_job(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script reads it the same way."""
    run("--json")
    assert json.loads(capsys.readouterr().out) == {
        "jobs": [],
        "running": 0,
        "burn_usd_per_hour": 0.0,
        "not_answered": {},
    }


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "no jobs: cloudtrain submit"),
        (("--active",), "no jobs are active"),
        (("--tag", "team=vision"), "no jobs: "),
    ],
)
def test_list_says_that_there_is_none(
    home: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], words: str
) -> None:
    """On standard error: there is no data."""
    run(*args)
    told = capsys.readouterr()
    assert (told.out, words in told.err) == ("", True)


def test_list_says_that_none_is_like_that(seed: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    """Where there are others."""
    seed("done", State("succeeded"))
    run("--tag", "team=vision")
    assert "no job is like that" in capsys.readouterr().err


def test_list_on_a_narrow_terminal_names_the_missing_columns(
    seed: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person must not believe that the table is complete."""
    seed("a-job-with-a-name-of-some-length", State("failed", "preempted"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    run()
    told = capsys.readouterr().err
    assert "not shown for lack of room: BACKEND, PROGRESS, USD, SUBMITTED; --json shows all" in told


def test_list_in_80_columns_shows_ranks_and_resumable(
    seed: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROGRESS becomes shorter first: the state is whole, and the ranks are there."""
    job = seed("digits-x4k2p", State("stopped", "user", resumable=True))
    progress = {"step": 123456, "max_steps": 2000000, "loss": 1.2345}
    Registry().database.execute("UPDATE attempts SET progress = ? WHERE job_id = ?", (json.dumps(progress), job.id))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    run()
    head, row = capsys.readouterr().out.splitlines()
    assert ("RANKS" in head, "PROGRESS" in head, "BACKEND" in head) == (True, True, True)
    assert ("stopped (user), resumable " in row, "…" in row, len(row) <= 80) == (True, True, True)


def test_list_refuses_a_backend_that_nobody_knows(seed: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    """A slip of the keyboard is no empty list; one whose plug-in has gone is known by its jobs."""
    seed("done", State("succeeded"))
    Registry().database.execute("UPDATE jobs SET backend = 'gone'")
    run("--backend", "gone", "--json")
    assert [job["job"] for job in json.loads(capsys.readouterr().out)["jobs"]] == ["done"]
    run("--backend", "ssh")
    assert "no job is like that" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--backend nope: there is no such backend"):
        run("--backend", "nope", "--json")


@pytest.mark.parametrize("line", ["--tag =x", "--since soon", "--active --state failed", "--state lost", "-n 0"])
def test_list_refuses_what_makes_no_sense(cli: Any, line: str) -> None:
    """Exit code 2, in a line that says what was meant."""
    result = cli("list", *line.split())
    assert (result.code, result.stdout, "Traceback" in result.stderr) == (2, "", False)

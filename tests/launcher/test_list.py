"""`list`: output beside the table, and refused arguments; test_listing.py tests the choice of jobs."""

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
    """Make every backend refuse to report a job's state."""

    def refresh(registry: Registry, job: Job) -> Job:
        raise CredentialError("the token has expired")

    monkeypatch.setattr(poller, "refresh", refresh)


@pytest.mark.usefixtures("refused")
def test_list_shows_the_last_state_of_a_job_that_cannot_be_polled(
    seed: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has the last state with the reason on standard error; JSON has the reason in `not_answered`."""
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
    """A script reads an empty list in the same way."""
    run("--json")
    assert json.loads(capsys.readouterr().out) == {
        "jobs": [],
        "sweeps": [],
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
def test_list_reports_an_empty_list(
    home: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], words: str
) -> None:
    """The message is on standard error, because standard output is for data."""
    run(*args)
    told = capsys.readouterr()
    assert (told.out, words in told.err) == ("", True)


def test_list_reports_that_no_job_matches(seed: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    """The message differs when the registry has jobs."""
    seed("done", State("succeeded"))
    run("--tag", "team=vision")
    assert "no job is like that" in capsys.readouterr().err


def test_list_on_a_narrow_terminal_names_the_missing_columns(
    seed: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user must not believe that the table is complete."""
    seed("a-job-with-a-name-of-some-length", State("failed", "preempted"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    run()
    told = capsys.readouterr().err
    assert "not shown for lack of room: BACKEND, PROGRESS, USD, SUBMITTED; --json shows all" in told


def test_list_in_80_columns_shows_ranks_and_resumable(
    seed: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROGRESS shrinks first: the state is complete, and the ranks are visible."""
    job = seed("digits-x4k2p", State("stopped", "user", resumable=True))
    progress = {"step": 123456, "max_steps": 2000000, "loss": 1.2345}
    Registry().database.execute("UPDATE attempts SET progress = ? WHERE job_id = ?", (json.dumps(progress), job.id))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    run()
    head, row = capsys.readouterr().out.splitlines()
    assert ("RANKS" in head, "PROGRESS" in head, "BACKEND" in head) == (True, True, True)
    assert ("stopped (user), resumable " in row, "…" in row, len(row) <= 80) == (True, True, True)


def test_list_refuses_an_unknown_backend(seed: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt backend is an error, not an empty list; a backend whose plug-in was removed is known from its jobs."""
    seed("done", State("succeeded"))
    Registry().database.execute("UPDATE jobs SET backend = 'gone'")
    run("--backend", "gone", "--json")
    assert [job["job"] for job in json.loads(capsys.readouterr().out)["jobs"]] == ["done"]
    run("--backend", "ssh")
    assert "no job is like that" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--backend nope: there is no such backend"):
        run("--backend", "nope", "--json")


@pytest.mark.parametrize("line", ["--tag =x", "--since soon", "--active --state failed", "--state lost", "-n 0"])
def test_list_refuses_invalid_options(cli: Any, line: str) -> None:
    """Invalid options exit with code 2 and a message without a traceback."""
    result = cli("list", *line.split())
    assert (result.code, result.stdout, "Traceback" in result.stderr) == (2, "", False)

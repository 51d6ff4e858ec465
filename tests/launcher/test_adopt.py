"""`doctor` names running jobs of a deleted registry, and `adopt` adds them again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.agent import node_folder
from cloudtrain.launcher.backend import Check, FoundAttempt, load
from cloudtrain.launcher.errors import ConfigError, CredentialError
from cloudtrain.launcher.jobs import adopt
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job
from doubles.signatures import MakeProject


def forget(home: Path) -> None:
    """Delete only the registry of the home folder."""
    for path in home.glob("registry.sqlite*"):
        path.unlink()


@pytest.fixture
def lost(cli: Any, project: MakeProject, idle_python: Path) -> Iterator[Path]:
    """Return a project with a running local job `lost` at 3.60 USD an hour, unknown to the registry."""
    more = "limits: {max_duration: 1h}\nproject: vision\n"
    folder = project(f"{more}local: {{python: {idle_python}, price_per_hour: 3.6}}\n")
    assert cli("submit", "-d", "-y", "--name", "lost", cwd=folder).code == 0
    forget(cli.home)
    yield folder
    root = cli.home / "local/lost/attempt-1/node-0"
    node_folder.ask_to_stop(root, "now")
    node_folder.end([root])


def test_deleted_registry_loses_no_running_job(cli: Any, lost: Path) -> None:
    """After `adopt` the job is shown, followed, counted and stopped like any job."""
    done = cli("doctor", "local")
    assert "the registry does not know 1 running: lost" in done.stdout
    assert "cloudtrain adopt --backend local" in done.stdout
    assert not (cli.home / "registry.sqlite").exists()
    assert cli("budget", "set", "vision", "10").code == 0
    done = cli("adopt", "-y", "--backend", "local", "--json")
    assert (done.code, done.json) == (0, {"adopted": ["lost"], "not_asked": {}}), done.stderr
    [held] = ledger.held(Registry(cli.home).database)
    assert (held.job_id, held.project) == ("lost", "vision")
    assert held.amount_micro is not None
    assert 3_600_000 <= held.amount_micro < 3_700_000
    assert "registry does not know" not in cli("doctor", "local").stdout
    status = cli("status", "lost", "--json").json
    assert (status["state"], status["attempt"], status["name"]) == ("running", 1, "loop")
    assert status["spend_usd"] is not None
    assert cli("logs", "lost").code == 0
    assert cli("stop", "lost", "--now", "-y").code == 0
    cli("wait", "lost")
    assert cli("status", "lost", "--json").json["state"] == "stopped"
    assert ledger.held(Registry(cli.home).database) == []


def test_adopt_asks_first_except_for_a_named_job(cli: Any, lost: Path) -> None:
    """Without `-y` and an answer no job is adopted; an unknown name exits with code 8."""
    assert cli("adopt", "--backend", "local").code != 0
    assert cli("list", "--json").json["jobs"] == []
    done = cli("adopt", "--backend", "local", "other")
    assert (done.code, "no running job `other`" in done.stderr) == (8, True)
    assert cli("adopt", "--backend", "local", "lost").code == 0
    done = cli("adopt", "-y", "--backend", "local")
    assert (done.code, "no running job of this home is missing" in done.stderr) == (0, True)


def test_job_without_a_record_is_named_and_hides_no_job(cli: Any, lost: Path) -> None:
    """The record is lost: the job is named, with the way to end the job."""
    (cli.home / "local/lost/attempt-1/record.json").unlink()
    assert "registry does not know 1 running: lost" in cli("doctor", "local").stdout
    done = cli("adopt", "--backend", "local", "lost")
    assert (done.code, "its record is missing or damaged" in done.stderr) == (3, True)
    done = cli("adopt", "--backend", "local", "-y", "--json")
    assert (done.code, done.json["adopted"]) == (0, [])


def test_backend_that_cannot_be_asked_hides_no_local_job(cli: Any, lost: Path) -> None:
    """Each backend that fails has a line, and the local job is adopted."""
    done = cli("adopt", "-y", "--json", cwd=lost.parent, env={"AWS_EC2_METADATA_DISABLED": "true"})
    assert (done.code, done.json["adopted"]) == (0, ["lost"]), done.stderr
    assert "sagemaker" in done.json["not_asked"]
    assert "sagemaker: not asked: " in done.stderr


@pytest.fixture
def found() -> FoundAttempt:
    """Return a found attempt with a complete record."""
    job = make_job("found", 2)
    return FoundAttempt("found", 2, {"folder": "/x", "nodes": 1, "checkpoint_dir": "/x"}, adopt.record_of(job))


def test_attempt_of_a_known_job_joins_its_job(home: Path, found: FoundAttempt) -> None:
    """A restored registry may know attempt 1; a second adoption changes nothing; the record has no alert's address."""
    registry = Registry()
    registry.add("found", lambda *given: make_job(*given), exclusive=True, key=None)
    for _ in range(2):
        adopt.adopt(registry, adopt.row_of("local", found), found)
    job = registry.find("found")
    assert [attempt.number for attempt in registry.attempts(job)] == [1, 2]
    assert (job.attempt.phase, job.attempt.ref) == ("sent", found.ref)
    job = make_job("found", 1, config={"notify": [{"slack": "https://hooks.example/secret"}], "name": "x"})
    assert "hooks.example" not in json.dumps(adopt.record_of(job))


@pytest.mark.parametrize("change", [{"plan": {}}, {"plan": None}, {"config": 7}, {"sent_s": "x"}, {"bundle": None}])
def test_damaged_record_is_refused(found: FoundAttempt, change: dict[str, Any]) -> None:
    """The record is untrusted input, because others may have write access."""
    assert found.record is not None
    with pytest.raises(ConfigError, match="missing or damaged"):
        adopt.row_of("local", FoundAttempt("found", 1, {}, {**found.record, **change}))
    with pytest.raises(ConfigError, match="missing or damaged"):
        adopt.row_of("local", FoundAttempt("../up", 1, {}, found.record))


def test_doctor_reports_a_failed_backend_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed check no second line repeats the reason."""
    backend = load("local")

    def refused(config: Any, home: Path) -> list[FoundAttempt]:
        raise CredentialError("no key")

    monkeypatch.setattr(backend, "jobs", refused)
    monkeypatch.setattr(backend, "doctor", lambda config: [Check("key", "fail", "none")])
    assert [check.name for check in adopt.checks("local", None)] == ["key"]
    monkeypatch.setattr(backend, "doctor", lambda config: [])
    assert [check.name for check in adopt.checks("local", None)] == ["jobs"]

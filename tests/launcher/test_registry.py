"""The registry: many processes at once, lookup, and files that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudtrain.launcher.errors import ConfigError, NoSuchJobError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.store.database import Database
from cloudtrain.launcher.store.registry import Registry, submitter_lives, this_process

# One process of many: waits for the others at the gate, then adds its jobs and prints their ids.
ADDER = """\
import json, sys, time
from pathlib import Path
from cloudtrain.launcher.job import Attempt, Job
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.store.registry import Registry, this_process

count, key, gate = int(sys.argv[1]), sys.argv[2] or None, Path(sys.argv[3])

def make(job_id, number=1):
    plan = Plan.load(dict.fromkeys(("instances", "nproc_per_node", "ranks", "cap_s"), 1))
    attempt = Attempt(job_id, 1, "intent", plan, {}, 0.0, this_process())
    return Job(job_id, "many", "local", 0.0, {}, "f", {}, attempt, key)

print("ready", flush=True)
while not gate.exists():
    time.sleep(0.001)
registry = Registry()
print(json.dumps([[job.id, new] for job, new in (
    registry.add("many", make, exclusive=False, key=key) for _ in range(count))]))
"""


def add_from_processes(count: int, each: int, key: str, gate: Path) -> list[tuple[str, bool]]:
    """Return the ids that `count` processes got, all adding at the same moment, each with whether it was new."""
    command = [sys.executable, "-c", ADDER, str(each), key, str(gate)]
    adders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    for adder in adders:
        assert adder.stdout is not None
        assert adder.stdout.readline() == "ready\n"
    gate.touch()
    answers = [adder.communicate(timeout=60)[0] for adder in adders]
    return [(job_id, new) for answer in answers for job_id, new in json.loads(answer)]


@pytest.fixture
def registry(home: Path) -> Registry:
    """Return an empty registry in the private home."""
    return Registry()


def test_registry_gives_many_processes_distinct_ids_and_loses_none(home: Path, tmp_path: Path) -> None:
    """Sixteen processes that meet a missing file at once add five jobs each: 80 jobs."""
    added = add_from_processes(16, 5, "", tmp_path / "gate")
    ids = [job_id for job_id, _ in added]
    assert len(set(ids)) == len(ids) == 80
    assert {job.id for job in Registry().jobs()} == set(ids)


def test_registry_gives_one_job_to_many_processes_with_one_key(home: Path, tmp_path: Path) -> None:
    """Of sixteen processes with the same idempotency key one gets a new job, the others the same one."""
    added = add_from_processes(16, 1, "deploy-7", tmp_path / "gate")
    assert len({job_id for job_id, _ in added}) == 1
    assert [new for _, new in added].count(True) == 1
    assert len(Registry().jobs()) == 1


def test_registry_refuses_a_chosen_name_that_is_taken(registry: Registry, make_job: Callable[..., Job]) -> None:
    """A name that the user chose is an id: it is given once, and the error says what to do."""
    registry.add("digits", make_job, exclusive=True, key=None)
    with pytest.raises(UsageError, match="exists already") as caught:
        registry.add("digits", make_job, exclusive=True, key=None)
    assert "--name" in caught.value.hint


def test_registry_refuses_a_chosen_name_that_is_another_jobs_config_name(
    registry: Registry, make_job: Callable[..., Job]
) -> None:
    """`--name digits` after a plain submit of `digits` would make `status digits` mean two jobs."""
    registry.add("digits", make_job, exclusive=False, key=None)
    with pytest.raises(UsageError, match="exists already"):
        registry.add("digits", make_job, exclusive=True, key=None)


def test_registry_keeps_nothing_of_a_job_that_could_not_be_made(registry: Registry) -> None:
    """An exception inside `make` rolls the transaction back."""

    def fail(job_id: str, number: int) -> Job:
        raise RuntimeError(job_id)

    with pytest.raises(RuntimeError):
        registry.add("digits", fail, exclusive=True, key=None)
    assert registry.jobs() == []


def test_registry_finds_by_id_name_prefix_and_last(registry: Registry, make_job: Callable[..., Job]) -> None:
    """Each of the ways to name a job leads to it; a config's name to the newest of that name."""
    first, _ = registry.add("digits", make_job, exclusive=False, key=None)
    second, _ = registry.add("digits", make_job, exclusive=False, key=None)
    other, _ = registry.add("charlm", make_job, exclusive=False, key=None)
    assert registry.find(first.id).id == first.id
    assert registry.find("digits").id == second.id
    assert registry.find("cha").id == registry.find("last").id == other.id


def test_registry_names_the_candidates_of_an_ambiguous_prefix(registry: Registry, make_job: Callable[..., Job]) -> None:
    """A prefix of two ids is no answer; the error lists both."""
    ids = [registry.add("digits", make_job, exclusive=False, key=None)[0].id for _ in range(2)]
    with pytest.raises(NoSuchJobError, match="could be any of") as caught:
        registry.find("digi")
    assert all(job_id in caught.value.message for job_id in ids)


@pytest.mark.parametrize("key", ["nope", "", "%", "_", "digits-%"])
def test_registry_says_when_there_is_no_such_job(registry: Registry, make_job: Callable[..., Job], key: str) -> None:
    """What names no job is exit code 8, SQL's wildcards among it."""
    registry.add("digits", make_job, exclusive=False, key=None)
    with pytest.raises(NoSuchJobError) as caught:
        registry.find(key)
    assert caught.value.exit_code == 8


def test_registry_gives_back_what_was_stored(registry: Registry, make_job: Callable[..., Job]) -> None:
    """State, progress and the backend's handle come back as they went in."""
    job, _ = registry.add("digits", make_job, exclusive=True, key="k")
    state = State("failed", "error", True, {"rank": 1, "message": "boom"}, 1.5, 2.5, 3, "said")
    registry.mark_sent(job.attempt, {"folder": "/x"})
    registry.set_state(job.attempt, state, {"step": 7, "loss": 0.1234567890123456789})
    found = registry.find("digits")
    assert (found.attempt.state, found.attempt.ref, found.attempt.phase) == (state, {"folder": "/x"}, "sent")
    assert found.attempt.progress == {"step": 7, "loss": 0.1234567890123456789}
    assert (found.idempotency_key, found.active) == ("k", False)


def test_registry_lists_the_newest_first_and_only_the_active(registry: Registry, make_job: Callable[..., Job]) -> None:
    """`active` leaves out what has ended, `limit` the older ones."""
    jobs = [registry.add(name, make_job, exclusive=True, key=None)[0] for name in ("a", "b", "c")]
    registry.set_state(jobs[1].attempt, State("succeeded"), {})
    assert [job.id for job in registry.jobs()] == ["c", "b", "a"]
    assert [job.id for job in registry.jobs(active=True)] == ["c", "a"]
    assert [job.id for job in registry.jobs(limit=1)] == ["c"]


def test_registry_takes_a_further_attempt_only_after_the_last_has_ended(
    registry: Registry, make_job: Callable[..., Job]
) -> None:
    """Two resumes at once make one attempt: the second finds the first one active."""
    job, _ = registry.add("digits", make_job, exclusive=True, key=None)
    second = replace(job.attempt, number=2)
    with pytest.raises(UsageError):
        registry.add_attempt(second, {}, {})
    registry.set_state(job.attempt, State("stopped", "user"), {})
    registry.add_attempt(second, {}, {})
    with pytest.raises(UsageError):
        registry.add_attempt(second, {}, {})
    assert registry.find("digits").attempt.number == 2


def test_registry_returns_earlier_attempts(registry: Registry, make_job: Callable[..., Job]) -> None:
    """An attempt that there was not is exit code 8, with the range that there is."""
    job, _ = registry.add("digits", make_job, exclusive=True, key=None)
    assert registry.attempt(job, 1).name == "digits-1"
    with pytest.raises(NoSuchJobError, match="no attempt 2"):
        registry.attempt(job, 2)


def test_registry_survives_a_process_killed_inside_a_transaction(home: Path, make_job: Callable[..., Job]) -> None:
    """`kill -9` between insert and commit leaves no trace, and no lock."""
    program = ADDER.replace('{}, "f"', '{}, __import__("os").kill(__import__("os").getpid(), 9) or "f"')
    home.mkdir()
    (home / "gate").touch()
    killed = subprocess.run(
        [sys.executable, "-c", program, "1", "", str(home / "gate")], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    registry = Registry()
    registry.add("after", make_job, exclusive=True, key=None)
    assert [job.id for job in registry.jobs()] == ["after"]


def test_registry_refuses_a_file_that_is_no_database(home: Path) -> None:
    """A damaged file is a config error that names it, and it is not overwritten."""
    home.mkdir()
    (home / "registry.sqlite").write_bytes(b"not a database, " * 500)
    with pytest.raises(ConfigError) as caught:
        Registry()
    assert "registry.sqlite" in str(caught.value)
    assert (home / "registry.sqlite").read_bytes().startswith(b"not a database")


def test_registry_refuses_the_file_of_a_newer_version(registry: Registry) -> None:
    """A schema that this version does not know is left alone, and the error says so."""
    with sqlite3.connect(registry.path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    registry.close()
    with pytest.raises(ConfigError, match="schema 99"):
        Registry()


def test_registry_whose_pages_are_damaged_is_a_config_error(
    registry: Registry, make_job: Callable[..., Job], home: Path
) -> None:
    """Damage behind the file's header shows on the first read; it too is said in our words."""
    for number in range(40):
        registry.add(f"job{number}", make_job, exclusive=True, key=None)
    registry.close()
    size = registry.path.stat().st_size
    with registry.path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with pytest.raises(ConfigError):
        Registry().jobs()


def test_registry_cannot_be_a_folder(home: Path) -> None:
    """What SQLite cannot open at all is a config error too."""
    (home / "registry.sqlite").mkdir(parents=True)
    with pytest.raises(ConfigError, match="registry"):
        Registry()


def test_home_that_cannot_be_made_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder below a file is said with its path and the variable that mends it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ConfigError, match="cannot keep its state") as caught:
        Registry()
    assert "CLOUDTRAIN_HOME" in caught.value.hint


def test_submitter_is_known_by_its_start_not_by_its_pid_alone(make_job: Callable[..., Job]) -> None:
    """A reused pid is not the submitter; this process is."""
    attempt = make_job("a").attempt
    assert submitter_lives(attempt)
    assert not submitter_lives(replace(attempt, submitter={**this_process(), "stamp": "other"}))
    assert not submitter_lives(replace(attempt, submitter={**this_process(), "stamp": None}))


def test_submitter_elsewhere_is_believed_for_a_while(make_job: Callable[..., Job]) -> None:
    """A pid of another machine says nothing here, so the intent's age decides."""
    attempt = replace(make_job("a").attempt, submitter={"host": "elsewhere", "pid": 1, "stamp": "x"})
    assert submitter_lives(attempt)
    assert not submitter_lives(replace(attempt, created_s=attempt.created_s - 3600))


def test_registry_lets_go_of_a_job_that_never_ran(registry: Registry, make_job: Callable[..., Job]) -> None:
    """A submit that the backend refused holds neither its idempotency key nor its name; the platform's is a new one."""
    job, _ = registry.add("mine", make_job, exclusive=True, key="k")
    registry.mark_never_sent(job.attempt, State("failed", "error"))
    assert registry.never_ran(job)
    again, is_new = registry.add("mine", make_job, exclusive=True, key="k")
    assert (again.id, is_new, again.attempt.name) == ("mine", True, "mine-2")
    assert registry.find("mine").attempt.state.state == "pending"
    registry.mark_sent(again.attempt, {"x": 1})
    assert not registry.never_ran(again)
    with pytest.raises(UsageError, match="exists already"):
        registry.add("mine", make_job, exclusive=True, key=None)


def test_registry_believes_the_answer_more_than_the_guess(registry: Registry, make_job: Callable[..., Job]) -> None:
    """An attempt given up too early is there again once its submitter has the backend's word, and stays there."""
    job, _ = registry.add("mine", make_job, exclusive=True, key=None)
    gone = State("failed", "error")
    registry.mark_never_sent(job.attempt, gone)
    registry.mark_sent(job.attempt, {"x": 1})
    assert registry.find("mine").active
    registry.mark_never_sent(job.attempt, gone)
    assert (registry.find("mine").active, registry.find("mine").attempt.phase) == (True, "sent")


def test_registry_opens_on_a_full_disk(registry: Registry, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SQLite has no room for its own files, the reserve goes, and jobs can be seen and stopped."""
    registry.close()
    opened = Database._open

    def open_when_there_is_room(self: Database) -> None:
        if (home / "registry.reserve").exists():
            raise sqlite3.OperationalError("disk I/O error")
        opened(self)

    monkeypatch.setattr(Database, "_open", open_when_there_is_room)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert Registry().jobs() == []


def test_slow_look_never_takes_back_an_end(home: Path, make_job: Callable[..., Job]) -> None:
    """One that began before the end and is stored after it: the attempt would run on in the meter for ever."""
    registry = Registry()
    job, _ = registry.add("one", lambda *_: make_job("one"), exclusive=True, key=None)
    registry.mark_sent(job.attempt, {"x": 1})
    assert registry.set_state(job.attempt, State("running", started_s=1000.0), {"step": 1})
    assert registry.set_state(job.attempt, State("failed", "error", started_s=1000.0, ended_s=1060.0), {"step": 2})
    assert not registry.set_state(job.attempt, State("running", started_s=1000.0), {"step": 1})
    registry.set_unreachable(job.attempt)
    registry.mark_sent(job.attempt, {"x": 1})  # by one that has settled a lost submit too
    found = registry.find("one").attempt
    assert (found.state.state, found.progress, found.unreachable_since_s) == ("failed", {"step": 2}, None)


def test_nobody_else_reads_the_file(home: Path) -> None:
    """Whatever the folder allows: configs may hold addresses that let anybody in."""
    home.mkdir(mode=0o755)
    database = Database(home)
    database.execute("SELECT 1")
    found = {path.name: path.stat().st_mode & 0o777 for path in home.iterdir() if "sqlite" in path.name}
    database.close()
    assert set(found.values()) == {0o600}, found

"""The registry: many processes at once, lookup, and unusable files."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudtrain.launcher.backend import Bundle
from cloudtrain.launcher.commands import doctor
from cloudtrain.launcher.completion import candidates
from cloudtrain.launcher.errors import ConfigError, NoSuchJobError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.money import period
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import Held
from cloudtrain.launcher.store.database import Database
from cloudtrain.launcher.store.registry import Registry, submitter_lives, this_process
from doubles.plans import make_job, plan_of

# A single process of many: waits for the gate file, then adds its jobs and prints their ids.
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
    """Return the ids that `count` simultaneous processes got, each with a flag for a new job."""
    command = [sys.executable, "-c", ADDER, str(each), key, str(gate)]
    adders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    for adder in adders:
        assert adder.stdout.readline() == "ready\n"
    gate.touch()
    answers = [adder.communicate(timeout=60)[0] for adder in adders]
    return [(job_id, new) for answer in answers for job_id, new in json.loads(answer)]


def test_simultaneous_processes_get_distinct_ids_or_the_job_of_their_key(home: Path, tmp_path: Path) -> None:
    """Sixteen processes that create the missing file at once add five jobs each; with one key all get a single job."""
    ids = [job_id for job_id, _ in add_from_processes(16, 5, "", tmp_path / "gate")]
    assert len(set(ids)) == len(ids) == 80
    assert {job.id for job in Registry().jobs()} == set(ids)
    added = add_from_processes(16, 1, "deploy-7", tmp_path / "second gate")
    assert len({job_id for job_id, _ in added}) == 1
    assert [new for _, new in added].count(True) == 1
    assert len(Registry().jobs()) == 81


@pytest.mark.parametrize("exclusive", [True, False])
def test_registry_refuses_a_chosen_name_that_is_taken(registry: Registry, exclusive: bool) -> None:
    """A chosen name is an id and is given once; as the config's name of a job, `status digits` would be ambiguous."""
    registry.add("digits", make_job, exclusive=exclusive, key=None)
    with pytest.raises(UsageError, match="exists already") as caught:
        registry.add("digits", make_job, exclusive=True, key=None)
    assert "--name" in caught.value.hint


def test_registry_survives_a_failure_inside_a_transaction(registry: Registry, home: Path) -> None:
    """An exception inside `make`, and `kill -9` between insert and commit, leave neither a row nor a lock."""

    def fail(job_id: str, number: int) -> Job:
        raise RuntimeError(job_id)

    with pytest.raises(RuntimeError):
        registry.add("digits", fail, exclusive=True, key=None)
    assert registry.jobs() == []
    program = ADDER.replace('{}, "f"', '{}, __import__("os").kill(__import__("os").getpid(), 9) or "f"')
    (home / "gate").touch()
    killed = subprocess.run(
        [sys.executable, "-c", program, "1", "", str(home / "gate")], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    registry = Registry()
    registry.add("after", make_job, exclusive=True, key=None)
    assert [job.id for job in registry.jobs()] == ["after"]


def test_registry_finds_by_id_name_prefix_and_last(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    """Each form finds the job; a name finds, and says, its newest job, and a prefix of two ids lists both."""
    first, _ = registry.add("digits", make_job, exclusive=False, key=None)
    second, _ = registry.add("digits", make_job, exclusive=False, key=None)
    other, _ = registry.add("charlm", make_job, exclusive=False, key=None)
    assert registry.find(first.id).id == first.id
    assert [registry.find("digits").id for _ in range(2)] == [second.id] * 2
    assert capsys.readouterr().err == f"`digits` is the name of 2 jobs; this is {second.id}, the newest\n"
    assert registry.find("cha").id == registry.find("last").id == other.id
    with pytest.raises(NoSuchJobError, match="could be any of") as caught:
        registry.find("digi")
    assert all(job.id in caught.value.message for job in (first, second))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        *(("lats", "last"), ("digist", "digits"), ("digits-%", "digits")),
        *((key, "") for key in ("qqq", "nope", "", "%", "_")),
    ],
)
def test_unknown_job_has_a_suggestion(registry: Registry, key: str, meant: str) -> None:
    """The hint is `last`, or a similar name; SQL's wildcards are unknown names too, and the exit code is 8."""
    registry.add("digits", make_job, exclusive=True, key=None)
    with pytest.raises(NoSuchJobError) as caught:
        registry.find(key)
    assert caught.value.exit_code == 8
    assert caught.value.hint.startswith(f"did you mean `{meant}`? " if meant else "cloudtrain list")


def test_registry_returns_the_stored_values_newest_first(registry: Registry) -> None:
    """State, progress and the backend's handle are unchanged; `active` excludes ended jobs, `limit` older jobs."""
    job, _ = registry.add("digits", make_job, exclusive=True, key="k")
    state = State("failed", "error", True, {"rank": 1, "message": "boom"}, 1.5, 2.5, 3, "said")
    registry.mark_sent(job.attempt, {"folder": "/x"})
    registry.set_state(job.attempt, state, {"step": 7, "loss": 0.1234567890123456789})
    found = registry.find("digits")
    assert (found.attempt.state, found.attempt.ref, found.attempt.phase) == (state, {"folder": "/x"}, "sent")
    assert found.attempt.progress == {"step": 7, "loss": 0.1234567890123456789}
    assert (found.idempotency_key, found.active) == ("k", False)
    jobs = [registry.add(name, make_job, exclusive=True, key=None)[0] for name in ("a", "b", "c")]
    registry.set_state(jobs[1].attempt, State("succeeded"), {})
    assert [job.id for job in registry.jobs()] == ["c", "b", "a", "digits"]
    assert [job.id for job in registry.jobs(active=True)] == ["c", "a"]
    assert [job.id for job in registry.jobs(limit=1)] == ["c"]


def test_registry_keeps_each_attempt_and_adds_one_at_a_time(registry: Registry) -> None:
    """Of two simultaneous resumes the second finds the first; a missing attempt, or a removed job, is an error."""
    job, _ = registry.add("digits", make_job, exclusive=True, key=None)
    assert registry.attempt(job, 1).name == "digits-1"
    with pytest.raises(NoSuchJobError, match="no attempt 2"):
        registry.attempt(job, 2)
    second = replace(job.attempt, number=2)
    with pytest.raises(UsageError):
        registry.add_attempt(second, {}, {})
    registry.set_state(job.attempt, State("stopped", "user"), {})
    registry.add_attempt(second, {}, {})
    with pytest.raises(UsageError):
        registry.add_attempt(second, {}, {})
    assert registry.find("digits").attempt.number == 2
    registry.remove(job.id)  # by another process, while a resume was being prepared
    with pytest.raises(NoSuchJobError, match="removed meanwhile"):
        registry.add_attempt(replace(second, number=3), {}, {})


def test_config_of_an_attempt_that_was_never_sent_is_not_the_jobs(registry: Registry) -> None:
    """The job has the config and the settings before the attempt, unless the attempt was sent after all."""
    job, _ = registry.add("one", make_job, exclusive=True, key=None)
    registry.mark_sent(job.attempt, {})
    registry.set_state(job.attempt, State("failed", "error"), {})
    who = {"settings": ["a=1"], "before": {"config": job.config, "bundle": job.bundle, "settings": []}}
    second = replace(job.attempt, number=2, phase="intent", submitter=who)
    registry.add_attempt(second, {"name": "new"}, {})
    registry.mark_never_sent(second, State("failed", "error"))
    found = registry.find("one")
    assert (found.config, found.bundle, found.attempt.settings) == (job.config, job.bundle, ())
    registry.mark_sent(second, {"x": 1})
    found = registry.find("one")
    assert (found.config, found.bundle, found.attempt.settings) == ({"name": "new"}, {}, ("a=1",))


def test_registry_refuses_an_unusable_place(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file and overwrites no damaged file, or the state folder with the variable for its path."""
    home.mkdir()
    (home / "registry.sqlite").write_bytes(b"not a database, " * 500)
    with pytest.raises(ConfigError) as caught:
        Registry()
    assert "registry.sqlite" in str(caught.value)
    assert (home / "registry.sqlite").read_bytes().startswith(b"not a database")
    (home / "registry.sqlite").unlink()
    (home / "registry.sqlite").mkdir()
    with pytest.raises(ConfigError, match="registry"):
        Registry()
    (home / "file").touch()
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(home / "file" / "home"))
    with pytest.raises(ConfigError, match="cannot keep its state") as caught:
        Registry()
    assert "CLOUDTRAIN_HOME" in caught.value.hint


def test_registry_refuses_the_file_of_another_version(registry: Registry) -> None:
    """An unknown schema is unchanged, and the error names the schema."""
    with sqlite3.connect(registry.database.path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    registry.close()
    with pytest.raises(ConfigError, match="schema 99"):
        Registry()


def test_damaged_name_in_the_schema_is_a_config_error(registry: Registry) -> None:
    """SQLite's message holds the damaged name, whose bytes need not be text; doctor and completion go on."""
    with contextlib.closing(sqlite3.connect(registry.database.path)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET name = CAST(x'78a8' AS TEXT), sql = 'x'")
        db.commit()
    registry.close()
    with pytest.raises(ConfigError, match="malformed database schema"):
        Registry()
    assert candidates._read("SELECT id FROM jobs") == []
    assert "malformed database schema" in doctor._registry(registry.database.path).found


def test_registry_with_damaged_pages_is_a_config_error(registry: Registry) -> None:
    """Damage after the file's header appears at the first read."""
    for number in range(40):
        registry.add(f"job{number}", make_job, exclusive=True, key=None)
    registry.close()
    size = registry.database.path.stat().st_size
    with registry.database.path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with pytest.raises(ConfigError):
        Registry().jobs()


def filled(registry: Registry, count: int) -> bytes:
    """Return the registry's file with so many ended jobs of 9 micro-dollars each; the file is closed."""
    plan = plan_of(worst_case_micro=9, worst_case_usd=9e-6, price_micro=9 * 3600)
    with registry.database.transaction():
        for number in range(count):
            job = make_job(f"job{number}", plan=plan)
            registry.adopt(job, {})
            ledger.adopt(registry.database, Held(job.id, 1, "", 9, 1.0))
            registry.set_state(job.attempt, State("succeeded", started_s=10.0, ended_s=11.0), {})
    registry.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    registry.close()
    return registry.database.path.read_bytes()


def sums(registry: Registry, data: bytes | bytearray) -> tuple[int, Mapping[str, Mapping[str, int]]]:
    """Return the sums of the jobs and of the ledger in a registry with this content. Raises ConfigError."""
    path = registry.database.path
    for beside in ("-wal", "-shm"):
        Path(f"{path}{beside}").unlink(missing_ok=True)
    path.write_bytes(data)
    with contextlib.closing(Database()) as database:
        spent = period.total(period.spent_between(database, 0.0, 1e12, 1e12))
        return (0 if spent.unknown else spent.spent_micro), ledger.accounts(database, 1e12).months


def pages(*numbers: int) -> list[slice]:
    """Return the places of the pages, counted from 1."""
    return [slice((number - 1) * 4096, number * 4096) for number in numbers]


@pytest.mark.parametrize("table", ["attempts", "reservations"])
def test_sums_with_rows_in_a_wrong_place_are_a_config_error(registry: Registry, table: str) -> None:
    """SQLite reads two exchanged pages of one table without an error, and misses rows; a sum must not."""
    root = registry.database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,))[0][0]
    data = bytearray(filled(registry, 300))
    (page,) = pages(root)  # of a tree: at 12 the places of its cells, which begin with a child
    places = (int.from_bytes(data[page][at : at + 2], "big") for at in (12, 14))
    one, two = pages(*(int.from_bytes(data[page][at : at + 4], "big") for at in places))
    data[one], data[two] = data[two], data[one]
    with pytest.raises(ConfigError, match=f"its table {table} is damaged"):
        sums(registry, data)


@pytest.mark.soak
def test_damaged_page_changes_no_sum_in_silence(registry: Registry) -> None:
    """A page of zeros or noise, two exchanged pages, a page twice, a cut file: the file is named, or the sums hold."""
    whole, chance = filled(registry, 150), random.Random(1)
    right = sums(registry, whole)
    assert right == (150 * 9, {"": {"1970-01": 150 * 9}})
    count = len(whole) // 4096
    for number, kind in itertools.product(range(1, count + 1), ("zeros", "noise", "exchanged", "twice", "cut")):
        data = bytearray(whole)
        here, there = pages(number, chance.randint(1, count))
        if kind in ("zeros", "noise"):
            data[here] = bytes(4096) if kind == "zeros" else chance.randbytes(4096)
        elif kind == "cut":
            del data[here.start + chance.randrange(4096) :]
        else:
            data[here], data[there] = whole[there], whole[here] if kind == "exchanged" else whole[there]
        with contextlib.suppress(ConfigError):
            assert sums(registry, data) in (right, (0, right[1])), (number, kind)


def test_rows_of_a_newer_version_are_read(registry: Registry) -> None:
    """A field that this version does not know makes no row a damaged row."""
    job, _ = registry.add("newer", make_job, exclusive=True, key=None)
    registry.mark_sent(job.attempt, {})
    for column in ("plan", "request", "outcome", "progress", "submitter", "ref"):
        registry.database.execute(f"UPDATE attempts SET {column} = json_set({column}, '$.newer', 1)")
    found = registry.find(job.id)
    assert (found.attempt.phase, found.attempt.state) == ("sent", State("pending"))
    bundle = Bundle("0" * 64, Path("x"), 1, 1, 1)
    assert Bundle.load({**bundle.dump(), "newer": 1}) == bundle


def test_submitter_is_identified_by_pid_and_start_time() -> None:
    """A reused pid is not the submitter; of a pid of a different machine the age of the intent decides."""
    attempt = make_job("a").attempt
    assert submitter_lives(attempt)
    assert not submitter_lives(replace(attempt, submitter={**this_process(), "stamp": "other"}))
    assert not submitter_lives(replace(attempt, submitter={**this_process(), "stamp": None}))
    attempt = replace(make_job("a").attempt, submitter={"host": "elsewhere", "pid": 1, "stamp": "x"})
    assert submitter_lives(attempt)
    for hours in (-1, 1):  # an intent of the future is of a clock that was set back since
        assert not submitter_lives(replace(attempt, created_s=attempt.created_s + 3600 * hours))


def test_registry_frees_the_name_of_a_job_that_never_ran(registry: Registry) -> None:
    """A refused submit holds neither its idempotency key nor its name; the name on the platform is new."""
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


def test_registry_opens_on_a_full_disk(registry: Registry, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If SQLite has no room for its files, the reserve file is deleted, and jobs can be listed and stopped."""
    registry.close()
    opened = Database._open

    def open_when_there_is_room(self: Database) -> None:
        if (home / "registry.reserve").exists():
            raise sqlite3.OperationalError("disk I/O error")
        opened(self)

    monkeypatch.setattr(Database, "_open", open_when_there_is_room)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert Registry().jobs() == []


def test_ends_are_never_reverted(registry: Registry) -> None:
    """A late poll must not make an attempt run on in the meter; an attempt that was given up too early stays active."""
    job, _ = registry.add("one", lambda *_: make_job("one"), exclusive=True, key=None)
    registry.mark_sent(job.attempt, {"x": 1})
    assert registry.set_state(job.attempt, State("running", started_s=1000.0), {"step": 1})
    assert registry.set_state(job.attempt, State("failed", "error", started_s=1000.0, ended_s=1060.0), {"step": 2})
    assert not registry.set_state(job.attempt, State("running", started_s=1000.0), {"step": 1})
    registry.set_unreachable(job.attempt)
    registry.mark_sent(job.attempt, {"x": 1})  # as after a lost submit was settled
    found = registry.find("one").attempt
    assert (found.state.state, found.progress, found.unreachable_since_s) == ("failed", {"step": 2}, None)
    job, _ = registry.add("mine", make_job, exclusive=True, key=None)
    gone = State("failed", "error")
    registry.mark_never_sent(job.attempt, gone)
    registry.mark_sent(job.attempt, {"x": 1})
    assert registry.find("mine").active
    registry.mark_never_sent(job.attempt, gone)
    assert (registry.find("mine").active, registry.find("mine").attempt.phase) == (True, "sent")


def test_registry_file_is_readable_only_by_its_owner(home: Path) -> None:
    """The mode does not depend on the folder, because configs may contain secret addresses."""
    home.mkdir(mode=0o755)
    database = Database(home)
    database.execute("SELECT 1")
    found = {path.name: path.stat().st_mode & 0o777 for path in home.iterdir() if "sqlite" in path.name}
    database.close()
    assert set(found.values()) == {0o600}, found

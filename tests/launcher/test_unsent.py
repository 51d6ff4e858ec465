"""Jobs that were not sent, damaged rows of the registry, and jobs that are removed."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.local import backend as local
from cloudtrain.launcher import cli as command_line
from cloudtrain.launcher.backend import BUILT_IN, Sending, load
from cloudtrain.launcher.commands.rm import command as removal
from cloudtrain.launcher.errors import ConfigError, NoSuchJobError, UnreachableError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import remove, stopping, submit
from cloudtrain.launcher.jobs.view import view_of
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import Held
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job
from doubles.signatures import MakeJob, MakeProject

UNSENT = State("failed", "error", detail="not sent: no network", ended_s=2000.0)
DONE = State("succeeded", started_s=1000.0, ended_s=4600.0)
Command = Callable[..., tuple[int, str]]


def _spent(registry: Registry) -> int:
    return sum(micro for months in ledger.months(registry.database).values() for micro in months.values())


@pytest.fixture
def add(registry: Registry) -> Callable[..., Job]:
    """Return a function that journals a job with 5 USD reserved in the given state; None leaves the intent."""

    def put(name: str, state: State | None = DONE, **changes: Any) -> Job:
        job, _ = registry.add(name, lambda *given: make_job(*given, **changes), exclusive=True, key=None)
        ledger.reserve(registry.database, Held(name, job.attempt.number, "", 5_000_000, 1000.0))
        if state is UNSENT:
            registry.mark_never_sent(job.attempt, state)
        elif state is not None:
            registry.mark_sent(job.attempt, {"folder": "/x", "nodes": 1, "checkpoint_dir": "/x"})
            registry.set_state(job.attempt, state, {})
        return registry.find(name)

    return put


@pytest.fixture
def command(registry: Registry, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs the command line in this process and returns the exit code and all output."""

    def run(*args: str) -> tuple[int, str]:
        capsys.readouterr()
        code = command_line._run(list(args), debug=False, as_json="--json" in args)
        return code, "".join(capsys.readouterr())

    return run


def test_backend_without_hooks_may_have_sent_the_job() -> None:
    """For a plug-in without hooks, an unanswered send counts as sent."""
    silent, known = Sending(), Sending()
    known.prepares()
    error = UnreachableError("no answer")
    assert (silent.is_nothing_sent(error), known.is_nothing_sent(error)) == (False, True)
    assert silent.is_nothing_sent(ConfigError("refused"))
    known.creates()
    assert not known.is_nothing_sent(error)
    assert not known.is_nothing_sent(KeyboardInterrupt())


def test_refused_submit_is_no_attempt_of_its_name(
    cli: Any, project: MakeProject, home: Path, registry: Registry
) -> None:
    """A submit that fails before the platform knows the name leaves no row, reservation, folder or number."""
    (where := project()).joinpath("in-the-way").touch()
    refused = ("submit", "-d", "-y", "--name", "one", "--set", "checkpoint.uri=in-the-way")
    done = cli(*refused, cwd=where)
    assert (done.code, "folder cannot be made" in done.stderr) == (3, True), done.stderr
    assert (registry.jobs(), (home / "local/one").exists()) == ([], False)
    assert registry.database.execute("SELECT * FROM reservations") == []
    cli.ok("submit", "-d", "-y", "--name", "one", cwd=where)
    assert cli("status", "one", "--json").json["attempt"] == 1


def test_refused_submit_keeps_a_folder_that_the_registry_does_not_know(
    cli: Any, project: MakeProject, home: Path
) -> None:
    """The checkpoints of a job whose registry was lost survive a submit of the same name."""
    (home / "local/one/attempt-1").mkdir(parents=True)
    (saved := home / "local/one/checkpoints").mkdir()
    done = cli("submit", "-d", "-y", "--name", "one", cwd=project())
    assert (done.code, "choose another --name" in done.stderr, saved.exists()) == (2, True, True), done.stderr


def test_number_stays_taken_until_the_teams_ledger_knows_the_release(registry: Registry) -> None:
    """A released row goes with its entry for the ledger; an entry that is still to be written keeps the row."""
    for number, told in ((1, "closing"), (2, "closed")):
        ledger.reserve(registry.database, Held("one", number, "", 1, 1000.0), ledgers=["/mnt/team"])
        ledger.release(registry.database, "one", number, 1001.0)
        registry.database.execute("UPDATE tellings SET told = ? WHERE attempt = ?", (told, number))
        ledger.forget(registry.database, "one", number)
    rows = registry.database.execute("SELECT attempt FROM reservations JOIN tellings USING (job_id, attempt)")
    assert [row["attempt"] for row in rows] == [1]


def test_unsent_job_is_never_last_and_hidden_after_a_day(registry: Registry, add: MakeJob, command: Command) -> None:
    """A list shows unsent jobs for a day as `not sent`, `--all` always; without a sent job there is no last job."""
    add("fresh", UNSENT)
    with pytest.raises(NoSuchJobError):
        registry.find("last")
    add("done")
    assert "not sent" in command("list")[1]
    add("old", UNSENT, created_s=1000.0)
    for _ in range(2):  # made, then stored
        assert "old" not in command("list")[1]
        assert "fresh" in command("list")[1]
    assert "old" in command("list", "--all")[1]
    assert command("status")[1].startswith("done ")
    assert command("status", "fresh")[1].startswith("fresh  not sent\n")
    described = json.loads(command("status", "fresh", "--json")[1])
    assert (described["state"], described["phase"]) == ("failed", "never_sent")


DAMAGES = {
    "config": ("jobs", "config", "{"),
    "bundle": ("jobs", "bundle", "[]"),
    "created": ("jobs", "created_s", "soon"),
    "plan": ("attempts", "plan", "{}"),
    "price": ("attempts", "plan", '{"instances": 1, "nproc_per_node": 1, "ranks": 1, "cap_s": 9, "hourly_usd": "x"}'),
    "request": ("attempts", "request", "null"),
    "submitter": ("attempts", "submitter", "7"),
    "outcome": ("attempts", "outcome", '{"stat'),
    "state": ("attempts", "outcome", '{"state": "dancing"}'),
    "field": ("attempts", "outcome", '{"state": "failed", "mood": 1}'),
    "time": ("attempts", "outcome", '{"state": "failed", "ended_s": "noon"}'),
    "progress": ("attempts", "progress", "\\x00"),
    "ref": ("attempts", "ref", "{]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("state", [DONE, State("running", started_s=1000.0)], ids=["ended", "running"])
def test_damaged_row_hides_no_sound_job(
    registry: Registry, add: MakeJob, command: Command, damage: str, state: State
) -> None:
    """The job is shown as damaged with advice, and `rm` removes the job; its possible cost still counts."""
    add("sound")
    add("broken", state)
    table, column, text = DAMAGES[damage]
    key = "id" if table == "jobs" else "job_id"
    registry.database.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = 'broken'", (text,))
    code, shown = command("list")
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert (code, "damaged" in lines["broken"], "succeeded" in lines["sound"]) == (0, True, True), shown
    code, shown = command("status", "broken", "sound")
    words = ("damaged", "cloudtrain rm broken", "sound  succeeded")
    assert (code, [each in shown for each in words]) == (0, [True] * 3)
    assert json.loads(command("list", "--json")[1])["jobs"][0]["phase"] == "damaged"
    assert command("stop", "broken")[0] in (0, 1)
    assert command("rm", "-y", "broken")[0] == 0
    assert [job.id for job in registry.jobs()] == ["sound"]
    assert _spent(registry) >= (5_000_000 if state.state == "running" else 0)
    assert ledger.held(registry.database) == []


ERROR = {"node": 0, "rank": 0, "kind": "exception", "type": "ValueError", "message": "boom", "traceback": "Traceback"}
GPU = {"use": 50.0, "memory_mib": 1.0, "total_mib": 2.0, "watts": 3.0, "count": 1, "mean": 50.0, "told_s": 1e9}
SOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "outcome": (
        "attempts",
        {
            **asdict(replace(DONE, state="failed", reason="error", billed_s=5.0, gone_s={"1": 3.0}, detail="d")),
            "error": {**ERROR, "lines": ["hello"], "hint": "h", "place": "t.py:3", "exit_code": 1, "signal": None},
        },
    ),
    "plan": (
        "attempts",
        {
            "instances": 1,
            "nproc_per_node": 1,
            "ranks": 1,
            "cap_s": 3600,
            "hourly_usd": 1.5,
            "price_micro": 1_500_000,
            "uncertainty": 1.0,
            "terms": {"tail_s": 20, "unit_s": 1, "minimum_bill_s": 0, "starts": 1},
            "worst_case_micro": 9,
            "budget_micro": 9,
            "alert_micro": [1],
            "deadline_s": 9,
            "own_limit_s": 9,
        },
    ),
    "progress": (
        "attempts",
        {
            "cursor": {"0/rank-0.log": 1},
            "step": 5,
            "max_steps": 9,
            "loss": 0.5,
            "metrics": {"acc": 0.5},
            "samples_per_s": 3.0,
            "step_s": 0.5,
            "data_s": 0.1,
            "eta_s": 9.0,
            "stepped_s": 1e9,
            "saved_s": 1e9,
            "checkpoint_step": 4,
            "forecast": [1, 1e9],
            "told": [["slack", "k"]],
            "gpus": {"0": GPU},
            "curve": "1.0,1795414050.0;0,1,0.5,1;5,5,0.4,2",
            "diagnosis": {"a": {"b": 1}},
        },
    ),
    "submitter": ("attempts", {"host": "h", "pid": 1, "stamp": "s"}),
    "ref": ("attempts", {"folder": "/x", "nodes": 2, "checkpoint_dir": "/x"}),
    "config": (
        "jobs",
        {"budget": {"limit": "5USD"}, "tags": {"a": "b"}, "project": {"name": "p"}, "retry": {"on": []}},
    ),
    "bundle": ("jobs", {"sha256": "0", "path": "/x", "bytes": 1, "git": {}}),
}


def retyped(value: Any) -> Iterator[Any]:
    """Yield copies of the value, each with a different part of a wrong type."""
    yield from (None, 7, [1, "x"], {"a": [1]}, "x" * 3000)
    for key, part in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        for other in retyped(part):
            changed = value.copy()
            changed[key] = other
            yield changed


@pytest.mark.parametrize("column", SOUND)
@pytest.mark.parametrize("state", [DONE, State("running", started_s=1000.0)], ids=["ended", "running"])
def test_wrong_types_deep_inside_a_row_hide_no_sound_job(
    registry: Registry, add: MakeJob, command: Command, column: str, state: State
) -> None:
    """All commands that read rows show the sound job, whatever the damaged rows hold."""
    if (column, state.state) == ("ref", "running"):
        pytest.skip("the form of a handle is known to its backend alone: a line names the job, and hides no other job")
    _, sound = SOUND[column]
    texts = [json.dumps(each) for each in retyped(sound)]
    with registry.database.transaction():
        for number, text in enumerate(texts):
            add(f"bad-{number}", state)
            for other, (place, values) in SOUND.items():
                if other != "outcome" or column == "outcome":
                    key = "id" if place == "jobs" else "job_id"
                    now = text if other == column else json.dumps(values)
                    registry.database.execute(f"UPDATE {place} SET {other} = ? WHERE {key} = ?", (now, f"bad-{number}"))
    for number in range(len(texts)):  # as long as nobody has asked the platform
        job = registry.find(f"bad-{number}")
        view_of(job, registry.attempts(job)).as_json()
    add("sound")
    every = ("status", "sound", *(f"bad-{number}" for number in range(len(texts))))
    for words in (("list", "--all"), ("list", "--all", "--json"), every, ("cost",), ("doctor",)):
        code, shown = command(*words)
        assert "itself failed" not in shown, shown[-2000:]
        assert words == ("doctor",) or (code, "sound" in shown or words == ("cost",)) == (0, True), shown[-2000:]


@pytest.mark.parametrize("backend", BUILT_IN)
@pytest.mark.parametrize("ref", [{}, {"nodes": "x", "name": [7]}])
def test_damaged_handle_of_a_running_job_is_a_clear_error(
    registry: Registry, add: MakeJob, command: Command, backend: str, ref: dict[str, Any]
) -> None:
    """A line names the damage; sound jobs are shown, and the damaged job still counts as running."""
    add("sound")
    add("broken", State("running", started_s=1000.0), backend=backend)
    registry.database.execute("UPDATE attempts SET ref = ? WHERE job_id = 'broken'", (json.dumps(ref),))
    for words in (("list",), ("status", "sound", "broken"), ("logs", "broken"), ("stop", "-y", "broken")):
        shown = command(*words)[1]
        assert ("the stored data of the job are damaged" in shown, "itself failed" in shown) == (True, False), shown
        assert "sound" in shown or words[0] in ("logs", "stop"), shown
    assert registry.find("broken").active


def test_removed_job_leaves_its_cost_and_frees_its_folder(registry: Registry, add: MakeJob, command: Command) -> None:
    """Rows, folder and log are gone, but the cost counts; a never sent name is free, with the next number."""
    add("done")
    add("other")
    registry.settle(replace(registry.find("done").attempt, state=replace(DONE, hourly_usd=2.0)))
    spent = _spent(registry)
    for place in ("local/done/checkpoints", "logs/done/1", "local/other"):
        (registry.folder / place).mkdir(parents=True)
        (registry.folder / place / "file").write_bytes(bytes(1 << 20))
    code, shown = command("rm", "-y", "done", "--json")
    assert (code, json.loads(shown[shown.index("{") : shown.index("}") + 1])["freed_bytes"]) == (0, 2 << 20)
    assert [path.name for path in (registry.folder / "local").iterdir()] == ["other"]
    assert [job.id for job in registry.jobs()] == ["other"]
    assert _spent(registry) == spent
    with pytest.raises(UsageError, match="removed"):
        add("done")
    add("one", UNSENT)
    registry.remove("one")
    assert add("one").attempt.number == 2
    assert ledger.reservation(registry.database, "one", 2) is not None


def test_bundle_without_a_job_is_removed(registry: Registry, add: MakeJob, command: Command) -> None:
    """The freed size counts; a bundle in use stays, and a young bundle, which a submit may have just packed."""
    add("done", bundle={"sha256": "used-by-one"})
    add("also", bundle={"sha256": "shared"})
    add("other", bundle={"sha256": "shared"})
    folder = registry.folder / "bundles"
    folder.mkdir()
    for name in ("used-by-one", "shared", "young"):
        (folder / f"{name}.tar.gz").write_bytes(bytes(3 << 10))
        if name != "young":
            os.utime(folder / f"{name}.tar.gz", (1000.0, 1000.0))
    code, shown = command("rm", "-y", "done", "also")
    assert (code, "removed 2 jobs, 3 KiB" in shown) == (0, True), shown
    assert sorted(path.name for path in folder.iterdir()) == ["shared.tar.gz", "young.tar.gz"]
    again, shown = command("rm", "-y", "also", "other")  # as after a kill between the two
    assert (again, "also was removed before" in shown, "removed 1 job, 3 KiB" in shown) == (0, True, True), shown
    assert [path.name for path in folder.iterdir()] == ["young.tar.gz"]
    assert "removed once an hour has passed since the last submit" in " ".join(str(removal.help).split())
    assert remove.UNSENT_S == 3600


def test_active_job_is_not_removed(registry: Registry, add: MakeJob, command: Command, monkeypatch: Any) -> None:
    """If a single job of several may still run, no job is removed."""
    monkeypatch.setattr(load("local"), "state", lambda ref: State("running", started_s=1000.0))
    add("done")
    add("runs", State("running", started_s=1000.0))
    code, shown = command("rm", "-y", "done", "runs")
    assert (code, "cloudtrain stop runs" in shown) == (2, True)
    assert len(registry.jobs()) == 2


def test_prune_asks_before_it_removes_a_resumable_job(
    registry: Registry, add: MakeJob, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without consent only the jobs stay that `resume` could go on with."""
    add("old")
    add("saved", replace(DONE, state="stopped", reason="user", resumable=True))
    asked: list[str] = []

    def answer(question: str, *, yes: bool) -> bool:
        asked.append(question)
        return "resume" not in question

    monkeypatch.setattr("cloudtrain.launcher.commands.prune.confirm", answer)
    monkeypatch.setattr("cloudtrain.launcher.commands.rm.confirm", answer)
    code, shown = command("prune", "--older", "1s")
    assert (code, [job.id for job in registry.jobs()]) == (0, ["saved"])
    assert asked[0] == "Remove 1 job that `resume` could go on with?"
    assert "saved  stopped (user), resumable" in shown


def test_prune_removes_old_jobs_alone(registry: Registry, add: MakeJob, command: Command) -> None:
    """The age counts from the end; running jobs and damaged jobs stay."""
    add("old")
    add("unsent", UNSENT)
    add("new", replace(DONE, ended_s=time.time() - 60))
    add("runs", None)
    add("broken")
    registry.database.execute("UPDATE jobs SET config = '{' WHERE id = 'broken'")
    assert command("prune", "--older", "1d", "-y")[0] == 0
    assert [job.id for job in registry.jobs()] == ["broken", "runs", "new"]
    assert command("prune", "--older", "soon")[0] == 2


def test_stop_finds_a_forgotten_job_that_appears_later(
    registry: Registry, add: MakeJob, command: Command, monkeypatch: Any
) -> None:
    """The backend does not answer and the user gives up; later the job appears, counts again, and is stopped."""

    def silent(*_: Any) -> Any:
        raise UnreachableError("no network")

    asked: list[Any] = []
    job = add("doubt", None)
    registry.release(job.attempt)
    monkeypatch.setattr(load("local"), "find", silent)
    code, shown = command("stop", "doubt")
    assert (code, "may exist there as doubt-1" in shown, "--forget doubt" in shown) == (7, True, True), shown
    assert len(ledger.held(registry.database)) == 1
    assert command("stop", "--forget", "-y", "doubt")[0] == 0
    assert (ledger.held(registry.database), registry.find("doubt").attempt.phase) == ([], "never_sent")
    monkeypatch.setattr(load("local"), "find", lambda *_: {"folder": "/x", "nodes": 1, "checkpoint_dir": "/x"})
    monkeypatch.setattr(load("local"), "state", lambda ref: State("running", started_s=1000.0))
    monkeypatch.setattr(load("local"), "stop", lambda ref, *, now: asked.append(ref))
    assert command("stop", "-d", "doubt")[0] == 0
    assert len(asked) == len(ledger.held(registry.database)) == 1


def test_forgotten_job_of_a_silent_backend_keeps_its_cost(registry: Registry, add: MakeJob, monkeypatch: Any) -> None:
    """A host that is gone forever blocks no budget; a job whose backend answers is stopped, not forgotten."""
    add("runs", State("running", started_s=1000.0))
    monkeypatch.setattr(load("local"), "state", lambda ref: State("running", started_s=1000.0))
    with pytest.raises(UsageError, match="answers"):
        stopping.forget(registry, "runs", lambda _: True)

    def silent(*_: Any) -> Any:
        raise UnreachableError("gone")

    monkeypatch.setattr(load("local"), "state", silent)
    assert stopping.forget(registry, "runs", lambda _: True).verdict == "forgotten"
    assert (ledger.held(registry.database), registry.find("runs").active) == ([], False)


def test_stop_request_that_cannot_be_written_is_told(
    registry: Registry, add: MakeJob, command: Command, tmp_path: Path, monkeypatch: Any
) -> None:
    """No agent of an ended job needs the request; for a live agent the error has the reason and `--now`."""
    add("done")
    (tmp_path / "node-0").write_text("")  # no file can be written below node-0
    ref = json.dumps({"folder": str(tmp_path), "nodes": 1, "checkpoint_dir": "/x"})
    registry.database.execute("UPDATE attempts SET ref = ?", (ref,))
    code, shown = command("stop", "done")
    assert (code, "there is nothing to stop" in shown, "itself failed" in shown) == (0, True, False), shown
    monkeypatch.setattr(local.node_folder, "agent_pid", lambda root: 1)
    with pytest.raises(ConfigError, match="cannot be asked to stop") as raised:
        load("local").stop({"folder": str(tmp_path), "nodes": 1, "checkpoint_dir": "/x"}, now=False)
    assert "--now" in raised.value.hint


@pytest.mark.parametrize("step", ["before the row", "after the row", "with the team", "while sending"])
def test_interrupted_submit_reports_a_possible_send(
    registry: Registry, command: Command, project: MakeProject, idle_python: Path, monkeypatch: Any, step: str
) -> None:
    """Ctrl-C before the send leaves no row and no reservation; after the send began, a message says how to check."""

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.chdir(project(f"local: {{python: {idle_python}, price_per_hour: 1.5}}\n"))
    places = {
        "before the row": (load("local"), "ready"),
        "after the row": (local, "make_own"),
        "with the team": (submit.shared_ledger_sync, "hold"),
        "while sending": (local, "start_agents"),
    }
    monkeypatch.setattr(*places[step], interrupt)
    code, shown = command("submit", "-d", "-y", "--name", "one")
    assert code == 130
    if step == "while sending":
        assert "one may have been sent, as one-1: cloudtrain status one" in shown
        assert command("status", "one")[1].startswith("one  not sent")
    else:
        assert "interrupted: nothing was sent, and nothing is reserved" in shown
        assert registry.jobs() == []
    assert ledger.held(registry.database) == []
    monkeypatch.undo()

"""The list keeps rows of ended jobs, chooses jobs by filters, and tells what is beside its table."""

import hashlib
import json
import queue
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import cli
from cloudtrain.launcher.errors import ConfigError, CredentialError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import causes, listing, poller, refresh, view
from cloudtrain.launcher.jobs.listing import JobFilter, chosen
from cloudtrain.launcher.jobs.view import view_of
from cloudtrain.launcher.store import database
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job
from doubles.signatures import MakeJob

DONE = State("succeeded", started_s=1000.0, ended_s=4600.0)
Patience = Callable[[int, Callable[[], bool]], None]


@pytest.fixture
def add(registry: Registry) -> MakeJob:
    """Return a function that journals a job which was sent and has the given state."""

    def put(name: str, state: State = DONE, **changes: Any) -> Job:
        job, _ = registry.add(name, lambda *told: make_job(*told, **changes), exclusive=True, key=None)
        registry.mark_sent(job.attempt, {"folder": "/x"})
        registry.set_state(job.attempt, state, {"step": 5, "max_steps": 9, "loss": 0.5})
        return registry.find(name)

    return put


def ids(registry: Registry, **choice: Any) -> list[str]:
    """Return the ids of the jobs that match the filter."""
    return [line.job_id for line in chosen(registry, JobFilter(**choice)).lines]


def test_listing_keeps_the_json_of_status(registry: Registry, add: MakeJob) -> None:
    """The stored JSON equals the JSON that `status` makes of the job."""
    job = add("done")
    for _ in range(2):  # made, then stored
        (line,) = chosen(registry, JobFilter(), described=True).lines
        assert json.loads(line.described) == view_of(job, [job.attempt]).as_json()
        assert (line.outcome, line.progress, line.ranks) == ("succeeded", "step 5/9 loss 0.5", "2 x 1")
    assert len(registry.database.execute("SELECT 1 FROM listed")) == 1


def test_listing_drops_a_line_when_the_job_or_the_form_changes(
    registry: Registry, add: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any write to the job or an attempt drops the row: an end, a resume, a reused name; a new version drops all."""
    job = add("done")
    assert ids(registry) == ["done"]
    registry.set_state(job.attempt, State("failed", "error"), {})
    assert chosen(registry, JobFilter()).lines[0].outcome == "failed (error)"
    registry.add_attempt(replace(job.attempt, number=2, phase="intent", state=State("pending")), {}, {})
    assert chosen(registry, JobFilter()).lines[0].outcome == "pending"
    registry.mark_never_sent(registry.attempt(job, 2), State("failed", "error", detail="refused"))
    assert chosen(registry, JobFilter()).lines[0].outcome == "not sent"
    add("other")
    chosen(registry, JobFilter())
    registry.database.execute("UPDATE listed SET outcome = 'as it was said once'")
    assert chosen(registry, JobFilter()).lines[0].outcome == "as it was said once"
    monkeypatch.setattr(listing, "JSON_FORM", listing.JSON_FORM + 1)
    assert chosen(registry, JobFilter()).lines[0].outcome == "as it was said once"
    monkeypatch.setattr(listing, "LINE_FORM", listing.LINE_FORM + 1)
    assert chosen(registry, JobFilter()).lines[0].outcome == "succeeded"


def test_each_line_is_made_once_without_the_json_of_scripts(
    registry: Registry, add: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of text describes each ended job once, a batch at a time; the JSON is made for the first list of JSON."""
    monkeypatch.setattr(listing, "BATCH", 2)
    for number in range(5):
        add(f"job-{number}")
    made: list[bool] = []
    row_of = listing.row_of
    monkeypatch.setattr(
        listing, "row_of", lambda *told: made.append(told[3] if len(told) > 3 else True) or row_of(*told)
    )
    texts = chosen(registry, JobFilter()).lines
    assert made == [False] * 5
    assert chosen(registry, JobFilter()).lines == texts
    assert made == [False] * 5
    lines = chosen(registry, JobFilter(), described=True).lines
    assert made == [False] * 5 + [True] * 5
    assert [line._replace(described="") for line in lines] == texts
    assert [json.loads(line.described)["job"] for line in lines] == [f"job-{number}" for number in reversed(range(5))]


def test_json_of_a_new_form_is_made_once_and_lists_of_text_use_the_stored_lines(
    registry: Registry, add: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade that changes the JSON alone, the first list of text makes no line, and a list of JSON each."""
    for number in range(3):
        add(f"job-{number}")
    texts = chosen(registry, JobFilter()).lines
    before = [line.described for line in chosen(registry, JobFilter(), described=True).lines]
    monkeypatch.setattr(listing, "JSON_FORM", listing.JSON_FORM + 1)
    made, row_of = list[str](), listing.row_of
    monkeypatch.setattr(listing, "row_of", lambda job, *rest: made.append(job.id) or row_of(job, *rest))
    assert chosen(registry, JobFilter()).lines == texts
    assert made == []
    for _ in range(2):
        assert [line.described for line in chosen(registry, JobFilter(), described=True).lines] == before
    assert made == ["job-2", "job-1", "job-0"]


def test_lines_of_a_batch_are_made_by_few_statements_without_forecasts(
    registry: Registry, add: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many unstored lines take as many statements as a single line, and no forecast: only the JSON has a forecast."""

    asked, execute = list[str](), registry.database.execute

    def statements() -> int:
        execute("DELETE FROM listed")
        asked.clear()
        assert {line.progress for line in chosen(registry, JobFilter()).lines} == {"step 5/9 loss 0.5"}
        return len(asked)

    add("a")
    monkeypatch.setattr(view, "forecast", None)
    monkeypatch.setattr(registry.database, "execute", lambda sql, *rest: asked.append(sql) or execute(sql, *rest))
    single = statements()
    for number in range(6):
        add(f"job-{number}")
    assert statements() == single
    assert len(execute("SELECT 1 FROM listed")) == 7


@pytest.mark.parametrize("column", ["request", "submitter", "ref", "plan", "outcome", "progress"])
def test_line_of_a_damaged_row_is_the_same_with_and_without_json(registry: Registry, add: MakeJob, column: str) -> None:
    """A list of text reads fewer columns, and still shows a damaged row as damaged."""
    add("done")
    registry.database.execute(f"UPDATE attempts SET {column} = '{{broken'")
    (line,) = chosen(registry, JobFilter()).lines
    assert line.outcome == "damaged"
    assert chosen(registry, JobFilter(), described=True).lines[0]._replace(described="") == line


ERRORS = [
    {"rank": 1, "kind": "exception", "type": "OutOfMemoryError", "message": "CUDA out of memory\nmore", "lines": ["a"]},
    {"rank": None, "kind": "lost", "message": "all agents are gone"},
]
STATES = [
    DONE,
    State("stopped", "budget", True, started_s=1000.0, ended_s=4600.0),
    *(State("failed", "error", False, error, 1000.0, 4600.0, 2, "why", url="https://x/y") for error in ERRORS),
]
FAR = {"step": 5, "max_steps": 9, "loss": 0.5, "metrics": {"a": 1.5}}
FAR |= {"step_s": 2.0, "data_s": 1.0, "checkpoint_step": 4}
PINNED = (13, "436f77347d0a4d8a", 5, "9cc974782e9db803")


def test_form_matches_the_pinned_texts() -> None:
    """A change of an ended job's words or JSON must raise its form and update PINNED, else lists mix old and new texts.

    The digests cover the names, figures and texts of jobs that ended in each way, and every likely cause.
    """
    told: list[Any] = []
    for state in STATES:
        config = {"budget": {"limit": "10 USD"}, "tags": {"team": "a"}, "task": "task.py"}
        job = make_job("golden-1", config=config, created_s=900.0, seq=1)
        last = replace(job.attempt, number=2, phase="sent", state=state, progress=FAR, created_s=900.0)
        before = replace(last, number=1, state=State("failed", "preempted", True, None, 100.0, 700.0))
        told += [listing.row_of(replace(job, attempt=last), [before, last], 5000.0)]
    lines = [listing.ListRow._make(row[:10]) for row in told]
    likely = [(each.pattern, each.means, each.do, each.of_task) for each in causes.CAUSES]
    words = [[*line._replace(described=""), *row[11:]] for line, row in zip(lines, told, strict=True)]
    digests = [
        hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
        for texts in (words, [likely, [line.described for line in lines]])
    ]
    found = (listing.LINE_FORM, digests[0], listing.JSON_FORM, digests[1])
    assert found == PINNED, "raise the form of what changed, and pin what is said now"


def test_list_shows_the_newest_first_up_to_the_limit(registry: Registry, add: MakeJob) -> None:
    """Running and ended jobs share the order of their submits; a job that leaves the chosen states is dropped."""
    for number in range(6):
        add(f"job-{number}", State("running", started_s=1000.0) if number % 2 else DONE)
    assert ids(registry) == [f"job-{number}" for number in reversed(range(6))]
    assert ids(registry, limit=3) == ["job-5", "job-4", "job-3"]
    assert [view.job.id for view in chosen(registry, JobFilter(limit=3)).active] == ["job-5", "job-3"]
    add("a", State("running"))

    def ask(_: Registry, jobs: list[Job]) -> poller.Answers:
        return poller.Answers([replace(job, attempt=replace(job.attempt, state=DONE)) for job in jobs], {})

    assert chosen(registry, JobFilter(states=frozenset({"running"})), ask).lines == []
    first = chosen(registry, JobFilter(states=frozenset({"succeeded"})), ask).lines[0]
    assert (first.job_id, first.state) == ("a", "succeeded")


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"states": frozenset({"failed"})}, ["c"]),
        ({"states": frozenset({"failed", "running"})}, ["d", "c"]),
        ({"backends": frozenset({"ssh"})}, ["d", "b"]),
        ({"project": "vision"}, ["b"]),
        ({"tags": (("team", "a"),)}, ["d", "a"]),
        ({"tags": (("team", None), ("run", "2"))}, ["a"]),
        ({"since_s": 150.0}, ["d", "c"]),
        ({"backends": frozenset({"ssh"}), "limit": 1}, ["d"]),
        ({"tags": (("te'am\"", "a"),)}, []),
    ],
)
@pytest.mark.parametrize("is_full", [False, True])
def test_list_filters_jobs(
    registry: Registry, add: MakeJob, is_full: bool, choice: dict[str, Any], wanted: list[str]
) -> None:
    """State, backend, project, tags and age filter alike for running jobs, stored rows and unstorable rows."""
    add("a", config={"tags": {"team": "a", "run": "2"}}, created_s=100.0)
    add("b", backend="ssh", config={"project": {"name": "vision"}, "tags": {"team": "b"}}, created_s=100.0)
    add("c", State("failed", "error"), created_s=200.0)
    add("d", State("running"), backend="ssh", config={"tags": {"team": "a"}}, created_s=200.0)
    if is_full:  # a full disk, on which no row can be stored
        registry.database.execute("CREATE TRIGGER full BEFORE INSERT ON listed BEGIN SELECT RAISE(FAIL, 'full'); END")
    assert ids(registry, **choice) == wanted


def test_list_does_not_wait_for_a_writer(registry: Registry, add: MakeJob) -> None:
    """A process inside a transaction does not delay the list."""
    add("done")
    other = sqlite3.connect(registry.database.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began_s = time.monotonic()
    assert ids(registry) == ["done"]
    assert time.monotonic() - began_s < database.BUSY_TIMEOUT_S / 2
    other.close()
    assert not registry.database.execute("SELECT 1 FROM listed")
    assert ids(registry) == ["done"]
    assert registry.database.execute("SELECT 1 FROM listed")


def test_list_shows_a_job_that_ends_meanwhile_once(
    registry: Registry, add: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may write between the query of the running jobs and the query of the ended jobs."""
    add("done")
    job, unlisted = add("runs", State("running", started_s=1000.0)), registry.unlisted

    def then_it_ends(form: int, **choice: Any) -> list[Job]:
        found = unlisted(form, **choice)
        if choice["active"]:
            other = Registry(registry.folder)
            other.set_state(job.attempt, DONE, {})
            other.close()
        return found

    monkeypatch.setattr(registry, "unlisted", then_it_ends)
    assert ids(registry) == ["runs", "done"]
    monkeypatch.undo()
    assert [line.state for line in chosen(registry, JobFilter()).lines] == ["succeeded", "succeeded"]


@pytest.mark.parametrize("is_sent", [True, False])
def test_line_is_stored_with_the_end(registry: Registry, monkeypatch: pytest.MonkeyPatch, is_sent: bool) -> None:
    """The transaction that stores an end stores the line too: if the line cannot be stored, the end is not stored."""
    job, _ = registry.add("job", make_job, exclusive=True, key=None)
    if is_sent:
        registry.mark_sent(job.attempt, {"folder": "/x"})
    monkeypatch.setattr(backends.load("local"), "state", lambda ref: DONE)
    monkeypatch.setattr(backends.load("local"), "logs_with", lambda *args, **kwargs: backends.LogPage([], {}))

    def end() -> None:
        if is_sent:
            refresh.refresh(registry, registry.find("job"))
        else:
            listing.end_unsent(registry, job.attempt, State("failed", "error", ended_s=time.time()))

    registry.database.execute("CREATE TRIGGER full BEFORE INSERT ON listed BEGIN SELECT RAISE(FAIL, 'full'); END")
    with suppress(ConfigError):
        end()
    assert registry.find("job").active
    registry.database.execute("DROP TRIGGER full")
    end()
    ((outcome, described),) = registry.database.execute("SELECT outcome, described FROM listed")
    assert outcome == ("succeeded" if is_sent else "not sent")
    job = registry.find("job")
    assert json.loads(described) == view_of(job, [job.attempt]).as_json()


@pytest.mark.parametrize("state", [DONE, State("running", started_s=1000.0)])
def test_job_that_cannot_be_described_hides_no_job(
    registry: Registry, add: MakeJob, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    """The job is listed with its state, and its JSON gives the reason."""
    add("a")
    add("odd", state)

    def outcome(job: Job) -> str:
        if job.id == "odd":
            raise TypeError("no such thing")
        return "fine"

    monkeypatch.setattr(listing, "outcome", outcome)
    for _ in range(2):
        odd, a = chosen(registry, JobFilter(), described=True).lines
        assert (odd.outcome, odd.progress, odd.money, a.outcome) == (state.state, "?", "?", "fine")
        assert json.loads(odd.described)["fault"] == "it cannot be described: TypeError: no such thing"


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Patience:
    """Return a function that ends the patience after so many answers and once a condition holds, on any machine."""

    def until(count: int, holds: Callable[[], bool]) -> None:
        taken: list[Any] = []

        class Counting(queue.SimpleQueue):  # type: ignore[type-arg]
            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                taken.append(found := super().get(block, timeout))
                return found

        def monotonic() -> float:
            return 1e9 if len(taken) >= count and holds() else 0.0

        clock = SimpleNamespace(monotonic=monotonic, thread_time=time.thread_time)
        monkeypatch.setattr(poller, "queue", SimpleNamespace(SimpleQueue=Counting, Empty=queue.Empty))
        monkeypatch.setattr(poller, "time", clock)

    return until


def test_poll_does_not_wait_for_a_silent_backend(
    registry: Registry, add: MakeJob, monkeypatch: pytest.MonkeyPatch, patience: Patience
) -> None:
    """Of three jobs a job hangs and a job fails: both keep their last state with a fault; the third is current."""
    jobs = [add(name, State("running", started_s=1.0)) for name in ("hangs", "fails", "lives")]
    release, asked = threading.Event(), threading.Event()

    def refresh(own: Registry, job: Job) -> Job:
        assert own is not registry  # a connection belongs to a single thread
        if job.id == "hangs":
            asked.set()
            release.wait(60)
        if job.id == "fails":
            raise CredentialError("the token has expired")
        return replace(job, attempt=replace(job.attempt, state=DONE))

    monkeypatch.setattr(poller, "refresh", refresh)
    patience(2, asked.is_set)
    answers = poller.ask(registry, jobs, 0.05)
    release.set()
    told = {job_id: (type(fault).__name__, fault.message) for job_id, fault in answers.faults.items()}
    assert told == {
        "hangs": ("UnreachableError", "local has not answered within 0 s"),
        "fails": ("CredentialError", "the token has expired"),
    }
    assert [job.attempt.state.state for job in answers.jobs] == ["running", "running", "succeeded"]


def test_poll_limits_the_threads_of_a_silent_backend(
    registry: Registry, add: MakeJob, monkeypatch: pytest.MonkeyPatch, patience: Patience
) -> None:
    """A job of a second backend is polled in time; jobs left out for lack of time get a fault of their own."""
    count = 18
    jobs = [add(f"silent-{n}", State("running"), backend="ssh") for n in range(count)] + [
        add("quick", State("running"))
    ]
    release, asked = threading.Event(), list[str]()

    def refresh(own: Registry, job: Job) -> Job:
        if job.id != "quick":
            asked.append(job.id)
            release.wait(60)
            raise CredentialError("too late")
        return replace(job, attempt=replace(job.attempt, state=DONE))

    monkeypatch.setattr(poller, "refresh", refresh)
    patience(1, lambda: len(asked) == 16)
    answers = poller.ask(registry, jobs, 0.05)
    release.set()
    assert answers.jobs[-1].attempt.state.state == "succeeded"
    words = [answers.faults[f"silent-{n}"].message for n in range(count)]
    assert words.count("ssh has not answered within 0 s") == 16
    assert words.count("ssh was not asked for it, as its other jobs took all of 0 s") == count - 16


def test_poll_reports_a_registry_that_cannot_be_opened(
    registry: Registry, add: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault appears at once for each job, and no thread dies with a traceback."""
    jobs = [add(f"job-{n}", State("running")) for n in range(20)]

    def refuse(folder: Path) -> Registry:
        raise ConfigError("too many open files")

    monkeypatch.setattr(poller, "Registry", refuse)
    answers = poller.ask(registry, jobs, 60.0)
    assert {fault.message for fault in answers.faults.values()} == {"too many open files"}
    assert len(answers.faults) == 20


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
    seed: MakeJob, capsys: pytest.CaptureFixture[str]
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


def test_list_reports_an_empty_list(seed: MakeJob, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message is on standard error, and differs when the registry has jobs; a script reads an empty list alike."""
    cases = (("", "no jobs: cloudtrain submit"), ("--active", "no jobs are active"), ("--tag a=b", "no jobs: "))
    for line, words in cases:
        run(*line.split())
        told = capsys.readouterr()
        assert (told.out, words in told.err) == ("", True)
    run("--json")
    empty = {"jobs": [], "running": 0, "burn_usd_per_hour": 0.0, "not_answered": {}}
    assert json.loads(capsys.readouterr().out) == empty
    seed("done", State("succeeded"))
    run("--tag", "team=vision")
    assert "no job is like that" in capsys.readouterr().err


def test_list_on_a_narrow_terminal_keeps_the_state(
    seed: MakeJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns PROGRESS shrinks first; in 60 the missing columns are named, so no table seems complete."""
    job = seed("digits-x4k2p", State("stopped", "user", resumable=True))
    progress = {"step": 123456, "max_steps": 2000000, "loss": 1.2345}
    Registry().database.execute("UPDATE attempts SET progress = ? WHERE job_id = ?", (json.dumps(progress), job.id))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    run()
    head, row = capsys.readouterr().out.splitlines()
    assert ("RANKS" in head, "PROGRESS" in head, "BACKEND" in head) == (True, True, True)
    assert ("stopped (user), resumable " in row, "…" in row, len(row) <= 80) == (True, True, True)
    seed("a-job-with-a-name-of-some-length", State("failed", "preempted"))
    monkeypatch.setenv("COLUMNS", "60")
    run("--state", "failed")
    told = capsys.readouterr().err
    assert "not shown for lack of room: BACKEND, PROGRESS, USD, SUBMITTED; --json shows all" in told


def test_list_refuses_an_unknown_backend(seed: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
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

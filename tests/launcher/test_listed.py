"""What is kept of jobs that have ended, and which jobs a list chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import asking, listed
from cloudtrain.launcher.describe import as_json
from cloudtrain.launcher.errors import CredentialError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.listed import Choice, chosen
from cloudtrain.launcher.registry import Registry

DONE = State("succeeded", started_s=1000.0, ended_s=4600.0)


@pytest.fixture
def registry(home: Path) -> Registry:
    """Return an empty registry in the private home."""
    return Registry()


@pytest.fixture
def add(registry: Registry, make_job: Callable[..., Job]) -> Callable[..., Job]:
    """Return a function that journals a job, sent and in that state."""

    def put(name: str, state: State = DONE, **changes: Any) -> Job:
        job, _ = registry.add(name, lambda *told: make_job(*told, **changes), exclusive=True, key=None)
        registry.mark_sent(job.attempt, {"folder": "/x"})
        registry.set_state(job.attempt, state, {"step": 5, "max_steps": 9, "loss": 0.5})
        return registry.find(name)

    return put


def ids(registry: Registry, **choice: Any) -> list[str]:
    """Return the ids of the jobs that are chosen so."""
    return [line.job_id for line in chosen(registry, Choice(**choice)).lines]


def test_listed_keeps_what_status_says_of_a_job_that_has_ended(registry: Registry, add: Callable[..., Job]) -> None:
    """The JSON that is kept is the very one that is made of the job."""
    job = add("done")
    for _ in range(2):  # made, then kept
        (line,) = chosen(registry, Choice(), described=True).lines
        assert json.loads(line.described) == as_json(job, [job.attempt])
        assert (line.outcome, line.progress, line.ranks) == ("succeeded", "step 5/9 loss 0.5", "2 x 1")
    assert len(registry.database.execute("SELECT 1 FROM listed")) == 1


def test_listed_drops_what_it_kept_as_soon_as_the_job_changes(registry: Registry, add: Callable[..., Job]) -> None:
    """Whoever writes to the job or an attempt: the end that is told later, a resume, a name taken over."""
    job = add("done")
    assert ids(registry) == ["done"]
    registry.set_state(job.attempt, State("failed", "error"), {})
    assert chosen(registry, Choice()).lines[0].outcome == "failed (error)"
    registry.add_attempt(replace(job.attempt, number=2, phase="intent", state=State("pending")), {}, {})
    assert chosen(registry, Choice()).lines[0].outcome == "pending"
    registry.mark_never_sent(registry.attempt(job, 2), State("failed", "error", detail="refused"))
    assert chosen(registry, Choice()).lines[0].outcome == "failed (error)"


def test_listed_makes_all_anew_where_their_form_has_changed(
    registry: Registry, add: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version's words are not mixed with what an older one kept."""
    add("done")
    chosen(registry, Choice())
    registry.database.execute("UPDATE listed SET outcome = 'as it was said once'")
    assert chosen(registry, Choice()).lines[0].outcome == "as it was said once"
    monkeypatch.setattr(listed, "FORM", listed.FORM + 1)
    assert chosen(registry, Choice()).lines[0].outcome == "succeeded"


def test_listed_form_belongs_to_these_names(registry: Registry, add: Callable[..., Job]) -> None:
    """Who adds a name to the JSON raises FORM, and both here: else lists lack it for jobs that ended before."""
    job = add("done")
    assert (listed.FORM, len(as_json(job, [job.attempt]))) == (1, 44)


def test_listed_shows_the_newest_first_and_no_more_than_asked(registry: Registry, add: Callable[..., Job]) -> None:
    """Running and ended ones are in one order: that of their submits."""
    for number in range(6):
        add(f"job-{number}", State("running", started_s=1000.0) if number % 2 else DONE)
    assert ids(registry) == [f"job-{number}" for number in reversed(range(6))]
    assert ids(registry, limit=3) == ["job-5", "job-4", "job-3"]
    assert [job.id for job in chosen(registry, Choice(limit=3)).active] == ["job-5", "job-3"]


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
def test_listed_chooses_by(
    registry: Registry, add: Callable[..., Job], is_full: bool, choice: dict[str, Any], wanted: list[str]
) -> None:
    """State, backend, project, tags and age choose alike among the running, the kept, and those not to be kept."""
    add("a", config={"tags": {"team": "a", "run": "2"}}, created_s=100.0)
    add("b", backend="ssh", config={"project": {"name": "vision"}, "tags": {"team": "b"}}, created_s=100.0)
    add("c", State("failed", "error"), created_s=200.0)
    add("d", State("running"), backend="ssh", config={"tags": {"team": "a"}}, created_s=200.0)
    if is_full:  # a disk on which nothing can be kept
        registry.database.execute("CREATE TRIGGER full BEFORE INSERT ON listed BEGIN SELECT RAISE(FAIL, 'full'); END")
    assert ids(registry, **choice) == wanted


def test_listed_leaves_out_what_has_left_the_chosen_states_when_it_is_asked(
    registry: Registry, add: Callable[..., Job]
) -> None:
    """`--active` lists nothing that turns out to have ended; `--state succeeded` lists what turns out to have."""
    add("a", State("running"))

    def ask(jobs: list[Job]) -> list[Job]:
        return [replace(job, attempt=replace(job.attempt, state=DONE)) for job in jobs]

    assert chosen(registry, Choice(states=frozenset({"running"})), ask).lines == []
    assert [line.state for line in chosen(registry, Choice(states=frozenset({"succeeded"})), ask).lines] == [
        "succeeded"
    ]


def test_asking_waits_for_no_backend_that_does_not_answer(
    registry: Registry, add: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three jobs one hangs and one fails: the third is as it is now, the two as last seen, each with why."""
    jobs = [add(name, State("running", started_s=1.0)) for name in ("hangs", "fails", "lives")]
    release = threading.Event()

    def refresh(own: Registry, job: Job) -> Job:
        assert own is not registry  # a connection is one thread's
        if job.id == "hangs":
            release.wait(60)
        if job.id == "fails":
            raise CredentialError("the token has expired")
        return replace(job, attempt=replace(job.attempt, state=DONE))

    monkeypatch.setattr(asking, "refresh", refresh)
    answers = asking.ask(registry, jobs, 1.0)
    release.set()
    told = {job_id: (type(fault).__name__, fault.message) for job_id, fault in answers.faults.items()}
    assert told == {
        "hangs": ("UnreachableError", "local has not answered within 1 s"),
        "fails": ("CredentialError", "the token has expired"),
    }
    assert [job.attempt.state.state for job in answers.jobs] == ["running", "running", "succeeded"]

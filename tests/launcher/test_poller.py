"""Polls of many jobs in threads: the lanes of the backends, and `wait`."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cloudtrain.launcher.errors import CredentialError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import follow
from cloudtrain.launcher.jobs.poller import Lanes
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text.terminal import reporting, say
from doubles.signatures import MakeJob, SetAnswers


@pytest.fixture
def lanes() -> Iterator[Callable[..., Lanes[str]]]:
    """Return a function that starts lanes; they are closed at the end of the test."""
    made: list[Lanes[str]] = []

    def begin(work: Callable[[Iterator[str]], None], at_once: int = 1) -> Lanes[str]:
        made.append(Lanes(work, "tests", at_once))
        return made[-1]

    yield begin
    for each in made:
        each.close(10.0)


def test_lane_runs_due_tasks_in_order_and_the_newest_of_a_key(lanes: Callable[..., Lanes[str]]) -> None:
    """A later task of the same key replaces the waiting task; a dropped task does not run."""
    begun, goes_on, done = threading.Event(), threading.Event(), list[str]()

    def work(tasks: Iterator[str]) -> None:
        for task in tasks:
            begun.set()
            assert goes_on.wait(60)
            done.append(task)

    found = lanes(work)
    found.put("near", "first", "first")
    assert begun.wait(60)
    found.put("near", "a", "old")
    found.put("near", "b", "dropped")
    found.put("near", "later", "later", 3600.0)
    found.put("near", "a", "new")
    found.keep_only({"a", "later"})
    found.hurry()
    goes_on.set()
    found.drain(60)
    assert done == ["first", "later", "new"]


def test_messages_of_a_lane_go_where_the_messages_of_the_caller_go(lanes: Callable[..., Lanes[str]]) -> None:
    """A program that uses the Python interface gets the alerts in its log, and not on standard error."""

    def work(tasks: Iterator[str]) -> None:
        for task in tasks:
            say(task)

    said: list[str] = []
    with reporting(said.append):
        found = lanes(work)
        found.put("near", "a", "an alert")
        found.drain(60)
    assert said == ["an alert"]


def test_wait_reports_an_end_while_a_second_backend_hangs(
    registry: Registry, seed: MakeJob, answers: SetAnswers
) -> None:
    """A slow backend delays only its own jobs."""
    hangs, ended = threading.Event(), queue.SimpleQueue[Job]()

    def far(ref: Any) -> State:
        assert hangs.wait(60)
        return State("succeeded", ended_s=time.time())

    answers(lambda ref: State("succeeded", ended_s=time.time()))
    answers(far, "ssh")
    jobs = [seed(name, State("running", started_s=time.time() - 60)) for name in ("far", "near")]
    registry.database.execute("UPDATE jobs SET backend = 'ssh' WHERE id = 'far'")

    def tell(job: Job) -> None:
        ended.put(job)
        hangs.set()

    assert follow.wait(registry, [registry.find(job.id) for job in jobs], None, tell) == 0
    assert [ended.get().id, ended.get().id] == ["near", "far"]


def test_follower_of_a_silent_job_sees_the_others_of_the_backend(
    registry: Registry, seed: MakeJob, answers: SetAnswers
) -> None:
    """A host that does not answer holds up one thread, and not the jobs of other hosts."""
    hangs, ended = threading.Event(), list[str]()

    def answer(ref: Any) -> State:
        assert "far" not in ref["folder"] or hangs.wait(60)
        return State("succeeded", ended_s=time.time())

    answers(answer)
    jobs = [seed(name, State("running", started_s=time.time() - 60)) for name in ("far", "near", "next")]

    def tell(job: Job) -> None:
        ended.append(job.id)
        if len(ended) == 2:
            hangs.set()

    assert follow.wait(registry, jobs, None, tell) == 0
    assert (sorted(ended[:2]), ended[2]) == (["near", "next"], "far")


def test_wait_ends_with_a_fault_that_is_no_outage(registry: Registry, seed: MakeJob, answers: SetAnswers) -> None:
    """Only an unreachable backend is waited for."""

    def refused(ref: Any) -> State:
        raise CredentialError("the token has expired")

    answers(refused)
    job = seed("job", State("running", started_s=time.time() - 60))
    with pytest.raises(CredentialError, match="the token has expired"):
        follow.wait(registry, [job], None, lambda job: None)

"""What gathers the live picture: threads on a real registry, with a backend that answers, is slow, or does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import retry
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.live.feed import Feed
from cloudtrain.launcher.live.sight import Sight
from cloudtrain.launcher.live.tail import Tail
from cloudtrain.launcher.notices import claims
from cloudtrain.launcher.registry import Registry

RUNS = State("running", started_s=time.time() - 60)
ENDED = State("failed", "error", ended_s=time.time() - 60)


@pytest.fixture
def feed() -> Iterator[Callable[..., Feed]]:
    """Return what begins a feed, which is closed at the end."""
    begun: list[Feed] = []

    def begin(*names: str) -> Feed:
        begun.append(Feed(names))
        return begun[-1]

    yield begin
    for each in begun:
        each.close(3.0)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], State]], None]:
    """Return a function that has the local backend answer so, with no lines."""
    local = backends.load("local")
    monkeypatch.setattr(local, "logs", lambda *args, **kwargs: backends.LogPage([], {}))
    return lambda answer: monkeypatch.setattr(local, "state", answer)


def sight(feed: Feed, job_id: str) -> Sight:
    """Return what is seen of a job now."""
    found = feed.scene(time.time()).of(job_id)
    assert found is not None
    return found


def test_picture_is_there_before_any_backend_answers(
    seed: Callable[..., Job], feed: Callable[..., Feed], answers: Callable[..., None], wait_until: Callable[..., Any]
) -> None:
    """What the registry knows is shown at once, and since when the backend is being asked."""
    is_answered = threading.Event()

    def slow(ref: Any) -> State:
        is_answered.wait(30)
        return RUNS

    answers(slow)
    seed("slow", State("running", started_s=1.0))
    watched = feed("slow")
    try:
        assert sight(watched, "slow").job.active
        wait_until(lambda: sight(watched, "slow").asks_since_s)
        assert sight(watched, "slow").seen_s is None
    finally:
        is_answered.set()
    wait_until(lambda: sight(watched, "slow").seen_s)
    assert sight(watched, "slow").asks_since_s is None


def test_silent_backend_is_shown_and_asked_on(
    seed: Callable[..., Job], feed: Callable[..., Feed], answers: Callable[..., None], wait_until: Callable[..., Any]
) -> None:
    """The job stays what it was."""

    def silent(ref: Any) -> State:
        raise UnreachableError("no route to host")

    answers(silent)
    seed("far", RUNS)
    watched = feed("far")
    wait_until(lambda: sight(watched, "far").job.attempt.unreachable_since_s)
    assert sight(watched, "far").job.attempt.state.state == "running"


def test_end_of_one_job_is_seen_beside_the_fault_of_another(
    seed: Callable[..., Job], feed: Callable[..., Feed], answers: Callable[..., None], wait_until: Callable[..., Any]
) -> None:
    """Each by itself."""
    answers(lambda ref: {}["no such"] if "broken" in ref["folder"] else replace(ENDED, ended_s=time.time()))
    for name in ("broken", "ends"):
        seed(name, RUNS)
    watched = feed()
    wait_until(lambda: not sight(watched, "ends").job.active)
    assert wait_until(lambda: sight(watched, "broken").fault) == "cloudtrain itself failed: KeyError: 'no such'"


def test_attempt_that_a_job_has_earned_is_sent_by_the_live_view(
    seed: Callable[..., Job],
    feed: Callable[..., Feed],
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., Any],
) -> None:
    """As the plain watch does."""

    def earned(registry: Registry, job: Job) -> Job:
        return replace(job, attempt=replace(job.attempt, number=2, state=State("pending")))

    monkeypatch.setattr(retry, "earned", earned)
    seed("again", replace(ENDED, reason="preempted", ended_s=time.time()))
    watched = feed("again")
    wait_until(lambda: sight(watched, "again").job.attempt.number == 2)


def test_job_that_is_submitted_meanwhile_joins_the_table(
    seed: Callable[..., Job], feed: Callable[..., Feed], answers: Callable[..., None], wait_until: Callable[..., Any]
) -> None:
    """Active ones come first, the newest before the others."""
    answers(lambda ref: RUNS)
    seed("ended", ENDED)
    watched = feed()
    assert [each.job.id for each in watched.scene(0.0).sights] == ["ended"]
    seed("older", RUNS)
    seed("newer", RUNS)
    wait_until(lambda: len(watched.scene(0.0).sights) == 3)
    assert [each.job.id for each in watched.scene(0.0).sights] == ["newer", "older", "ended"]


def test_opened_job_has_its_curves_and_alerts(
    seed: Callable[..., Job], feed: Callable[..., Feed], wait_until: Callable[..., Any]
) -> None:
    """Other jobs have no need of them."""
    from cloudtrain.entrypoints.notices.message import Notice
    from cloudtrain.launcher import series

    seed("told", ENDED)
    registry = Registry()
    event = 'step 1  ::ct {"e":"step","step":1,"loss":0.5}'
    with registry.database.transaction():
        series.append(registry.database, "told", series.gather(1, [(event, 1.0)]))
    for channel in ("terminal", "slack-0123"):
        claims.mark_told(registry.database, "told", channel, Notice("1", "budget:50@9", "budget", "half"), 100.0)
    registry.close()
    watched = feed("told")
    watched.open("told")
    curves = wait_until(lambda: sight(watched, "told").curves)
    assert curves.loss.newest == 0.5
    assert sight(watched, "told").alerts == (claims.Told("budget:50@9", 100.0, ("slack", "terminal")),)


def test_stop_is_asked_for_as_the_command_does(
    seed: Callable[..., Job],
    feed: Callable[..., Feed],
    answers: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., Any],
) -> None:
    """And what came of it is said."""
    asked: list[bool] = []
    answers(lambda ref: RUNS)
    monkeypatch.setattr(backends.load("local"), "stop", lambda ref, *, now: asked.append(now))
    seed("runs", RUNS)
    watched = feed("runs")
    watched.stop("runs")
    assert wait_until(lambda: watched.scene(0.0).notes)[0][1] == "stopping runs after saving"
    assert asked == [False]


def test_log_is_read_by_a_thread_and_of_the_ranks_chosen(
    seed: Callable[..., Job], home: Path, wait_until: Callable[..., Any]
) -> None:
    """To its end, where the job has ended."""
    seed("ended", ENDED, {"0": "one\ntwo\n", "1": "other\n"})
    for ranks, lines in ((None, {"one", "two", "other"}), (frozenset({1}), {"other"})):
        tail = Tail(home, "ended", ranks)
        shot = wait_until(lambda tail=tail: tail.shot() if tail.shot().is_over else None)
        assert ({line.text for line in shot.lines if line.rank is not None}, shot.fault) == (lines, "")
        tail.close()


def test_log_that_cannot_be_read_says_why(
    seed: Callable[..., Job], home: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    """And is tried again."""

    def silent(*args: Any, **kwargs: Any) -> backends.LogPage:
        raise UnreachableError("no route to host")

    monkeypatch.setattr(backends.load("local"), "logs", silent)
    seed("far", RUNS)
    tail = Tail(home, "far")
    assert "no route to host" in wait_until(lambda: tail.shot().fault)
    tail.close()

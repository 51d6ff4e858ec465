"""The data source of the live view: threads on a real registry, with a fast, a slow and a silent backend."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.notices.message import Notice
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import ConfigError, UnreachableError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import poller, retry, stopping
from cloudtrain.launcher.jobs import watch as watching
from cloudtrain.launcher.jobs.view import read_view
from cloudtrain.launcher.live import feed as feeds
from cloudtrain.launcher.live.feed import JobFeed, LogTail
from cloudtrain.launcher.live.model import WatchedJob, with_log
from cloudtrain.launcher.notices import outbox
from cloudtrain.launcher.store import series, sweeps
from cloudtrain.launcher.store.database import QuiesceLock
from cloudtrain.launcher.store.registry import Registry
from doubles import swept
from doubles.signatures import MakeJob, SetAnswers
from doubles.waiting import until

MakeFeed = Callable[..., JobFeed]


def runs() -> State:
    """Return the state of a job that has run for a minute, counted from the test and not from its collection."""
    return State("running", started_s=time.time() - 60)


def ended() -> State:
    """Return the state of a job that failed a minute ago."""
    return State("failed", "error", ended_s=time.time() - 60)


@pytest.fixture
def feed() -> Iterator[MakeFeed]:
    """Return a function that starts a feed; each feed is closed at the end of the test."""
    begun: list[JobFeed] = []

    def begin(*names: str) -> JobFeed:
        begun.append(JobFeed(names))
        begun[-1].watcher.start()
        return begun[-1]

    yield begin
    for each in begun:
        each.watcher.close(3.0)


def watched_job(feed: JobFeed, job_id: str) -> WatchedJob:
    """Return the present model of a job."""
    found = feed.scene(time.time()).of(job_id)
    assert found is not None
    return found


def test_scene_is_available_before_any_backend_answers(seed: MakeJob, feed: MakeFeed, answers: SetAnswers) -> None:
    """The view shows the registry's state at once, and the time since when the poll waits."""
    is_answered = threading.Event()

    def slow(ref: Any) -> State:
        is_answered.wait(30)
        return runs()

    answers(slow)
    seed("slow", State("running", started_s=1.0))
    watched = feed("slow")
    try:
        assert watched_job(watched, "slow").job.active
        until(lambda: watched_job(watched, "slow").asks_since_s)
        assert watched_job(watched, "slow").seen_s is None
    finally:
        is_answered.set()
    until(lambda: watched_job(watched, "slow").seen_s)
    assert watched_job(watched, "slow").asks_since_s is None


def test_backends_of_the_jobs_do_not_affect_each_other(seed: MakeJob, feed: MakeFeed, answers: SetAnswers) -> None:
    """Each job is polled separately: a silent backend's job keeps its state, and a broken one shows its fault."""

    def silent(ref: Any) -> State:
        raise UnreachableError("no route to host")

    answers(silent)
    seed("far", runs())
    watched = feed("far")
    until(lambda: watched_job(watched, "far").job.attempt.unreachable_since_s)
    assert watched_job(watched, "far").job.attempt.state.state == "running"
    answers(lambda ref: {}["no such"] if "broken" in ref["folder"] else replace(ended(), ended_s=time.time()))
    for name in ("broken", "ends"):
        seed(name, runs())
    watched = feed()
    until(lambda: not watched_job(watched, "ends").job.active)
    assert until(lambda: watched_job(watched, "broken").fault) == "cloudtrain itself failed: KeyError: 'no such'"


def test_first_answer_brings_the_trials_with_the_counts(registry: Registry) -> None:
    """A poll by this or another process has stored trials: the picture has them with the view, not a read later."""
    job = swept.put(registry, 9)
    rows = sweeps.segments(registry.database, job.id)
    sweeps.forget(registry.database, job.id)
    watched = JobFeed((job.id,))
    watched.opened = job.id
    watched._step(registry, None)
    assert "no trial yet" in watched_job(watched, job.id).trials[0]
    sweeps.take(registry.database, job.id, rows)
    watched._show(poller.Seen(job, read_view(registry, job)))
    assert "8 done, 1 failed" in watched_job(watched, job.id).trials[0]


def test_live_view_sends_an_earned_retry(seed: MakeJob, feed: MakeFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live view acts like the plain `watch`."""

    def send_if_due(registry: Registry, job: Job) -> Job:
        return replace(job, attempt=replace(job.attempt, number=2, state=State("pending")))

    monkeypatch.setattr(retry, "send_if_due", send_if_due)
    seed("again", replace(ended(), reason="preempted", ended_s=time.time()))
    watched = feed("again")
    until(lambda: watched_job(watched, "again").job.attempt.number == 2)


def test_new_job_joins_the_table(seed: MakeJob, feed: MakeFeed, answers: SetAnswers) -> None:
    """Active jobs come first, and the newest job comes first among them."""
    answers(lambda ref: runs())
    seed("ended", ended())
    watched = feed()
    assert [each.job.id for each in watched.scene(0.0).jobs] == ["ended"]
    seed("older", runs())
    seed("newer", runs())
    until(lambda: len(watched.scene(0.0).jobs) == 3)
    assert [each.job.id for each in watched.scene(0.0).jobs] == ["newer", "older", "ended"]


def test_opened_job_has_its_curves_and_alerts(registry: Registry, seed: MakeJob, feed: MakeFeed) -> None:
    """Only an opened job needs curves and alerts."""
    seed("told", ended())
    event = 'step 1  ::ct {"e":"step","step":1,"loss":0.5}'
    with registry.database.transaction():
        series.append(registry.database, "told", series.gather(1, [(event, 1.0)]))
    for channel in ("terminal", "slack-0123"):
        outbox.mark_sent(registry.database, "told", channel, Notice("1", "budget:50@9", "budget", "half"), 100.0)
    watched = feed("told")
    watched.opened = "told"
    curves = until(lambda: watched_job(watched, "told").curves)
    assert curves.loss.newest == 0.5
    assert watched_job(watched, "told").alerts == (outbox.Sent("budget:50@9", 100.0, ("slack", "terminal")),)


def test_stop_from_the_live_view_saves_first(
    seed: MakeJob, feed: MakeFeed, answers: SetAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view stops a job like the command and shows the result."""
    asked: list[bool] = []
    answers(lambda ref: runs())
    monkeypatch.setattr(backends.load("local"), "stop", lambda ref, *, now: asked.append(now))
    seed("runs", runs())
    watched = feed("runs")
    watched.stop("runs")
    assert until(lambda: watched.scene(0.0).notes)[0][1] == "stopping runs after saving"
    assert asked == [False]


def test_running_stop_is_waited_for(seed: MakeJob, feed: MakeFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who leaves meanwhile gets the result, or a message that the result is unknown."""
    goes_on = threading.Event()

    def slow(registry: Registry, name: str) -> stopping.StopResult:
        assert goes_on.wait(60)
        return stopping.StopResult(registry.find(name), "asked")

    monkeypatch.setattr(stopping, "ask", slow)
    seed("money", ended())
    watched = feed("money")
    watched.stop("money")
    assert watched.stopping() == ["money"]
    assert watched.stops(0.0) == ["it is not known whether money was asked to stop"]
    watched.watcher.close(0.1)
    goes_on.set()
    assert watched.stops(60.0) == ["stopping money after saving"]
    assert watched.stopping() == []


def test_job_that_ended_long_ago_leaves_the_table(
    seed: MakeJob, feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An opened or marked job stays in the table."""
    for name in ("old", "opened", "marked"):
        seed(name, ended())
    watched = feed()
    watched.opened = "opened"
    watched.marked = "marked"
    of_late = watching.chosen

    def chosen(*args: Any) -> list[Job]:
        return [job for job in of_late(*args) if job.id == "newer"]

    monkeypatch.setattr(watching, "chosen", chosen)
    seed("newer", ended())
    shown = {"newer", "opened", "marked"}
    until(lambda: {each.job.id for each in watched.scene(0.0).jobs} == shown)


def test_busy_registry_stops_polls_only_for_a_moment(
    seed: MakeJob, feed: MakeFeed, answers: SetAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile each job shows the reason."""
    answers(lambda ref: runs())
    job = seed("runs", runs())
    is_full = threading.Event()
    is_full.set()

    def opened(folder: Path | None = None) -> Registry:
        if is_full.is_set() and threading.current_thread() is not threading.main_thread():
            raise ConfigError("the job registry cannot be used: too many open files")
        return Registry(folder)

    for module in (poller, watching):
        monkeypatch.setattr(module, "Registry", opened)
    monkeypatch.setattr(watching, "BACK_OFF_S", 0.05)
    monkeypatch.setattr(poller, "_SILENT_S", 0.05)
    watched = feed("runs")
    assert "too many open files" in until(lambda: watched.scene(0.0).notes)[0][1]
    watched.watcher.poller.take(job)
    assert "too many open files" in until(lambda: watched_job(watched, "runs").fault)
    is_full.clear()
    until(lambda: watched_job(watched, "runs").seen_s and not watched_job(watched, "runs").fault)


def test_suspension_waits_for_running_polls(
    seed: MakeJob, feed: MakeFeed, answers: SetAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suspension waits for the running poll and lets no new poll start, so that no lock is held meanwhile."""
    looks, goes_on = threading.Semaphore(0), threading.Event()

    def slow(ref: Any) -> State:
        looks.release()
        assert goes_on.wait(60)
        return runs()

    answers(slow)
    monkeypatch.setattr(feeds, "_STILL_S", 60.0)
    seed("a", runs())
    watched = feed("a")
    assert looks.acquire(timeout=60)
    threading.Timer(0.2, goes_on.set).start()
    with watched.still():
        assert goes_on.is_set()
        while looks.acquire(blocking=False):
            pass
        assert not looks.acquire(timeout=1.5)
    assert looks.acquire(timeout=60)


def test_quiesce_lock_lets_running_workers_finish() -> None:
    """The closing thread may itself be inside; if the wait ends early, the lock reports false."""
    gate, inside, goes_on, begun = QuiesceLock(), threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        with gate.passing():
            inside.set()
            assert goes_on.wait(60)
            with gate.passing():
                begun.append("deeper")

    def come_late() -> None:
        with gate.passing():
            begun.append("late")

    first, second = threading.Thread(target=work), threading.Thread(target=come_late)
    first.start()
    assert inside.wait(60)
    with gate.passing(), gate.shut(0.01) as is_calm:
        assert not is_calm
        second.start()
        goes_on.set()
        first.join(60)
        with gate.shut(60.0) as is_calm:
            assert is_calm
        assert begun == ["deeper"]
    second.join(60)
    assert begun == ["deeper", "late"]


def test_log_tail_reads_the_chosen_ranks(seed: MakeJob, home: Path) -> None:
    """A thread reads the log of an ended job to the end."""
    seed("ended", ended(), {"0": "one\ntwo\n", "1": "other\n"})
    for ranks, lines in ((None, {"one", "two", "other"}), (frozenset({1}), {"other"})):
        tail = LogTail(home, "ended", ranks)
        shot = until(lambda tail=tail: tail.shot() if tail.shot().is_over else None)
        assert ({line.text for line in shot.lines if line.rank is not None}, shot.fault) == (lines, "")
        tail.close()


@pytest.mark.parametrize(("polled_s", "steps"), [(50.0, (140, 130)), (102.0, (140, 130)), (500.0, (60, 50))])
def test_head_agrees_with_the_log_below_it(
    registry: Registry, seed: MakeJob, home: Path, polled_s: float, steps: tuple[int, int]
) -> None:
    """State and log are read at different times: the step and the save of the log count, unless its reader is stuck."""
    told = [("step", {"step": 130}), ("checkpoint", {"step": 130, "path": "/c/step-130"}), ("step", {"step": 140})]
    text = "".join(f"{events.format_line(name, f'{name} {fields}', fields)}\n" for name, fields in told)
    job = seed("lagging", runs(), {"0": text})
    log = home / "local" / job.id / "attempt-1" / "node-0" / "log" / "rank-0.times"
    log.write_text(f"{len(text)} 100.0\n")
    polled = {"step": 60, "stepped_s": polled_s, "checkpoint_step": 50, "saved_s": polled_s - 1, "curve": "kept"}
    registry.set_state(job.attempt, job.attempt.state, polled)
    watched = WatchedJob(read_view(registry, registry.find(job.id)))
    tail = LogTail(home, job.id)
    shot = until(lambda: tail.shot() if tail.shot().is_read else None)
    tail.close(10.0)
    view = with_log(watched, shot).view
    assert (view.progress["step"], view.money.checkpoint_step, view.progress["curve"]) == (*steps, "kept")


@pytest.mark.parametrize(
    ("error", "words"), [(UnreachableError("no route to host"), "no route to host"), (OSError(), "OSError")]
)
def test_unreadable_log_reports_the_reason(
    seed: MakeJob, home: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """A fault without a message is reported by its type; no fault ends the reader silently."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise error

    if isinstance(error, OSError):
        monkeypatch.setattr(feeds, "LogStream", broken)
    else:
        monkeypatch.setattr(backends.load("local"), "logs", broken)
    seed("far", runs())
    tail = LogTail(home, "far")
    assert words in until(lambda: tail.shot().fault)
    tail.close(10.0)


def test_hanging_log_readers_are_bounded(seed: MakeJob, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `r` or Enter starts a reader; a new reader waits until a hanging reader has its answer."""
    is_asked, goes_on = threading.Event(), threading.Event()

    def hangs(*args: Any, **kwargs: Any) -> backends.LogPage:
        is_asked.set()
        assert goes_on.wait(60)
        return backends.LogPage([], {})

    monkeypatch.setattr(backends.load("local"), "logs", hangs)
    monkeypatch.setattr(feeds, "_READING", threading.BoundedSemaphore(1))
    seed("hangs", runs())
    first = LogTail(home, "hangs")
    assert is_asked.wait(60)
    first.close()
    second = LogTail(home, "hangs")
    assert "still wait for their backends" in until(lambda: second.shot().fault)
    goes_on.set()
    until(lambda: second.shot().is_read)
    second.close(10.0)

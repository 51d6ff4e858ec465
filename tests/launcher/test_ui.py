"""Parts of the live page without a browser: polling of backends, shared log lines, job lists, spend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.launcher.errors import CapacityError, CredentialError, UnreachableError, UsageError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.jobs import overview, retry
from cloudtrain.launcher.jobs.view import read_view
from cloudtrain.launcher.jobs.watch import Watcher
from cloudtrain.launcher.logs import reader
from cloudtrain.launcher.logs.stream import LogStream
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.ui import feeds, pages
from cloudtrain.launcher.ui.site import Pages, assets
from doubles.plans import make_job
from doubles.signatures import MakeJob, SetAnswers
from doubles.waiting import until

RUNS = State("running", started_s=time.time() - 60)
StartWatcher = Callable[..., Watcher]


@pytest.fixture
def watcher(home: Path) -> Iterator[StartWatcher]:
    """Return a function that starts a watcher, as an open page does; each watcher ends with the test."""
    made: list[Watcher] = []

    def begin(*, is_quiet: bool = False) -> Watcher:
        made.append(Watcher(home, (), lambda seen: None, lambda fault: None, is_quiet=is_quiet))
        made[-1].start()
        return made[-1]

    yield begin
    for each in made:
        each.close(10.0)


@pytest.fixture
def open_feeds(home: Path) -> Iterator[feeds.Feeds]:
    """Return the feeds of the page, which end with the test."""
    found = feeds.Feeds(lambda: None, home)
    yield found
    found.close()


def state_of(home: Path, name: str) -> str:
    """Return a job's state as the registry has it."""
    found = Registry(home).find(name).attempt
    return "unreachable" if found.unreachable_since_s else found.state.state


def test_open_page_sends_an_earned_retry(
    seed: MakeJob, watcher: StartWatcher, answers: SetAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher acts like `watch`; a job that ended just before the page was opened gets its retry too."""
    asked: list[str] = []
    monkeypatch.setattr(retry, "send_if_due", lambda registry, job: asked.append(job.id))
    answers(lambda ref: State("failed", "preempted", ended_s=time.time()))
    seed("runs", RUNS)
    seed("just-ended", State("failed", "preempted", ended_s=time.time() - 5))
    watcher()
    until(lambda: set(asked) == {"runs", "just-ended"})


def test_read_only_page_updates_the_registry_and_sends_nothing(
    home: Path,
    seed: MakeJob,
    watcher: StartWatcher,
    answers: SetAnswers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page brings the registry up to date, as `status` does."""
    monkeypatch.setattr(retry, "send_if_due", lambda registry, job: pytest.fail("an attempt was sent"))
    answers(lambda ref: State("failed", "preempted", ended_s=time.time()))
    seed("runs", RUNS)
    watcher(is_quiet=True)
    until(lambda: state_of(home, "runs") == "failed")


def test_backend_that_hangs_delays_only_its_own_jobs(
    home: Path, registry: Registry, seed: MakeJob, watcher: StartWatcher, answers: SetAnswers
) -> None:
    """The remaining backends are polled, and the list is served."""
    hangs = threading.Event()
    answers(lambda ref: State("succeeded", ended_s=time.time()))
    answers(lambda ref: hangs.wait(20) and RUNS, "ssh")
    seed("far", RUNS)
    registry.database.execute("UPDATE jobs SET backend = 'ssh' WHERE id = 'far'")
    seed("near", RUNS)
    watcher()
    until(lambda: state_of(home, "near") == "succeeded")
    assert [job["state"] for job in pages.listed(registry, pages.JobListQuery())["jobs"]] == ["succeeded", "running"]
    hangs.set()


def test_unreachable_backend_is_polled_seldom(
    home: Path, seed: MakeJob, watcher: StartWatcher, answers: SetAnswers
) -> None:
    """The registry keeps the job's last state."""
    asked: list[float] = []

    def silent(ref: Any) -> State:
        asked.append(time.monotonic())
        raise UnreachableError("no route to host")

    answers(silent)
    seed("far", RUNS)
    found = watcher()
    until(lambda: state_of(home, "far") == "unreachable")
    assert len(asked) == 1
    found.wake()  # as after a click on a button
    until(lambda: len(asked) >= 2)
    assert state_of(home, "far") == "unreachable"


def test_pages_share_a_feed_and_each_gets_every_line_once(open_feeds: feeds.Feeds, seed: MakeJob) -> None:
    """Each page asks for the lines after the last number that the page has."""
    seed("job", State("succeeded", started_s=1.0, ended_s=2.0), {"0": "a\nb\nc\n", "1": "other\n"})
    wanted = feeds.LogQuery("job", 1, ranks=frozenset({0}))
    one, two = open_feeds.enter(wanted), open_feeds.enter(wanted)
    assert one is two
    until(lambda: one.is_over)
    assert [line[3] for line in one.since(0)[0]] == ["a", "b", "c"]
    assert [line[3] for line in one.since(2)[0]] == ["c"]
    assert one.since(3) == ([], 3)
    assert one.since(99) == ([], 3)


def test_feed_continues_after_an_expired_login(
    open_feeds: feeds.Feeds, seed: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feed reports the fault while the fault lasts; then all lines arrive."""
    expired, read = threading.Event(), LogStream.tail
    expired.set()

    def tail(stream: LogStream, *args: Any) -> Any:
        if expired.is_set():
            raise CredentialError("the login has expired", hint="log in")
        return read(stream, *args)

    monkeypatch.setattr(LogStream, "tail", tail)
    monkeypatch.setattr(reader, "BACK_OFF_S", 0.02)
    seed("job", State("succeeded", started_s=1.0, ended_s=2.0), {"0": "a\nb\n", "1": ""})
    feed = open_feeds.enter(feeds.LogQuery("job", 1))
    until(lambda: feed.trouble)
    assert feed.trouble.endswith("the job is unaffected: the login has expired (log in)")
    assert not feed.is_ready
    expired.clear()
    until(lambda: feed.is_over)
    assert (feed.trouble, [line[3] for line in feed.since(0)[0]]) == ("", ["a", "b"])


def test_feed_keeps_only_the_last_lines(
    open_feeds: feeds.Feeds, seed: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feed is bounded in lines and characters, and the numbers continue; a failed feed is replaced by a new one."""
    monkeypatch.setattr(feeds, "KEPT_CHARS", 400)
    seed("job", State("succeeded", started_s=1.0, ended_s=2.0), {"0": f"{'x' * 100}\n" * 9, "1": ""})
    feed = open_feeds.enter(feeds.LogQuery("job", 1))
    until(lambda: feed.is_over)
    lines, last = feed.since(0)
    assert (len(lines), last) == (4, 9)
    monkeypatch.setattr(feeds.LogFeed, "_follow", lambda *args: 1 / 0)
    seed("other", State("succeeded", started_s=1.0, ended_s=2.0), {"0": "a\n", "1": ""})
    first = open_feeds.enter(feeds.LogQuery("other", 1))
    until(first.closed.is_set)
    assert "ZeroDivisionError" in first.trouble
    assert open_feeds.enter(feeds.LogQuery("other", 1)) is not first


def test_feeds_are_bounded_and_an_idle_feed_makes_room(open_feeds: feeds.Feeds, seed: MakeJob) -> None:
    """Above the limit of open feeds a new filter is refused."""
    seed("job", State("succeeded", started_s=1.0, ended_s=2.0))
    made = [open_feeds.enter(feeds.LogQuery("job", 1, grep=f"x{number}")) for number in range(feeds.MOST_FEEDS)]
    with pytest.raises(CapacityError, match="open already"):
        open_feeds.enter(feeds.LogQuery("job", 1))
    open_feeds.leave(made[0])
    assert open_feeds.enter(feeds.LogQuery("job", 1)) is not made[0]
    with pytest.raises(UsageError, match="not a valid regular expression"):
        open_feeds.enter(feeds.LogQuery("job", 1, grep="("))


def test_jobs_are_filtered_by_state_backend_tag_and_text(registry: Registry) -> None:
    """Filters combine, and the pages follow in order."""
    for number in range(pages.PAGE + 10):
        tags = {"team": "vision" if number % 2 else "speech", "run": str(number)}
        change = {"config": {"tags": tags}, "backend": "ssh" if number % 5 == 0 else "local"}
        registry.add(f"job-{number}", lambda name, _, change=change: make_job(name, **change), exclusive=True, key=None)

    def ids(**words: Any) -> list[str]:
        return [job["job"] for job in pages.listed(registry, pages.JobListQuery(**words))["jobs"]]

    assert ids()[:2] == ["job-59", "job-58"]
    assert ids(page=2)[-1] == "job-0"
    assert pages.listed(registry, pages.JobListQuery())["pages"] == 2
    assert len(ids(backend="ssh")) == 12
    assert len(ids(backend="ssh", tag="team=vision")) == 6
    assert ids(tag="run=7") == ["job-7"]
    assert len(ids(tag="run")) == pages.PAGE
    assert ids(text="JOB-12") == ["job-12"]
    assert ids(text="%") == ids(tag="team=%") == ids(state="failed") == []
    assert len(ids(state="active")) == pages.PAGE
    assert pages.choices(registry)["tags"][:2] == ["team=speech", "team=vision"]


@pytest.mark.parametrize("query", [{"page": "-1"}, {"page": "x"}, {"page": "9" * 30}, {"state": "'; DROP TABLE jobs"}])
def test_invalid_query_in_the_address_shows_all_jobs(query: dict[str, str]) -> None:
    """Invalid or unknown values are ignored."""
    assert pages.JobListQuery.of(query) == pages.JobListQuery()


def test_spend_has_twelve_months_in_valid_groups(registry: Registry, seed: MakeJob) -> None:
    """The spend has twelve months in valid groups; an unknown month is the current month."""
    now_s = time.time()
    seed("paid", State("succeeded", started_s=now_s - 7200, ended_s=now_s - 3600, hourly_usd=None))
    registry.database.execute("UPDATE attempts SET plan = json_set(plan, '$.hourly_usd', 4.0)")
    found = pages.spend_values(registry.database, "1999-01", "nonsense")
    assert len(found["months"]) == 12
    assert list(found["months"]) == sorted(found["months"])
    assert found["month"] == list(found["months"])[-1]
    assert found["by"] == "backend"
    assert sum(each.spent_micro for each in found["months"].values()) == pytest.approx(4e6)


def test_resume_that_differs_from_the_offer_is_refused(
    registry: Registry, seed: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume is refused if the job was resumed meanwhile, or if the worst case costs more than the page showed."""
    seed("job", State("failed", "error", ended_s=time.time()))
    prepared = SimpleNamespace(plan=SimpleNamespace(most_micro=3_000_000))
    monkeypatch.setattr(pages, "_prepared", lambda *args: prepared)
    with pytest.raises(UsageError, match="was already resumed"):
        pages.resume(registry, "job", attempt=3, worst_micro=3_000_000)
    with pytest.raises(UsageError, match="more than was shown"):
        pages.resume(registry, "job", attempt=2, worst_micro=2_999_999)
    prepared.plan.most_micro = None
    with pytest.raises(UsageError, match="more than was shown"):
        pages.resume(registry, "job", attempt=2, worst_micro=3_000_000)


@pytest.mark.parametrize(("is_resumable", "words"), [(True, "saved, step not reported"), (False, "no checkpoint yet")])
def test_page_names_the_checkpoint_of_a_script_that_reports_no_steps(
    registry: Registry, seed: MakeJob, is_resumable: bool, words: str
) -> None:
    """A job that can be resumed has a checkpoint, and `status` says the same."""
    job = seed("job", State("failed", "error", resumable=is_resumable, started_s=1.0, ended_s=2.0))
    facts = pages.job_parts(Pages(assets(), csrf="", is_read_only=True), registry, "job", "").parts["facts"]
    assert f"<dt>Checkpoint</dt><dd>{words}</dd>" in facts
    shown = "\n".join(overview.as_lines(read_view(registry, job)))
    assert ("checkpoint  saved, step not reported" in shown) == is_resumable
    running = seed("other", State("running", started_s=1.0))
    registry.set_state(running.attempt, running.attempt.state, {"saved_s": 2.0})
    facts = pages.job_parts(Pages(assets(), csrf="", is_read_only=True), registry, "other", "").parts["facts"]
    assert "<dt>Checkpoint</dt><dd>saved, step not reported</dd>" in facts

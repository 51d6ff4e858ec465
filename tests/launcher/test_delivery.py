"""Delivery sends each notice of a job once per channel, in the background of the follower, in spite of failures."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.notices import sending
from cloudtrain.entrypoints.notices.facts import JobFacts
from cloudtrain.entrypoints.notices.message import Notice, compose
from cloudtrain.launcher.channels import ChannelEntry, desktop, doubts
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.notices import outbox
from cloudtrain.launcher.notices.delivery import Delivery, DeliveryThread, deliver
from cloudtrain.launcher.notices.notifier import Notifier
from cloudtrain.launcher.store.registry import Registry
from doubles import receivers

ALL = ("budget", "projected", "deadline", "stalled", "succeeded", "failed", "stopped")


@pytest.fixture
def job(seed: Callable[..., Job]) -> Job:
    """Return a running job in its own registry."""
    return seed("seeded", State("running", started_s=time.time()))


@pytest.fixture
def told() -> Iterator[receivers.Hooks]:
    """Return a receiver that accepts all messages."""
    with receivers.hooks() as hooks:
        yield hooks


def notice(percent: int = 50) -> Notice:
    """Return the notice of a budget threshold."""
    facts = JobFacts("seeded", "local", 1, spent_micro=percent * 10_000, limit_micro=1_000_000)
    return compose(f"budget:{percent}@1000000", "budget", f"{percent} %", facts, 0.0)


def entry(url: str, **more: Any) -> ChannelEntry:
    """Return a webhook."""
    return ChannelEntry("webhook", url, ALL, **more)


def courier(home: Path, said: list[str] | None = None, **environ: str) -> DeliveryThread:
    """Return a delivery thread that the registry treats as a separate process."""
    return DeliveryThread(home, ([] if said is None else said).append, environ)


def carried(job: Job, home: Path, url: str, *limit_s: float, **environ: str) -> list[str]:
    """Offer a notice for the address to a new process, and return what the process has said when it is closed."""
    said: list[str] = []
    carrier = courier(home, said, **environ)
    carrier.offer([Delivery(job.id, entry(url), notice())])
    carrier.close(*limit_s)
    return said


def test_due_notice_is_sent_once(job: Job, home: Path, told: receivers.Hooks) -> None:
    """Repeated offers from several threads send a single message."""
    for _ in range(3):
        carrier = courier(home)
        carrier.offer([Delivery(job.id, entry(told.url), notice())])
        carrier.offer([Delivery(job.id, entry(told.url), notice())])
        carrier.close()
    assert [each["key"] for each in told.got] == ["budget:50@1000000"]


def test_many_followers_send_each_notice_once(job: Job, home: Path, told: receivers.Hooks) -> None:
    """Eight followers, three channels and five notices give fifteen messages."""
    notices = [compose(f"stalled:1@{step}", "stalled", "x", JobFacts("seeded", "local", 1), 0.0) for step in range(5)]
    places = [entry(f"{told.url}/{name}") for name in "abc"]
    deliveries = [Delivery(job.id, place, each) for place in places for each in notices]
    crowd = [courier(home) for _ in range(8)]
    barrier = threading.Barrier(8)

    def follow(one: DeliveryThread) -> None:
        barrier.wait()
        one.offer(deliveries)
        one.close(20.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(follow, crowd))
    assert sorted((path[-1], body["key"]) for path, _, body in told.asked) == sorted(
        (name, each.key) for name in "abc" for each in notices
    )


def test_delivery_retries_after_failures(job: Job, home: Path) -> None:
    """The receiver answers 503 twice, then accepts; the failure is printed once, without the address.

    A command that ends keeps trying for at most three seconds.
    """
    said: list[str] = []
    with receivers.hooks([503, 503]) as told:
        carrier = courier(home, said)
        carrier.offer([Delivery(job.id, entry(told.url), notice())])
        told.wait(1)
        carrier.close()
        assert (len(told.asked), len(told.got)) == (3, 1)
    assert len(said) == 1
    assert "answers with HTTP 503" in said[0]
    assert "secret-part" not in said[0]
    with receivers.hooks([503]) as told:
        carried(job, home, told.url)
        assert len(told.got) == 1


def test_receiver_that_never_answers_gets_three_attempts(job: Job, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver may have shown the message each time; after three attempts every follower gives up."""
    monkeypatch.setattr(sending, "ANSWER_S", 0.1)
    monkeypatch.setattr(sending, "_MENDED_S", 0.1)
    with receivers.hooks([receivers.HANG] * 9) as stuck:
        said = carried(job, home, stuck.url, 5.0)
        assert len(stuck.asked) == 3
        said += carried(job, home, stuck.url, 5.0)
        assert len(stuck.asked) == 3
    assert "has accepted the message and does not answer" in said[0]
    assert all(words.startswith("given up: webhook http://127.0.0.1") for words in said[1:])


def test_hanging_receiver_delays_neither_exit_nor_sound_receivers(job: Job, home: Path, told: receivers.Hooks) -> None:
    """The undelivered notice is left for the next follower; the delivered one is marked, and not repeated."""
    said: list[str] = []
    with receivers.hooks([receivers.HANG]) as stuck:
        carrier = courier(home, said)
        begin_s = time.monotonic()
        carrier.offer([Delivery(job.id, entry(stuck.url), notice()), Delivery(job.id, entry(told.url), notice())])
        told.wait(1)
        carrier.close(0.3)
        assert time.monotonic() - begin_s < 5.0
        delivered = outbox.delivered_keys(Registry(home).database, job.id, entry(told.url).id)
        assert delivered == {notice().key}
    assert any("not delivered yet" in words for words in said)


def test_address_that_fails_is_reported_with_the_name_of_its_variable(job: Job, home: Path) -> None:
    """Neither the message nor the registry contains the secret address; an unset variable has the fix."""
    url = f"http://127.0.0.1:{receivers.free_port()}/secret-part"
    said = carried(job, home, "env:HOOK", HOOK=url)
    assert "webhook env:HOOK" in said[0]
    assert "cannot be reached: Connection refused" in said[0]
    kept = b"".join(path.read_bytes() for path in home.glob("registry.sqlite*"))
    assert b"secret-part" not in kept + "".join(said).encode()
    assert "export UNSET=..." in carried(job, home, "env:UNSET")[0]


def test_follower_killed_before_the_mark_repeats_a_notice_once(
    registry: Registry, job: Job, home: Path, told: receivers.Hooks
) -> None:
    """The receipt is unknown after the kill; the single repeat has the same id."""
    program = f"""\
import os, signal, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from pathlib import Path
from cloudtrain.launcher.notices import outbox
import test_delivery as here
outbox.mark_sent = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
carrier = here.courier(Path({str(home)!r}))
carrier.offer([here.Delivery({job.id!r}, here.entry({told.url!r}), here.notice())])
carrier.close(60.0)
"""
    done = subprocess.run([sys.executable, "-c", program], env=None, check=False, timeout=60)
    assert (done.returncode, len(told.got)) == (-9, 1)
    carried(job, home, told.url, 0.3)
    assert len(told.got) == 1  # the claim of the killed process is still valid
    registry.database.execute("UPDATE notices SET lease_s = 1")
    for _ in range(2):
        carried(job, home, told.url)
    assert [each["id"] for each in told.got] == [notice().id] * 2


def test_clock_set_back_holds_no_notice(registry: Registry, job: Job, home: Path, told: receivers.Hooks) -> None:
    """A lease or a pause that a later clock has written is void."""
    outbox.claim(registry.database, job.id, entry(told.url).id, notice(), "dead", time.time() + 6 * 3600)
    carrier = courier(home)
    carrier.offer([Delivery(job.id, entry(told.url), notice())])
    told.wait(1)
    carrier.close()


def test_higher_threshold_replaces_a_pending_lower_threshold(registry: Registry, job: Job, home: Path) -> None:
    """A late notice is not sent after a newer notice of the same kind."""
    with receivers.hooks([503]) as told:
        carrier = courier(home)
        carrier.offer([Delivery(job.id, entry(told.url), notice(50))])
        with told.news:
            told.news.wait_for(lambda: bool(told.asked), 10.0)
        carrier.offer([Delivery(job.id, entry(told.url), notice(80))])
        told.wait(1)
        carrier.close()
        assert [each["key"] for each in told.got] == ["budget:80@1000000"]
    keys = outbox.delivered_keys(registry.database, job.id, entry(told.url).id)
    assert keys == {"budget:50@1000000", "budget:80@1000000"}
    assert outbox.pending(registry.database, 0.0) == []


def test_notice_of_the_job_is_waited_for_and_then_sent(
    registry: Registry, job: Job, home: Path, told: receivers.Hooks
) -> None:
    """The launcher holds a notice back, and repeats none that the job has sent; after the hold time it sends itself."""
    place = entry(told.url, from_job=True)
    carrier = courier(home)
    carrier.offer([Delivery(job.id, place, notice(50), hold_s=60.0)])
    carrier.offer([Delivery(job.id, place, notice(50), hold_s=60.0, is_sent=True)])
    carrier.close()
    assert outbox.delivered_keys(registry.database, job.id, place.id) == {"budget:50@1000000"}
    assert told.asked == []
    carrier = courier(home)
    carrier.offer([Delivery(job.id, entry(told.url, from_job=True), notice(80), hold_s=0.3)])
    told.wait(1)
    carrier.close()


def test_notifier_prints_a_due_notice_and_sends_it(
    seed: Callable[..., Job], home: Path, told: receivers.Hooks, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal shows the alert, the subscribed channels get the notice, and a second follower repeats neither."""
    notify = {"webhook": told.url, "on": ["budget"]}
    running, registry = seed("seeded", State("running", started_s=time.time() - 1000)), Registry(home)
    config = {"budget": {"limit": "10 USD", "alert_at": ["50%"]}, "notify": [notify]}
    plan = {**running.attempt.plan.dump(), "hourly_usd": 36.0, "price_micro": 18_000_000}
    for column, value in (("config", config), ("plan", plan)):
        table, key = ("jobs", "id") if column == "config" else ("attempts", "job_id")
        registry.database.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (json.dumps(value), running.id))
    for _ in range(2):
        notifier = Notifier(registry)
        notifier.look(registry.find(running.id))
        notifier.close()
    registry.close()
    printed = capsys.readouterr().err
    assert printed.count("[alert] seeded: 50 % of the budget is spent: 10.00 USD of 10.00 USD") == 1
    assert [each["event"] for each in told.got] == ["budget"]


def test_desktop_notification_uses_notify_send(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """`notify-send` gets the text after `--`."""
    record = tmp_path / "shown"
    (tmp_path / "notify-send").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {record}\n')
    (tmp_path / "notify-send").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DISPLAY", ":0")
    place = desktop()
    assert place is not None
    deliver(place, notice())
    assert record.read_text().splitlines()[2:5] == ["--", "seeded: 50 %", "spent       0.50 USD of 1.00 USD (50 %)"]


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")
def test_apprise_delivers_to_a_known_service(told: receivers.Hooks) -> None:
    """The message reaches the JSON service of the installed library."""
    url = told.url.replace("http://", "json://")
    deliver(ChannelEntry("apprise", "env:URL", ALL), notice(), {"URL": url})
    assert told.got[0]["title"] == "seeded: 50 %"


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")
@pytest.mark.parametrize(("url", "words"), [("nosuch://x", "knows no service"), ("json://127.0.0.1:1/", "could not")])
def test_apprise_failure_hides_the_address(url: str, words: str) -> None:
    """The address may contain a password."""
    with pytest.raises(sending.DeliveryError, match=words):
        deliver(ChannelEntry("apprise", url, ALL), notice(), {})


@pytest.mark.parametrize("place", ["pover://user@token1", "slack://token1/b/c", "ntfy://token1/x", "token1"])
def test_apprise_address_shows_its_service_alone(place: str) -> None:
    """The host part of an Apprise address may be a token."""
    shown = ChannelEntry("apprise", place, ("budget",)).shown
    assert shown == f"apprise {place.partition(':')[0] if ':' in place else '...'}://..."
    assert "token1" not in shown


def test_doubts_name_unset_variables_and_missing_followers() -> None:
    """The doubts are printed before the user relies on a channel."""
    config = {"notify": [{"slack": "env:S", "on": ["failed"]}, {"email": "a@b.c", "on": [], "from_job": True}]}
    assert list(doubts(config, {"S": "x"})) == [
        "notify: CLOUDTRAIN_SMTP is not set here, so no alerts by email",
        "notify: only a command that follows the job sends alerts; with from_job: true the job sends them",
    ]

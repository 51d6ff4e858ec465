"""Delivery: once for each job, thing and channel, behind whoever follows, whatever fails."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.notices import sending
from cloudtrain.entrypoints.notices.message import Facts, Notice, budget_key, compose
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.notices import claims, transports
from cloudtrain.launcher.notices.delivery import Delivery, DeliveryThread
from cloudtrain.launcher.notices.herald import Notifier
from cloudtrain.launcher.store.channels import ChannelEntry, desktop, doubts
from cloudtrain.launcher.store.registry import Registry
from doubles import receivers

ALL = ("budget", "projected", "deadline", "stalled", "succeeded", "failed", "stopped")


@pytest.fixture
def job(seed: Callable[..., Job]) -> Job:
    """Return a job that runs, in a registry of its own."""
    return seed("seeded", State("running", started_s=time.time()))


@pytest.fixture
def told() -> Iterator[receivers.Hooks]:
    """Return a receiver that takes everything."""
    with receivers.hooks() as hooks:
        yield hooks


def notice(percent: int = 50) -> Notice:
    """Return a threshold."""
    facts = Facts("seeded", "local", 1, spent_micro=percent * 10_000, limit_micro=1_000_000)
    return compose(budget_key(percent, 1_000_000), "budget", f"{percent} %", facts, 0.0)


def entry(url: str, **more: Any) -> ChannelEntry:
    """Return a webhook."""
    return ChannelEntry("webhook", url, ALL, **more)


def courier(home: Path, said: list[str] | None = None, **environ: str) -> DeliveryThread:
    """Return one of a process of its own, as far as the registry knows."""
    return DeliveryThread(home, ([] if said is None else said).append, environ)


def test_what_is_due_is_told_once(job: Job, home: Path, told: receivers.Hooks) -> None:
    """However often it is offered, and by whom."""
    for _ in range(3):
        carrier = courier(home)
        carrier.offer([Delivery(job.id, entry(told.url), notice())])
        carrier.offer([Delivery(job.id, entry(told.url), notice())])
        carrier.close()
    assert [each["key"] for each in told.got] == ["budget:50@1000000"]


def test_many_followers_tell_each_thing_once(job: Job, home: Path, told: receivers.Hooks) -> None:
    """Eight at once, three channels, five things: fifteen messages."""
    notices = [compose(f"stalled:1@{step}", "stalled", "x", Facts("seeded", "local", 1), 0.0) for step in range(5)]
    places = [entry(f"{told.url}/{name}") for name in "abc"]
    errands = [Delivery(job.id, place, each) for place in places for each in notices]
    crowd = [courier(home) for _ in range(8)]
    barrier = threading.Barrier(8)

    def follow(one: DeliveryThread) -> None:
        barrier.wait()
        one.offer(errands)
        one.close(20.0)

    threads = [threading.Thread(target=follow, args=(one,)) for one in crowd]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((path[-1], body["key"]) for path, _, body in told.asked) == sorted(
        (name, each.key) for name in "abc" for each in notices
    )


def test_two_failures_are_tried_through(job: Job, home: Path) -> None:
    """503 twice, then it is taken; and said once."""
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


def test_receiver_that_takes_and_never_answers_is_told_thrice(
    job: Job, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have shown it each time: then it is given up, for all who follow."""
    monkeypatch.setattr(sending, "ANSWER_S", 0.1)
    monkeypatch.setattr(sending, "_MENDED_S", 0.1)
    said: list[str] = []
    with receivers.hooks([receivers.HANG] * 9) as stuck:
        carrier = courier(home, said)
        carrier.offer([Delivery(job.id, entry(stuck.url), notice())])
        carrier.close(5.0)
        assert len(stuck.asked) == 3
        another = courier(home, said)
        another.offer([Delivery(job.id, entry(stuck.url), notice())])
        another.close(5.0)
        assert len(stuck.asked) == 3
    assert "has accepted the message and does not answer" in said[0]
    assert all(words.startswith("given up: webhook http://127.0.0.1") for words in said[1:])


def test_end_tries_again_while_there_is_time(job: Job, home: Path) -> None:
    """A command that ends goes on for a moment, and no longer than three seconds."""
    with receivers.hooks([503]) as told:
        carrier = courier(home)
        carrier.offer([Delivery(job.id, entry(told.url), notice())])
        carrier.close()
        assert len(told.got) == 1


def test_hanging_receiver_holds_up_neither_exit_nor_others(job: Job, home: Path, told: receivers.Hooks) -> None:
    """What is left is said; the next to look tells it."""
    said: list[str] = []
    with receivers.hooks([receivers.HANG]) as stuck:
        carrier = courier(home, said)
        begin_s = time.monotonic()
        carrier.offer([Delivery(job.id, entry(stuck.url), notice()), Delivery(job.id, entry(told.url), notice())])
        told.wait(1)
        carrier.close(0.2)
        assert time.monotonic() - begin_s < 2.0
    assert any("not delivered yet" in words for words in said)


def test_what_was_taken_is_marked_though_another_hangs(job: Job, home: Path, told: receivers.Hooks) -> None:
    """A command that ends meanwhile leaves nothing to be repeated."""
    with receivers.hooks([receivers.HANG]) as stuck:
        carrier = courier(home)
        carrier.offer([Delivery(job.id, entry(stuck.url), notice()), Delivery(job.id, entry(told.url), notice())])
        told.wait(1)
        carrier.close(0.3)
        registry = Registry(home)
        assert claims.told(registry.database, job.id, entry(told.url).id) == {notice().key}
        registry.close()


def test_closed_port_is_said_with_its_variable(job: Job, home: Path) -> None:
    """And the address stays unsaid, as it does in the registry."""
    said: list[str] = []
    url = f"http://127.0.0.1:{receivers.free_port()}/secret-part"
    carrier = courier(home, said, HOOK=url)
    carrier.offer([Delivery(job.id, entry("env:HOOK"), notice())])
    carrier.close()
    assert "webhook env:HOOK" in said[0]
    assert "cannot be reached: Connection refused" in said[0]
    kept = b"".join(path.read_bytes() for path in home.glob("registry.sqlite*"))
    assert b"secret-part" not in kept + "".join(said).encode()


def test_variable_that_is_not_set_names_its_cure(job: Job, home: Path) -> None:
    """A config is sent from one machine and followed from another."""
    said: list[str] = []
    carrier = courier(home, said)
    carrier.offer([Delivery(job.id, entry("env:HOOK"), notice())])
    carrier.close()
    assert "export HOOK=..." in said[0]


def test_killed_between_receipt_and_mark_repeats_once(job: Job, home: Path, told: receivers.Hooks) -> None:
    """Nobody can know whether it was taken; the repeat has the same id, and is the only one."""
    program = f"""\
import os, signal, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from pathlib import Path
from cloudtrain.launcher.notices import claims
import test_delivery as here
claims.mark_told = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
carrier = here.courier(Path({str(home)!r}))
carrier.offer([here.Delivery({job.id!r}, here.entry({told.url!r}), here.notice())])
carrier.close(60.0)
"""
    done = subprocess.run([sys.executable, "-c", program], env=None, check=False, timeout=60)
    assert (done.returncode, len(told.got)) == (-9, 1)
    registry = Registry(home)
    heir = courier(home)
    heir.offer([Delivery(job.id, entry(told.url), notice())])
    heir.close(0.3)
    assert len(told.got) == 1  # the claim of the dead one holds yet
    registry.database.execute("UPDATE notices SET lease_s = 1")
    for _ in range(2):
        heir = courier(home)
        heir.offer([Delivery(job.id, entry(told.url), notice())])
        heir.close()
    registry.close()
    assert [each["id"] for each in told.got] == [notice().id] * 2


def test_higher_threshold_takes_the_lower_ones_place(job: Job, home: Path) -> None:
    """What could not be told for an hour is not told after what came then."""
    with receivers.hooks([503]) as told:
        carrier = courier(home)
        carrier.offer([Delivery(job.id, entry(told.url), notice(50))])
        with told.news:
            told.news.wait_for(lambda: bool(told.asked), 10.0)
        carrier.offer([Delivery(job.id, entry(told.url), notice(80))])
        told.wait(1)
        carrier.close()
        assert [each["key"] for each in told.got] == ["budget:80@1000000"]
    registry = Registry(home)
    assert claims.told(registry.database, job.id, entry(told.url).id) == {"budget:50@1000000", "budget:80@1000000"}
    assert claims.pending(registry.database, 0.0) == []
    registry.close()


def test_job_tells_by_itself_first(job: Job, home: Path, told: receivers.Hooks) -> None:
    """The launcher leaves it the time; what it has told is not told again."""
    place = entry(told.url, from_job=True)
    carrier = courier(home)
    carrier.offer([Delivery(job.id, place, notice(50), hold_s=60.0)])
    carrier.offer([Delivery(job.id, place, notice(50), hold_s=60.0, is_told=True)])
    carrier.close()
    registry = Registry(home)
    assert claims.told(registry.database, job.id, place.id) == {"budget:50@1000000"}
    registry.close()
    assert told.asked == []


def test_job_that_cannot_tell_is_told_for(job: Job, home: Path, told: receivers.Hooks) -> None:
    """After the time it was given."""
    carrier = courier(home)
    carrier.offer([Delivery(job.id, entry(told.url, from_job=True), notice(), hold_s=0.3)])
    told.wait(1)
    carrier.close()


def test_herald_prints_what_comes_due_and_has_it_told(
    seed: Callable[..., Job], home: Path, told: receivers.Hooks, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the terminal with its mark, by the channels that want it; and a second follower repeats nothing."""
    notify = {"webhook": told.url, "on": ["budget"]}
    running, registry = seed("seeded", State("running", started_s=time.time() - 1000)), Registry(home)
    config = {"budget": {"limit": "10 USD", "alert_at": ["50%"]}, "notify": [notify]}
    plan = {**running.attempt.plan.dump(), "hourly_usd": 36.0, "price_micro": 18_000_000}
    for column, value in (("config", config), ("plan", plan)):
        table, key = ("jobs", "id") if column == "config" else ("attempts", "job_id")
        registry.database.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (json.dumps(value), running.id))
    for _ in range(2):
        herald = Notifier(registry)
        herald.look(registry.find(running.id))
        herald.close()
    registry.close()
    printed = capsys.readouterr().err
    assert printed.count("[alert] seeded: 50 % of the budget is spent: 10.00 USD of 10.00 USD") == 1
    assert [each["event"] for each in told.got] == ["budget"]


def test_desktop_is_told_where_there_is_one(job: Job, home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """By `notify-send`, with markup escaped."""
    record = tmp_path / "shown"
    (tmp_path / "notify-send").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {record}\n')
    (tmp_path / "notify-send").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DISPLAY", ":0")
    place = desktop()
    assert place is not None
    transports.deliver(place, notice())
    assert record.read_text().splitlines()[2:5] == ["--", "seeded: 50 %", "spent       0.50 USD of 1.00 USD (50 %)"]


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")
def test_apprise_delivers_what_it_knows(job: Job, told: receivers.Hooks) -> None:
    """Its own JSON service, of the installed library."""
    url = told.url.replace("http://", "json://")
    transports.deliver(ChannelEntry("apprise", "env:URL", ALL), notice(), {"URL": url})
    assert told.got[0]["title"] == "seeded: 50 %"


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")
@pytest.mark.parametrize(("url", "words"), [("nosuch://x", "knows no service"), ("json://127.0.0.1:1/", "could not")])
def test_apprise_says_what_it_cannot(url: str, words: str) -> None:
    """Without its address, which may be a password."""
    with pytest.raises(sending.DeliveryError, match=words):
        transports.deliver(ChannelEntry("apprise", url, ALL), notice(), {})


@pytest.mark.parametrize("place", ["pover://user@token1", "slack://token1/b/c", "ntfy://token1/x", "token1"])
def test_apprise_address_shows_its_service_alone(place: str) -> None:
    """Where others have a host it may have what lets anybody in."""
    shown = ChannelEntry("apprise", place, ("budget",)).shown
    assert shown == f"apprise {place.partition(':')[0] if ':' in place else '...'}://..."
    assert "token1" not in shown


def test_doubts_name_what_is_not_set_here() -> None:
    """Before anybody relies on it."""
    config = {"notify": [{"slack": "env:S", "on": ["failed"]}, {"email": "a@b.c", "on": [], "from_job": True}]}
    assert list(doubts(config, {"S": "x"})) == [
        "notify: CLOUDTRAIN_SMTP is not set here, so no alerts by email",
        "notify: only a command that follows the job sends alerts; with from_job: true the job sends them",
    ]

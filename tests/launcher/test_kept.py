"""Kept lines: compressed, committed with the cursor, whole after every death of who writes, bounded in all."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.local import backend as local
from cloudtrain.launcher import terminal
from cloudtrain.launcher.backend import LogLine
from cloudtrain.launcher.errors import UnreachableError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.logs import blocks, keeping, kept
from cloudtrain.launcher.logs.stream import Stream
from cloudtrain.launcher.registry import Registry

RUNNING, DONE = State("running", started_s=1.0), State("succeeded", started_s=1.0, ended_s=2.0)

# Follows a job to its end, in small commits, so that one that is killed dies at any of them.
FOLLOWER = """
import sys
from cloudtrain.launcher.logs import blocks, kept
from cloudtrain.launcher.logs.stream import Stream
from cloudtrain.launcher.registry import Registry
from cloudtrain.entrypoints import nodelogs
blocks.BLOCK_BYTES, kept.COMMIT_BYTES, kept.COMMIT_S = 2000, 1, 0.0
nodelogs.FILE_BYTES = nodelogs.PAGE_BYTES = 4000
registry = Registry()
job = registry.find(sys.argv[1])
stream = Stream(registry, job, job.attempt)
while not stream.is_over:
    stream.read()
stream.close()
"""


@pytest.fixture
def registry(home: Path) -> Iterator[Registry]:
    """Give the registry of the private home."""
    registry = Registry()
    yield registry
    registry.close()


def read_all(registry: Registry, job: Job, **named: Any) -> list[LogLine]:
    """Return all lines of a job that has ended."""
    stream = Stream(registry, job, job.attempt, tell=terminal.aside, **named)
    found = []
    try:
        while not stream.is_over:
            found += stream.read()
    finally:
        stream.close()
    return found


def numbered(count: int) -> str:
    """Return so many lines."""
    return "".join(f"line {number} of many\n" for number in range(count))


def gone(*args: Any, **named: Any) -> Any:
    """Answer as a backend that is away."""
    raise UnreachableError("the backend is away")


def test_block_gives_back_what_was_put_in() -> None:
    """Texts with anything in them but newlines, ranks and none, times to the last bit."""
    lines = [
        LogLine("", 0, None, 0.1), LogLine("é\r\x1b[31m\u2028 \ud800", 3, 63, 1e9 / 3), LogLine("x" * 70_000, 1, 0, 2.0)
    ]  # fmt: skip
    data, entry = blocks.encoded(lines, 17)
    assert blocks.decoded(data, entry).lines() == lines
    assert (entry.offset, entry.line_count, entry.first_s, entry.last_s) == (17, 3, 0.1, 1e9 / 3)


def test_block_that_was_touched_is_known_to_be() -> None:
    """One bit anywhere."""
    data, entry = blocks.encoded([LogLine(f"line {number}", 0, 0, 1.0) for number in range(9)], 0)
    for place in range(len(data)):
        touched = bytearray(data)
        touched[place] ^= 1
        with pytest.raises(blocks.DamagedError):
            blocks.decoded(bytes(touched), entry)


def test_finished_job_is_kept_whole(home: Path, seed: Callable[..., Job], registry: Registry) -> None:
    """All lines, by one look at the log; nobody else may read them."""
    job = seed("ended", DONE, {"0": numbered(30_000), "1": "other\n"})
    found = read_all(registry, job)
    place = kept.place(registry.database, "ended", 1)
    assert place is not None
    assert (place.is_complete, place.count, len(found)) == (True, 30_001, 30_001)
    folder = home / "logs" / "ended" / "1"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert sum(path.stat().st_size for path in folder.iterdir()) < len(numbered(30_000)) / 4


def test_running_job_that_is_left_is_kept_as_far_as_it_was_read(
    home: Path, seed: Callable[..., Job], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes back reads that part from here, and the backend from there on."""
    job = seed("going", RUNNING, {"0": "one\n", "1": ""})
    stream = Stream(registry, job, job.attempt)
    stream.read()
    stream.close()
    cursors: list[Any] = []
    real = local.logs

    def noting(ref: Any, cursor: Any, *args: Any, **named: Any) -> Any:
        cursors.append(cursor)
        return real(ref, cursor, *args, **named)

    monkeypatch.setattr(local, "logs", noting)
    again = Stream(registry, job, job.attempt)
    assert [line.text for line in again.read()] == ["one"]
    assert again.read() == []
    assert cursors == [{"0/rank-0.log": 4}]
    again.close()


def test_one_writes_and_others_read(seed: Callable[..., Job], registry: Registry) -> None:
    """Two who follow one job see the same; the lines are kept once."""
    job = seed("ended", DONE, {"0": numbered(100), "1": ""})
    first, second = Stream(registry, job, job.attempt), Stream(registry, job, job.attempt)
    assert len(first.read()) == len(second.read()) == 100
    assert (first.is_keeping, second.is_keeping) == (True, False)
    second.close()
    while not first.is_over:
        first.read()
    first.close()
    assert [line.text for line in read_all(registry, job)] == numbered(100).splitlines()


def test_kept_rank_is_read_alone(seed: Callable[..., Job], registry: Registry) -> None:
    """By the ranks that were asked for, the same as from the backend."""
    job = seed("ended", DONE, {"0": numbered(10), "1": "other\n"})
    ranks = frozenset({1})
    before = read_all(registry, job, ranks=ranks)
    assert kept.place(registry.database, "ended", 1) is None  # a part is not kept
    read_all(registry, job)
    assert [line.text for line in read_all(registry, job, ranks=ranks)] == [line.text for line in before] == ["other"]


def test_keep_reads_a_finished_job_to_its_end(seed: Callable[..., Job], registry: Registry) -> None:
    """What watch does when a job ends; the second time there is nothing to do."""
    job = seed("ended", DONE)
    assert keeping.keep(registry, job)
    assert keeping.keep(registry, job)
    assert not keeping.keep(registry, seed("going", RUNNING))


def test_keep_of_a_backend_that_is_away_is_tried_again(
    seed: Callable[..., Job], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises nothing: a job's end must not be hidden by its log."""
    job = seed("ended", DONE)
    with monkeypatch.context() as outage:
        outage.setattr(local, "logs", gone)
        assert not keeping.keep(registry, job)
    assert keeping.keep(registry, job)


def test_full_disk_is_said_once_and_lines_go_on(
    seed: Callable[..., Job], registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Following is worth more than keeping."""
    job = seed("ended", DONE, {"0": numbered(30_000), "1": ""})

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert len(read_all(registry, job)) == 30_000
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert kept.place(registry.database, "ended", 1) is None


# -- room -------------------------------------------------------------------------------------------------------------


def test_room_is_made_by_what_was_read_the_longest_ago(
    home: Path, seed: Callable[..., Job], registry: Registry
) -> None:
    """Logs of ended jobs go, whole ones; a running job's never does."""
    for name in ("old", "new"):
        read_all(registry, seed(name, DONE))
    going = Stream(registry, seed("going", RUNNING), registry.find("going").attempt)
    going.read()
    going.close()
    registry.database.execute("UPDATE kept_logs SET used_s = 1 WHERE job_id = 'old'")
    sizes = {row["job_id"]: row["bytes"] for row in registry.database.execute("SELECT * FROM kept_logs")}
    keeping.make_room(registry.database, sum(sizes.values()) - 1)
    assert sorted(path.name for path in (home / "logs").iterdir()) == ["going", "new"]
    keeping.make_room(registry.database, 0)
    assert sorted(path.name for path in (home / "logs").iterdir()) == ["going"]


def test_room_of_nothing_keeps_nothing(
    home: Path, seed: Callable[..., Job], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wants no copies has none."""
    monkeypatch.setenv(keeping.ROOM, "0")
    read_all(registry, seed("ended", DONE))
    assert not (home / "logs").exists()


@pytest.mark.parametrize("text", ["much", "-1", "nan", "1e9"])
def test_room_that_is_no_number_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The hint shows how it is written."""
    monkeypatch.setenv(keeping.ROOM, text)
    with pytest.raises(UsageError, match="no number of gigabytes"):
        keeping.room_bytes()


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have some hundred lines in a block, so that a short log has many."""
    monkeypatch.setattr(kept, "BLOCK_LINES", 500)


def by_rank(lines: list[LogLine]) -> list[tuple[int | None, str]]:
    """Return what each rank says; lines whose times nobody has noted may change places between ranks."""
    return sorted([(line.rank, line.text) for line in lines], key=lambda each: each[0] or 0)


def damaged(home: Path, name: str, file: str, at: float) -> None:
    """Turn a byte of the job's kept log over, at that share of the file."""
    path = next((home / "logs" / name / "1").glob(f"{file}-*"))
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("file", ["lines", "index"])
@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_damaged_log_is_read_from_the_backend_again(
    home: Path,
    seed: Callable[..., Job],
    registry: Registry,
    capsys: pytest.CaptureFixture[str],
    file: str,
    at: float,
) -> None:
    """It is said; no line is lost, none shown twice, and what is kept is whole again."""
    job = seed("ended", DONE, {"0": numbered(6_000), "1": "other\n"})
    whole = read_all(registry, job)
    damaged(home, "ended", file, at)
    assert by_rank(read_all(registry, job)) == by_rank(whole)
    assert "has been read again" in capsys.readouterr().err
    assert by_rank(read_all(registry, job)) == by_rank(whole)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("small_blocks")
def test_damaged_log_of_a_machine_that_is_gone_lacks_that_block(
    home: Path, seed: Callable[..., Job], registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many lines are lost is said; the rest is shown."""
    job = seed("ended", DONE, {"0": numbered(6_000), "1": ""})
    whole = read_all(registry, job)
    damaged(home, "ended", "lines", 0.5)
    shutil.rmtree(home / "local")
    found = read_all(registry, job)
    said = capsys.readouterr().err
    assert f"{len(whole) - len(found)} lines that were kept here are damaged" in said
    assert 0 < len(found) < len(whole)


@pytest.mark.usefixtures("small_blocks")
def test_damaged_log_has_its_tail(home: Path, seed: Callable[..., Job], registry: Registry) -> None:
    """The last block is the one that is wanted most."""
    job = seed("ended", DONE, {"0": numbered(6_000), "1": ""})
    whole = read_all(registry, job)
    damaged(home, "ended", "lines", 0.99)
    stream = Stream(registry, job, job.attempt)
    assert [line.text for line in stream.tail(5)] == [line.text for line in whole[-5:]]
    stream.close()


# -- kill -9 ----------------------------------------------------------------------------------------------------------


def kill_again_and_again(home: Path, job: Job, registry: Registry, kills: int, chance: random.Random) -> int:
    """Follow the job by processes that are killed; return how many were, before one has come to the end."""
    killed = 0
    while killed < kills:
        process = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, job.id],
            env={**os.environ, "CLOUDTRAIN_HOME": str(home)},
            stdin=subprocess.DEVNULL,
        )
        end_s = time.monotonic() + 60
        before = kept.place(registry.database, job.id, 1) or kept.Place()
        while process.poll() is None and time.monotonic() < end_s:
            now = kept.place(registry.database, job.id, 1) or kept.Place()
            if now.count > before.count:  # it is at work: let it die somewhere in that
                time.sleep(chance.uniform(0.0, 0.02))
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        killed += 1
    return killed


def check_whole(job: Job, registry: Registry, text: str) -> None:
    """Assert that what is read, and then what is kept, is every line once, in order."""
    for _ in ("read on", "kept"):
        assert [line.text for line in read_all(registry, job) if line.rank == 0] == text.splitlines()


@pytest.mark.slow
def test_kept_log_is_whole_after_kills(home: Path, seed: Callable[..., Job], registry: Registry) -> None:
    """kill -9 of who keeps it, at any moment: no line is lost or there twice."""
    text = numbered(60_000)
    job = seed("ended", DONE, {"0": text, "1": ""})
    assert kill_again_and_again(home, job, registry, 5, random.Random(3)) == 5
    check_whole(job, registry, text)


@pytest.mark.soak
def test_kept_log_is_whole_after_many_kills(home: Path, seed: Callable[..., Job], registry: Registry) -> None:
    """The same a hundred times, over logs that are followed to their end in many lives."""
    chance, killed, number = random.Random(5), 0, 0
    text = numbered(100_000)
    while killed < 100:
        number += 1
        job = seed(f"ended-{number}", DONE, {"0": text, "1": ""})
        killed += kill_again_and_again(home, job, registry, 10, chance)
        check_whole(job, registry, text)

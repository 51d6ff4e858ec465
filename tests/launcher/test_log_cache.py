"""The log cache: compressed, committed with the cursor, complete after every kill of the writer, bounded in size."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cloudtrain.backends.local import backend as local
from cloudtrain.entrypoints.agent import node_logs
from cloudtrain.launcher.backend import LogLine, LogPage, Pace, load
from cloudtrain.launcher.errors import UnreachableError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.logs import blocks, cache, late_lines, stream
from cloudtrain.launcher.logs.stream import LogStream
from cloudtrain.launcher.logs.view import View
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text import terminal
from doubles.signatures import MakeJob

RUNNING, DONE = State("running", started_s=1.0), State("succeeded", started_s=1.0, ended_s=2.0)
ROOM_FILES = {str(module.__file__) for module in (blocks, late_lines, cache, stream)}

# Follow a job to its end in small commits; a signal kills the process after the given seconds of CPU time.
FOLLOWER = """
import signal, sys
from cloudtrain.backends.local import backend as local
from cloudtrain.launcher.logs import blocks, cache
from cloudtrain.launcher.logs.stream import LogStream
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.entrypoints.agent import node_logs
blocks.BLOCK_BYTES, cache.COMMIT_BYTES, cache.COMMIT_S = 2000, 1, 0.0
node_logs.FILE_BYTES = local.PAGE_BYTES = 4000
registry = Registry()
job = registry.find(sys.argv[1])
stream = LogStream(registry, job, job.attempt)
signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel ends it where it stands, as by SIGKILL
signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
while not stream.is_over:
    stream.read()
stream.close()
"""


def small_commits(monkeypatch: pytest.MonkeyPatch, commit: int, file: int) -> None:
    """Commit after so many bytes; a read takes so many bytes of a file, and twice as many for a page."""
    monkeypatch.setattr(cache, "COMMIT_BYTES", commit)
    monkeypatch.setattr(node_logs, "FILE_BYTES", file)
    monkeypatch.setattr(local, "PAGE_BYTES", 2 * file)


def keep(registry: Registry, job: Job) -> bool:
    """Cache the log of the job's last attempt."""
    return stream.keep_whole(registry, job, job.attempt)


def read_all(registry: Registry, job: Job, view: View | None = None) -> list[LogLine]:
    """Return all lines of a job that has ended."""
    stream = LogStream(registry, job, job.attempt, view, tell=terminal.aside)
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
    """Raise the error of an unreachable backend."""
    raise UnreachableError("the backend is away")


def test_flipped_bit_in_a_block_is_detected() -> None:
    """A block decodes to any texts but newlines, exact times and no rank; a flip of a bit of each byte is detected."""
    lines = [
        LogLine("", 0, None, 0.1), LogLine("é\r\x1b[31m\u2028 \ud800", 3, 63, 1e9 / 3), LogLine("x" * 70_000, 1, 0, 2.0)
    ]  # fmt: skip
    data, entry = blocks.encoded(lines, 17)
    assert blocks.decoded(data, entry).lines() == lines
    assert (entry.offset, entry.line_count, entry.first_s, entry.last_s) == (17, 3, 0.1, 1e9 / 3)
    data, entry = blocks.encoded([LogLine(f"line {number}", 0, 0, 1.0) for number in range(9)], 0)
    for place in range(len(data)):
        touched = bytearray(data)
        touched[place] ^= 1
        with pytest.raises(blocks.DamagedError):
            blocks.decoded(bytes(touched), entry)


def test_log_of_an_ended_job_is_stored_completely(home: Path, seed: MakeJob, registry: Registry) -> None:
    """A single read stores all lines; only the owner may read the files."""
    job = seed("ended", DONE, {"0": numbered(30_000), "1": "other\n"})
    found = read_all(registry, job)
    place = cache.place(registry.database, "ended", 1)
    assert place is not None
    assert (place.is_complete, place.count, len(found)) == (True, 30_001, 30_001)
    folder = home / "logs" / "ended" / "1"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert sum(path.stat().st_size for path in folder.iterdir()) < len(numbered(30_000)) / 4


def test_partial_log_of_a_running_job_is_stored(
    seed: MakeJob, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next reader takes the stored part from disk, and the rest from the backend."""
    job = seed("going", RUNNING, {"0": "one\n", "1": ""})
    stream = LogStream(registry, job, job.attempt)
    stream.read()
    stream.close()
    cursors: list[Any] = []
    real = load("local").logs

    def noting(ref: Any, cursor: Any, *args: Any, **named: Any) -> Any:
        cursors.append(cursor)
        return real(ref, cursor, *args, **named)

    monkeypatch.setattr(load("local"), "logs", noting)
    again = LogStream(registry, job, job.attempt)
    assert [line.text for line in again.read()] == ["one"]
    assert again.read() == []
    assert cursors == [{"0/rank-0.log": 4}]
    again.close()


def test_only_the_first_of_two_readers_writes(seed: MakeJob, registry: Registry) -> None:
    """Two followers of a job see the same lines, and the lines are stored once."""
    job = seed("ended", DONE, {"0": numbered(100), "1": ""})
    first, second = LogStream(registry, job, job.attempt), LogStream(registry, job, job.attempt)
    assert len(first.read()) == len(second.read()) == 100
    assert (first.is_keeping, second.is_keeping) == (True, False)
    second.close()
    while not first.is_over:
        first.read()
    first.close()
    assert [line.text for line in read_all(registry, job)] == numbered(100).splitlines()


def test_single_rank_is_read_from_the_log_cache(seed: MakeJob, registry: Registry) -> None:
    """The lines of the rank equal the backend's lines."""
    job = seed("ended", DONE, {"0": numbered(10), "1": "other\n"})
    ranks = frozenset({1})
    before = read_all(registry, job, View(ranks=ranks))
    assert cache.place(registry.database, "ended", 1) is None  # a part of the ranks is not stored
    read_all(registry, job)
    again = read_all(registry, job, View(ranks=ranks))
    assert [line.text for line in again] == [line.text for line in before] == ["other"]


def test_keep_stores_the_log_of_an_ended_job(
    seed: MakeJob, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`watch` calls `keep`: a fault hides no end, a second call has no work, and a dropped log waits for a reader."""
    job = seed("ended", DONE)
    with monkeypatch.context() as outage:
        outage.setattr(load("local"), "logs", gone)
        assert not keep(registry, job)
    assert keep(registry, job)
    assert keep(registry, job)
    assert not keep(registry, seed("going", RUNNING))
    cache.make_room(registry.database, 0)
    assert not keep(registry, job)
    assert cache.place(registry.database, "ended", 1) is None
    assert len(read_all(registry, job)) == 2
    assert keep(registry, job)


def test_full_disk_is_reported_once_and_reading_continues(
    seed: MakeJob, registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading the log matters more than storing the log."""
    job = seed("ended", DONE, {"0": numbered(30_000), "1": ""})

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert len(read_all(registry, job)) == 30_000
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert cache.place(registry.database, "ended", 1) is None


# -- room -------------------------------------------------------------------------------------------------------------


def test_least_recently_read_logs_are_dropped(home: Path, seed: MakeJob, registry: Registry) -> None:
    """Only complete logs of ended jobs are dropped; a running job keeps its log."""
    for name in ("old", "new"):
        read_all(registry, seed(name, DONE))
    going = LogStream(registry, seed("going", RUNNING), registry.find("going").attempt)
    going.read()
    going.close()
    registry.database.execute("UPDATE kept_logs SET used_s = 1 WHERE job_id = 'old'")
    sizes = {row["job_id"]: row["bytes"] for row in registry.database.execute("SELECT * FROM kept_logs")}
    cache.make_room(registry.database, sum(sizes.values()) - 1)
    assert sorted(path.name for path in (home / "logs").iterdir()) == ["going", "new"]
    cache.make_room(registry.database, 0)
    assert sorted(path.name for path in (home / "logs").iterdir()) == ["going"]


@pytest.mark.usefixtures("small_blocks")
def test_log_above_the_size_limit_is_stored_in_part(
    seed: MakeJob, registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is reported, all lines are shown, and cached logs of older jobs are dropped first."""
    read_all(registry, seed("other", DONE))
    monkeypatch.setenv(cache.ROOM, "0.000009")
    small_commits(monkeypatch, 1, 8000)
    job = seed("long", DONE, {"0": numbered(20_000), "1": ""})
    assert len(read_all(registry, job)) == 20_000
    assert capsys.readouterr().err.count(f"{cache.ROOM} is 9e-06") == 1
    place = cache.place(registry.database, "long", 1)
    assert place is not None
    assert 9_000 < place.size < 20_000
    assert cache.is_dropped(registry.database, "other", 1)


def test_log_cache_is_readable_while_the_registry_is_locked(seed: MakeJob, registry: Registry) -> None:
    """The reader does not wait for the lock; the time of the last read is not updated."""
    job = seed("ended", DONE)
    found = read_all(registry, job)
    registry.database.execute("UPDATE kept_logs SET used_s = 1")
    other = Registry()
    with other.database.transaction():
        assert read_all(registry, job) == found  # waiting for the lock would fail after a minute
    other.close()
    read_all(registry, job)
    assert registry.database.execute("SELECT used_s FROM kept_logs")[0]["used_s"] > 1


def test_entry_of_several_lines_is_split_alike_from_the_cache(
    seed: MakeJob, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A platform may put several lines into an entry; the backend and the log cache give the same lines."""
    page = LogPage([LogLine("one\ntwo", 0, 0, 1.0), LogLine("three", 0, 0, 2.0)], {"at": 1}, is_complete=True)
    rest = LogPage([], {"at": 2}, is_complete=True)
    monkeypatch.setattr(load("local"), "logs", lambda ref, cursor, *_, **__: rest if cursor else page)
    job = seed("ended", DONE)
    for _ in ("from the backend", "kept"):
        assert [line.text for line in read_all(registry, job)] == ["one", "two", "three"]


def test_size_limit_of_zero_stores_no_log(
    home: Path, seed: MakeJob, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of 0 turns the log cache off; the message about an invalid limit shows the expected form."""
    monkeypatch.setenv(cache.ROOM, "0")
    read_all(registry, seed("ended", DONE))
    assert not (home / "logs").exists()
    for text in ("much", "-1", "nan", "1e9"):
        monkeypatch.setenv(cache.ROOM, text)
        with pytest.raises(UsageError, match="not a number of gigabytes"):
            cache.room_bytes()


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put some hundred lines into a block, so that a short log has many blocks."""
    monkeypatch.setattr(cache, "BLOCK_LINES", 500)


def by_rank(lines: list[LogLine]) -> list[tuple[int | None, str]]:
    """Return the lines of each rank; lines without a noted time may change places between ranks."""
    return sorted([(line.rank, line.text) for line in lines], key=lambda each: each[0] or 0)


def damaged(home: Path, name: str, file: str, at: float) -> None:
    """Flip a byte of the job's log cache, at the given share of the file."""
    path = next((home / "logs" / name / "1").glob(f"{file}-*"))
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("file", ["lines", "index"])
@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_damaged_log_is_read_from_the_backend_again(
    home: Path, seed: MakeJob, registry: Registry, capsys: pytest.CaptureFixture[str], file: str, at: float
) -> None:
    """The damage is reported; every line appears once, and the log cache is complete again."""
    job = seed("ended", DONE, {"0": numbered(6_000), "1": "other\n"})
    whole = read_all(registry, job)
    damaged(home, "ended", file, at)
    assert by_rank(read_all(registry, job)) == by_rank(whole)
    assert "has been read again" in capsys.readouterr().err
    assert by_rank(read_all(registry, job)) == by_rank(whole)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("places", [(0.5,), (0.2, 0.6)])
def test_damaged_log_of_a_lost_machine_lacks_only_the_damaged_blocks(
    home: Path, seed: MakeJob, registry: Registry, capsys: pytest.CaptureFixture[str], places: tuple[float, ...]
) -> None:
    """The number of lost lines is reported, and the lines between and after the damaged blocks are shown."""
    job = seed("ended", DONE, {"0": numbered(6_000), "1": ""})
    whole = read_all(registry, job)
    for at in places:
        damaged(home, "ended", "lines", at)
    shutil.rmtree(home / "local")
    found = read_all(registry, job)
    lost, said = len(whole) - len(found), capsys.readouterr().err
    assert said.count("are damaged, and cannot be read again") == len(places)
    assert f"{lost} lines that were kept here are damaged" in said or len(places) > 1
    assert (len(places) - 1) * cache.BLOCK_LINES < lost <= len(places) * cache.BLOCK_LINES
    assert found[-1] == whole[-1]


@pytest.mark.usefixtures("small_blocks")
def test_damaged_log_is_read_again_for_a_search(home: Path, seed: MakeJob, registry: Registry) -> None:
    """Skipped blocks without a match hide no line of later blocks."""
    text = "".join(f"line {number} is {'rare' if number % 1500 == 1499 else 'common'}\n" for number in range(6_000))
    job = seed("ended", DONE, {"0": text, "1": ""})
    read_all(registry, job)
    damaged(home, "ended", "lines", 0.55)
    found = [line.text for line in read_all(registry, job, View(grep=re.compile("rare"))) if "rare" in line.text]
    assert found == [line for line in text.splitlines() if "rare" in line]


@pytest.mark.usefixtures("small_blocks")
def test_shorter_backend_log_does_not_replace_a_damaged_log(
    home: Path, seed: MakeJob, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the backend has only a part of the log, the log cache keeps all blocks but the damaged block."""
    monkeypatch.setattr(cache, "COMMIT_BYTES", 1)
    job = seed("ended", DONE, {"0": numbered(6_000), "1": ""})
    read_all(registry, job)
    damaged(home, "ended", "lines", 0.5)
    log = home / "local" / "ended" / "attempt-1" / "node-0" / "log" / "rank-0.log"
    log.write_text(numbered(3_000))
    for _ in ("once", "again"):
        assert len(read_all(registry, job)) >= 6_000 - cache.BLOCK_LINES


@pytest.mark.usefixtures("small_blocks")
def test_tail_reads_a_log_with_a_damaged_last_block(home: Path, seed: MakeJob, registry: Registry) -> None:
    """Users want the last block most."""
    job = seed("ended", DONE, {"0": numbered(6_000), "1": ""})
    whole = read_all(registry, job)
    damaged(home, "ended", "lines", 0.99)
    stream = LogStream(registry, job, job.attempt)
    assert [line.text for line in stream.tail(5)] == [line.text for line in whole[-5:]]
    stream.close()


# -- kill, and Ctrl-C -------------------------------------------------------------------------------------------------


def kill_again_and_again(home: Path, job: Job, kills: int, chance: random.Random) -> int:
    """Follow the job in processes that are killed; return the number of kills before a process reaches the end."""
    for killed in range(kills):
        command = [sys.executable, "-c", FOLLOWER, job.id, str(chance.uniform(0.002, 0.04))]
        code = subprocess.run(command, env={**os.environ, "CLOUDTRAIN_HOME": str(home)}, check=False).returncode
        if code == 0:
            return killed
        assert code == -signal.SIGPROF
    return kills


def check_whole(job: Job, registry: Registry, text: str) -> None:
    """Assert that the read lines, and then the stored lines, are every line once and in order."""
    for _ in ("read on", "kept"):
        assert [line.text for line in read_all(registry, job) if line.rank == 0] == text.splitlines()


@pytest.mark.slow
def test_log_cache_is_complete_after_kills(home: Path, seed: MakeJob, registry: Registry) -> None:
    """The writer is killed at random moments: every line appears exactly once."""
    text = numbered(60_000)
    job = seed("ended", DONE, {"0": text, "1": ""})
    assert kill_again_and_again(home, job, 5, random.Random(3)) == 5
    check_whole(job, registry, text)


@pytest.mark.soak
def test_log_cache_is_complete_after_many_kills(home: Path, seed: MakeJob, registry: Registry) -> None:
    """The same with a hundred kills, over logs that many processes follow in turn."""
    chance, killed, number = random.Random(5), 0, 0
    text = numbered(100_000)
    while killed < 100:
        number += 1
        job = seed(f"ended-{number}", DONE, {"0": text, "1": ""})
        killed += kill_again_and_again(home, job, 10, chance)
        check_whole(job, registry, text)


def traced(read: Callable[[], object], place: int = 0) -> list[tuple[str, int]]:
    """Run `read`, with a Ctrl-C at the given line of the package `logs`; return the lines that ran."""
    passed: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in ROOM_FILES or frame.f_code.co_name.startswith("<"):
            return None
        if event == "line":
            passed.append((frame.f_code.co_filename, frame.f_lineno))
            if len(passed) == place:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        read()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return passed


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_log_cache_is_complete_after_ctrl_c_at_any_line(
    seed: MakeJob, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line appears exactly once, also after Ctrl-C between a page and its file, or within a commit."""
    small_commits(monkeypatch, 4000, 4000)
    monkeypatch.setattr(load("local"), "pace", lambda ref: Pace(hold_back_s=0.001))
    monkeypatch.setattr(os, "fsync", lambda file: None)
    registry.database.execute("PRAGMA synchronous = OFF")
    texts = {"0": numbered(400), "1": numbered(200)}

    def seeded(number: int) -> Job:
        return seed(f"ended-{number}", DONE, texts)

    jobs = [seeded(0)]
    places: dict[tuple[str, int], list[int]] = {}
    for place, line in enumerate(traced(lambda: read_all(registry, jobs[-1])), 1):
        places.setdefault(line, []).append(place)
    assert len(places) > 150
    for number, (line, found) in enumerate(places.items()):
        if not cache.discard(registry.database, jobs[-1].id, 1):  # the interrupted reader still has the lock
            jobs.append(seeded(len(jobs)))
        traced(lambda: read_all(registry, jobs[-1]), found[number * 5 % len(found)])
        for _ in ("read on", "kept"):
            lines = read_all(registry, jobs[-1])
            for rank in (0, 1):
                assert [each.text for each in lines if each.rank == rank] == texts[str(rank)].splitlines(), line


@pytest.mark.parametrize("calls", [1, 2, 4, 9])
def test_partially_stored_page_is_read_again(
    seed: MakeJob, registry: Registry, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """After Ctrl-C between two blocks of a page, the cursor behind the page is not committed."""
    monkeypatch.setattr(cache, "BLOCK_LINES", 100)
    small_commits(monkeypatch, 1000, 8000)
    job = seed("ended", DONE, {"0": numbered(2000), "1": ""})
    left, real = calls, blocks.encoded

    def interrupted(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(blocks, "encoded", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read_all(registry, job)
    for _ in ("read on", "kept"):
        assert [line.text for line in read_all(registry, job)] == numbered(2000).splitlines()

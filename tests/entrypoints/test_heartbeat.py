"""The ranks' heartbeats, their watch, and the stacks of hung ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.rank import heartbeat
from cloudtrain.entrypoints.rank.heartbeat import Watch
from doubles.waiting import until

# Beats once, then hangs in a function whose name must appear in the log.
STUCK = """
import time
from cloudtrain.entrypoints.rank import heartbeat
def stand_still():
    time.sleep(60)
heartbeat.beat()
stand_still()
"""


@pytest.fixture
def beat(tmp_path: Path) -> Callable[..., None]:
    """Return a function that touches rank 0's file, as the rank with the given pid would."""
    now = [1000.0]

    def touch(pid: int = os.getpid()) -> None:
        (tmp_path / "beat-0").write_text(str(pid))
        now[0] += 1.0
        os.utime(tmp_path / "beat-0", (now[0], now[0]))

    return touch


def looks(watch: Watch, first_s: int, last_s: int) -> list[heartbeat.Hang]:
    """Poll every second; return the result of the last poll."""
    return [watch.look(float(now_s)) for now_s in range(first_s, last_s + 1)][-1]


def test_rank_without_heartbeats_hangs(tmp_path: Path, beat: Callable[..., None]) -> None:
    """The silence counts from the last heartbeat, despite any clock of the file system."""
    watch = Watch(tmp_path, 10.0, 0.0)
    beat()
    assert looks(watch, 1, 10) == []
    beat()
    assert looks(watch, 11, 21) == []
    (hang,) = looks(watch, 22, 22)
    assert (hang.rank, hang.pid, hang.silent_s, hang.last_s) == (0, os.getpid(), 11.0, 1002.0)


def test_rank_that_never_beat_is_not_watched(tmp_path: Path) -> None:
    """A script without heartbeats may take its time."""
    assert looks(Watch(tmp_path, 10.0, 0.0), 1, 100) == []


def test_rank_that_has_ended_does_not_hang(tmp_path: Path, beat: Callable[..., None]) -> None:
    """A rank may finish before other ranks, and its file stays."""
    watch = Watch(tmp_path, 10.0, 0.0)
    with subprocess.Popen(["sleep", "60"]) as child:
        beat(child.pid)
        assert looks(watch, 1, 5) == []
        child.kill()
    assert looks(watch, 6, 60) == []


def test_machine_that_was_suspended_has_not_hung(tmp_path: Path, beat: Callable[..., None]) -> None:
    """An hour between two polls does not count as silence."""
    watch = Watch(tmp_path, 10.0, 0.0)
    beat()
    watch.look(1.0)
    assert watch.look(3600.0) == []


def test_restarted_process_begins_a_new_count(tmp_path: Path, beat: Callable[..., None]) -> None:
    """After torchrun's own restart, the new process does not inherit the old silence."""
    watch = Watch(tmp_path, 10.0, 0.0)
    beat(1)
    looks(watch, 1, 9)
    (tmp_path / "beat-0").write_text(str(os.getpid()))
    assert looks(watch, 10, 19) == []


def test_beat_does_nothing_outside_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script run by hand may contain heartbeats."""
    monkeypatch.chdir(tmp_path)
    heartbeat.beat()
    assert list(tmp_path.iterdir()) == []


def test_stuck_rank_prints_its_stacks_into_its_log(tmp_path: Path) -> None:
    """At the watch's request a stuck rank prints its stacks, and lives on."""
    (tmp_path / "train.py").write_text(STUCK)
    env = {**os.environ, "RANK": "3", "CLOUDTRAIN_RESULT_DIR": str(tmp_path), "CLOUDTRAIN_LOG_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "cloudtrain.entrypoints.agent.worker", "script", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=env) as rank:
        try:
            until((tmp_path / "beat-3").exists)
            heartbeat.print_stacks(tmp_path, silent_s=30.0)
            assert "stand_still" not in (tmp_path / "rank-3.log").read_text(), "it is not silent for that long"
            heartbeat.print_stacks(tmp_path)
            until(lambda: "in stand_still" in (tmp_path / "rank-3.log").read_text())
            assert rank.poll() is None
        finally:
            rank.kill()


def test_stacks_are_requested_only_of_ranks(tmp_path: Path) -> None:
    """The signal would kill a program that a script has started."""
    (tmp_path / "beat-0").write_text("1")
    env = {**os.environ, "CLOUDTRAIN_RESULT_DIR": str(tmp_path)}
    with subprocess.Popen(["sleep", "60"], env=env) as child:
        heartbeat.print_stacks(tmp_path)
        time.sleep(0.1)
        assert processes.stamp(child.pid) is not None
        child.kill()


def test_stopped_supervisor_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped supervisor could not end the job, and would hold its lock; one that continues in time is left alone."""
    monkeypatch.setattr(heartbeat, "STOPPED_S", 1.0)
    with subprocess.Popen(["sleep", "60"]) as process:
        supervisor = heartbeat.Supervisor(process.pid)
        supervisor.look(100.0)
        process.send_signal(signal.SIGSTOP)
        until(lambda: processes.state(process.pid) == "T")
        supervisor.look(101.0)
        process.send_signal(signal.SIGCONT)
        until(lambda: processes.state(process.pid) != "T")
        supervisor.look(103.0)
        assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        until(lambda: processes.state(process.pid) == "T")
        supervisor.wait()
        assert process.wait() == -signal.SIGKILL

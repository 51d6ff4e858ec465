"""Real process trees."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.entrypoints import processes
from doubles.waiting import until

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# A child in its own session, as torchrun starts its workers, whose parent exits at once.
ORPHANS = """
import os, subprocess, sys
from cloudtrain.entrypoints import processes
processes.become_subreaper()
child = subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.Popen("
    "[sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"])
child.wait()
found = processes.descendants(os.getpid())
print(len(found), processes.kill_descendants(), len(processes.descendants(os.getpid())))
"""
# The parent dies after the fork, before the kernel learns about the child's wish to die too.
LATE = """
import os, time
from cloudtrain.entrypoints import processes
heard, tell = os.pipe()
parent = os.getpid()
def late(option, value):
    os.write(tell, b"x")
    while os.getppid() == parent:
        time.sleep(0.01)
processes._prctl = late
if os.fork():
    os.read(heard, 1)
    os._exit(0)
processes.die_with_parent()
print("alive", flush=True)
"""


def test_child_dies_with_a_parent_that_died_first() -> None:
    """The kernel reports no death from before the request."""
    assert subprocess.run([sys.executable, "-c", LATE], capture_output=True, timeout=30).stdout == b""


def test_stamp_distinguishes_a_process_from_its_successor() -> None:
    """A process that is gone has no stamp, and no further process has the same stamp.

    A process that has ended but is not yet reaped does not count as alive.
    """
    child = subprocess.Popen(SLEEP)
    stamp = processes.stamp(child.pid)
    assert processes.alive(child.pid, stamp)
    assert not processes.alive(os.getpid(), stamp)
    child.kill()
    until(lambda: not processes.alive(child.pid, stamp), 10)
    child.wait()
    assert processes.stamp(child.pid) is None


def test_subreaper_kills_orphans_of_its_children() -> None:
    """An orphan in a separate session is found and killed."""
    out = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["1", "[]", "0"]


def test_with_environment_finds_by_variables() -> None:
    """Processes of a dead agent are found by the job's name in their environment."""
    child = subprocess.Popen(SLEEP, env={**os.environ, "CLOUDTRAIN_JOB": "test-env", "CLOUDTRAIN_ATTEMPT": "1"})
    try:
        wanted = {"CLOUDTRAIN_JOB": "test-env", "CLOUDTRAIN_ATTEMPT": "1"}
        found = until(lambda: processes.with_environment(**wanted), 10)  # the child has our own before the exec
        assert found == [child.pid]
        assert processes.with_environment(CLOUDTRAIN_JOB="test-env", CLOUDTRAIN_ATTEMPT="2") == []
    finally:
        child.kill()
        child.wait()


def test_signal_that_a_thread_waits_for_is_caught() -> None:
    """`signal.sigwait` needs no handler: a blocked signal does not kill."""
    assert not processes.catches(os.getpid(), signal.SIGUSR1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        assert processes.catches(os.getpid(), signal.SIGUSR1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("signum", [0, 9])
def test_kill_of_a_dead_process_is_no_error(signum: int) -> None:
    """A pid without a process is already in the wanted state."""
    child = subprocess.Popen(SLEEP)
    child.kill()
    child.wait()
    processes.kill(child.pid, signum)


def test_lock_of_another_process_is_not_taken(tmp_path: Path) -> None:
    """The lock is free again once the holder's descriptor is closed; two readers hold the lock at the same time."""
    path = tmp_path / "lock"
    with processes.locked(path):
        assert processes.try_lock(path) is None
    held = processes.try_lock(path)
    assert held is not None
    assert processes.try_lock(path) is None
    os.close(held)
    readers = [processes.try_lock(path, fcntl.LOCK_SH) for _ in range(2)]
    assert None not in readers
    assert processes.try_lock(path) is None
    for reader in readers:
        assert reader is not None
        os.close(reader)


def test_lock_of_a_removed_file_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder has removed the file between the open and the lock: a later process would lock a new file."""
    path = tmp_path / "lock"
    monkeypatch.setattr(fcntl, "flock", lambda *_: path.unlink())
    assert processes.try_lock(path) is None

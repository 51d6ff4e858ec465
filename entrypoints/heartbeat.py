"""Heartbeats of the ranks: the files that record progress, the watch over the files, and the stacks of stuck ranks.

A rank can be stuck where no collective's timeout applies: in a data loader on a dead network share, in a deadlock of
the script. So each step calls `beat`, which touches the rank's file about once a second, and boot polls the files
(`Watch`). Any script may call `beat` too:

    from cloudtrain.entrypoints import heartbeat
    heartbeat.beat()

A rank that never beats is never judged. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.entrypoints import processes

__all__ = ["STALE_S", "Hang", "Supervisor", "Watch", "beat", "enable", "print_stacks"]

EVERY_S = 1.0  # between two touches: a beat in between only reads the clock
STALE_S = 60.0  # without a beat: then print the rank's stack, even if the job ends for a different reason
STOPPED_S = 8.0  # before an agent in the stopped state is killed: the agent's peers wait about as long
PAUSE_S = 5.0  # the most that counts between two polls: a machine that slept has not hung
PRINT_S = 1.0  # for printing the stacks, on a busy machine
MOST_S = 2.0  # for signalling all processes: an agent that is busy for longer would seem lost to its peers

_due_s = math.inf  # until `enable` sets the file: before, a beat does nothing
_file = Path()
_pid = 0


def enable() -> None:
    """Activate this rank's beats, and print all its Python stacks on SIGUSR2. Called once, by the rank's shell.

    A beat in a forked process, such as a data loader's, counts for the rank.
    """
    global _due_s, _file, _pid
    # Use the present log, even if a script redirects its standard error later.
    faulthandler.register(signal.SIGUSR2, file=os.dup(2), all_threads=True)
    folder = os.environ.get("CLOUDTRAIN_RESULT_DIR")
    if folder:
        _file, _pid, _due_s = Path(folder) / f"beat-{os.environ.get('RANK', '0')}", os.getpid(), 0.0
        with contextlib.suppress(OSError):  # a predecessor's, if torchrun restarts ranks in place
            _file.unlink(missing_ok=True)


def beat() -> None:
    """Record that this rank makes progress: call it at every step, and during other long work."""
    global _due_s
    now_s = time.monotonic()
    if now_s < _due_s:
        return
    _due_s = now_s + EVERY_S
    try:
        os.utime(_file)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            _file.write_text(str(_pid))
    except OSError:  # training continues unwatched
        pass


@dataclass(frozen=True)
class Hang:
    """A living rank whose beats have stopped. `last_s` is the time of the last beat, in unix seconds."""

    rank: int
    pid: int
    silent_s: float
    last_s: float


@dataclass
class _Seen:
    """A rank at the last poll; the stamp identifies the rank's process."""

    pid: int
    stamp: str | None
    touched_ns: int
    silent_s: float = 0.0


class Watch:
    """Polls the beats of one start of this node's ranks."""

    def __init__(self, folder: Path, timeout_s: float, now_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._looked_s = now_s
        self._seen: dict[int, _Seen] = {}

    def look(self, now_s: float) -> list[Hang]:
        """Return the hanging ranks, the longest silent first; `now_s` comes from any monotonic clock."""
        passed_s, self._looked_s = min(now_s - self._looked_s, PAUSE_S), now_s
        hangs = []
        for path in self._folder.glob("beat-*"):
            rank = int(path.name[5:])
            # Compare times for change only: the file system's clock differs.
            if (touched_ns := _touched_ns(path)) is None or (pid := _pid_in(path)) is None:
                continue
            seen = self._seen.get(rank)
            if seen is None or seen.pid != pid:
                self._seen[rank] = _Seen(pid, processes.stamp(pid), touched_ns)
            elif seen.touched_ns != touched_ns:
                seen.touched_ns, seen.silent_s = touched_ns, 0.0
            else:
                seen.silent_s += passed_s
                if seen.silent_s > self._timeout_s and processes.alive(pid, seen.stamp):  # dead ranks may have finished
                    hangs.append(Hang(rank, pid, seen.silent_s, touched_ns / 1e9))
        return sorted(hangs, key=lambda hang: hang.last_s)


@dataclass
class Supervisor:
    """The agent, as its child sees it: an agent stopped by SIGSTOP supervises nothing, and only the child can kill it.

    After the kill, the agent's processes die too. A debugger's stop does not count.
    """

    pid: int
    stopped_s: float | None = None

    def look(self, now_s: float) -> None:
        """Kill the agent after a long stop; `now_s` comes from any monotonic clock."""
        if not processes.is_stopped(self.pid):
            self.stopped_s = None
        elif self.stopped_s is None:
            self.stopped_s = now_s
        elif now_s - self.stopped_s > STOPPED_S:
            processes.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Return when the agent is killed or running again."""
        while processes.is_stopped(self.pid):
            self.look(time.monotonic())
            time.sleep(0.2)


def print_stacks(folder: Path, silent_s: float = 0.0) -> None:
    """Make this node's ranks print their Python stacks into their logs, if a rank has been silent for `silent_s`.

    The workers of their data loaders print too. Processes that the signal would kill are left out.
    """
    beats = [touched_ns / 1e9 for path in folder.glob("beat-*") if (touched_ns := _touched_ns(path)) is not None]
    if not beats or time.time() - min(beats) < silent_s:
        return
    end_s = time.monotonic() + MOST_S
    found = processes.with_environment(CLOUDTRAIN_RESULT_DIR=str(folder))
    able = [pid for pid in found if processes.catches(pid, signal.SIGUSR2)]
    for pid in able:
        if time.monotonic() < end_s:
            processes.kill(pid, signal.SIGUSR2)
            time.sleep(0.05)  # in sequence: a rank and its children share a log
    if able:
        time.sleep(PRINT_S)


def _touched_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _pid_in(path: Path) -> int | None:
    """Return the pid in the rank's file, None during the write."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

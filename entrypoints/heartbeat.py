"""Whether a rank still makes steps: what it leaves of them, who looks, and where a stuck one stands.

A rank can be stuck where no collective's timeout sees it: in a data loader on a dead network share, in a deadlock of
a script's own. So each step calls `beat`, which touches the rank's file about once a second, and boot looks at the
files (`Watch`). Any script may beat too:

    from cloudtrain.entrypoints import heartbeat
    heartbeat.beat()

Who never beats is never judged. Standard library only.
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

EVERY_S = 1.0  # between two touches: a beat in between costs a look at the clock
STALE_S = 60.0  # without a beat: then it is worth a stack, also where the job ends for another reason
STOPPED_S = 8.0  # an agent that supervises nothing, before it is ended: its peers wait about as long
PAUSE_S = 5.0  # the most that counts between two looks: a machine that slept has not hung
PRINT_S = 1.0  # for printing the stacks, on a busy machine
MOST_S = 2.0  # for asking everybody: an agent that is busy for longer would seem lost to its peers

_due_s = math.inf  # until the rank's shell says where: elsewhere a beat does nothing
_file = Path()
_pid = 0


def enable() -> None:
    """Let this rank's beats count, and have it print all its Python stacks on SIGUSR2. Called once, by its shell.

    A beat in a process forked from it, as a data loader's, counts for the rank.
    """
    global _due_s, _file, _pid
    # To the log as it is now, whatever a script does with its standard error later.
    faulthandler.register(signal.SIGUSR2, file=os.dup(2), all_threads=True)
    folder = os.environ.get("CLOUDTRAIN_RESULT_DIR")
    if folder:
        _file, _pid, _due_s = Path(folder) / f"beat-{os.environ.get('RANK', '0')}", os.getpid(), 0.0
        with contextlib.suppress(OSError):  # a predecessor's, where torchrun restarts ranks in place
            _file.unlink(missing_ok=True)


def beat() -> None:
    """Say that this rank makes progress: for every step, and whatever else takes long and gets on."""
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
    except OSError:  # unwatched, it trains on
        pass


@dataclass(frozen=True)
class Hang:
    """A rank that has beaten, lives, and beats no more. `last_s` is its last beat, in unix seconds."""

    rank: int
    pid: int
    silent_s: float
    last_s: float


@dataclass
class _Seen:
    """A rank as the last look found it; the stamp is that of its process."""

    pid: int
    stamp: str | None
    touched_ns: int
    silent_s: float = 0.0


class Watch:
    """Looks at the beats of one start of this node's ranks."""

    def __init__(self, folder: Path, timeout_s: float, now_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._looked_s = now_s
        self._seen: dict[int, _Seen] = {}

    def look(self, now_s: float) -> list[Hang]:
        """Return the ranks that hang by now (seconds of any clock that only rises), the longest silent first."""
        passed_s, self._looked_s = min(now_s - self._looked_s, PAUSE_S), now_s
        hangs = []
        for path in self._folder.glob("beat-*"):
            rank = int(path.name[5:])
            # Its change counts, not its time: that is another clock's.
            if (touched_ns := _touched_ns(path)) is None or (pid := _pid_in(path)) is None:
                continue
            seen = self._seen.get(rank)
            if seen is None or seen.pid != pid:
                self._seen[rank] = _Seen(pid, processes.stamp(pid), touched_ns)
            elif seen.touched_ns != touched_ns:
                seen.touched_ns, seen.silent_s = touched_ns, 0.0
            else:
                seen.silent_s += passed_s
                if seen.silent_s > self._timeout_s and processes.alive(pid, seen.stamp):  # it may have finished
                    hangs.append(Hang(rank, pid, seen.silent_s, touched_ns / 1e9))
        return sorted(hangs, key=lambda hang: hang.last_s)


@dataclass
class Supervisor:
    """The agent, as its child sees it: one that is stopped (SIGSTOP) supervises nothing, and nobody else can end it.

    It is killed then, and what it has started dies with it. A debugger's stop is not meant.
    """

    pid: int
    stopped_s: float | None = None

    def look(self, now_s: float) -> None:
        """Kill it where it has been stopped for long; `now_s` of any clock that only rises."""
        if not processes.is_stopped(self.pid):
            self.stopped_s = None
        elif self.stopped_s is None:
            self.stopped_s = now_s
        elif now_s - self.stopped_s > STOPPED_S:
            processes.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Return once it is not stopped: killed, or going on."""
        while processes.is_stopped(self.pid):
            self.look(time.monotonic())
            time.sleep(0.2)


def print_stacks(folder: Path, silent_s: float = 0.0) -> None:
    """Have this node's ranks print their Python stacks into their logs, where one has been silent for so long.

    Their data loaders' workers do too. Whoever would die of the signal is not sent it.
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
            time.sleep(0.05)  # one after the other: a rank and its children share a log
    if able:
        time.sleep(PRINT_S)


def _touched_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _pid_in(path: Path) -> int | None:
    """Return the pid that the rank has written, None while it does."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

"""Detects ranks that make no more steps: the ranks' beats, the watch over the beats, and the stacks of stuck ranks.

A rank can be stuck without a collective's timeout: in a data loader on a dead network share, or in a deadlock of a
script. So each step calls `beat`, which touches the rank's file about once a second, and boot polls the files
(`Watch`). Any script may call `beat` too:

    from cloudtrain.entrypoints.rank import heartbeat
    heartbeat.beat()

A rank that never beats is never judged. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import mmap
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from .. import processes

EVERY_S = 1.0  # between two touches: a beat in between only reads the clock
STALE_S = 60.0  # without a beat: then the rank prints its stack, even if the job ends for a different reason
STOPPED_S = 8.0  # until a stopped agent is killed: the agent's peers wait about as long
PAUSE_S = 5.0  # the most silence that counts between two polls: a machine's sleep is no hang
PRINT_S = 1.0  # for printing the stacks, on a busy machine
MOST_S = 2.0  # for signals to all ranks: an agent that is busy for longer would seem lost to its peers

_due_s = math.inf  # until the rank's shell calls `enable`: before, a beat has no effect
_file = Path()
_pid = 0
_steps: mmap.mmap | None = None  # the file with the rank's step: a write costs less than a system call
_STEP_BYTES = 20


def enable() -> None:
    """Make this rank's beats count, and print all its Python stacks on SIGUSR2. The rank's shell calls `enable` once.

    A beat in a forked process (a data loader) counts for the rank.
    """
    global _due_s, _file, _pid, _steps
    # Stacks go to the current log, even if the script redirects its standard error later.
    faulthandler.register(signal.SIGUSR2, file=os.dup(2), all_threads=True)
    folder = os.environ.get("CLOUDTRAIN_RESULT_DIR")
    if folder:
        _file, _pid, _due_s = Path(folder) / f"beat-{os.environ.get('RANK', '0')}", os.getpid(), 0.0
        with contextlib.suppress(OSError):  # a predecessor's file, if torchrun restarts ranks in place
            _file.unlink(missing_ok=True)
            with _file.with_name(f"steps-{_file.name[5:]}").open("wb+") as file:
                file.write(bytes(_STEP_BYTES))  # not a hole: on a full disk the first write to one would kill the rank
                file.flush()
                _steps = mmap.mmap(file.fileno(), _STEP_BYTES)


def left_code(folder: Path, ranks: int) -> int | None:
    """Return the code of this node's ranks, 0 done or 75 saved, after all have written their codes; else None.

    After the code comes the interpreter's teardown, which hangs or aborts one time in nine (torch 2.13, gloo).
    """
    codes = []
    for path in folder.glob("left-*"):
        with contextlib.suppress(OSError, ValueError):  # a rank that starts again removes its file
            codes.append(path.read_text())
    known = [int(code) for code in codes if code in ("0", "75")]  # else the file is being written, or is a script's
    return None if len(known) < ranks else max(known)


def beat() -> None:
    """Report that this rank makes progress. Call `beat` in every step, and during long work that progresses."""
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
    except OSError:  # without a watch, the training continues
        pass


def at(step: int) -> None:
    """Note the steps that this rank has done, for the account of a failure."""
    if _steps is not None:
        _steps[:] = b"%20d" % step


def steps_done(folder: Path, rank: int | None) -> int | None:
    """Return the steps that a rank of this node has done, None if not known."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / f"steps-{rank}").read_text())
    return None


@dataclass(frozen=True)
class Hang:
    """A living rank that has beaten before, and beats no more. `last_s` is its last beat, in unix seconds."""

    rank: int
    pid: int
    silent_s: float
    last_s: float


@dataclass
class _Seen:
    """A rank's state at the last poll; `stamp` identifies the rank's process."""

    pid: int
    stamp: str | None
    touched_ns: int
    silent_s: float = 0.0


class Watch:
    """Watches the beats of this node's ranks, for a single start of the ranks."""

    def __init__(self, folder: Path, timeout_s: float, now_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._looked_s = now_s
        self._seen: dict[int, _Seen] = {}

    def look(self, now_s: float) -> list[Hang]:
        """Return the ranks that hang at `now_s` (seconds of any monotonic clock), the longest silent first."""
        passed_s, self._looked_s = min(now_s - self._looked_s, PAUSE_S), now_s
        hangs = []
        for path in self._folder.glob("beat-*"):
            rank = int(path.name[5:])
            # A change of the time counts, not the time itself, which comes from a different clock.
            try:
                touched_ns, pid = path.stat().st_mtime_ns, int(path.read_text())
            except (OSError, ValueError):  # gone, or the rank is writing its pid
                continue
            seen = self._seen.get(rank)
            if seen is None or seen.pid != pid:
                self._seen[rank] = _Seen(pid, processes.stamp(pid), touched_ns)
            elif seen.touched_ns != touched_ns:
                seen.touched_ns, seen.silent_s = touched_ns, 0.0
            else:
                seen.silent_s += passed_s
                if seen.silent_s > self._timeout_s and processes.alive(pid, seen.stamp):  # the rank may have finished
                    hangs.append(Hang(rank, pid, seen.silent_s, touched_ns / 1e9))
        return sorted(hangs, key=lambda hang: hang.last_s)


@dataclass
class Supervisor:
    """The agent, seen by boot. An agent stopped by SIGSTOP supervises no job, and only boot can end the agent.

    Boot kills a stopped agent, and the agent's descendants die too. An agent stopped by a debugger is left alone.
    """

    pid: int
    stopped_s: float | None = None

    def look(self, now_s: float) -> None:
        """Kill an agent that has been stopped for STOPPED_S; `now_s` is of any monotonic clock."""
        if processes.state(self.pid) != "T":
            self.stopped_s = None
        elif self.stopped_s is None:
            self.stopped_s = now_s
        elif now_s - self.stopped_s > STOPPED_S:
            processes.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Return when the agent is not stopped: either killed, or running."""
        while processes.state(self.pid) == "T":
            self.look(time.monotonic())
            time.sleep(0.2)


def print_stacks(folder: Path, silent_s: float = 0.0) -> None:
    """Have this node's ranks print their Python stacks into their logs, if a rank has been silent for `silent_s`.

    0: in any case, also without a beat. The ranks' data loader workers print too. A process that would die of the
    signal gets no signal.
    """
    beats = []
    for path in folder.glob("beat-*"):
        with contextlib.suppress(OSError):
            beats.append(path.stat().st_mtime)
    if silent_s and (not beats or time.time() - min(beats) < silent_s):
        return
    end_s = time.monotonic() + MOST_S
    found = processes.with_environment(CLOUDTRAIN_RESULT_DIR=str(folder))
    able = [pid for pid in found if processes.catches(pid, signal.SIGUSR2)]
    for pid in able:
        if time.monotonic() < end_s:
            processes.kill(pid, signal.SIGUSR2)
            time.sleep(0.05)  # in turn, because a rank and its children share a log
    if able:
        time.sleep(PRINT_S)

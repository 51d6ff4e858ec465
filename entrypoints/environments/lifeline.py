"""Process 1 of a container that an agent runs: passes signals on, and ends everything when the agent is gone.

    python -u -m cloudtrain.entrypoints.environments.lifeline PROGRAM [ARGUMENT ...]

Standard input is held open by the agent. It says one line, a JSON object: the variables that the program alone is to
see, because what the client is told of them lies on a disk. Its end means that the agent, the client or the daemon
between them is dead. The exit code is the program's, 128 + N where signal N killed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from types import FrameType

from cloudtrain.entrypoints import processes

__all__ = ["CUT", "MARK", "main"]

MARK = {"CLOUDTRAIN_BELOW_LIFELINE": "1"}  # in the environment of the program and of what it starts
CUT = 137  # as if killed, which is what happens to the program


def main(argv: list[str]) -> int:
    """Run the program below this process to its end, or to that of the standard input; return the exit code."""
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        if child is not None and child.returncode is None:
            processes.kill(child.pid, signum)

    # As process 1 it would not even notice a signal without a handler.
    for passed in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(passed, pass_on)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    processes.become_subreaper()  # where the client has put a process 1 of its own before this one
    if (told := _told()) is None:
        return CUT
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env={**os.environ, **told, **MARK})
    for signum in asked:
        processes.kill(child.pid, signum)
    code = _watch(child.pid, woken)
    child.returncode = CUT if code is None else code  # reaped here
    processes.kill_descendants()
    return CUT if code is None else 128 - code if code < 0 else code


def _told() -> dict[str, str] | None:
    """Return the variables that the standard input's line holds, or None where it has ended before."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(0, 1 << 16)):
            return None
        line += more
    told: dict[str, str] = json.loads(line)
    return told


def _watch(pid: int, woken: int) -> int | None:
    """Return the process's exit code, negative for a signal, or None where the standard input has ended before."""
    while True:
        ready = select.select([0, woken], [], [])[0]
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == pid:
                    return os.waitstatus_to_exitcode(ended[1])
        if 0 in ready and not os.read(0, 4096):
            return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

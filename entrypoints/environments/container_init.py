"""Process 1 of a container that an agent runs: passes signals on, and ends all processes when the agent is gone.

    python -u -m cloudtrain.entrypoints.environments.container_init PROGRAM [ARGUMENT ...]

The agent holds the standard input open, and writes one line, a JSON object: variables for the program only, because
variables given to the client lie on a disk. The end of the input means that the agent, the client or the daemon between
them is dead. The exit code is the program's, or 128 + N if signal N killed the program.
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

from .. import processes

MARK = {"CLOUDTRAIN_BELOW_LIFELINE": "1"}  # in the environment of the program and its children
CUT = 137  # as if killed, since the program is killed


def main(argv: list[str]) -> int:
    """Run the program below this process to its end, or to the end of the standard input; return the exit code."""
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        if child is not None and child.returncode is None:
            processes.kill(child.pid, signum)

    # Process 1 ignores any signal without a handler.
    for passed in (signal.SIGTERM, signal.SIGINT, *processes.SAVE_SIGNALS):
        signal.signal(passed, pass_on)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    processes.become_subreaper()  # if the client has started its own process 1 before this process
    if (variables := _read_variables()) is None:
        return CUT
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env={**os.environ, **variables, **MARK})
    for signum in asked:
        processes.kill(child.pid, signum)
    code = _watch(child.pid, woken)
    child.returncode = CUT if code is None else code  # already reaped
    processes.kill_descendants()
    return CUT if code is None else 128 - code if code < 0 else code


def _read_variables() -> dict[str, str] | None:
    """Return the variables in the standard input's line, or None if the input ended before the line."""
    with open(0, "rb", buffering=0, closefd=False) as given:  # unbuffered: `_watch` reads on
        line = given.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def _watch(pid: int, woken: int) -> int | None:
    """Return the process's exit code, negative for a signal, or None if the standard input ended before."""
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

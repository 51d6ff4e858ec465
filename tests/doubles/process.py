"""Runs a stand-in as a separate process: the process's own side, and the side that starts the process.

A signal or the parent's death ends the process with all its containers. A shell outlives the process by a moment and
always removes the state folder, even after SIGKILL.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
START_S = 60.0
TESTS = Path(__file__).resolve().parents[1]
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "DOUBLES_SANDBOX", "LD_LIBRARY_PATH", "OMP_WAIT_POLICY")
_REMOVER = 'cat >/dev/null; for i in 1 2 3 4 5; do rm -rf -- "$0" && exit; sleep 0.3; done'


class Served(NamedTuple):
    """A stand-in that answers requests."""

    told: str  # the line printed for the parent
    close: Callable[[], None]


def serve(name: str, description: str | None, begin: Callable[[Path, int], Served]) -> None:
    """Run as `python -m doubles.NAME`: begin with a folder and a port, print a line, end on a signal."""
    parser = argparse.ArgumentParser(prog=f"python -m doubles.{name}", description=description)
    parser.add_argument("--state", type=Path, help="a folder of its own, removed at the end (default: a new one)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--parent", type=int, help="the process to die with")
    options = parser.parse_args()
    if options.parent is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != options.parent:
            sys.exit("the parent is gone")
    state = options.state or Path(tempfile.mkdtemp(prefix=f"double-{name}-"))
    state.mkdir(parents=True, exist_ok=True)
    _remove_after_us(state)
    ended = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: ended.set())
    served = begin(state, options.port)
    print(served.told, flush=True)
    ended.wait()
    served.close()
    os._exit(0)  # threads may still be answering


def _remove_after_us(state: Path) -> None:
    """Start a shell that removes the folder when this process ends: its end closes the shell's input."""
    subprocess.Popen(["/bin/sh", "-c", _REMOVER, str(state)], stdin=subprocess.PIPE, start_new_session=True)


def bind(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Return a listening socket."""
    return socket.create_server((host, port), backlog=256)


def start(name: str, state: Path | None = None) -> tuple[subprocess.Popen[str], str]:
    """Start the process, which dies with the calling thread; return the process and its line once it answers."""
    argv = [sys.executable, "-m", f"doubles.{name}", "--parent", str(os.getpid())]
    argv += ["--state", str(state)] if state is not None else []
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    process = subprocess.Popen(
        argv, env={**env, "PYTHONPATH": str(TESTS)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    told = process.stdout.readline().strip()
    if not told:
        raise RuntimeError(f"the stand-in did not start: exit code {process.wait(START_S)}")
    return process, told


def stop(process: subprocess.Popen[str]) -> None:
    """End the process and all its containers."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()

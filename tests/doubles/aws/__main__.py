"""The stand-in as a process: `python -m doubles.aws [--state DIR] [--port N]` prints its URL when it is ready.

It ends, with all containers, when it is told to, when its parent dies, and never leaves its folder behind: a shell that
outlives it by a moment removes it, even after SIGKILL.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from doubles.aws import server
from doubles.aws.world import World
from doubles.sandbox import Switch

PR_SET_PDEATHSIG = 1
_REMOVER = 'cat >/dev/null; for i in 1 2 3 4 5; do rm -rf -- "$0" && exit; sleep 0.3; done'


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(prog="python -m doubles.aws", description=__doc__)
    parser.add_argument("--state", type=Path, help="a folder of its own, removed at the end (default: a new one)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--parent", type=int, help="the process to die with")
    options = parser.parse_args()
    if options.parent is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != options.parent:
            sys.exit("the parent is gone")
    state = options.state or Path(tempfile.mkdtemp(prefix="double-aws-"))
    state.mkdir(parents=True, exist_ok=True)
    _remove_after_us(state)
    os.environ["MOTO_CALL_RESET_API"] = "false"
    listening = server.bind(options.port)
    world = World(state, f"http://127.0.0.1:{listening.getsockname()[1]}", Switch.open())
    ended = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: ended.set())
    threading.Thread(target=server.serve, args=(world, listening), daemon=True).start()
    print(world.url, flush=True)
    ended.wait()
    world.close()
    os._exit(0)  # threads may still be answering


def _remove_after_us(state: Path) -> None:
    """Start a shell that waits for our end, by the end of its input, and removes the folder."""
    subprocess.Popen(["/bin/sh", "-c", _REMOVER, str(state)], stdin=subprocess.PIPE, start_new_session=True)


if __name__ == "__main__":
    main()

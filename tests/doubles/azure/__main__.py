"""The stand-in as a process: `python -m doubles.azure [--state DIR] [--port N]` prints what a client needs, in JSON.

It ends, with all containers, when it is told to, when its parent dies, and never leaves its folder behind: a shell that
outlives it by a moment removes it, even after SIGKILL.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from doubles.azure import proxy
from doubles.azure.application import Application, service_of
from doubles.azure.certificates import Authority
from doubles.azure.control import Plain
from doubles.azure.world import World
from doubles.sandbox import Switch

PR_SET_PDEATHSIG = 1
_REMOVER = 'cat >/dev/null; for i in 1 2 3 4 5; do rm -rf -- "$0" && exit; sleep 0.3; done'


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(prog="python -m doubles.azure", description=__doc__)
    parser.add_argument("--state", type=Path, help="a folder of its own, removed at the end (default: a new one)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--parent", type=int, help="the process to die with")
    options = parser.parse_args()
    if options.parent is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != options.parent:
            sys.exit("the parent is gone")
    state = options.state or Path(tempfile.mkdtemp(prefix="double-azure-"))
    state.mkdir(parents=True, exist_ok=True)
    _remove_after_us(state)
    authority = Authority(state / "ca")
    listening = proxy.bind(options.port)
    port = int(listening.getsockname()[1])
    world = World(state, port, Switch.open(), authority.file)
    ended = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: ended.set())
    serving = proxy.Proxy(authority, lambda host: service_of(host) is not None, Application(world), Plain(world))
    threading.Thread(target=serving.serve, args=(listening,), daemon=True).start()
    inner = proxy.bind(0) if world.switch is None else world.switch.listen(port)
    world.container_url = "http://{}:{}".format(*inner.getsockname()[:2])
    threading.Thread(target=serving.serve, args=(inner, True), daemon=True).start()
    print(json.dumps({"url": f"http://127.0.0.1:{port}", "ca": str(authority.file)}), flush=True)
    ended.wait()
    world.close()
    os._exit(0)  # threads may still be answering


def _remove_after_us(state: Path) -> None:
    """Start a shell that waits for our end, by the end of its input, and removes the folder."""
    subprocess.Popen(["/bin/sh", "-c", _REMOVER, str(state)], stdin=subprocess.PIPE, start_new_session=True)


if __name__ == "__main__":
    main()

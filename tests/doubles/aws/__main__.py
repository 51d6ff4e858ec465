"""The stand-in as a process: `python -m doubles.aws [--state DIR] [--port N]` prints its URL, in JSON, when ready."""

import json
import os
import threading
from pathlib import Path

from doubles import process
from doubles.aws import server
from doubles.aws.world import World
from doubles.sandbox import Switch


def begin(state: Path, port: int) -> process.Served:
    """Listen, and answer in threads."""
    os.environ["MOTO_CALL_RESET_API"] = "false"
    listening = process.bind(port)
    world = World(state, f"http://127.0.0.1:{listening.getsockname()[1]}", Switch.open())
    threading.Thread(target=server.serve, args=(world, listening), daemon=True).start()
    return process.Served(json.dumps({"url": world.url}), world.close)


if __name__ == "__main__":
    process.serve("aws", __doc__, begin)

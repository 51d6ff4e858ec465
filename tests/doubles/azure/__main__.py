"""The stand-in as a process: `python -m doubles.azure [--state DIR] [--port N]` prints what a client needs, in JSON."""

import json
import threading
from pathlib import Path

from doubles import process, proxy
from doubles.azure.application import Application, service_of
from doubles.azure.control import Plain
from doubles.azure.world import World
from doubles.certificates import Authority
from doubles.sandbox import Switch


def begin(state: Path, port: int) -> process.Served:
    """Listen, and answer in threads."""
    authority = Authority(state / "ca")
    listening = process.bind(port)
    port = int(listening.getsockname()[1])
    world = World(state, port, Switch.open(), authority.file)
    serving = proxy.Proxy(authority, lambda host: service_of(host) is not None, Application(world), Plain(world))
    threading.Thread(target=serving.serve, args=(listening,), daemon=True).start()
    inner = process.bind(0) if world.switch is None else world.switch.listen(port)
    world.container_url = "http://{}:{}".format(*inner.getsockname()[:2])
    threading.Thread(target=serving.serve, args=(inner, True), daemon=True).start()
    told = {"url": f"http://127.0.0.1:{port}", "ca": str(authority.file)}
    return process.Served(json.dumps(told), world.close)


if __name__ == "__main__":
    process.serve("azure", __doc__, begin)
